"""What DistServe, Llumnix, Mooncake and Preble report, on the simulated fleet. Built in chapter 22.

Each function returns a dictionary: `reported` quotes the source, `found` has the same ratio from the simulation, and
`why` says what differs. A ratio is comparable only as far as `why` allows: lengths, engines and metrics are not the
papers' own where they are not published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ...engine.fleet.costs import LLAMA_13B, LLAMA_70B, MISTRAL_7B, OPT_13B, Link, ReplicaSpec, roofline
from ...engine.fleet.migration import Migration
from ...engine.fleet.report import FleetReport
from ...engine.fleet.simulation import FleetSimulation
from ...engine.fleet.synthetic import mooncake_like, plain_trace, shared_prefix_trace
from ...engine.fleet.traces import FleetRequest

GB = 1e9


def serve(spec: ReplicaSpec, num_replicas: int, trace: Sequence[FleetRequest], policy="least_tokens", **settings):
    """A fleet's report on this trace."""
    return FleetSimulation(spec, num_replicas, policy, **settings).run(trace)


def largest_rate(holds: Callable[[float], bool], low: float, high: float, probes: int = 9) -> float:
    """The largest rate at which a promise holds, by bisection; `low` when it does not even hold a little above it."""
    for _ in range(probes):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


# ---- DistServe --------------------------------------------------------------------------------------------------

TTFT, TPOT, ISL, OSL = 0.4, 0.04, 512, 64  # the example of the DistServe blog: P90 within these seconds


def _example(rate: float, output_length: int = OSL, count: int = 400) -> list[FleetRequest]:
    return list(plain_trace(count, rate, ISL, output_length, seed=1))


def _p90(report: FleetReport, ttft: float | None = TTFT, tpot: float | None = TPOT) -> bool:
    return (ttft is None or report.percentile("ttft", 90) <= ttft) and (
        tpot is None or report.percentile("tpot", 90) <= tpot
    )


def prefill_rate(spec: ReplicaSpec) -> float:
    """Requests/s of one replica that only prefills, within the TTFT promise."""
    return largest_rate(lambda rate: _p90(serve(spec, 1, _example(rate, 1)), tpot=None), 0.1, 40)


def decode_rate(spec: ReplicaSpec) -> float:
    """Requests/s of one replica that only decodes, within the TPOT promise; 20 others prefill for it."""
    link = Link(bandwidth=1e15, latency=0.0)
    return largest_rate(
        lambda rate: _p90(serve(spec, 21, _example(rate), num_prefill=20, link=link), ttft=None), 0.1, 60
    )


def colocated_rate(spec: ReplicaSpec, ttft: float | None = TTFT, tpot: float | None = TPOT) -> float:
    """Requests/s of one replica that does both."""
    return largest_rate(lambda rate: _p90(serve(spec, 1, _example(rate)), ttft, tpot), 0.05, 20)


def disaggregated_rate(spec: ReplicaSpec, num_prefill: int = 2, num_decode: int = 1) -> float:
    """Requests/s per replica of a fleet with prefill and decode apart, over NVLink."""
    total = num_prefill + num_decode
    link = Link(bandwidth=300e9, latency=1e-3)

    def holds(rate: float) -> bool:
        return _p90(serve(spec, total, _example(rate * total), num_prefill=num_prefill, link=link))

    return largest_rate(holds, 0.05, 20)


def distserve_spec() -> ReplicaSpec:
    """OPT-13B on an A100 with the scheduler of 2023, its two shares fitted to the blog's two single-phase rates."""

    def spec(bandwidth_share: float, flops_share: float) -> ReplicaSpec:
        return roofline(
            OPT_13B,
            "A100",
            80 * GB,
            bandwidth_share=bandwidth_share,
            flops_share=flops_share,
            enable_chunked_prefill=False,
            max_num_batched_tokens=2560,
        )

    low, high = 0.05, 1.0
    for _ in range(8):  # flops_share: one replica that only prefills reaches 5.6 requests/s
        flops = (low + high) / 2
        low, high = (flops, high) if prefill_rate(spec(0.8, flops)) < 5.6 else (low, flops)
    low, high = 0.1, 1.0
    for _ in range(8):  # bandwidth_share: one that only decodes reaches 10
        share = (low + high) / 2
        low, high = (share, high) if decode_rate(spec(share, flops)) < 10 else (low, share)
    return spec(share, flops)


