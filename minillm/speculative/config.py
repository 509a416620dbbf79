"""SpeculativeConfig: who drafts, and how many tokens. Built in chapter 18.

`LLM(speculative_config={"method": "ngram", "num_speculative_tokens": 4})`, with vLLM's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

METHODS = ("ngram", "draft_model", "eagle", "eagle3")
NAMES = {"draft_model": "tinyworld-draft", "eagle": "tinyworld-eagle"}  # the bundled model of a method
MOST_TOKENS = 64  # of a draft: even where 95 of 100 are accepted, those after the 64th rarely count


@dataclass(frozen=True)
class SpeculativeConfig:
    """What drafts: "ngram" looks the last tokens up in the text so far, "draft_model" runs a smaller model, "eagle" a
    head of one layer that reads the hidden states of the model it drafts for.

    At most `num_speculative_tokens` are drafted in a step; `adaptive` drafts fewer where the acceptance measured so
    far and the size of the batch say that they would not pay. An n-gram is looked up by its last `prompt_lookup_max`
    tokens, then by fewer, down to `prompt_lookup_min`. `model` is the draft model: a bundled name, a folder,
    a GGUF file or a hub id, with the tokenizer of the model it drafts for; `quantization` as in `LLM`. Of "eagle" it is
    a bundled head, the folder of one (`minillm.speculative.eagle_config`), or a folder or hub id of a head in EAGLE-3's
    layout (`minillm.speculative.eagle3_config`). "eagle3", vLLM's name for the latter, means the same as "eagle".
    Raises TypeError or ValueError naming the field, the value and what is allowed.
    """

    method: str
    num_speculative_tokens: int = 4
    model: str | Path | None = None
    quantization: Any = None
    prompt_lookup_min: int | None = None  # 2, or less where prompt_lookup_max is less
    prompt_lookup_max: int | None = None  # 4, or more where prompt_lookup_min is more
    adaptive: bool = False

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(
                f"speculative_config: method={self.method!r} is not allowed; allowed: {', '.join(METHODS)}"
            )
        if self.method == "eagle3":  # the folder says which layout it has
            object.__setattr__(self, "method", "eagle")
        for name, most in (
            ("num_speculative_tokens", MOST_TOKENS),
            ("prompt_lookup_min", None),
            ("prompt_lookup_max", None),
        ):
            value = getattr(self, name)
            allowed = "a whole number from 1 " + (f"to {most}" if most else "on")
            if value is None and most is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"speculative_config: {name}={value!r} is not allowed; allowed: {allowed}")
            if value < 1 or (most and value > most):
                raise ValueError(f"speculative_config: {name}={value!r} is not allowed; allowed: {allowed}")
        self._check_method()

    def _check_method(self) -> None:
        """Raise ValueError for fields that the method has no use for, and fill in what it needs."""
        if self.method in NAMES:
            for name in ("prompt_lookup_min", "prompt_lookup_max"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"speculative_config: {name}={getattr(self, name)} has nothing to do with "
                        f"method={self.method!r}; leave it out"
                    )
        else:
            shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
            object.__setattr__(self, "prompt_lookup_min", min(2, longest or 2) if shortest is None else shortest)
            object.__setattr__(self, "prompt_lookup_max", max(4, shortest or 4) if longest is None else longest)
        if self.method == "ngram" and self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"speculative_config: prompt_lookup_min={self.prompt_lookup_min} exceeds "
                f"prompt_lookup_max={self.prompt_lookup_max}; lower the one or raise the other"
            )
        if not isinstance(self.adaptive, bool):
            raise TypeError(f"speculative_config: adaptive={self.adaptive!r} is not allowed; allowed: True or False")
        if self.method in NAMES and not isinstance(self.model, (str, Path)):
            raise ValueError(
                f"speculative_config: method={self.method!r} needs a model, model={self.model!r} is none; "
                f"give a bundled name, a folder or a hub id, such as {NAMES[self.method]!r}"
            )
        if self.method == "ngram" and self.model is not None:
            raise ValueError(
                f"speculative_config: model={self.model!r} has nothing to do with method='ngram'; "
                "use method='draft_model', 'eagle' or 'eagle3', or leave it out"
            )
        if self.method != "draft_model" and self.quantization is not None:
            why = "needs a model to quantize" if self.method == "ngram" else "of a draft head is not supported"
            raise ValueError(
                f"speculative_config: quantization={self.quantization!r} {why}; "
                f"leave it out with method={self.method!r}"
            )

    @classmethod
    def of(cls, given: Mapping[str, Any] | SpeculativeConfig | None) -> SpeculativeConfig | None:
        """What `LLM(speculative_config=...)` means. Raises TypeError or ValueError for what it cannot mean."""
        if given is None or isinstance(given, cls):
            return given
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping):
            raise TypeError(
                f"speculative_config={given!r} is not allowed; allowed: None, or a dict of {', '.join(names)}"
            )
        if unknown := [name for name in given if name not in names]:
            raise ValueError(f"speculative_config has no field {unknown[0]!r}; fields: {', '.join(names)}")
        if "method" not in given:
            raise ValueError(
                f"speculative_config={dict(given)!r} does not say who drafts; add 'method': "
                f"{' or '.join(map(repr, METHODS))}"
            )
        return cls(**given)
