"""Streams: keys and values travel from a replica that prefills to one that decodes, layer by layer, while the prompt
is computed. Built in chapter 22.

    front          Depart ────────────> source            Expect ───────────> destination: reserve blocks
    source         layer 0, layer 1, ... of each step ──connection──────────> written into these blocks
    source         the first token ──> front ──Submit(Arriving(key))────────> runs on: all is there, or about to be

A stream may break anywhere: the source died, the destination has no room, a connection was lost. The blocks are free
again then, and the request computes its prompt where it is, or again where it goes on.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from minillm.engine import handover
from minillm.engine.layerwise import Departing, LayerBlocks, LayerwiseExecutor, is_served, pack, write_layer
from minillm.engine.request import Request
from minillm.kv_cache.connector import KVConnector, KVHandle
from minillm.kv_cache.sockets import Door, connect
from minillm.serving.replicas.messages import Arriving, Depart, Expect, Left, Unexpect

if TYPE_CHECKING:
    from minillm.serving.replicas.replica import Replica

KNOWN_SECONDS = 60.0  # for the front to say what a connection brings
REMEMBERED = 4096  # streams that were expected, and never came
BROKEN = (OSError, EOFError, AuthenticationError, ValueError)  # what a connection raises whose other end is gone


class Departure:
    """The blocks of one request on their way to the replica at `place`. `put`, `finish` and `close` return at once."""

    def __init__(self, connector: KVConnector, secret: bytes, place: tuple[str, int], key: str, num_tokens: int):
        self.connector, self.secret, self.place, self.key = connector, secret, place, key
        self.num_tokens = num_tokens  # that the destination has blocks for, and a block more
        self.is_taken: bool | None = None  # whether the destination has room; None before it has said so
        self._queue: queue.SimpleQueue[LayerBlocks | int | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"depart {key}", daemon=True).start()

    def put(self, blocks: LayerBlocks) -> None:
        if self.is_taken is not False:
            self._queue.put(blocks)

    def finish(self, num_tokens: int) -> None:
        """All blocks were put; they have the keys and values of so many tokens."""
        self._queue.put(num_tokens)

    def close(self) -> None:
        """The request goes nowhere."""
        self._queue.put(None)

    def _run(self) -> None:
        sent: list[KVHandle] = []
        try:
            with connect(self.place, self.secret) as connection:
                connection.send(self.key)
                self.is_taken = connection.recv()
                while self.is_taken and (item := self._queue.get()) is not None:
                    if isinstance(item, int):
                        connection.send(item)
                        connection.recv()  # it has read all
                        return
                    connection.send((item.layer, item.first, item.count))
                    if (handle := self.connector.send(connection, pack(item.parts.wait()))) is not None:
                        sent.append(handle)
        except BROKEN:
            pass
        self.is_taken = False
        for handle in sent:  # of those that were read nothing is left
            self.connector.drop(handle)


class Arrival:
    """Blocks that wait for a request, or fill up with its keys and values."""

    def __init__(self, blocks: list[int], hashes: list[bytes]):
        self.blocks, self.hashes = blocks, hashes
        self.num_tokens: int | None = None  # that are all here
        self.is_read = self.is_over = False  # whether it is connected; whether nothing more comes
        self.is_wanted = True
        self.then: Callable[[], None] | None = None  # what waits for its end


class Streams:
    """Those of one replica. The methods belong to its engine's thread, but for those of connections."""

    def __init__(self, replica: Replica, secret: bytes):
        self.replica, self.secret, self.engine = replica, secret, replica.engine.llm.engine
        self.departures: dict[str, Departure] = {}  # by flight id
        self.arrivals: OrderedDict[str, Arrival | None] = OrderedDict()  # by key; None is refused
        self._changed = threading.Condition()
        self.is_served = is_served(replica.engine.llm.model, replica.engine.llm.engine.kv_cache.window)
        self.executor = LayerwiseExecutor(self.engine.runner, self.engine.kv_cache.tables)
        if self.is_served:
            self.engine.executor = self.executor
        self.door = Door(secret, self._receive, replica.host)

    def hear(self, message: Depart | Expect | Unexpect) -> None:
        if isinstance(message, Depart):
            self._depart(message)
        elif isinstance(message, Expect):
            self._expect(message)
        else:
            self._unexpect(message.key)

    def stop(self) -> None:
        self.door.close()

    # Source.

    def _depart(self, message: Depart) -> None:
        flight_id = message.flight_id
        if flight_id not in self.engine.scheduler.requests or not self.is_served:
            self.replica.channel.send(Left(flight_id, None))
            return
        num_tokens = self.engine.scheduler.requests[flight_id].num_tokens
        departure = Departure(self.replica.connector, self.secret, message.place, flight_id, num_tokens)
        self.departures[flight_id] = departure
        self.executor.depart(flight_id, Departing(message.num_cached, departure.put))

    def begun(self, flight_id: str) -> None:
        """A flight has a token: let it go on elsewhere before the next step."""
        if flight_id in self.departures:
            self.replica.engine.thread.tell(partial(self._leave, flight_id))

    def _leave(self, flight_id: str) -> None:
        departure, request = self.departures.get(flight_id), self.engine.scheduler.requests.get(flight_id)
        if departure is None or request is None:
            self.close(flight_id)
            return
        num_tokens = handover.num_certain_tokens(request)
        waits_long = num_tokens > departure.num_tokens + self.engine.kv_cache.block_size
        if departure.is_taken is False or waits_long:
            self.close(flight_id)
            self.replica.channel.send(Left(flight_id, None))
        elif departure.is_taken:
            self._send_away(flight_id, request, departure, num_tokens)
        # Else the next token asks again: the destination is in a long step.

    def _send_away(self, flight_id: str, request: Request, departure: Departure, num_tokens: int) -> None:
        departure.finish(num_tokens)
        self._forget(flight_id)
        self.engine.finish("abort", request)
        self.replica.forget(flight_id)
        self.replica.channel.send(Left(flight_id, num_tokens))

    def close(self, flight_id: str) -> None:
        """A flight has ended; nothing happens if it was not departing."""
        if (departure := self._forget(flight_id)) is not None:
            departure.close()

    def _forget(self, flight_id: str) -> Departure | None:
        self.executor.departing.pop(flight_id, None)
        return self.departures.pop(flight_id, None)

    # Destination.

    def _expect(self, message: Expect) -> None:
        blocks = None
        if self.is_served:
            sizes = (message.num_cached, message.num_tokens + self.engine.kv_cache.block_size)
            blocks = handover.reserve(self.engine, message.key, message.hashes, *sizes)
        arrival = None if blocks is None else Arrival(blocks, message.hashes)
        with self._changed:
            self.arrivals[message.key] = arrival
            self._changed.notify_all()
        refused = [key for key, one in self.arrivals.items() if one is None][:-REMEMBERED]
        for key in refused:
            del self.arrivals[key]

    def _unexpect(self, key: str) -> None:
        if (arrival := self.arrivals.get(key)) is not None:
            arrival.is_wanted = False
            self._settle(key, arrival)

    def fetch(self, request: Request, arriving: Arriving) -> bool:
        """Whether a request runs on with the keys and values that its last replica has put; if that has ended
        meanwhile, they are gone, and are computed again."""
        num_computed, entries, handle, _ = arriving
        try:
            data = None if handle is None else self.replica.connector.get(handle)
        except ConnectionError:
            return False
        return handover.take_in(self.engine, request, handover.TakenOut(num_computed, entries, data))

    def take_in(self, request: Request, arriving: Arriving, begin: Callable[[bool], None]) -> None:
        """Let a request run on with what has arrived for it: `begin(True)`, if all of it has; else `begin(False)`, and
        it computes its tokens again. At once, or when the last layer is here."""
        key = arriving.key
        arrival = self.arrivals.get(key)
        if arrival is None:
            begin(False)
        elif not arrival.is_over:
            arrival.then = lambda: self.take_in(request, arriving, begin)
        else:
            del self.arrivals[key]
            if arrival.num_tokens != arriving.num_computed_tokens or request.request_id not in self.replica.flights:
                handover.release(self.engine, key)
                begin(False)
            else:
                begin(handover.take_reserved(self.engine, key, request, arrival.hashes, arrival.num_tokens))

    def _settle(self, key: str, arrival: Arrival) -> None:
        """Free what nothing writes to and nothing waits for."""
        if arrival.is_over and arrival.then is not None:
            arrival.then()
            return
        with self._changed:
            is_broken = arrival.is_over and arrival.num_tokens is None
            is_left = not arrival.is_wanted and (arrival.is_over or not arrival.is_read)
            if (is_broken or is_left) and self.arrivals.get(key) is arrival:
                self.arrivals[key] = None
                handover.release(self.engine, key)

    # A thread of each connection.

    def _receive(self, connection: Connection) -> None:
        with connection, suppress(*BROKEN):
            key = connection.recv()
            with self._changed:
                self._changed.wait_for(lambda: key in self.arrivals, KNOWN_SECONDS)
                if (arrival := self.arrivals.get(key)) is not None:
                    arrival.is_read = True
            connection.send(arrival is not None)
            if arrival is None:
                return
            try:
                self._write(connection, arrival)
            finally:
                arrival.is_over = True
                self.replica.engine.thread.tell(partial(self._settle, key, arrival))

    def _write(self, connection: Connection, arrival: Arrival) -> None:
        cache = self.engine.runner.cache
        while not isinstance(item := connection.recv(), int):
            layer, first, count = item
            data = self.replica.connector.receive(connection)
            write_layer(cache, layer, arrival.blocks[first : first + count], data)
        arrival.num_tokens = item
        connection.send(True)
