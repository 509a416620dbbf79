"""Serves a random road, and looks whether the engine is whole when it is idle."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from minillm.book.roads.late import be_late
from minillm.book.roads.models import ADAPTERS, LATENT, MODELS, MXFP4, WINDOW, adapter_folder, config_of
from minillm.book.roads.pickled import pickle_steps
from minillm.book.roads.road import Arrival, Road
from minillm.device import LIKE_A_GPU
from minillm.engine.llm import LLM
from minillm.engine.lora_request import LoRARequest
from minillm.engine.outputs import CompletionOutput, RequestOutput, StreamDelta
from minillm.engine.runner import ModelRunner
from minillm.engine.sink import OutputSink
from minillm.kernels import language, native
from minillm.kv_cache.paged import bytes_per_block
from minillm.kv_cache.quantized import KV_DTYPES
from minillm.sampling.params import SamplingParams

QUANTIZED = {None: None, "int8": "int8", "int4": {"weights": "int4", "group_size": 16}}
QUANTIZED["rotated"] = QUANTIZED["int4"] | {"rotate": True}
QUANTIZED |= {"mxfp4": {"name": "mxfp4", "group_size": 16}, "nvfp4": "nvfp4"}
OFFLOADED = 10**6  # bytes: all layers, of which two stand on the device
MOST_STEPS = 3000  # of a round; the longest road takes some hundreds


class Refused(Exception):
    """The engine does not take these settings together, and says so."""


class StepFailed(Exception):
    """Raised by the step of a road that is to fail."""


@dataclass
class Served:
    """What became of a request in one round."""

    samples: list[CompletionOutput]
    prompt_logprobs: list | None = None
    is_aborted: bool = False
    num_preemptions: int = 0
    deltas: list[StreamDelta] = field(default_factory=list)  # of a streamed one


def serve(road: Road, models: Path, counts: Counter[str]) -> list[list[Served]]:
    """The outputs of every round. `counts` hears how often what happened.

    Raises Refused for settings that are refused, and whatever the engine raises while it serves.
    """
    with TemporaryDirectory() as folder, _environment(road.like_a_gpu):
        llm, rounds = _engine(road, models, folder), []
        try:
            for number in range(road.rounds):
                if number and road.restart:
                    llm.close()
                    llm = _engine(road, models, folder)
                if number == 0 and road.fails_at is not None:
                    _fail_at(llm, road.fails_at)
                rounds.append((_generate if road.together else _arrive)(llm, road, models))
                check_idle(llm)
            _count(llm, counts)
            counts["failed a step"] += road.fails_at is not None and "forward" not in vars(llm.engine.runner)
            counts["aborted a request"] += any(served.is_aborted for round_ in rounds for served in round_)
            counts["preempted"] += any(served.num_preemptions for served in rounds[-1])
        finally:
            llm.close()
    return rounds


def settings_of(road: Road, models: Path, disk: str | Path) -> dict[str, Any]:
    """The arguments of `LLM`."""
    config = config_of(road.model)
    dtype = KV_DTYPES.get(road.kv, torch.float32)
    sizes = config.num_layers, config.num_kv_heads, config.head_dim
    block_bytes = bytes_per_block(*sizes, road.block_size, dtype, config.kv_vectors)
    # A file has a header beside its block.
    disk_settings = (
        {"disk_kv_path": disk, "disk_kv_bytes": road.disk_blocks * (block_bytes + 512)} if road.disk_blocks else {}
    )
    return dict(
        model=models / road.model, dtype="float32", device="cpu", max_model_len=road.max_model_len,
        max_num_seqs=road.max_num_seqs, max_num_batched_tokens=road.budget,
        block_size=road.block_size, num_kv_blocks=road.num_kv_blocks,
        enable_prefix_caching=road.prefix, enable_chunked_prefill=road.chunked, scheduling_policy=road.policy,
        attention_backend=_present(road.attention), preemption_mode="swap" if road.swap else "recompute",
        quantization=QUANTIZED[road.weights], kv_cache_dtype=road.kv,
        kv_retention=None if road.sinks is None else {"sinks": road.sinks, "window": WINDOW},
        speculative_config=_speculation(road, models), host_kv_bytes=road.host_blocks * block_bytes, **disk_settings,
        enforce_eager=not road.recorded, async_scheduling=None if road.like_a_gpu else road.ahead,
        cpu_offload_bytes=OFFLOADED if road.offload else 0,
        tensor_parallel_size=road.tensor_parallel, pipeline_parallel_size=road.stages,
        enable_expert_parallel=road.spread,
        enable_lora=road.max_loras > 0, max_loras=road.max_loras or 1, max_cpu_loras=road.max_loras or 1,
    )  # fmt: skip


def check_idle(llm: LLM) -> None:
    """Raise RuntimeError unless nothing is left of the requests: no block, no place, no state of theirs."""
    engine = llm.engine
    engine.step()  # what the runner and a drafter remember of finished requests they drop here
    engine.scheduler.check_integrity()
    managers = {"": engine.kv_cache}
    if of_workers := llm.get_world_size() > 1:
        held, features = [one for of_rank in engine.executor.collective("held") for one in of_rank], {}
    else:
        held, features = engine.runner.requests.states, {}
        if hasattr(drafter := engine.runner.drafter, "manager"):
            managers["draft model's "] = drafter.manager
        features = getattr(getattr(drafter, "store", None), "kept", {})
    scheduler, outputs = engine.scheduler, llm.outputs
    left = {
        "requests": scheduler.requests,
        "leaving": scheduler.leaving,
        "waiting": list(scheduler.waiting),
        "runner's requests": held,
        "sinks": outputs.sinks,
        "beams": outputs.raw,
        "features of a draft head": features,
        "step": engine.flying if of_workers else engine.in_flight,
    }
    for owner, manager in managers.items():
        manager.check_integrity()
        left |= {owner + "records": manager.records}
        left |= {f"{owner}blocks": manager.pool.num_blocks - manager.pool.num_free}
        left |= {f"{owner}host places": manager.host.num_blocks - manager.host.num_free}
    if left := {name: found for name, found in left.items() if found}:
        raise RuntimeError(f"all requests have ended, and the engine still holds {left}")


def _engine(road: Road, models: Path, folder: str) -> LLM:
    settings = settings_of(road, models, folder)
    try:
        for arrival in road.requests:  # shrinking may leave parameters that do not go together
            params_of(arrival)
        llm = LLM(**settings)
        if llm.get_world_size() == 1:
            pickle_steps(llm.engine)
        elif road.late is not None:
            llm.collective_rpc(be_late, args=(road.late,))
        return llm
    except (ValueError, NotImplementedError) as error:
        raise Refused(str(error)) from error


def _arrive(llm: LLM, road: Road, models: Path) -> list[Served]:
    """Every request comes and goes between two steps."""
    found: dict[int, tuple[OutputSink, Served]] = {}
    for step in range(MOST_STEPS):
        for index, arrival in enumerate(road.requests):
            if arrival.at == step:
                found[index] = _submit(llm, road, arrival, models)
        for index, arrival in enumerate(road.requests):
            if arrival.abort_at == step and index in found and not found[index][0].is_finished:
                submission = found[index][0]
                submission.withdraw() if arrival.withdrawn else llm.engine.abort(submission.request.request_id)
                found[index][1].is_aborted = True
        try:
            is_working = llm.step()
        except StepFailed:
            is_working = llm.engine.has_unfinished  # those that were not in the step
            for submission, served in found.values():
                served.is_aborted |= submission.error is not None
        llm.engine.scheduler.check_integrity()
        if not is_working and len(found) == len(road.requests):
            break
    else:
        raise RuntimeError(f"still working after {MOST_STEPS} steps: {llm.engine.scheduler.requests}")
    for submission, served in found.values():
        if served.is_aborted:
            submission.collected()  # makes the text of what there was
        else:
            _take(served, submission.output())
    return [found[index][1] for index in range(len(road.requests))]


def _submit(llm: LLM, road: Road, arrival: Arrival, models: Path) -> tuple[OutputSink, Served]:
    [request] = llm.inputs.requests(
        prompt_of(arrival), params_of(arrival), priority=arrival.priority, user=arrival.user,
        lora_request=lora_request_of(road, arrival, models),
    )  # fmt: skip
    served = Served([])
    hear = (lambda _, delta: served.deltas.append(delta)) if arrival.streaming else None
    submission = llm.outputs.add(request, on_delta=hear, streaming=arrival.streaming)
    served.samples = submission.samples
    return submission, served


def _generate(llm: LLM, road: Road, models: Path) -> list[Served]:
    try:
        return _call_generate(llm, road, models)
    except StepFailed:
        return [Served([], is_aborted=True) for _ in road.requests]


def _call_generate(llm: LLM, road: Road, models: Path) -> list[Served]:
    outputs = llm.generate(
        list(map(prompt_of, road.requests)), list(map(params_of, road.requests)), use_tqdm=False,
        priority=[arrival.priority for arrival in road.requests], user=[arrival.user for arrival in road.requests],
        lora_request=[lora_request_of(road, arrival, models) for arrival in road.requests],
    )  # fmt: skip
    return [_take(Served([]), output) for output in outputs]


def _fail_at(llm: LLM, step: int) -> None:
    """Let the forward pass of a step raise, once."""
    runner, steps = llm.engine.runner, count()

    def forward(*arguments: Any) -> Any:
        if next(steps) == step:
            del runner.forward
            raise StepFailed
        return ModelRunner.forward(runner, *arguments)

    runner.forward = forward


def _take(served: Served, output: RequestOutput) -> Served:
    served.samples, served.prompt_logprobs = output.outputs, output.prompt_logprobs
    served.num_preemptions = output.metrics.num_preemptions
    return served


def prompt_of(arrival: Arrival) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt_token_ids": list(arrival.prompt)}
    if arrival.salt is not None:
        prompt["cache_salt"] = arrival.salt
    if arrival.logprob_start and "prompt_logprobs" in arrival.params:
        prompt["logprob_start_len"] = arrival.logprob_start
    return prompt


def lora_request_of(road: Road, arrival: Arrival, models: Path) -> LoRARequest | None:
    if arrival.adapter is None or not road.max_loras:
        return None
    number = 1 + list(ADAPTERS).index(arrival.adapter)
    return LoRARequest(arrival.adapter, number, adapter_folder(models, road.model, arrival.adapter))


def params_of(arrival: Arrival, **changed: Any) -> SamplingParams:
    params = arrival.params | changed
    if "logit_bias" in params:  # JSON has no numbers for keys
        params = params | {"logit_bias": {int(token_id): value for token_id, value in params["logit_bias"].items()}}
    return SamplingParams(**params)


def _speculation(road: Road, models: Path) -> dict[str, Any] | None:
    if road.speculation is None:
        return None
    common = {"num_speculative_tokens": road.num_drafts, "adaptive": road.adaptive}
    if road.speculation == "ngram":
        return common | {"method": "ngram", "prompt_lookup_min": 1}
    if road.speculation in ("eagle", "eagle3"):
        return common | {"method": road.speculation, "model": models / f"{road.model}-{road.speculation}"}
    names = [name for name in MODELS if name not in (LATENT, MXFP4)]
    another = names[(names.index(road.model) + 1) % len(names)] if road.model in names else names[0]
    draft = {"noisy": f"{road.model}-noisy", "same": road.model, "another": another}[road.speculation]
    return common | {"method": "draft_model", "model": models / draft}


def _present(attention: str) -> str:
    """The backend, or PyTorch's where this machine has no compiler, or no interpreter of Triton's (a GPU has none)."""
    absent = (attention == "native" and native.library() is None) or (
        attention == "triton" and language.MODE != "interpreted"
    )
    return "torch" if absent else attention


def _count(llm: LLM, counts: Counter[str]) -> None:
    engine = llm.engine
    if llm.get_world_size() > 1:
        counts["split over processes"] += 1
        return
    found = engine.kv_cache.tiers.found
    moved = engine.runner.transfer.bytes_moved if engine.runner.transfer else {}
    adapters = engine.runner.adapters
    happened = {
        "served adapters": adapters and adapters.on_device,
        "read adapters again": adapters and adapters.num_read > len(llm.adapters.known),
        "hit a prefix": found.device, "hit host memory": found.host, "hit the disk": found.disk,
        "swapped out": moved.get("swap_out"), "swapped in": moved.get("swap_in"), "wrote to disk": moved.get("to_disk"),
        "drafted": engine.speculation and engine.speculation.metrics.num_draft_tokens,
        "kept features": hasattr(engine.runner.drafter, "store"),
        "scheduled ahead": engine.overlap, "recorded steps": engine.runner.graphs is not None,
    }  # fmt: skip
    counts.update(name for name, value in happened.items() if value)


@contextmanager
def _environment(like_a_gpu: str) -> Iterator[None]:
    before = os.environ.get(LIKE_A_GPU)
    try:
        os.environ[LIKE_A_GPU] = like_a_gpu
        yield
    finally:
        if before is None:
            del os.environ[LIKE_A_GPU]
        else:
            os.environ[LIKE_A_GPU] = before
