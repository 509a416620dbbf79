"""Counters of a server: every request, whole or aborted, by its adapter. Built in chapter 23.

    engine thread  take(deltas)   after each step: tokens, TTFT, ITL, tokens of a step, preemptions
    text thread    end(sink)      once a request: how it ended, its times and its lengths
    any thread     reads          numbers that only grow; nothing waits for anything

Each number is written by one thread only.
"""

from __future__ import annotations

from collections import Counter as Tally, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minillm.engine.counters import Counters, Distribution
from minillm.engine.deltas import TokenDelta
from minillm.engine.request import Request
from minillm.engine.sink import OutputSink

if TYPE_CHECKING:
    from minillm.engine.llm import LLM

GAPS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
STEP_TOKENS = tuple(2**power for power in range(15))
CHOICES = (1, 2, 5, 10, 20, 50, 100)
COMPLETE = ("stop", "length")


def lengths_up_to(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... as far as `limit`."""
    powers = range(len(str(limit)))
    return tuple(size for power in powers for digit in (1, 2, 5) if (size := digit * 10**power) <= limit)


class AdapterCounters:
    """What is counted of the requests of one adapter, or of those without one."""

    def __init__(self, max_model_len: int):
        lengths = lengths_up_to(max_model_len)
        # Written by the engine thread.
        self.num_prompt_tokens = self.num_cached_tokens = self.num_generation_tokens = 0
        self.ttft, self.itl = Distribution(), Distribution(GAPS)
        # Written by the text thread.
        self.ended: Tally[str] = Tally()  # samples, by finish_reason
        self.e2e, self.queue, self.prefill, self.decode, self.inference = (Distribution() for _ in range(5))
        self.tpot = Distribution(GAPS)
        self.prompt_len, self.generation_len = Distribution(lengths), Distribution(lengths)
        self.max_generation_len, self.max_tokens = Distribution(lengths), Distribution(lengths)
        self.n = Distribution(CHOICES)


class ServingCounters(Counters):
    """`Counters` with all that a server's metrics need, from now on. `by_adapter` has "" for the base model."""

    def __init__(self, llm: LLM):
        super().__init__()
        self.llm = llm
        self.num_preemptions = 0
        self.step_tokens = Distribution(STEP_TOKENS)
        self.by_adapter: defaultdict[str, AdapterCounters] = defaultdict(lambda: AdapterCounters(llm.max_model_len))
        self.by_adapter[""]  # it is there before the first request

    def take(self, deltas: Sequence[TokenDelta]) -> None:
        """What one step made. In the engine thread, or another one that holds the LLM's lock."""
        super().take(deltas)
        stats = self.llm.engine.stats
        if stats.num_tokens:
            self.step_tokens.add(stats.num_tokens)
            self.num_preemptions += stats.num_preempted
        made = Tally(delta.request for delta in deltas if delta.token_id is not None)
        gaps: dict[str, Tally[float]] = defaultdict(Tally)  # those of a step are mostly the same
        for request, count in made.items():
            adapter = adapter_of(request)
            counters, times = self.by_adapter[adapter], request.token_times
            counters.num_generation_tokens += count
            if len(times) > count:
                gaps[adapter][times[-1] - times[-1 - count]] += 1
            elif not request.index:  # samples share their prompt
                counters.ttft.add(times[0] - request.arrival_time)
                counters.num_prompt_tokens += request.num_prompt_tokens
                counters.num_cached_tokens += request.num_cached_tokens
        for adapter, tally in gaps.items():
            for gap, times_seen in tally.items():
                self.by_adapter[adapter].itl.add(gap, times_seen)

    def end(self, sink: OutputSink) -> None:
        """A request has ended. In the text thread."""
        request, counters = sink.request, self.by_adapter[adapter_of(sink.request)]
        for sample in sink.samples:
            counters.ended["error" if sink.error is not None else sample.finish_reason] += 1
        if all(sample.finish_reason in COMPLETE for sample in sink.samples) and request.token_times:
            _add_times(counters, request)
            _add_lengths(counters, sink)


def adapter_of(request: Request) -> str:
    """The name of its adapter; "" where it has none."""
    adapter = getattr(request.spec, "lora_request", None)
    return "" if adapter is None else adapter.lora_name


def _add_times(counters: AdapterCounters, request: Request) -> None:
    """Of the first sample: the others share its prompt."""
    arrival, scheduled = request.arrival_time, request.scheduled_time
    first, last, num_gaps = request.token_times[0], request.token_times[-1], len(request.token_times) - 1
    counters.e2e.add(last - arrival)
    counters.queue.add(scheduled - arrival)
    counters.prefill.add(first - scheduled)
    counters.decode.add(last - first)
    counters.inference.add(last - scheduled)
    if num_gaps:
        counters.tpot.add((last - first) / num_gaps)


def _add_lengths(counters: AdapterCounters, sink: OutputSink) -> None:
    params, lengths = sink.request.params, [len(sample.token_ids) for sample in sink.samples]
    counters.prompt_len.add(sink.request.num_prompt_tokens)
    for length in lengths:
        counters.generation_len.add(length)
    counters.max_generation_len.add(max(lengths))
    counters.n.add(params.n)
    counters.max_tokens.add(sink.request.max_tokens)
