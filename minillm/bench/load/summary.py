"""A run in numbers: throughput, latencies with their error, goodput. Built in chapter 24."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields

import numpy as np

from ...engine.metrics import Targets, goodput, percentile
from .intervals import interval_of_groups, interval_of_percentile
from .outcome import Outcome

QUANTILES = (50, 90, 95, 99)
LATENCIES = ("ttft", "itl", "tpot", "e2e")
SPOILS = 0.1  # of a latency: a client that is later than this share of it spoils its figures
KNOWN = 0.5  # of the prompts' tokens: chat templates begin alike, so that some are found in any prefix cache


def parse_targets(text: str) -> Targets:
    """ "ttft:0.5,itl:0.05": what every request has to keep, in seconds; `itl` is its longest gap. Raises ValueError
    naming the part that is not understood."""
    names, made = [field.name for field in fields(Targets)], {}
    for part in text.split(","):
        name, colon, seconds = part.strip().partition(":")
        try:
            value = float(seconds)
        except ValueError:
            value = 0.0
        if not colon or name not in names or not 0 < value < float("inf"):
            raise ValueError(
                f"slo={part!r} is not understood; write a name of {', '.join(names)}, a colon and seconds above 0, "
                "such as ttft:0.5,itl:0.05"
            )
        made[name] = value
    return Targets(**made)


def attainment(outcomes: Sequence[Outcome], targets: Targets) -> float:
    """The share of all requests, failed ones too, that were answered within the targets."""
    return sum(one.is_complete and targets.met_by(one) for one in outcomes) / len(outcomes) if outcomes else 0.0


def summarize(outcomes: Sequence[Outcome], targets: Targets | None = None, confidence: float = 0.95) -> dict:
    """The figures of one run; latencies in seconds, of complete answers alone. Failures count in goodput."""
    complete = [one for one in outcomes if one.is_complete]
    seconds = max((one.ended for one in outcomes), default=0.0) - min((one.intended for one in outcomes), default=0.0)
    seconds = max(seconds, 1e-9)
    tokens = sum(one.num_output_tokens for one in complete)
    figures: dict = {
        "num_requests": len(outcomes),
        "num_complete": len(complete),
        "failures": dict(sorted(Counter(_failure(one) for one in outcomes if not one.is_complete).items())),
        "duration_seconds": seconds,
        "request_throughput": len(complete) / seconds,
        "output_throughput": tokens / seconds,
        "total_token_throughput": (tokens + sum(one.num_prompt_tokens for one in complete)) / seconds,
        "num_prompt_tokens": sum(one.num_prompt_tokens for one in complete),
        "num_cached_tokens": sum(one.num_cached_tokens for one in complete),
        "num_output_tokens": tokens,
        "mean_concurrency": sum(one.ended - one.sent for one in outcomes) / seconds,
        "max_concurrency": most_at_once(outcomes),
    }
    gaps = [one.inter_token_latencies for one in complete]
    latencies = {
        "ttft": [one.ttft for one in complete],
        "tpot": [one.tpot for one in complete if one.num_output_tokens > 1],
        "e2e": [one.e2e_latency for one in complete],
        "service_ttft": [one.service_ttft for one in complete],
        "lateness": [one.lateness for one in outcomes],
    }
    for name, values in latencies.items():
        figures[f"{name}_seconds"] = latency(
            values, lambda q, values=values: interval_of_percentile(values, q, confidence)
        )
    every_gap = [gap for group in gaps for gap in group]
    figures["itl_seconds"] = latency(every_gap, lambda q: interval_of_groups(gaps, q, confidence))
    if targets is not None:
        met = [one for one in complete if targets.met_by(one)]
        figures["goodput"] = goodput(met, targets, seconds)
        figures["attainment"] = attainment(outcomes, targets)
    return figures


def latency(values: Sequence[float], interval_of) -> dict | None:
    """Mean, percentiles and largest value of one latency; each percentile as [value, low, high]. None for no value."""
    if not values:
        return None
    told = {f"p{q}": [percentile(values, q), *interval_of(q)] for q in QUANTILES}
    return {"mean": float(np.mean(values)), "max": float(max(values))} | told


def most_at_once(outcomes: Iterable[Outcome]) -> int:
    """The largest number of requests that were under way at one moment."""
    changes = sorted((time, change) for one in outcomes for time, change in ((one.sent, 1), (one.ended, -1)))
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def merge(runs: Iterable[Sequence[Outcome]]) -> list[Outcome]:
    """The outcomes of several clients that began together, in the order in which they were due. Figures are taken of
    the merged run: percentiles of clients cannot be averaged."""
    return sorted((one for run in runs for one in run), key=lambda one: one.intended)


def warnings_of(
    figures: dict, lag: dict, planned: Sequence[int], outcomes: Sequence[Outcome], num_shared_tokens: int = 0
) -> list[str]:
    """What spoils the figures of a run. `lag` is the client's own, `planned` the output tokens asked for;
    `num_shared_tokens` of the prompts stand in an earlier prompt of the run, and are meant to be in a prefix cache."""
    found = []
    itl, ttft, lateness = (figures[f"{name}_seconds"] for name in ("itl", "ttft", "lateness"))
    shortest = min((one["p50"][0] for one in (itl, ttft) if one), default=float("inf"))
    if lag["p99"] > SPOILS * shortest:
        found.append(
            f"the client's own event loop was {1e3 * lag['p99']:.1f} ms late (p99), more than {SPOILS:.0%} of the "
            f"median latency, {1e3 * shortest:.1f} ms: run it on a machine or core of its own"
        )
    if ttft and lateness and lateness["p99"][0] > max(1e-3, SPOILS * ttft["p50"][0]):
        found.append(
            f"requests were sent {1e3 * lateness['p99'][0]:.1f} ms after their time (p99): latencies count from the "
            "intended time and include that wait"
        )
    if failures := figures["failures"]:
        told = ", ".join(f"{count} × {what}" for what, count in failures.items())
        found.append(f"{sum(failures.values())} of {figures['num_requests']} requests failed: {told}")
    known = figures["num_cached_tokens"] - num_shared_tokens
    if known > KNOWN * figures["num_prompt_tokens"]:
        found.append(
            f"{known:,} of {figures['num_prompt_tokens']:,} prompt tokens were in the server's prefix cache before the "
            "run, so that their prefill took no time: give another --seed, or start the server again"
        )
    short = sum(one.is_complete and one.num_output_tokens != asked for one, asked in zip(outcomes, planned))
    if short:
        found.append(f"{short} answers have another length than was asked for; the server may not know ignore_eos")
    return found


def _failure(one: Outcome) -> str:
    if one.status not in (0, 200):
        return f"HTTP {one.status}"
    return one.error or "an answer without a token"