def distserve(spec: ReplicaSpec | None = None) -> dict:
    """Prefill and decode apart: the blog's example, two of its five figures fitted and three predicted."""
    spec = spec or distserve_spec()
    rates = {
        "prefill only": prefill_rate(spec),
        "decode only": decode_rate(spec),
        "colocated, TTFT": colocated_rate(spec, tpot=None),
        "colocated, TPOT": colocated_rate(spec, ttft=None),
        "colocated": colocated_rate(spec),
        "2 prefill + 1 decode, per GPU": disaggregated_rate(spec),
    }
    chunked = replace(spec, enable_chunked_prefill=True, max_num_batched_tokens=256)
    rates["colocated, chunks of 256"] = colocated_rate(chunked)
    return {
        "paper": "DistServe (Zhong et al., OSDI 2024), its blog of 17 March 2024, 13B on A100-80GB, 512 in, 64 out",
        "source": "https://hao-ai-lab.github.io/blogs/distserve/",
        "reported": {
            "prefill only": 5.6,
            "decode only": 10.0,
            "colocated, TTFT": 2.3,
            "colocated, TPOT": 1.6,
            "colocated": 1.6,
            "2 prefill + 1 decode, per GPU": 3.3,
            "ratio": 3.3 / 1.6,
        },
        "found": rates | {"ratio": rates["2 prefill + 1 decode, per GPU"] / rates["colocated"]},
        "fitted": ["prefill only", "decode only"],
        "why": (
            "The two single-phase rates are fitted; the other rates follow. The engine of 2023 is modelled with "
            "prompts that stop all decoding. With chunked prefill the colocated replica does better than the one it "
            "was compared with."
        ),
    }


# ---- Llumnix ----------------------------------------------------------------------------------------------------


def llumnix_trace(rate: float, count: int) -> list[FleetRequest]:
    """Lengths with a heavy tail, as conversations have: 300 in and 400 out on average."""
    return list(plain_trace(count, rate, 300, 400, spread=1.1, seed=3, longest=6_000))


def llumnix(rates: Sequence[float] = (48, 54, 60), num_replicas: int = 16, count: int = 5_000) -> dict:
    """Round robin without and with live migration, and least tokens, at rates below the knee."""
    spec = roofline(LLAMA_13B, "A100", 80 * GB, max_num_batched_tokens=2048)
    link = Link(bandwidth=8e9, latency=2e-3)
    settings = Migration(interval=0.25, low=60, high=150)
    found: dict[str, dict] = {}
    for rate in rates:
        trace = llumnix_trace(rate, count)
        runs = {
            "round robin": serve(spec, num_replicas, trace, "round_robin"),
            "least tokens": serve(spec, num_replicas, trace, "least_tokens"),
            "round robin + migration": serve(spec, num_replicas, trace, "round_robin", migration=settings, link=link),
        }
        found[f"{rate:g}/s"] = {
            name: {
                "ttft_mean_seconds": float(np.mean(run.ttft)),
                "ttft_p99_seconds": run.percentile("ttft", 99),
                "tpot_p99_seconds": run.percentile("tpot", 99),
                "num_preemptions": run.num_preemptions,
                "num_moves": run.num_moves,
                "pause_median_seconds": run.percentile("pauses", 50) if run.pauses else 0.0,
                "pause_max_seconds": max(run.pauses, default=0.0),
            }
            for name, run in runs.items()
        }

    def best(base: str, what: str) -> float:
        ours = "round robin + migration"
        return max(run[base][what] / run[ours][what] for run in found.values())

    return {
        "paper": "Llumnix (Sun et al., OSDI 2024), README of v0.1.0: 16 instances of a 7B and a 13B model, ShareGPT",
        "source": "https://github.com/AlibabaPAI/llumnix/blob/060b89a085e2be3e01514935516c27d04a19099d/README.md",
        "reported": {
            "round robin, TTFT mean": 6.4,
            "round robin, TTFT P99": 12.1,
            "round robin, TBT P99": 1.12,
            "queue sizes, TTFT mean": 4.6,
            "queue sizes, TTFT P99": 9.1,
            "queue sizes, TBT P99": 1.15,
        },
        "found": {
            "round robin, TTFT mean": best("round robin", "ttft_mean_seconds"),
            "round robin, TTFT P99": best("round robin", "ttft_p99_seconds"),
            "round robin, TPOT P99": best("round robin", "tpot_p99_seconds"),
            "least tokens, TTFT mean": best("least tokens", "ttft_mean_seconds"),
            "least tokens, TTFT P99": best("least tokens", "ttft_p99_seconds"),
            "least tokens, TPOT P99": best("least tokens", "tpot_p99_seconds"),
        },
        "runs": found,
        "why": (
            "Both columns are the largest ratio over the rates. Lengths are lognormal with 300 in and 400 out, not "
            "ShareGPT's; TPOT is the mean over a request, TBT is per token. Least tokens counts tokens where the "
            "compared scheduler counts requests: it avoids most preemptions by itself, so migration adds "
            "nothing to it here."
        ),
    }


# ---- Mooncake ---------------------------------------------------------------------------------------------------


