"""What HTTP costs, how the server behaves under many streams and under overload, and other servers beside it.
Built in chapter 24."""

from __future__ import annotations

import gc
import tempfile
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from prometheus_client.parser import text_string_to_metric_families

from ...engine.metrics import percentile
from ...model.checkpoint import load_config
from .. import measure
from ..decode import SHAPES, Shape
from ..load.client import Job, Report
from ..load.intervals import interval_over_rounds
from ..load.lengths import Lengths, Profile, trace_of
from ..load.run import Generator, Point, Run, Workload as Load, drive
from ..load.summary import summarize
from ..record import Record
from . import peers
from .one_process import Here, Pair, added_by_http, http_cost, served_here, times_slower
from .peers import Programs, Server, ask, running

CPU = torch.device("cpu")
PARTS = ("http", "ttft", "streams", "overload", "peers")
CHECKED_PROMPTS, CHECKED_TOKENS = 4, 16  # greedily, over HTTP and offline, before anything is timed
# Within seconds the machine's pace changes by more than HTTP costs, so there are many rounds of a few seconds, with and
# without HTTP: so many for each repeat. The first requests of a round are slower, and are not counted in `ttft`.
HTTP_ROUNDS = 3
TTFT_ROUNDS, TTFT_WARMUPS, TTFT_REQUESTS, TTFT_TOKENS = 10, 2, 6, 4
WAYS, LOADS = ("offline", "http"), ("uncongested", "overloaded")  # of the rounds, which have a run of each
LAG = "minillm:event_loop_lag_seconds_bucket"
GOALS = {
    "http_cost": 0.10,
    "ttft_difference_seconds": 0.005,
    "loop_lag_p99_seconds": 0.020,
    "overload_times_slower": 2.0,
    "throughput_over_peer": 2.0,
}


@dataclass(frozen=True)
class Workload:
    shape: str = "smollm2-135m"
    dtype: str = "float32"
    requests: int = 16  # at once
    prompt_tokens: int = 64
    output_tokens: int = 64
    streams: int = 256
    stream_tokens: int = 32
    overload_seconds: float = 20.0
    overload: float = 10.0  # times the capacity
    max_queued_requests: int = 8  # the gate during the overload
    repeats: int = measure.MIN_REPEATS
    parts: tuple[str, ...] = PARTS
    seed: int = 0

    def __post_init__(self):
        if unknown := set(self.parts) - set(PARTS):
            raise ValueError(f"only={', '.join(sorted(unknown))!r} is unknown; choose of {', '.join(PARTS)}")
        measure.check_repeats(self.repeats)


def run(
    workload: Workload = Workload(),
    programs: Programs | None = None,
    command: str = "minillm bench server",
    shapes: dict[str, Shape] = SHAPES,
    on_run: Callable[[str], None] = lambda what: None,
    keep: Callable[[dict], object] | None = None,
) -> dict:
    """Measure `workload` on the CPU; a result for `measure.save`. Raises ValueError for an unknown shape or a program
    that is not there, RuntimeError where a server gives other tokens than `LLM.generate`, or does not start."""
    if workload.shape not in shapes:
        raise ValueError(f"shape={workload.shape!r} is unknown; choose one of {', '.join(shapes)}")
    programs = programs or Programs()
    programs.check()
    name = "-".join(("server", *(workload.parts if workload.parts != PARTS else ()), workload.shape))
    record = Record(name, command, CPU, asdict(workload), keep)
    record.figures["goals"] = GOALS
    with tempfile.TemporaryDirectory() as folder:
        path = peers.write_checkpoint(shapes[workload.shape], Path(folder) / workload.shape, workload.seed)
        bench = _Bench(workload, programs, path, record, on_run)
        for part in workload.parts:
            if part == "peers" and not programs.peers:
                continue
            with record.case(part):
                getattr(bench, part)()
            gc.collect()
    return record.finish()


