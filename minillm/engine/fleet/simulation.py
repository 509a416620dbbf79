"""The simulated fleet: arrivals, a router, replicas, transfers, failures, on one virtual clock. Built in chapter 22.

Everything that happens is an event in one heap, ordered by time:

    arrival         the router's policy picks a replica from its FleetView
    end of a run    a replica has finished some steps (see `replica`); finished requests leave, others join
    delivery        keys and values have arrived on another replica (prefill and decode apart, or a migration)
    tick            the autoscaler or the migration policy looks at the fleet
    failure, ready  a replica dies; a new one has loaded its weights

The router's policies are those of the live fleet (`minillm.engine.routing`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable

from minillm.engine import routing
from minillm.engine.fleet.costs import Link, ReplicaSpec
from minillm.engine.fleet.events import EventQueue
from minillm.engine.fleet.faults import Failure
from minillm.engine.fleet.job import Job
from minillm.engine.fleet.migration import Migration, pause_seconds, plan
from minillm.engine.fleet.replica import SimulatedReplica
from minillm.engine.fleet.report import FleetReport
from minillm.engine.fleet.traces import HASH_BLOCK, FleetRequest
from minillm.engine.routing import RequestView
from minillm.engine.scaling import AutoscalerPolicy, FleetLoad, make_autoscaler

NO_BLOCKS = ("round_robin", "random", "least_tokens", "power_of_two")  # policies that need no reports of blocks


class FleetSimulation:
    """A fleet of `num_replicas` equal replicas. With `num_prefill`, the first ones only prefill, the others decode."""

    def __init__(
        self,
        spec: ReplicaSpec,
        num_replicas: int,
        policy: str | routing.RouterPolicy = "least_tokens",
        *,
        num_prefill: int = 0,
        link: Link | None = None,
        migration: Migration | None = None,
        autoscaler: str | AutoscalerPolicy | None = None,
        min_replicas: int = 1,
        max_replicas: int | None = None,
        scale_interval: float = 10.0,
        failures: Iterable[Failure] = (),
        block_size: int = HASH_BLOCK,
    ):
        if num_replicas < 1 or not 0 <= num_prefill < num_replicas:
            raise ValueError(
                f"num_replicas={num_replicas} and num_prefill={num_prefill} are not allowed: at least one replica, "
                f"and at least one that decodes"
            )
        if num_prefill and autoscaler is not None:
            raise ValueError("an autoscaler needs replicas of one kind; set num_prefill=0, or size both pools yourself")
        if not 1 <= min_replicas <= (max_replicas or num_replicas):
            raise ValueError(
                f"min_replicas={min_replicas}, max_replicas={max_replicas or num_replicas} are not allowed: "
                f"1 <= min_replicas <= max_replicas, which is num_replicas where it is not given"
            )
        self.spec, self.link, self.block_size = spec, link or Link(), block_size
        self.migration, self.autoscaler, self.scale_interval = migration, make_autoscaler(autoscaler), scale_interval
        self.min_replicas, self.max_replicas = min_replicas, max_replicas or num_replicas
        self.policy = routing.make_router_policy(policy)
        self.decode_policy = routing.LeastTokens()
        self.events = EventQueue()
        self.report = FleetReport()
        self.replicas: dict[str, SimulatedReplica] = {}
        self.view, self.decode_view = routing.FleetView(), routing.FleetView()
        self._reports_blocks = not isinstance(self.policy, tuple(map(routing.POLICIES.get, NO_BLOCKS)))
        self._names = itertools.count()
        self._backlog: deque[Job] = deque()  # while no replica is ready
        self._ordered: dict[str, float] = {}  # replica -> when it was ordered
        self._starting: set[str] = set()
        self._draining: set[str] = set()
        self._unfinished = 0
        self._arriving = False
        for number in range(num_replicas):
            self._join(self._order_replica(), hands_over=number < num_prefill, decodes=number >= num_prefill > 0)
        for failure in failures:
            if not 0 <= failure.replica < num_replicas:
                raise ValueError(f"replica={failure.replica} of {failure} is not one of the {num_replicas} replicas")
            self.events.at(failure.time, self._fail, failure)

    def run(self, trace: Iterable[FleetRequest], on_arrival: Callable[[int], None] = lambda index: None) -> FleetReport:
        """Serve the trace to its end. Raises RuntimeError if requests are left that no replica will ever take."""
        arrivals = iter(trace)
        upcoming, index, events = next(arrivals, None), 0, self.events
        self._arriving = upcoming is not None
        if self.autoscaler is not None:
            events.tick(self.scale_interval, self._scale)
        if self.migration is not None:
            events.tick(self.migration.interval, self._migrate)
        while upcoming is not None or (self._unfinished and len(events)):
            if upcoming is not None and upcoming.timestamp <= events.next_time:
                events.now = upcoming.timestamp
                self._arrive(index, upcoming)
                on_arrival(index)
                upcoming, index = next(arrivals, None), index + 1
                self._arriving = upcoming is not None
                continue
            if (replica := events.step()) is not None:
                self._end_run(replica)
        if self._unfinished:
            raise RuntimeError(f"{self._unfinished} requests are left and no replica takes them")
        self._check_idle()
        for replica in list(self.replicas.values()):
            self._retire(replica)
        return self.report

    def _check_idle(self) -> None:
        """Raise RuntimeError unless every token of memory and of load was given back."""
        for name, replica in self.replicas.items():
            view = self._view_of(replica)
            load = view.get(name) if name in view else None
            if replica.pool.used or replica.pool.pinned or (load and (load.num_tokens or load.num_requests)):
                raise RuntimeError(
                    f"{name} holds {replica.pool.used} tokens after the last request, its load is {load}"
                )

    def _arrive(self, index: int, request: FleetRequest) -> None:
        job = Job(index, request.timestamp, request.input_length, request.output_length, request.full_blocks)
        self._unfinished += 1
        self._route(job)

    def _route(self, job: Job) -> None:
        """Give a request that needs its prompt computed to the replica that the policy picks."""
        if job.prompt_length + job.output_length + self.spec.kv_block > self.spec.num_kv_tokens:
            self.report.num_refused += 1
            self._unfinished -= 1
        elif not len(self.view):
            self._backlog.append(job)
        else:
            request = RequestView(str(job.index), job.num_tokens, job.blocks, self.block_size, job.output_length)
            self._submit(job, self.replicas[self.policy.pick(request, self.view)])

    def _submit(self, job: Job, replica: SimulatedReplica, front: bool = False) -> None:
        self._view_of(replica).started(replica.name, job.num_tokens)
        replica.submit(job, self.now, front)
        self._touched(replica)

    def _touched(self, replica: SimulatedReplica) -> None:
        """Report its blocks to the router, and note when its run ends."""
        if replica.pool.changes:
            stored, evicted = replica.pool.take_changes()
            if self._reports_blocks:
                self.view.removed(replica.name, evicted)
                self.view.stored(replica.name, stored)
        self.events.run_of(replica)

    def _end_run(self, replica: SimulatedReplica) -> None:
        finished, handed_over, num_tokens = replica.finish_run()
        name, view = replica.name, self._view_of(replica)
        if num_tokens:
            view.generated(name, num_tokens)
        for job in finished:
            view.finished(name, job.num_tokens)
            self.report.add(job)
            self._unfinished -= 1
        for job in handed_over:
            view.finished(name, job.num_tokens)
            job.pause_started = self.now
            self._send(job, replica)
        for job, target, seconds in replica.leaving:
            replica.moving.discard(job)
            if replica.take_out(job):
                view.finished(name, job.num_tokens)
                job.pause_started, job.num_moves = self.now, job.num_moves + 1
                self.events.at(self.now + seconds, self._deliver, job, target, None)
        replica.leaving.clear()
        replica.begin(self.now)
        self._touched(replica)
        if name in self._draining and replica.is_idle:
            self._draining.discard(name)
            self._retire(replica)

    def _send(self, job: Job, source: SimulatedReplica) -> None:
        """Keys and values of a prompt go to a decode replica; the source's link sends one request after the other."""
        request = RequestView(str(job.index), job.num_tokens)
        target = self.replicas[self.decode_policy.pick(request, self.decode_view)]
        num_bytes = (job.num_tokens - 1) * self.spec.kv_bytes
        self.report.kv_bytes_moved += num_bytes
        if self.link.layers > 1:  # all but the last layer may have been sent during the step
            sent = self.link.bandwidth * max(0.0, self.now - max(source.run_started, source.link_free))
            num_bytes = max(num_bytes / self.link.layers, num_bytes - sent)
        source.link_free = max(self.now, source.link_free) + num_bytes / self.link.bandwidth
        self.events.at(source.link_free + self.link.latency, self._deliver, job, target, source)

    def _deliver(self, job: Job, target: SimulatedReplica, source: SimulatedReplica | None) -> None:
        lost = source is not None and source.name not in self.replicas
        if source is not None and not lost:
            source.release(job, self.now)
            self._touched(source)
        elif source is not None:
            job.pinned, job.private = [], 0
        if lost or target.name not in self.replicas:  # sender or receiver died: compute it again
            job.has_kv = False
            self.report.recomputed_tokens += job.num_tokens
            self._route(job)
            return
        job.has_kv = True
        self.report.num_moves += source is None
        self._submit(job, target, front=source is None)

    def _migrate(self) -> None:
        for job, target in plan(
            [self.replicas[one.replica_id] for one in (self.decode_view if len(self.decode_view) else self.view)],
            self.migration,
        ):
            source = self.replicas[job.replica]
            step = self.spec.decode_seconds(len(source.decoding), source.context)
            before, stopped = pause_seconds(
                job.prompt_length + source.generated_of(job), self.spec.kv_bytes, self.link, step
            )
            source.moving.add(job)
            self.events.at(self.now + before, self._leave, job, source, target, stopped)
        if self._arriving or not self.events.only_ticks:
            self.events.tick(self.migration.interval, self._migrate)

    def _leave(self, job: Job, source: SimulatedReplica, target: SimulatedReplica, stopped: float) -> None:
        """The first stages are copied: at the next boundary the request stops here and goes on there."""
        if source.name not in self.replicas or target.name not in self.replicas or job not in source.decoding:
            source.moving.discard(job)
            return
        self.report.kv_bytes_moved += (job.prompt_length + source.generated_of(job)) * self.spec.kv_bytes
        source.leaving.append((job, target, stopped))
        source.cut(self.now)
        self._touched(source)

    def _scale(self) -> None:
        ready = [self.replicas[one.replica_id] for one in self.view]
        waiting = [job for replica in ready for job in replica.waiting] + list(self._backlog)
        chunk = self.spec.max_num_batched_tokens
        load = FleetLoad(
            self.now,
            len(ready) + len(self._starting),
            sum(replica.num_requests for replica in ready) + len(self._backlog),
            sum(job.num_tokens for job in waiting),
            chunk / self.spec.prefill_seconds(chunk),
        )
        wanted = min(self.max_replicas, max(self.min_replicas, self.autoscaler.desired(load)))
        for _ in range(wanted - len(ready) - len(self._starting)):
            self._start()
        surplus = len(ready) + len(self._starting) - wanted
        for name in sorted(self._starting)[: max(0, surplus)]:
            self._starting.discard(name)
            self.report.replica_seconds += self.now - self._ordered.pop(name)
            surplus -= 1
        for replica in sorted(ready, key=lambda replica: replica.num_requests)[: max(0, surplus)]:
            self.view.remove(replica.name)
            self._draining.add(replica.name)
            if replica.is_idle:
                self._draining.discard(replica.name)
                self._retire(replica)
        self.report.replicas_over_time.append((self.now, len(self.view)))
        if self._arriving or not self.events.only_ticks:
            self.events.tick(self.scale_interval, self._scale)

    def _fail(self, failure: Failure) -> None:
        """A replica dies: its requests go on elsewhere, from the tokens that the client has."""
        name = f"replica-{failure.replica}"
        if (replica := self.replicas.get(name)) is None:
            return
        hands_over, decodes = replica.hands_over, name in self.decode_view
        jobs = replica.fail(self.now)
        self._retire(replica)
        for job in jobs:
            if job.generated:
                self.report.num_resumed += 1
                self.report.recomputed_tokens += job.num_tokens
                job.pause_started = self.now if job.pause_started is None else job.pause_started
            self._route(job)
        if failure.repair is not None:
            self._start(failure.repair, hands_over, decodes)

    def _start(self, after: float = 0.0, hands_over: bool = False, decodes: bool = False) -> None:
        name = self._order_replica()
        self._starting.add(name)
        self.events.at(self.now + after + self.spec.cold_start, self._ready, name, hands_over, decodes)

    def _ready(self, name: str, hands_over: bool, decodes: bool) -> None:
        if name not in self._starting:
            return  # it was cancelled
        self._starting.discard(name)
        self._join(name, hands_over, decodes)
        while self._backlog and len(self.view):
            self._route(self._backlog.popleft())

    def _order_replica(self) -> str:
        name = f"replica-{next(self._names)}"
        self._ordered[name] = self.now
        return name

    def _join(self, name: str, hands_over: bool, decodes: bool) -> None:
        self.replicas[name] = SimulatedReplica(name, self.spec, self.block_size, hands_over)
        (self.decode_view if decodes else self.view).add(name)

    def _retire(self, replica: SimulatedReplica) -> None:
        name = replica.name
        for view in (self.view, self.decode_view):
            if name in view:
                view.remove(name)
        del self.replicas[name]
        self.report.replica_seconds += self.now - self._ordered.pop(name)
        self.report.busy_seconds += replica.busy_seconds
        self.report.num_events += replica.num_events
        self.report.num_steps += replica.num_steps

    def _view_of(self, replica: SimulatedReplica) -> routing.FleetView:
        return self.decode_view if replica.name in self.decode_view else self.view

    @property
    def now(self) -> float:
        """Seconds on the fleet's clock."""
        return self.events.now
