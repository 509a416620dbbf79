"""Fleet: many replicas of one model that are used like one `AsyncLLM`. Built in chapter 22.

with Fleet({"model": "tinyworld"}, FleetConfig(replicas=2)) as fleet:
    for delta in fleet.submit("Once upon a time", SamplingParams(max_tokens=32)):
        print(delta.text, end="")

Each replica is a process with an `AsyncLLM`: a fork on this machine, or a Ray actor. Ray Serve is not used. It would
put its own proxy, router and autoscaler between our HTTP application and the replicas. Its router knows queue lengths,
but not which blocks a replica caches. A request that streams when its replica dies ends with an error, and replicas
cannot hand a request to each other. Plain actors give what Ray is best at: processes placed on the machines and GPUs
of a cluster. Tokens travel over a socket of our own, and not as Ray objects: one packet for a step of all requests of
a replica, and a closed socket tells of a death at once.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from minillm.device import resolve_device
from minillm.engine.async_llm import AsyncLLM
from minillm.engine.config import EngineConfig
from minillm.engine.inputs import Prompt
from minillm.engine.routing import make_router_policy
from minillm.engine.scaling import make_autoscaler
from minillm.engine.stream import Stream
from minillm.engine.vllm_names import merged
from minillm.kv_cache.connector import remove_leftovers
from minillm.kv_cache.events import CacheChange
from minillm.sampling.params import SamplingParams
from minillm.serving.replicas.config import FleetConfig, check_arguments
from minillm.serving.replicas.front import FrontLLM
from minillm.serving.replicas.launchers import Launcher, LocalLauncher, make_launcher
from minillm.serving.replicas.members import Member, Members, State
from minillm.serving.replicas.messages import Ended, Facts, Failed, Left, Ready, Tokens
from minillm.serving.replicas.migration import Migrations
from minillm.serving.replicas.scaler import Scaler
from minillm.serving.replicas.sizes import arguments_of, setup_of
from minillm.serving.router import Router

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

TICK = 0.2  # seconds between two looks at the replicas


class Fleet(AsyncLLM):
    """`arguments` are those of `LLM`, the same for each replica. Raises RuntimeError if no replica can be started.

    The methods of `AsyncLLM` serve requests; `submit` does without an event loop.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any] | None = None,
        config: FleetConfig | None = None,
        launcher: Launcher | None = None,
    ):
        self.fleet_config = config = config or FleetConfig()
        check_arguments(arguments or {})
        names = arguments_of(arguments or {})
        engine_config, options = merged(*names)
        engine_config = EngineConfig(**engine_config)
        self.arguments = names[0] | names[1]
        self.fleet_id, self.secret = secrets.token_hex(4), secrets.token_bytes(32)
        self.on_gpu = resolve_device(engine_config.device).type == "cuda"
        self.launcher = launcher or make_launcher(config, self.on_gpu)
        fastest = "shm" if isinstance(self.launcher, LocalLauncher) else "tcp"
        self.kv_transport = fastest if config.kv_transport == "auto" else config.kv_transport
        self._changed = threading.Condition()
        self._early: list[Callable[[], object]] | None = []  # messages before there is an engine thread
        self._is_over = threading.Event()
        self.launcher.prepare(self.arguments)
        self.members = Members(
            self.launcher, partial(setup_of, self), self.secret, self._post, self._member_changed, self._hear,
            config.max_failed_starts,
        )  # fmt: skip
        try:
            for number in range(config.replicas):
                self.members.add(number, config.role(number))
            facts = self._wait_for_facts()
            self.router = Router(
                make_router_policy(config.router_policy), self._send, facts.identity, facts.block_size,
                facts.enable_prefix_caching,
            )  # fmt: skip
            self.facts = facts
            super().__init__(FrontLLM(engine_config, options, facts, self.router))
        except BaseException:
            self.members.close()
            raise
        self.migrations = Migrations(self)
        self.scaler = Scaler(self, make_autoscaler(config.autoscaler))
        with self._changed:
            early, self._early = self._early, None
            for message in early:
                self.thread.tell(message)
        threading.Thread(target=self._tick_until_over, name="fleet", daemon=True).start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    # Requests.

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> Stream:
        """Ask for one prompt, in any thread: iterate over the stream's deltas, or wait for its `output()`."""
        return self.thread.submit(prompt, sampling_params, request_id, **options)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Of every replica; whether all of them have done it."""
        if reset_running_requests:
            await self.abort(list(self.thread.streams))
        return await asyncio.to_thread(self.clear_prefix_caches)

    def clear_prefix_caches(self) -> bool:
        """Of every replica, in any thread; whether all of them have done it: not those with a request under way."""
        call = lambda member: member.call(self.members.numbers, "reset_prefix_cache")
        calls = self.thread.call(lambda: list(map(call, self.members.in_state(State.READY)))).result()
        return all(answer.result() for answer in calls)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        raise NotImplementedError("a fleet does not sleep; remove replicas instead")

    async def check_health(self) -> None:
        """Raise RuntimeError where no replica serves or is about to."""
        await super().check_health()
        if not self.members.in_state(State.READY, State.STARTING):
            raise RuntimeError(self.members.why_none())

    # Replicas.

    @property
    def replicas(self) -> dict[str, str]:
        """The state of each replica, by id."""
        return {member.replica_id: member.state.value for member in self.members}

    def where(self, stream: Stream) -> str | None:
        """The replica that serves a request, or its first sample; None before it has one, and behind its end."""
        flight = self.router.by_request.get(stream.sink.request.request_id)
        return None if flight is None else flight.replica_id

    def kill(self, replica_id: str) -> None:
        """End a replica's process at once (SIGKILL): its requests go on elsewhere, and another process takes its
        place. Raises KeyError for an id that there is not."""
        process = self.members.by_id[replica_id].process
        if process is not None:
            process.kill()

    def migrate(self, stream: Stream, replica_id: str, recompute: bool = False, timeout: float = 60.0) -> bool:
        """Move a running request, or its first sample, to another replica with its keys and values, while it goes on
        decoding; whether it is there now: not if it ended first. `recompute` leaves the keys and values behind."""
        return self.migrations.start(stream.sink.request.request_id, replica_id, recompute=recompute).result(timeout)

    def scale(self, replicas: int) -> None:
        """Start replicas, or end the least loaded ones, whose requests move to others, until there are so many."""
        if replicas < 1:
            raise ValueError(f"replicas={replicas} is not allowed; allowed: 1 or more")
        self.thread.call(partial(self.scaler.scale, replicas)).result()

    def wait_until_ready(self, replicas: int | None = None, timeout: float | None = None) -> None:
        """Until so many replicas take requests; None: all that are to. Raises RuntimeError where that cannot be, and
        TimeoutError."""

        def is_done() -> bool:
            states = [member.state for member in self.members]
            if not any(state in (State.STARTING, State.READY) for state in states):
                raise RuntimeError(self.members.why_none())
            ready = states.count(State.READY)
            return State.STARTING not in states if replicas is None else ready >= replicas

        timeout = self.fleet_config.start_seconds if timeout is None else timeout
        with self._changed:
            if not self._changed.wait_for(is_done, timeout):
                raise TimeoutError(f"after {timeout:g} s the replicas are {self.replicas}")

    def shutdown(self) -> None:
        """Abort what is under way, and end all processes. A second call does nothing."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        self.thread.drain(0)
        self.members.is_closing = True  # none is started again
        super().shutdown()
        self.migrations.close()
        self.members.close()
        remove_leftovers(f"minillm-{self.fleet_id}")

    def replica_metrics(self, model_name: str) -> Iterator[Metric]:
        """For `/metrics`: what is known of each replica."""
        from minillm.serving.replicas.metrics import replica_metrics  # a fleet without HTTP needs no prometheus_client

        return replica_metrics(self, model_name)

    # The engine thread.

    def _hear(self, member: Member, messages: list[Any]) -> None:
        engine = self.llm.engine
        for message in messages:
            if isinstance(message, Tokens):
                try:
                    flight = engine.take(message)
                except RuntimeError as error:  # what the replica says contradicts what is known
                    member.error = str(error)
                    self.kill(member.replica_id)
                    return
                if flight is not None and message.begun is not None:
                    self.migrations.begun(flight, message.begun)
            elif isinstance(message, Left):
                self.migrations.left(message)
            elif isinstance(message, CacheChange):
                self.router.cached(member.replica_id, message.removed, message.stored)
            elif isinstance(message, Ended):
                engine.fail(message)
            elif isinstance(message, Ready):
                self._ready(member, message.facts)
            elif isinstance(message, Failed):
                member.error = message.error
        self.scaler.end_drained()

    def _member_changed(self, member: Member) -> None:
        """It has another state."""
        if self._early is None:
            router = self.router
            if member.state is State.READY:
                router.join(member.replica_id, member.role)
            elif member.state is State.DRAINING:
                router.leave(member.replica_id)
                self.migrations.empty(member)
            else:
                self.migrations.lost(member)
                hopeless = router.lost(member.replica_id)
                for flight in hopeless:
                    error = RuntimeError(
                        f"{flight.num_deaths} replicas died, one after the other, while they computed request "
                        f"{flight.request.request_id}, the last of them {member.replica_id}"
                    )
                    self.llm.engine.abort(flight.request.request_id, error=error)
                if not self.members.in_state(State.READY, State.STARTING, State.DRAINING):
                    requests = list(self.llm.engine.scheduler.requests)
                    self.llm.engine.abort(*requests, error=RuntimeError(self.members.why_none()))
        with self._changed:
            self._changed.notify_all()

    def _ready(self, member: Member, facts: Facts) -> None:
        """It can compute; one that would compute other tokens than the others is ended."""
        for name in ("identity", "layout", "block_size", "max_model_len"):
            ours, theirs = getattr(self.facts, name), getattr(facts, name)
            if ours != theirs:
                member.error = f"it has {name}={theirs!r}, the others {ours!r}: all need the same model and settings"
                self.kill(member.replica_id)
                return
        self.members.ready(member, facts)

    def _send(self, replica_id: str, message: Any) -> None:
        channel = self.members.by_id[replica_id].channel
        if channel is not None:  # else it has died, and the router is about to hear of it
            channel.send(message)

    # Other threads.

    def _post(self, message: Callable[[], object]) -> None:
        with self._changed:
            if self._early is not None:
                self._early.append(message)
                self._changed.notify_all()
                return
        self.thread.tell(message)

    def _wait_for_facts(self) -> Facts:
        """Handle what the first replicas say, in this thread, until one of them is ready."""
        deadline = time.monotonic() + self.fleet_config.start_seconds
        found: list[Ready] = []

        def hear(member: Member, messages: list[Any]) -> None:
            for message in messages:
                if isinstance(message, Failed):
                    member.error = message.error
                elif isinstance(message, Ready):
                    found.append(message)

        while not found:
            with self._changed:
                if not self._changed.wait_for(lambda: self._early, 0.1):
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"no replica was ready after {self.fleet_config.start_seconds:g} s")
                    continue
                messages, self._early = self._early, []
            self.members.on_messages = hear
            for place, message in enumerate(messages):
                message()
                if found:  # it is heard again, when there is an engine
                    with self._changed:
                        self._early = messages[place:] + self._early
                    break
            self.members.on_messages = self._hear
            if not self.members.in_state(State.STARTING):
                raise RuntimeError(self.members.why_none())
        return found[0].facts

    def _tick_until_over(self) -> None:
        while not self._is_over.wait(TICK):
            self.thread.tell(self.scaler.tick)
