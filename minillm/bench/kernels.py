"""Every kernel alone, against torch's own and against the limit that its bytes or its arithmetic set.
Built in chapter 12.

Outputs are compared with the PyTorch twin before anything is timed. On a GPU a candidate is timed by events around
replays of a CUDA graph, launch cost apart, its inputs rotated among enough copies that none is still in the cache; on
a CPU by the clock, over calls in a row, so that what fits a CPU's cache stays there. The limit of a case is the larger
of its bytes over the copy bandwidth and its operations over the matrix product rate, both measured in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from ..device import resolve_device, resolve_dtype
from ..kernels.language import MODE
from . import measure
from .case import Case
from .kernel_cases import cases_of
from .record import Record

L2_BYTES = 256 * 2**20  # rotate among inputs of this size together: more than any cache holds


@dataclass(frozen=True)
class Workload:
    """`scale` shrinks every case, for a machine that interprets the Triton kernels; 1 is what the figures are for.

    No `families` are those of the device: on a GPU the Triton kernels, on a CPU our C kernels.
    """

    families: tuple[str, ...] = ()
    dtype: str = "auto"
    scale: int = 1
    repeats: int = measure.MIN_REPEATS


def run(
    workload: Workload = Workload(),
    device: str = "auto",
    command: str = "minillm bench kernels",
    on_run: Callable[[str], None] = lambda what: None,
    keep: Callable[[dict], object] | None = None,
) -> dict:
    """Measure every case; a result for `measure.save`. Raises RuntimeError if a candidate's output is wrong, or,
    where the result is kept (see `Record`), notes it and goes on.
    A peer that does not run here is named in `unavailable`."""
    where = resolve_device(device)
    dtype = resolve_dtype(workload.dtype, where)
    name = "-".join([f"kernels-{measure.name_of(dtype)}", *workload.families])
    record = Record(name, command, where, asdict(workload) | {"mode": MODE}, keep)
    with record.case("ceilings"):
        record.ceilings = measure.measure_ceilings(where, (dtype,))
    if record.ceilings is None:  # nothing can be set beside a limit
        return record.finish()
    for case in cases_of(workload.families, workload.scale, where, dtype):
        with record.case(case.name):
            record.figures[case.name] = measure_case(case, record, measure.name_of(dtype), workload.repeats)
        on_run(case.name)
    return record.finish()


def measure_case(case: Case, record: Record, dtype: str, repeats: int) -> dict:
    unavailable = check(case, record.device)
    case = replace(case, candidates={name: run for name, run in case.candidates.items() if name not in unavailable})
    times = time_case(case, record, repeats)
    limit = max(case.num_bytes / record.ceilings.bandwidth, case.flops / record.ceilings.matmul_flops_per_second[dtype])
    candidates = {
        name: {
            "seconds": t.median,
            "spread": t.spread,
            "share_of_limit": limit / t.median,
            "minillm_speedup": t.median / times[case.ours].median,
        }
        for name, t in times.items()
    }
    figures = {"limit_seconds": limit, "bytes": case.num_bytes, "flops": case.flops, "candidates": candidates}
    return figures | ({"unavailable": unavailable} if unavailable else {})


def check(case: Case, device: torch.device) -> dict[str, str]:
    """Every candidate says what the first torch one says, on inputs of its own that it may spoil.
    Returns the peers that do not run on this device, with their errors; ours have to."""
    torch.manual_seed(0)
    inputs, said, unavailable = case.make(), {}, {}
    for name, run in case.candidates.items():
        try:
            said[name] = run(*(x.clone() if torch.is_tensor(x) else x for x in inputs)).float()
        except Exception as error:
            if name.startswith("minillm"):
                raise
            unavailable[name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    reference = next((out for name, out in said.items() if not name.startswith("minillm")), None)
    if reference is None:
        raise RuntimeError(f"{case.name}: no peer runs here to compare with: {unavailable}")
    for name, out in said.items():
        error = ((out - reference).norm() / reference.norm()).item()
        if name != case.unchecked and not error < case.tolerance:
            raise RuntimeError(f"{case.name}: {name} is {error:.1e} from the reference; no point in timing")
    return unavailable


def time_case(case: Case, into: Record, repeats: int) -> dict[str, measure.Samples]:
    """The times of every candidate, in turns; the samples go into `into` as they are taken."""
    device = into.device
    copies = max(1, min(64, L2_BYTES // max(1, case.num_bytes) + 1)) if device.type == "cuda" else 1
    inputs = [case.make() for _ in range(copies)]
    if device.type != "cuda":
        candidates = {name: lambda run=run: time_calls(run, inputs[0]) for name, run in case.candidates.items()}
        return into.interleave(candidates, repeats, f"{case.name}/")
    graphs = {name: record(run, inputs) for name, run in case.candidates.items()}
    candidates = {name: lambda replay=replay: time_replays(replay, len(inputs)) for name, replay in graphs.items()}
    return into.interleave(candidates, repeats, f"{case.name}/")


def time_calls(run: Callable[..., Tensor], inputs: tuple, seconds: float = 0.02) -> float:
    """Seconds a call, from as many as take about `seconds`: one of microseconds alone would be lost in the clock."""
    started, calls = time.perf_counter(), 0
    while not calls or time.perf_counter() - started < seconds:
        run(*inputs)
        calls += 1
    return (time.perf_counter() - started) / calls


def record(run: Callable[..., Tensor], inputs: list[tuple]) -> Callable[[], None]:
    """One pass over all inputs as a CUDA graph; as it is where it cannot be recorded."""
    for _ in range(2):
        for one in inputs:
            run(*one)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for one in inputs:
                run(*one)
    except RuntimeError:  # a library that synchronises
        torch.cuda.synchronize()
        return lambda: [run(*one) for one in inputs] and None
    return graph.replay


def time_replays(replay: Callable[[], None], num_inputs: int, seconds: float = 0.05) -> float:
    """Seconds a call, from events around as many passes as take about `seconds`."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    started = time.perf_counter()
    replay()
    torch.cuda.synchronize()
    passes = max(1, min(1000, int(seconds / max(1e-6, time.perf_counter() - started))))
    begin.record()
    for _ in range(passes):
        replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / passes / num_inputs


def tables(measured: dict) -> list:
    """The limit first, then every candidate with its share of it (rich renderables)."""
    from rich.table import Table

    found = []
    for name, f in measured["figures"].items():
        table = Table("candidate", "µs", "± half range", "of limit", "ours is faster by", title=name)
        table.add_row("the limit", f"{1e6 * f['limit_seconds']:,.1f}", "", "100%", "", style="dim")
        for candidate, c in f["candidates"].items():
            table.add_row(
                candidate,
                f"{1e6 * c['seconds']:,.1f}",
                f"{c['spread'] / 2:.0%}",
                f"{c['share_of_limit']:.0%}",
                f"{c['minillm_speedup']:.2f}×",
            )
        found.append(table)
    return found