class _Bench:
    """One checkpoint, and what is measured on it; each method is a part."""

    def __init__(self, workload: Workload, programs: Programs, path: Path, record: Record, on_run):
        self.workload, self.programs, self.path, self.record, self.on_run = workload, programs, path, record, on_run
        self.config = load_config(path)
        self._turn = 0

    def http(self) -> None:
        """The same requests at once, with and without HTTP, in one process."""
        w, rounds = self.workload, []
        with served_here(self.path, w.dtype) as here:
            self._check(here)
            for turn in range(HTTP_ROUNDS * w.repeats + 1):  # the first one warms both up
                prompts = self._prompts(here.server, w.requests, w.prompt_tokens)
                own = here.seconds(prompts, w.output_tokens)
                self.on_run("offline")
                report = self._load(here.server, w.requests, w.requests, w.prompt_tokens, w.output_tokens)
                self.on_run("http")
                if turn:
                    self._take("http", WAYS, rounds, ([own], [max(one.ended for one in report.outcomes)]))
        times = self._taken("http", WAYS)
        tokens = w.requests * w.output_tokens
        self.record.figures["http"] = {
            "tokens_per_second": {name: tokens / taken.median for name, taken in times.items()},
            "spread": {name: taken.spread for name, taken in times.items()},
            "http_cost": http_cost(rounds),
            "http_cost_interval": interval_over_rounds(rounds, http_cost),  # 95%
        }

    def ttft(self) -> None:
        """One request at a time: the time to its first token, with and without HTTP, in one process."""
        w, rounds = self.workload, []
        with served_here(self.path, w.dtype) as here:
            for turn in range(w.repeats + 1):
                for _ in range(TTFT_ROUNDS if turn else 1):  # the first turn warms both up
                    report = self._load(here.server, TTFT_REQUESTS, 1, w.prompt_tokens, TTFT_TOKENS, TTFT_WARMUPS)
                    prompts = self._prompts(here.server, TTFT_WARMUPS + TTFT_REQUESTS, w.prompt_tokens)
                    own = [here.ttft(prompt, TTFT_TOKENS) for prompt in prompts]
                    if turn:
                        pair = own[TTFT_WARMUPS:], [one.ttft for one in report.outcomes]
                        self._take("ttft", WAYS, rounds, pair)
                self.on_run("ttft")
        taken = self._taken("ttft", WAYS)
        p50, p95 = ({name: percentile(one.seconds, q) for name, one in taken.items()} for q in (50, 95))
        self.record.figures["ttft"] = {
            "p50_seconds": p50,
            "p95_seconds": p95,
            "ttft_difference_seconds": added_by_http(rounds),
            "ttft_difference_interval": interval_over_rounds(rounds, added_by_http),  # 95%
        }

    def streams(self) -> None:
        """Many streams at once: how late the server's event loop is meanwhile."""
        w = self.workload
        with self._minillm("--max-num-seqs", str(w.streams)) as server:
            self._load(server, w.requests, w.requests, 16, 8)  # warm-up
            before = lag_buckets(server)
            report = self._load(server, w.streams, w.streams, 16, w.stream_tokens)
            lag = {limit: count - before[limit] for limit, count in lag_buckets(server).items()}
            figures = summarize(report.outcomes)
            self.record.figures["streams"] = {
                "loop_lag_p99_seconds": percentile_of_buckets(lag, 99),
                "loop_lag_buckets": {str(limit): count for limit, count in lag.items()},
                "client_lag_p99_seconds": report.lag["p99"],
                **_told(figures),
            }
            self.on_run("streams")

    def overload(self) -> None:
        """Ten times what the server can do is offered, in turns with half of it: those that are admitted in both."""
        w = self.workload
        profile = Profile(Lengths("fixed", w.prompt_tokens), Lengths("fixed", w.output_tokens))
        with self._minillm("--max-queued-requests", str(w.max_queued_requests)) as server:

            def generator(num_prompts: int) -> Generator:
                return Generator(
                    server.target, server.prompts, Load(profile, max(num_prompts, 1), 4, seed=self._seed())
                )

            at_once = w.max_queued_requests
            capacity = generator(4 * at_once).run(Point(concurrency=at_once)).figures["request_throughput"]
            self.on_run("capacity")
            runs: list[tuple[Run, Run]] = []
            rounds: list[Pair] = []
            for _ in range(w.repeats):
                pair = []
                for rate in (capacity / 2, w.overload * capacity):
                    pair.append(generator(round(rate * w.overload_seconds)).run(Point(rate)))
                    self.on_run("overload")
                runs.append(tuple(pair))
                latencies = [[one.e2e_latency for one in run.outcomes if one.is_complete] for run in pair]
                self._take("overload", LOADS, rounds, tuple(latencies))
        offered = [one for _, run in runs for one in run.outcomes]
        refused = sum(one.status == 429 for one in offered)
        admitted = sum(one.is_complete for one in offered)
        taken = self._taken("overload", LOADS)
        self.record.figures["overload"] = {
            "capacity_requests_per_second": capacity,
            "client_lag_p99_seconds": max(one.report.lag["p99"] for pair in runs for one in pair),
            "p99_seconds": {name: percentile(one.seconds, 99) for name, one in taken.items()},
            "rounds": [{name: _told(one.figures) for name, one in zip(taken, pair)} for pair in runs],
            "num_admitted": admitted,
            "num_refused": refused,
            "num_lost": len(offered) - admitted - refused,
            "overload_times_slower": times_slower(rounds),
            "overload_interval": interval_over_rounds(rounds, times_slower),  # 95%
        }

    def peers(self) -> None:
        """Every server on the same weights, in turns, while the others stand still: many at once, and one at a time."""
        w = self.workload
        with ExitStack() as stack:
            servers = {
                name: stack.enter_context(running(name, self.path, self.config, w.dtype, self.programs))
                for name in ("minillm", *self.programs.peers)
            }
            for server in servers.values():
                server.pause()
            figures = self.record.figures["peers"] = {}
            for at_once in (w.requests, 1):
                ttfts: dict[str, list[float]] = {name: [] for name in servers}

                def once(name: str, at_once: int = at_once, ttfts: dict[str, list[float]] = ttfts) -> float:
                    servers[name].resume()
                    report = self._load(servers[name], at_once, at_once, w.prompt_tokens, w.output_tokens)
                    servers[name].pause()
                    ttfts[name] += [one.ttft for one in report.outcomes]
                    return max(one.ended for one in report.outcomes)

                times = self.record.interleave(
                    {name: lambda name=name: once(name) for name in servers}, w.repeats, f"{at_once}/", self.on_run
                )
                tokens = at_once * w.output_tokens
                figures[str(at_once)] = {
                    name: {
                        "tokens_per_second": tokens / taken.median,
                        "spread": taken.spread,
                        "ttft_p50_seconds": percentile(ttfts[name], 50),
                        **_over(times["minillm"], taken),
                    }
                    for name, taken in times.items()
                }

    def _minillm(self, *options: str):
        return running("minillm", self.path, self.config, self.workload.dtype, self.programs, options)

    def _seed(self) -> int:
        """Each turn has prompts of its own, so that none is in a prefix cache."""
        self._turn += 1
        return self.workload.seed + self._turn

    def _trace(self, count: int, prompt_tokens: int, output_tokens: int):
        profile = Profile(Lengths("fixed", prompt_tokens), Lengths("fixed", output_tokens))
        return trace_of(profile, [0.0] * count, self._seed())

    def _prompts(self, server: Server, count: int, prompt_tokens: int) -> list[list[int]]:
        return [one.prompt(server.prompts.token_ids) for one in self._trace(count, prompt_tokens, 1)]

    def _load(
        self, server: Server, count: int, at_once: int, prompt_tokens: int, output_tokens: int, warmups: int = 0
    ) -> Report:
        """`warmups` requests before are not in the report. Raises RuntimeError where an answer is missing or has
        another length."""
        trace = self._trace(warmups + count, prompt_tokens, output_tokens)
        sends = server.prompts.sends(trace, True)
        endpoint = server.target.endpoint(chat=False)
        report = drive(Job(endpoint, sends[warmups:], sends[:warmups], concurrency=at_once, headers={}))
        for one in report.outcomes:
            if not one.is_complete or one.num_output_tokens != output_tokens:
                raise RuntimeError(
                    f"{server.target.model} answered {one.num_output_tokens} of {output_tokens} tokens, "
                    f"status {one.status}: {one.error[:300] or one.finish_reason}"
                )
        return report

    def _take(self, part: str, names: tuple[str, str], rounds: list[Pair], pair: Pair) -> None:
        """One more round; the record keeps its samples, too."""
        rounds.append(pair)
        for name, seconds in zip(names, pair):
            self.record.take(f"{part}/{name}", seconds)

    def _taken(self, part: str, names: tuple[str, str]) -> dict[str, measure.Samples]:
        return {name: self.record.samples[f"{part}/{name}"] for name in names}

    def _check(self, here: Here) -> None:
        for prompt in self._prompts(here.server, CHECKED_PROMPTS, self.workload.prompt_tokens):
            [expected], made = here.generate([prompt], CHECKED_TOKENS), ask(here.server, prompt, CHECKED_TOKENS)
            if made != list(expected.outputs[0].token_ids):
                raise RuntimeError("the server and LLM.generate disagree on greedy tokens: no point in timing")
        self.record.figures["outputs_checked"] = True