def mooncake(
    num_replicas: int = 16, count: int = 1_500, kinds: Sequence[str] = ("conversation", "toolagent", "synthetic")
) -> dict:
    """Coupled replicas against prefill and decode apart, on traces like the published ones: the largest rate at which
    nine of ten requests have their first token in 30 s and 0.1 s a token."""
    spec = roofline(LLAMA_70B, "A100", 80 * GB, num_gpus=8, max_num_batched_tokens=8192, enable_prefix_caching=True)
    coupled = replace(spec, enable_chunked_prefill=False)
    link = Link(bandwidth=100e9, latency=2e-3, layers=80)
    found = {}
    for kind in kinds:

        def rate_of(spec: ReplicaSpec, policy: str, kind: str = kind, **settings) -> float:
            def holds(rate: float) -> bool:
                report = serve(spec, num_replicas, mooncake_like(kind, count, rate, seed=5), policy, **settings)
                return report.attainment(ttft=30.0, tpot=0.1) >= 0.9

            return largest_rate(holds, 0.1, 60, probes=7)

        uncached = replace(coupled, enable_prefix_caching=False)
        base = rate_of(uncached, "least_tokens")
        steps = {
            "coupled, no prefix cache": base,
            "coupled, least tokens": rate_of(coupled, "least_tokens"),
            "coupled, prefix aware": rate_of(coupled, "prefix_aware"),
            "coupled, prefix aware, chunks of 512": rate_of(replace(spec, max_num_batched_tokens=512), "prefix_aware"),
        }
        for num_prefill in (num_replicas // 2, num_replicas * 7 // 10):
            name = f"{num_prefill} prefill + {num_replicas - num_prefill} decode, prefix aware"
            steps[name] = rate_of(spec, "prefix_aware", num_prefill=num_prefill, link=link)
        found[kind] = {"rates": steps, "ratio": max(list(steps.values())[4:]) / base}
    return {
        "paper": "Mooncake (Qin et al., FAST 2025): 16 nodes, three workloads, vLLM 0.5.1 as the baseline",
        "source": "https://github.com/kvcache-ai/Mooncake/tree/3b5a594/FAST25-release",
        "reported": {
            "abstract": "increases the effective request capacity by 59% to 498% when compared to baseline methods",
            "production": "handle 115% and 107% more requests on NVIDIA A800 and H800 clusters",
            "ratios": [1.59, 5.98],
        },
        "found": found,
        "ratios": [min(one["ratio"] for one in found.values()), max(one["ratio"] for one in found.values())],
        "why": (
            "The rate at which 90% of the requests meet both targets, LLaMA2-70B on nodes of eight A100 by the "
            "roofline, traces with the published means. The cache is each replica's own memory; Mooncake's is a "
            "pool in "
            "host memory shared by all nodes, so its hit rate is higher. Early rejection is not modelled."
        ),
    }


# ---- Preble -----------------------------------------------------------------------------------------------------

# (prefixes, blocks of 512 tokens in each, tokens of their own, output tokens, skew of the popularity)
PREBLE_WORKLOADS = {
    "tools": (240, 4, 300, 60, 0.8),
    "documents": (80, 30, 400, 30, 0.4),
    "programs": (40, 7, 200, 190, 0.2),
}


def preble(num_replicas: int = 4, count: int = 2_000, loads: Sequence[float] = (0.5, 0.75, 0.9)) -> dict:
    """Round robin against the prefix-aware router, at shares of the rate that round robin can serve at most."""
    spec = roofline(MISTRAL_7B, "A100", 40 * GB, max_num_batched_tokens=2048)
    found = {}
    for name, (prefixes, blocks, own, output, skew) in PREBLE_WORKLOADS.items():

        def trace(rate: float, shape=(prefixes, blocks, own, output, skew)) -> list[FleetRequest]:
            return list(shared_prefix_trace(count, rate, *shape, seed=4))

        most = count / serve(spec, num_replicas, trace(1e6), "round_robin").seconds
        for load in loads:
            requests = trace(load * most)
            runs = {policy: serve(spec, num_replicas, requests, policy) for policy in ("round_robin", "prefix_aware")}
            base, ours = runs.values()
            found[f"{name}, {load:.0%}"] = {
                "latency mean": float(np.mean(base.e2e) / np.mean(ours.e2e)),
                "latency P99": base.percentile("e2e", 99) / ours.percentile("e2e", 99),
                "hit_rates": {policy: run.hit_rate for policy, run in runs.items()},
            }
    ratios = [case["latency mean"] for case in found.values()]
    tails = [case["latency P99"] for case in found.values()]
    return {
        "paper": "Preble (Srivatsa et al., ICLR 2025): two open-source models, real workloads",
        "source": "https://arxiv.org/abs/2407.00023",
        "reported": {"latency mean": [1.5, 14.5], "latency P99": [2.0, 10.0]},
        "found": {"latency mean": [min(ratios), max(ratios)], "latency P99": [min(tails), max(tails)]},
        "runs": found,
        "why": (
            "Ranges over workloads and loads. The three workloads are synthetic, with prefixes of 2,048 to 15,360 "
            "tokens whose working set is larger than one replica's cache; the paper's are ToolBench, ALFWorld "
            "and others. The "
            "ratio depends on the load: near the knee of round robin it has no upper limit."
        ),
    }


PAPERS: dict[str, Callable[[], dict]] = {
    "distserve": distserve,
    "llumnix": llumnix,
    "mooncake": mooncake,
    "preble": preble,
}
