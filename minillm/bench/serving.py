"""What the engine's own machinery costs and saves: prefix hits, the scheduler's steps, the simulator's error.
Built in chapter 09."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch

from .. import LLM, SamplingParams
from ..device import resolve_device
from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..engine.request import Request
from ..engine.scheduler import Scheduler
from ..engine.simulator import CostModel, SimulatedRunner, StepRecorder, VirtualClock, WallClock, replay
from ..engine.step import StepResult
from ..engine.workload import poisson_trace, to_requests
from ..kv_cache.manager import KVCacheManager
from . import measure

OWN_TOKENS = 16  # of each request, after the shared prompt
QUEUES = {
    "none": (0, 0),
    "10 waiting": (10, 0),
    "1,000 waiting": (1_000, 0),
    "10,000 waiting": (10_000, 0),
    "10,000 finished": (0, 10_000),
}
STEPS, RUNNING = 300, 16


def run_prefix(
    model: str = "tinyworld",
    prompt_tokens: int = 512,
    repeats: int = measure.MIN_REPEATS,
    device: str = "auto",
    command: str = "minillm bench prefix",
    on_run: Callable[[str], None] = lambda what: None,
) -> dict:
    """Time to first token of a request that begins with a shared prompt: cold, and with the prompt's blocks cached."""
    where = resolve_device(device)
    llm = LLM(model, device=str(where), dtype="float32")
    rng = random.Random(0)
    vocab_size = llm.model.config.vocab_size
    shared = [rng.randrange(4, vocab_size) for _ in range(prompt_tokens)]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    said, cached = {"cold": [], "warm": []}, {"cold": [], "warm": []}

    def ttft(kind: str) -> float:
        own = [rng.randrange(4, vocab_size) for _ in range(OWN_TOKENS)]
        if kind == "cold":
            llm.engine.kv_cache.pool.evict_all()
        [output] = llm.generate({"prompt_token_ids": shared + own}, params, use_tqdm=False)
        said[kind].append((tuple(own), output.outputs[0].token_ids[0]))
        cached[kind].append(output.metrics.num_cached_tokens)
        return output.metrics.ttft

    times = measure.interleave(
        {kind: lambda kind=kind: ttft(kind) for kind in ("cold", "warm")}, repeats, device=where, on_run=on_run
    )
    for own, token in said["warm"]:  # a warm answer is a cold one's
        llm.engine.kv_cache.pool.evict_all()
        [output] = llm.generate({"prompt_token_ids": shared + list(own)}, params, use_tqdm=False)
        if output.outputs[0].token_ids[0] != token:
            raise RuntimeError(f"a prefix hit changed the answer from {output.outputs[0].token_ids[0]} to {token}")
    figures = {f"{kind}_ttft_seconds": times[kind].median for kind in times} | {
        f"{kind}_spread": times[kind].spread for kind in times
    }
    figures |= {
        "speedup": times["cold"].median / times["warm"].median,
        "cached_tokens": min(cached["warm"]),
        "outputs_checked": True,
    }
    workload = {"model": model, "shared_tokens": prompt_tokens, "own_tokens": OWN_TOKENS, "repeats": repeats}
    return measure.result("prefix", command, where, workload, None, figures, times)


def prefix_table(measured: dict):
    from rich.table import Table

    f, w = measured["figures"], measured["workload"]
    table = Table(
        "prefix cache",
        "time to first token, ms",
        "± half range",
        "speed-up",
        title=f"{w['shared_tokens']} shared tokens and {w['own_tokens']} of its own, {measured['hardware']['name']}",
    )
    table.add_row("cold", f"{1e3 * f['cold_ttft_seconds']:.2f}", f"{f['cold_spread'] / 2:.0%}", "1×")
    table.add_row(
        f"warm, {f['cached_tokens']} tokens hit",
        f"{1e3 * f['warm_ttft_seconds']:.2f}",
        f"{f['warm_spread'] / 2:.0%}",
        f"{f['speedup']:.1f}×",
    )
    return table


class _Free:
    """A runner that costs nothing: what is left is the engine."""

    def execute(self, output):
        return StepResult({row.request_id: [1] for row in output.rows if row.samples})