def _over(own: measure.Samples, its: measure.Samples) -> dict:
    """How many times minillm's throughput is that of a server which did the same in `its` seconds, in turns with it."""

    turns = [([ours], [theirs]) for ours, theirs in zip(own.seconds, its.seconds, strict=True)]
    over, bounds = times_slower(turns, 50), interval_over_rounds(turns, lambda turns: times_slower(turns, 50))
    return {"minillm_over_it": over, "minillm_over_it_interval": bounds}  # 95%


def _told(figures: dict) -> dict:
    names = ("request_throughput", "output_throughput", "ttft_seconds", "itl_seconds", "e2e_seconds", "failures")
    return {name: figures[name] for name in (*names, "num_requests", "num_complete", "max_concurrency")}


def lag_buckets(server: Server) -> dict[float, float]:
    """How often the server's event loop was at most so late, by seconds, since it began."""
    with urllib.request.urlopen(f"{server.target.url}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples if sample.name == LAG]
    return {float(sample.labels["le"]): sample.value for sample in samples}


def percentile_of_buckets(buckets: dict[float, float], q: float) -> float:
    """The upper limit of the bucket with the value that `q` percent do not exceed; `buckets` are cumulated."""
    wanted = q / 100 * max(buckets.values())
    return min(limit for limit, count in buckets.items() if count >= wanted)
