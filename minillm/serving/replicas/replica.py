"""A replica: an `AsyncLLM` in a process of its own, which serves the flights that the front sends. Built in chapter 22.

    reader thread   Submit, Abort, Call  ->  inbox of the engine thread
    engine thread   step -> Tokens of each flight, changes of the prefix cache
    workers         what a `Call` asks for beside the steps: copies of KV blocks
    sender thread   one packet for all that a step has made

Only tokens travel: the front makes the texts, so a text goes on unbroken when its tokens come from another replica.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from minillm.engine import handover
from minillm.engine.async_llm import AsyncLLM
from minillm.engine.llm import LLM
from minillm.engine.parts import retention_of, sliding_window
from minillm.engine.request import Request
from minillm.kv_cache.connector import KVConnector, SharedMemoryConnector, TCPConnector, layout_of
from minillm.kv_cache.events import CacheEvents
from minillm.kv_cache.sockets import connect, own_address
from minillm.model.decoder import Decoder
from minillm.serving.replicas.channel import Channel
from minillm.serving.replicas.listener import FlightListener
from minillm.serving.replicas.messages import (
    Abort,
    Answer,
    Call,
    Copied,
    Depart,
    Exit,
    Expect,
    Facts,
    Failed,
    Hello,
    Ready,
    Report,
    Setup,
    Submit,
    Unexpect,
)
from minillm.serving.replicas.streams import Streams

REPORT_EVERY = 0.2  # seconds
LOOK_EVERY = 0.002  # seconds between two looks for blocks that are about to be filled
NUM_WORKERS = 4


class Replica:
    """Reaches the front at `address`, makes its engine as the front says, and serves until told to exit, or until the
    front is gone. `began` is when its process did, in seconds of `time.monotonic`; `preloaded` is a model that the
    process has already."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        replica_id: str,
        generation: int = 0,
        began: float | None = None,
        preloaded: Decoder | None = None,
    ):
        self.replica_id, self.preloaded = replica_id, preloaded
        self.began = time.monotonic() if began is None else began
        self.seconds: dict[str, float] = {"process": time.monotonic() - self.began}
        self.flights: dict[str, FlightListener] = {}  # of the engine thread
        self.engine: AsyncLLM | None = None
        self.events: CacheEvents
        self.connector: KVConnector
        self.streams: Streams
        self._over = threading.Event()
        self._workers = ThreadPoolExecutor(NUM_WORKERS, "worker")
        self._setup: list[Setup] = []
        self._has_setup = threading.Event()
        connection = connect(address, secret)
        self.host = own_address(connection)  # as the other machines of the fleet see it
        self.channel = Channel(connection, self._hear, self._lost, replica_id).start()
        self.channel.send(Hello(replica_id, generation, os.getpid(), dict(self.seconds)))

    def run(self) -> None:
        """Returns when the replica is told to exit; a replica whose front is gone ends its process at once."""
        self._has_setup.wait()
        try:
            setup = self._setup[0]
            self._prepare(setup)
            start = time.monotonic()
            self.engine = AsyncLLM(make_llm(setup, self.preloaded))
            self.seconds["engine"] = time.monotonic() - start
            self.events = CacheEvents(self.engine.llm.engine.kv_cache)
            self.streams = Streams(self, setup.secret)
            self.channel.send(Ready(self._facts()))
        except BaseException as error:
            self.channel.send(Failed(f"{type(error).__name__}: {error}"))
        else:
            self._report_until_over()
            self.engine.shutdown()
            self.streams.stop()
            self.connector.close()
        self.channel.close()
        self.channel.join(5)

    # What the front may call. Each runs in a worker.

    def copy_blocks(self, flight_id: str, first: int, wait_seconds: float = 0.0) -> Copied | None:
        """Full blocks of a flight from number `first` on; None if it is not here. Waits for blocks to be filled, or for
        its first token, up to `wait_seconds`."""
        deadline = time.monotonic() + wait_seconds
        while True:
            copied = self._between_steps(lambda: handover.copy_blocks(self.engine.llm.engine, flight_id, first))
            if copied is None:
                return None
            if copied.data is not None or copied.num_generated or time.monotonic() >= deadline:
                handle = None if copied.data is None else self.connector.put(copied.data)
                return Copied(copied.hashes, handle, copied.end, copied.num_left, copied.num_generated)
            time.sleep(LOOK_EVERY)

    def take_out(
        self, flight_id: str, num_copied: int, with_blocks: bool = True
    ) -> tuple[int, list[bytes | int | None], Any] | None:
        """End a flight here; what its next replica needs of it: computed tokens, entries and a handle."""

        def take() -> handover.TakenOut | None:
            taken = handover.take_out(self.engine.llm.engine, flight_id, num_copied)
            self.forget(flight_id)
            return taken

        if (taken := self._between_steps(take)) is None:
            return None
        if not with_blocks:
            return 0, [], None
        try:
            handle = None if taken.data is None else self.connector.put(taken.data)
        except OSError:  # no room for them: the next replica computes them again
            return 0, [], None
        return taken.num_computed_tokens, taken.entries, handle

    def stage_blocks(self, hashes: list[bytes], handle: Any) -> int:
        """Put another replica's blocks into the prefix cache; how many are new."""
        data = self.connector.get(handle)
        return self._between_steps(lambda: handover.stage(self.engine.llm.engine, hashes, data))

    def drop(self, handle: Any) -> None:
        self.connector.drop(handle)

    def reset_prefix_cache(self) -> bool:
        return self._between_steps(self.engine.llm.reset_prefix_cache)

    def _between_steps(self, function: Callable[[], Any]) -> Any:
        return self.engine.thread.call(function).result()

    # The reader thread.

    def _hear(self, messages: list[Any]) -> None:
        for message in messages:
            if isinstance(message, Submit):
                self.engine.thread.tell(partial(self._submit, message, time.monotonic()))
            elif isinstance(message, Abort):
                self.engine.thread.tell(partial(self._abort, message.flight_ids))
            elif isinstance(message, Depart | Expect | Unexpect):
                self.engine.thread.tell(partial(self.streams.hear, message))
            elif isinstance(message, Call):
                self._workers.submit(self._answer, message)
            elif isinstance(message, Setup):
                self._setup.append(message)
                self._has_setup.set()
            elif isinstance(message, Exit):
                self._over.set()

    def _lost(self) -> None:
        if not self._over.is_set():
            connector = getattr(self, "connector", None)
            if connector is not None:
                connector.close()
            os._exit(0)  # nothing that it computes has a reader

    def _answer(self, call: Call) -> None:
        try:
            self.channel.send(Answer(call.number, getattr(self, call.method)(*call.arguments), None))
        except Exception as error:
            self.channel.send(Answer(call.number, None, f"{type(error).__name__}: {error}"))

    # The engine thread.

    def _submit(self, submit: Submit, arrived: float) -> None:
        request = handover.resumed(submit.spec, submit.output_token_ids)
        request.arrival_time = arrived  # the front may be on another machine, with another clock
        flight, arriving = FlightListener(self, submit, arrived), submit.arriving
        self.flights[submit.flight_id] = flight
        try:
            if arriving is not None and arriving.key is not None:
                self.streams.take_in(request, arriving, partial(self._begin, request, flight))
            else:
                self._begin(request, flight, arriving is not None and self.streams.fetch(request, arriving))
        except Exception as error:
            flight.fail(error)

    def _begin(self, request: Request, flight: FlightListener, took_in: bool) -> None:
        """It runs on with keys and values that are here, or it is added."""
        flight.took_in, outputs = took_in, self.engine.llm.outputs
        try:
            if took_in:
                outputs.raw[flight.flight_id] = flight
            elif flight.flight_id in self.flights:  # it was not aborted meanwhile
                outputs.add_raw(request, flight)
        except Exception as error:
            flight.fail(error)

    def _abort(self, flight_ids: list[str]) -> None:
        for flight_id in flight_ids:
            self.forget(flight_id)
        self.engine.llm.engine.abort(*flight_ids)

    def forget(self, flight_id: str) -> None:
        self.flights.pop(flight_id, None)
        self.engine.llm.outputs.raw.pop(flight_id, None)
        self.streams.close(flight_id)

    def tell_cache(self) -> None:
        if self.events.has_changes:
            self.channel.send(self.events.take())

    # The main thread.

    def _prepare(self, setup: Setup) -> None:
        if setup.cuda_device is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(setup.cuda_device)
        if setup.num_threads is not None:
            torch.set_num_threads(setup.num_threads)
        if setup.kv_transport == "shm":
            self.connector = SharedMemoryConnector(f"minillm-{setup.fleet_id}-{self.replica_id}-{os.getpid()}")
        else:
            self.connector = TCPConnector(setup.secret, self.host)

    def _facts(self) -> Facts:
        llm = self.engine.llm
        manager, policy = llm.engine.kv_cache, retention_of(llm.config, llm.model)
        return Facts(
            llm.model.config,
            llm.max_model_len,
            manager.pool.num_blocks,
            manager.block_size,
            manager.enable_prefix_caching,
            manager.identity,
            sliding_window(llm.model) if policy is None else policy.window,
            0 if policy is None else policy.sinks,
            llm.engine.runner.cache.bytes_per_block,
            layout_of(llm.engine.runner.cache),
            self.streams.door.address,
            dict(self.seconds),
        )

    def _report_until_over(self) -> None:
        counters, engine = self.engine.counters, self.engine.llm.engine
        steps, before, mean = 0, time.monotonic(), 0.0
        while not self._over.wait(REPORT_EVERY):
            self.engine.thread.tell(self.tell_cache)
            now, done = time.monotonic(), engine.num_steps - steps
            if done and engine.scheduler.requests:
                mean = (now - before) / done if not mean else 0.7 * mean + 0.3 * (now - before) / done
            steps, before = engine.num_steps, now
            running, base = len(engine.scheduler.running), counters.by_adapter[""]
            self.channel.send(
                Report(
                    running,
                    max(0, len(engine.scheduler.requests) - running),
                    engine.kv_cache.pool.usage,
                    engine.num_steps,
                    mean,
                    base.num_generation_tokens,
                    base.num_prompt_tokens - base.num_cached_tokens,
                    base.num_cached_tokens,
                    counters.num_preemptions,
                )
            )


class PreloadedLLM(LLM):
    """An LLM around a model that this process has already."""

    def __init__(self, preloaded: Decoder, **arguments: Any):
        self._preloaded = preloaded
        super().__init__(**arguments)

    def _load_model(self) -> Decoder:
        return self._preloaded


def make_llm(setup: Setup, preloaded: Decoder | None) -> LLM:
    return LLM(**setup.arguments) if preloaded is None else PreloadedLLM(preloaded, **setup.arguments)


def run_replica(*arguments: Any, **options: Any) -> None:
    """Serve in this process, and end it: the way of a forked child, which has no caller to return to."""
    code = 0
    try:
        Replica(*arguments, **options).run()
    except (ConnectionError, EOFError):
        pass  # the front has gone
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