def run_scheduler(
    repeats: int = measure.MIN_REPEATS,
    command: str = "minillm bench scheduler",
    steps: int = STEPS,
    on_run: Callable[[str], None] = lambda what: None,
) -> dict:
    """Seconds of `Engine.step` without a model, RUNNING requests decoding,
    by how many wait and how many have finished."""

    def request(name: str, max_tokens: int) -> Request:
        return Request(name, [1] * 20, SamplingParams(max_tokens=max_tokens, ignore_eos=True), max_tokens)

    def seconds_per_step(waiting: int, finished: int) -> float:
        scheduler = Scheduler(KVCacheManager(1000), max_num_seqs=RUNNING)
        engine = Engine(scheduler=scheduler, runner=_Free())
        for index in range(finished):
            engine.add_request(request(f"finished {index}", 1))
        while engine.has_unfinished:
            engine.step()
        for index in range(RUNNING + waiting):
            engine.add_request(request(str(index), steps + 50))
        engine.step()
        started = time.perf_counter()
        for _ in range(steps):
            engine.step()
        return (time.perf_counter() - started) / steps

    times = measure.interleave(
        {name: lambda queue=queue: seconds_per_step(*queue) for name, queue in QUEUES.items()}, repeats, on_run=on_run
    )
    figures = {
        "step_seconds": {name: taken.median for name, taken in times.items()},
        "spread": {name: taken.spread for name, taken in times.items()},
    }
    workload = {"running": RUNNING, "steps": steps, "repeats": repeats}
    return measure.result("scheduler", command, torch.device("cpu"), workload, None, figures, times)


def scheduler_table(measured: dict):
    from rich.table import Table

    f = measured["figures"]
    table = Table(
        "requests beside",
        "µs a step",
        "± half range",
        "× none",
        title=f"{measured['workload']['running']} requests decode, no model, {measured['hardware']['name']}",
    )
    for name, seconds in f["step_seconds"].items():
        table.add_row(
            name, f"{1e6 * seconds:.1f}", f"{f['spread'][name] / 2:.0%}", f"{seconds / f['step_seconds']['none']:.2f}"
        )
    return table


def run_simulator(
    model: str = "tinyworld",
    repeats: int = measure.MIN_REPEATS,
    device: str = "auto",
    command: str = "minillm bench simulator",
    on_run: Callable[[str], None] = lambda what: None,
) -> dict:
    """Fit the cost of a step on one trace; then run another on the engine, in real time, and on the simulator."""
    where = resolve_device(device)
    llm = LLM(model, device=str(where), dtype="float32")
    vocab_size = llm.model.config.vocab_size
    settings = dict(max_num_seqs=16, max_num_batched_tokens=256)
    fitting, judged = (
        poisson_trace(48, rate=1e9, input_length=100, output_length=60, max_length=500, seed=seed) for seed in (1, 2)
    )

    def real(trace) -> tuple[StepRecorder, float]:
        clock = WallClock()
        engine = Engine(
            llm.model,
            scheduler=Scheduler(KVCacheManager(2000, enable_prefix_caching=False), **settings),
            clock=clock,
            config=EngineConfig("", async_scheduling=False),
        )  # the simulator takes its steps in turn
        engine.runner = StepRecorder(engine.runner)
        replay(engine, to_requests(trace, vocab_size, time_scale=0))
        return engine.runner, clock()

    steps: dict[str, list[StepRecorder]] = {"fitted": [], "engine": []}

    def timed(name: str, trace) -> float:
        recorded, seconds = real(trace)
        steps[name].append(recorded)
        return seconds

    # In turns, so that a machine that slows down for a while slows both.
    times = measure.interleave(
        {
            name: lambda name=name, trace=trace: timed(name, trace)
            for name, trace in (("fitted", fitting), ("engine", judged))
        },
        repeats,
        device=where,
        on_run=on_run,
    )
    warm = steps["fitted"][1:]  # the first round warmed the machine up
    cost = CostModel.fit(
        [step for run in warm for step in run.features], [taken for run in warm for taken in run.seconds]
    )
    clock = VirtualClock()
    engine = Engine(
        scheduler=Scheduler(KVCacheManager(2000, enable_prefix_caching=False), **settings),
        runner=SimulatedRunner(cost, clock),
        clock=clock,
    )
    engine.runner = StepRecorder(engine.runner)
    started = time.perf_counter()
    replay(engine, to_requests(judged, vocab_size, time_scale=0))
    own_seconds = time.perf_counter() - started
    if engine.runner.summaries != steps["engine"][-1].summaries:
        raise RuntimeError("the simulator took other steps than the engine")
    figures = {
        "engine_seconds": times["engine"].median,
        "spread": times["engine"].spread,
        "simulated_seconds": clock.now,
        "error": clock.now / times["engine"].median - 1,
        "seconds_to_simulate": own_seconds,
        "steps": len(engine.runner.summaries),
        "same_steps": True,
        "cost_model": vars(cost),
    }
    return measure.result(
        "simulator",
        command,
        where,
        {"model": model, "requests": 48, "repeats": repeats} | settings,
        None,
        figures,
        times,
    )


def simulator_table(measured: dict):
    from rich.table import Table

    f = measured["figures"]
    table = Table("", "seconds", title=f"{f['steps']} steps, the same in both, {measured['hardware']['name']}")
    table.add_row("engine, measured", f"{f['engine_seconds']:.3f} ± {f['spread'] / 2:.0%}")
    table.add_row("simulator says", f"{f['simulated_seconds']:.3f} ({f['error']:+.1%})")
    table.add_row("simulating took", f"{f['seconds_to_simulate']:.3f}")
    return table
