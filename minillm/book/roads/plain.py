"""The plain engine, which every random road is compared with: one request at a time, nothing shared."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from minillm.book.roads.draw import LONGEST_PROMPT, MAX_TOKENS
from minillm.book.roads.road import GREEDY, Arrival, Road
from minillm.book.roads.serve import Served, lora_request_of, params_of, prompt_of, settings_of
from minillm.engine.llm import LLM
from minillm.sampling.logprobs import Logprob
from minillm.sampling.metadata import SamplingMetadata
from minillm.sampling.noise import derive_seed
from minillm.sampling.sampler import Sampler, SamplerOutput

# What another order of the same float32 sums changes in a logit, and in a cache of codes a code that is rounded to its
# neighbour.
TOLERANCE = {"auto": 1e-3, "int8": 0.05, "fp8": 0.3, "int4": 0.6}
NUM_SHAKEN = 6
ModelKey = tuple[str, str | None, str, int | None]  # the model, its weights, its cache format and its sinks


class PlainEngine:
    """What a request generates alone. Each answer is computed once for a model, its weights and its cache format."""

    def __init__(self, models: Path):
        self.models = models
        self.answers: dict[str, Served] = {}
        self.engines: dict[ModelKey, LLM] = {}

    def answer(self, road: Road, arrival: Arrival) -> Served:
        """All samples of the request; those of n are served as n requests, each with the seed that its sample has."""
        adapter = arrival.adapter if road.max_loras else None
        key = json.dumps([*_model_of(road), arrival.prompt, arrival.params, arrival.logprob_start, adapter])
        if key not in self.answers:
            self.answers[key] = self._compute(road, arrival)
        return self.answers[key]

    def is_undecided(self, road: Road, arrival: Arrival) -> bool:
        """Whether rounding may choose another token somewhere: logits moved by the tolerance say something else."""
        expected = [sample.token_ids for sample in self.answer(road, arrival).samples]
        for seed in range(NUM_SHAKEN):
            shaken = self._compute(road, arrival, Shaken(TOLERANCE[road.kv], seed))
            if [sample.token_ids for sample in shaken.samples] != expected:
                return True
        return False

    def _compute(self, road: Road, arrival: Arrival, sampler: Sampler | None = None) -> Served:
        llm = self._engine(_model_of(road))
        llm.engine.runner.sampler = sampler or Sampler()
        outputs = []
        for index in range(arrival.params.get("n", 1)):
            changed = {"n": 1} | ({"seed": derive_seed(arrival.params["seed"], index)} if index else {})
            options = {"use_tqdm": False, "lora_request": lora_request_of(road, arrival, self.models)}
            [output] = llm.generate(prompt_of(arrival), params_of(arrival, **changed), **options)
            outputs.append(output)
        return Served([output.outputs[0] for output in outputs], outputs[0].prompt_logprobs)

    def _engine(self, key: ModelKey) -> LLM:
        """One engine for a model: it serves one request at a time and keeps nothing of it."""
        if key not in self.engines:
            model, weights, kv, sinks = key
            longest = Arrival((0,) * LONGEST_PROMPT, GREEDY | {"max_tokens": MAX_TOKENS})
            max_loras = int(weights != "rotated")  # which takes no adapters
            plain = Road(
                (longest,), model=model, weights=weights, kv=kv, sinks=sinks, max_num_seqs=1, max_loras=max_loras
            )
            self.engines[key] = LLM(**settings_of(plain, self.models, ""))
        return self.engines[key]


class Shaken(Sampler):
    """Draws from logits with noise on them."""

    def __init__(self, size: float, seed: int):
        super().__init__()
        self.size, self.generator = size, torch.Generator().manual_seed(seed)

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        noise = torch.rand(logits.shape, generator=self.generator)
        return super().sample(logits + self.size * (2 * noise - 1), metadata)


def difference(road: Road, served: Served, expected: Served) -> str | None:
    """The first thing that a request generated differently, in words;
    None if all is equal, log-probabilities nearly."""
    tolerance = TOLERANCE[road.kv]
    for index, (sample, wanted) in enumerate(zip(served.samples, expected.samples)):
        where = f"sample {index}: " if len(served.samples) > 1 else ""
        if served.is_aborted and sample.finish_reason == "abort":
            if sample.token_ids != wanted.token_ids[: len(sample.token_ids)]:
                return f"{where}aborted with tokens {sample.token_ids}, which are not the first of {wanted.token_ids}"
            continue
        for name in ("token_ids", "text", "finish_reason", "stop_reason", "error"):
            if (found := getattr(sample, name)) != (plain := getattr(wanted, name)):
                return f"{where}{name} {found!r}, the plain engine has {plain!r}"
        if problem := _scores_differ(sample.logprobs, wanted.logprobs, tolerance):
            return f"{where}logprobs {problem}"
    if served.deltas and len(served.samples) == 1 and not served.is_aborted:
        if (streamed := "".join(delta.text for delta in served.deltas)) != served.samples[0].text:
            return f"streamed {streamed!r}, the text is {served.samples[0].text!r}"
    if not served.is_aborted and (
        problem := _scores_differ(served.prompt_logprobs, expected.prompt_logprobs, tolerance)
    ):
        return f"prompt_logprobs {problem}"
    return None


def _scores_differ(found: list | None, wanted: list | None, tolerance: float) -> str | None:
    if found is None or wanted is None:
        return None if found == wanted else f"{found}, the plain engine has {wanted}"
    if len(found) != len(wanted):
        return f"of {len(found)} tokens, the plain engine has {len(wanted)}"
    for index, (row, plain) in enumerate(zip(found, wanted)):
        if (row is None) != (plain is None) or (row is not None and not _close(row, plain, tolerance)):
            return f"of token {index} are {row}, the plain engine has {plain}"
    return None


def _close(row: dict[int, Logprob], plain: dict[int, Logprob], tolerance: float) -> bool:
    """The same values, in the order of the ranks: which of two equal tokens comes first is left open."""
    values, wanted = (sorted(entry.logprob for entry in one.values()) for one in (row, plain))
    same_token = next(iter(row)) == next(iter(plain))  # the one that was drawn
    near = (abs(a - b) <= tolerance for a, b in zip(values, wanted))
    return same_token and len(values) == len(wanted) and all(near)


def _model_of(road: Road) -> ModelKey:
    return road.model, road.weights, road.kv, road.sinks
