"""LLMEngine: requests added one by one, and a step at a time, in vLLM's shape. Built in chapter 05.

engine = LLMEngine.from_engine_args(EngineArgs(model="tinyworld"))
engine.add_request("0", "Once upon a time", SamplingParams(max_tokens=8))
while engine.has_unfinished_requests():
    for output in engine.step():
        print(output.request_id, output.outputs[0].text)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from minillm.engine.config import EngineConfig
from minillm.engine.inputs import Prompt
from minillm.engine.llm import LLM
from minillm.engine.lora_request import LoRARequest
from minillm.engine.outputs import CompletionOutput, RequestOutput, StreamDelta
from minillm.engine.sink import OutputSink
from minillm.engine.vllm_names import translated
from minillm.sampling.checks import check_float
from minillm.sampling.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EngineArgs:
    """The arguments of an `LLM`, kept to make one later. Wrong names are refused at once, wrong values then."""

    def __init__(self, model: str | Path = "tinyworld", **arguments: Any):
        names = {one.name for one in fields(EngineConfig)}
        translated({name: value for name, value in arguments.items() if name not in names})
        self.arguments = {"model": model, **arguments}

    def __getattr__(self, name: str) -> Any:
        arguments = self.__dict__.get("arguments", {})
        if name in arguments:
            return arguments[name]
        default = getattr(EngineConfig, name, MISSING)
        if default is MISSING or name.startswith("_"):
            raise AttributeError(f"EngineArgs has no argument {name!r}")
        return default

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """An option for each argument whose value is text, a number, yes or no (--max-num-seqs 8), or a dictionary as
        JSON: --speculative-config '{"method": "ngram"}'."""
        for one in fields(EngineConfig):
            first = str(one.type).split(" | ")[0].split("[")[0]
            kind = {"int": int, "float": float, "bool": bool, "dict": json.loads}.get(first, str)
            option = "--" + one.name.replace("_", "-")
            default = "tinyworld" if one.name == "model" else one.default
            if kind is bool:
                parser.add_argument(option, action=argparse.BooleanOptionalAction, default=default)
            else:
                parser.add_argument(option, type=kind, default=default)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        names = [one.name for one in fields(EngineConfig) if hasattr(args, one.name)]
        return cls(**{name: getattr(args, name) for name in names})

    def __repr__(self) -> str:
        return f"EngineArgs({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


AsyncEngineArgs = EngineArgs  # vLLM's name of them for AsyncLLM


class LLMEngine:
    """An `LLM` stepped by its caller. A request's `output_kind` says what each step hands out of it."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self.sinks: dict[str, OutputSink] = {}  # under way, by the caller's id
        self._new: dict[str, list[StreamDelta]] = {}  # what was not handed out yet, also of other callers' steps

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **options: Any) -> Self:
        """`options` are what vLLM takes beside them, such as usage_context; an LLM in this process needs none."""
        return cls(LLM.from_engine_args(engine_args))

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
    ) -> str:
        """Queue one prompt under the caller's id. Raises ValueError for an id that is under way, and what
        `LLM.generate` would."""
        if not isinstance(request_id, str):
            raise TypeError(f"request_id={request_id!r} is not allowed; allowed: a string")
        if arrival_time is not None:
            check_float("arrival_time", arrival_time, 0, 2**53)
        with self.llm.lock:
            self._forget_finished()
            if request_id in self.sinks:
                raise ValueError(f"request_id={request_id!r} is under way; every request needs its own id")
            request = self.llm.one_request("add_request", prompt, params, priority, None, lora_request)
            if arrival_time is not None:
                request.spec = replace(request.spec, arrival_time=arrival_time)
            self.sinks[request_id] = self.llm.outputs.add(
                request, on_delta=self._take, streaming=True, name=request_id, on_finish=None
            )
        return request_id

    def step(self) -> list[RequestOutput]:
        """Compute one step; an output of every request that has something to tell. A step that fails raises, and ends
        the requests in it; what another caller's function raises, that caller hears of."""
        with self.llm.lock:
            try:
                self.llm.step()
            except Exception as error:
                if not self.llm.engine.is_open or not self.sinks or error in [one.error for one in self.sinks.values()]:
                    raise
            new, self._new = self._new, {}
            outputs = [self._output(name, deltas) for name, deltas in new.items()]
            self._forget_finished()
        return [output for output in outputs if output is not None]

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End these without another output; an id that is not under way changes nothing."""
        with self.llm.lock:
            for name in [request_ids] if isinstance(request_ids, str) else list(request_ids):
                if (sink := self.sinks.pop(name, None)) is not None:
                    self._new.pop(name, None)
                    sink.on_delta = None
                    sink.withdraw()

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        with self.llm.lock:
            self._forget_finished()
            return len(self.sinks)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return self.llm.get_tokenizer()

    tokenizer = property(get_tokenizer)

    def __getattr__(self, name: str) -> Any:
        """The upkeep is the LLM's: get_metrics, sleep, reset_prefix_cache, start_profile and the like."""
        if name in ("llm", "sinks"):
            raise AttributeError(name)
        return getattr(self.llm, name)

    def _forget_finished(self) -> None:
        """Those that have ended and were handed out, or were ended by a failed step, `sleep` or the like."""
        self.sinks = {name: sink for name, sink in self.sinks.items() if name in self._new or not sink.is_finished}

    def _take(self, sink: OutputSink, delta: StreamDelta) -> None:
        if delta.finish_reason == "abort":
            self._new.pop(sink.name, None)
        else:
            self._new.setdefault(sink.name, []).append(delta)

    def _output(self, name: str, deltas: list[StreamDelta]) -> RequestOutput | None:
        sink = self.sinks[name]
        kind = sink.request.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not sink.is_finished:
            return None
        if kind is RequestOutputKind.DELTA:
            indices = dict.fromkeys(delta.index for delta in deltas)
            samples = [_joined(sink.samples[at], [one for one in deltas if one.index == at]) for at in indices]
        else:
            samples = [replace(sample, token_ids=list(sample.token_ids)) for sample in sink.samples]
        return replace(sink.so_far(), outputs=samples, finished=sink.is_finished)


def _joined(sample: CompletionOutput, deltas: list[StreamDelta]) -> CompletionOutput:
    """What is new of one sample."""
    scores = [row for delta in deltas if delta.logprobs for row in delta.logprobs]
    return replace(
        sample,
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=None if sample.logprobs is None else scores,
    )
