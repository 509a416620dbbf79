"""LoRARequest: which adapter a request asks for, with vLLM's names. Built in chapter 23."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from minillm.sampling.checks import check_int


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: its name in outputs and metrics, a number of your own, and its folder as PEFT writes it. The folder
    is read when the number is first seen, or comes with another folder, or with `load_inplace`."""

    lora_name: str
    lora_int_id: int
    lora_path: str | Path = ""
    base_model_name: str | None = None  # told and not read
    load_inplace: bool = False  # read the folder again, in the place of what the number stands for

    def __post_init__(self):
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise TypeError(f"lora_name={self.lora_name!r} is not allowed; allowed: a string that is not empty")
        check_int("lora_int_id", self.lora_int_id, 1)
        if not isinstance(self.lora_path, str | Path) or not str(self.lora_path):
            raise TypeError(f"lora_path={self.lora_path!r} is not allowed; allowed: the folder of an adapter")
        if not isinstance(self.load_inplace, bool):
            raise TypeError(f"load_inplace={self.load_inplace!r} is not allowed; allowed: True or False")

    name = property(lambda self: self.lora_name)
    path = property(lambda self: self.lora_path)
    adapter_id = property(lambda self: self.lora_int_id)


LoRAs = LoRARequest | Sequence[LoRARequest | None] | None  # of several prompts: one for all, or one each


class AdapterRef(NamedTuple):
    """An adapter as plain data, for steps: the hash of its content, and where it can be read again."""

    key: str
    path: str


def each_lora_request(given: Any, num_prompts: int) -> list[LoRARequest | None]:
    """`lora_request` for every prompt: one for all, or one each, where None is the model itself."""
    if given is None or isinstance(given, LoRARequest):
        return [given] * num_prompts
    if not isinstance(given, list | tuple) or not all(one is None or isinstance(one, LoRARequest) for one in given):
        raise TypeError(
            f"lora_request={given!r} is not allowed; allowed: a LoRARequest, or a list with one or None for each prompt"
        )
    if len(given) != num_prompts:
        raise ValueError(
            f"lora_request has {len(given)} entries for {num_prompts} prompts; pass one for all, or one each"
        )
    return list(given)
