"""RoomView: the steps of an engine, summed up as one record for those who watch it. Built in chapter 23.

    logged steps  ->  runs       [number, kind, first step, steps, tokens, drafted, accepted] of each request
                      requests   how far each one is: numbers, never a text, a key or a user
                      totals     counts that only grow, so that a watcher who misses a record misses no token
                      blocks     the state of every KV block

A run is a stretch of steps in which a request did the same: "p" computed a part of its prompt, "r" computed again what
it had lost, "d" decoded. "x" marks the step that preempted it. Requests are called by numbers in the order in which
they are first seen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minillm.engine.engine import Engine
from minillm.engine.request import Request, RequestStatus
from minillm.engine.serving_counters import adapter_of
from minillm.engine.step import ScheduledRequest
from minillm.engine.step_log import LoggedStep
from minillm.serving.block_map import block_map, ranges

MOST_LISTED = 64  # requests of each state
REMEMBERED_STEPS = 8192  # whose times say when a request arrived
REMEMBERED_TTFTS = 100
TOTALS = (
    "steps tokens prefill recomputed decoded generated drafted accepted preempted finished aborted prompt cached"
).split()


@dataclass(eq=False)
class Seen:
    """What has been seen of a request."""

    request: Request
    number: int
    arrived: int | None = None  # the first step after its arrival; None before the steps since then are summed up
    is_admitted: bool = False
    has_token: bool = False
    reach: int = 0  # how far any step has come in its tokens
    gone: int | None = None  # the last step that was known when it was found finished
    ended: int | None = None  # its last step
    runs: list[list[Any]] = field(default_factory=list)  # since the last record

    @property
    def state(self) -> str:
        """Its status; one that may have ended in a step that is not known yet still runs."""
        status = self.request.status
        if status is RequestStatus.FINISHED and self.ended is None:
            status = RequestStatus.RUNNING
        return status.value


class RoomView:
    """Sums up steps. All methods belong to one thread; the engine goes on meanwhile."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.totals = dict.fromkeys(TOTALS, 0)
        self.step = 0  # of the last step
        self.seen: dict[str, Seen] = {}  # by request id
        self._num_seen = 0
        self._times: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._ttfts: deque[float] = deque(maxlen=REMEMBERED_TTFTS)
        self._before: LoggedStep | None = None
        for request in list(engine.scheduler.requests.values()):  # they were there before
            seen = self._see(request)
            seen.is_admitted, seen.reach = request.num_computed_tokens > 0, request.num_computed_tokens
            seen.has_token = bool(request.output_token_ids)

    def record(self, steps: Sequence[LoggedStep], tags: Mapping[str, str] | None = None) -> dict[str, Any]:
        """What happened in `steps`, which follow those of the last call, and how the engine stands now. `tags` are
        names that callers gave their own requests, by group id."""
        first = self.step + 1
        now = list(self.engine.scheduler.requests.values())
        for request in [*(one for step in steps for one in (*step.arrived, *step.ended)), *now]:  # as they arrived
            self._see(request)
        for step in steps:
            self._add(step)
        for one in self.seen.values():
            if one.ended is None and one.request.is_finished:
                if one.gone is None:  # perhaps in a step that was not logged yet when `steps` were taken
                    one.gone = self.step
                else:  # no: it was aborted, or met a stop string, between two steps
                    self._end(one, one.gone)
            if one.arrived is None:
                num_later = len(self._times) - bisect_right(self._times, one.request.arrival_time)
                one.arrived = self.step - num_later + 1
        record = {
            "step": self.step,
            "first_step": first if steps else None,
            **self._state(),
            "step_seconds": self._step_seconds(steps),
            "totals": dict(self.totals),
            "ttft": self._latency(),
            **self._requests(tags or {}),
            "blocks": block_map(self.engine.kv_cache.pool),
        }
        for name in [name for name, one in self.seen.items() if one.ended is not None]:
            del self.seen[name]
        for one in self.seen.values():
            one.runs.clear()
        return record

    def _add(self, step: LoggedStep) -> None:
        self.step += 1
        self._times.append(step.time)
        self.totals["steps"] += 1
        self.totals["generated"] += len(step.generated)
        for row in step.rows:
            self._add_row(row, step.num_accepted.get(row.request_id, 0))
        for name in step.generated:
            one = self.seen.get(name)
            if one is not None and not one.has_token:
                one.has_token = True
                if one.request.index == 0:  # samples share their prompt
                    self._ttfts.append(one.request.token_times[0] - one.request.arrival_time)
        for name in step.preempted:
            self.totals["preempted"] += 1
            if (one := self.seen.get(name)) is not None:
                one.runs.append([one.number, "x", self.step, 1, 0, 0, 0])
        for request in step.ended:
            self._end(self.seen[request.request_id], self.step)

    def _add_row(self, row: ScheduledRequest, accepted: int) -> None:
        one, drafted = self.seen.get(row.request_id), len(row.draft)
        known = row.num_tokens - drafted
        totals = self.totals
        totals["tokens"] += row.num_tokens
        totals["drafted"] += drafted
        totals["accepted"] += accepted
        if one is None:  # it was aborted before it was seen
            return
        if not one.is_admitted:
            one.is_admitted = True
            if one.request.index == 0:
                totals["prompt"] += one.request.num_prompt_tokens
                totals["cached"] += one.request.num_cached_tokens
        if known == 1 and row.start >= one.request.num_prompt_tokens:
            kind = "d"
            totals["decoded"] += row.num_tokens
        else:
            again = max(0, min(one.reach, row.start + known) - row.start)
            kind = "r" if again else "p"
            totals["recomputed"] += again
            totals["prefill"] += known - again
        one.reach = max(one.reach, row.start + known)
        last = one.runs[-1] if one.runs else None
        if last is not None and last[1] == kind and last[2] + last[3] == self.step:
            last[3] += 1
            last[4] += row.num_tokens
            last[5] += drafted
            last[6] += accepted
        else:
            one.runs.append([one.number, kind, self.step, 1, row.num_tokens, drafted, accepted])

    def _see(self, request: Request) -> Seen:
        one = self.seen.get(request.request_id)
        if one is None:
            self._num_seen += 1
            one = self.seen[request.request_id] = Seen(request, self._num_seen)
        return one

    def _end(self, one: Seen, step: int) -> None:
        if one.ended is None:
            one.ended = step
            self.totals["aborted" if one.request.finish_reason in ("abort", "error") else "finished"] += 1

    def _state(self) -> dict[str, int]:
        scheduler = self.engine.scheduler
        num_running = len(scheduler.running)
        return {
            "running": num_running,
            "waiting": max(0, len(scheduler.requests) - num_running),
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "block_size": scheduler.block_size,
        }

    def _step_seconds(self, steps: Sequence[LoggedStep]) -> float | None:
        """How long a step took, on the mean of those that followed another while there was work."""
        gaps = []
        for step in steps:
            if self._before is not None and self._before.num_running:
                gaps.append(step.time - self._before.time)
            self._before = step
        return round(sum(gaps) / len(gaps), 6) if gaps else None

    def _latency(self) -> dict[str, float] | None:
        """Seconds, of the last requests that got their first token."""
        if not self._ttfts:
            return None
        p50, p90 = np.percentile(self._ttfts, (50, 90)).round(5).tolist()
        return {"last": round(self._ttfts[-1], 5), "p50": p50, "p90": p90, "count": len(self._ttfts)}

    def _requests(self, tags: Mapping[str, str]) -> dict[str, Any]:
        """Those that run, that have ended since the last record, and that wait: some of each."""
        by_state: dict[str, list[Seen]] = {"running": [], "finished": [], "waiting": []}
        for one in self.seen.values():
            by_state[one.state if one.state in by_state else "waiting"].append(one)
        listed = [one for some in by_state.values() for one in some[:MOST_LISTED]]
        return {
            "requests": [self._told(one, tags) for one in listed],
            "runs": [list(run) for one in listed for run in one.runs],
        }

    def _told(self, one: Seen, tags: Mapping[str, str]) -> dict[str, Any]:
        request = one.request
        record = getattr(self.engine.kv_cache, "records", {}).get(request.request_id)
        table = getattr(record, "table", None)
        told = {
            "number": one.number,
            "state": one.state,
            "prompt": request.num_prompt_tokens,
            "cached": request.num_cached_tokens,
            "computed": min(request.num_computed_tokens, request.num_prompt_tokens),
            "output": len(request.output_token_ids),
            "max_tokens": request.max_tokens,
            "blocks": len(table) if table else 0,
            "arrived": one.arrived,
        }
        optional = {
            "reason": request.finish_reason if one.ended is not None else None,
            "ended": one.ended,
            "sample": request.index,
            "preemptions": request.num_preemptions,
            "adapter": adapter_of(request),
            "table": ranges(list(table)) if table and one.state == "running" else None,
            "tag": tags.get(request.group_id),
        }
        return told | {name: value for name, value in optional.items() if value}
