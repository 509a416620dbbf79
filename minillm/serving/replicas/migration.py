"""Migrations: running requests move between replicas with their keys and values. Built in chapter 22.

    copy_blocks  ->  stage_blocks     full blocks, while the request goes on decoding; again for those filled meanwhile
    take_out                          the source lets go, and hands over the last, partly filled block
    Submit(Arriving)                  the destination runs it from its next step on

Used to empty a replica before it ends, to balance load by hand, and to hand a computed prompt from a replica that
prefills to one that decodes (DistServe, Zhong et al. 2024). The last goes layer by layer while the prompt is computed
(`minillm.serving.replicas.streams`); by copies behind the first token where no such stream came about. Where anything
fails, the request goes on where the router puts it, and computes its tokens again: the result is the same.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minillm.kv_cache.connector import remove_leftovers
from minillm.rounding import ceil_div
from minillm.serving.replicas.members import Member, State
from minillm.serving.replicas.messages import Arriving, Begun, Copied, Depart, Expect, Left, Unexpect
from minillm.serving.router import Flight

if TYPE_CHECKING:
    from minillm.kv_cache.connector import KVHandle
    from minillm.serving.replicas.fleet import Fleet

AT_ONCE = 16  # migrations under way
MOST_ROUNDS = 64  # of copies, after which the rest is copied while the request pauses
WAIT_SECONDS = 0.05  # for blocks that a prefill is about to fill
REMEMBERED = 4096


@dataclass
class Move:
    """One migration, as it went."""

    request_id: str
    source: str
    destination: str
    num_tokens: int = 0  # whose keys and values moved, or were there already
    num_bytes: int = 0  # that were sent
    num_rounds: int = 0  # of copies while the request went on
    last_token: float = 0.0  # when the source's last token came, seconds on the front's clock
    pause_seconds: float | None = None  # from there to the destination's first token
    num_steps: int | None = None  # that the destination took from the arrival to its first token
    took_in: bool = False  # whether the destination used the keys and values
    by_layers: bool = False  # whether they went while the prompt was computed


class Migrations:
    """Those under way and the last ones of the past. `moves` may be read in any thread."""

    def __init__(self, fleet: Fleet):
        self.fleet = fleet
        self.moves: deque[Move] = deque(maxlen=REMEMBERED)
        self.num_bytes = 0  # of keys and values, in all moves
        self._workers = ThreadPoolExecutor(AT_ONCE, "migrate")
        self._awaited: dict[str, Move] = {}  # by the id of the flight whose first token ends the pause
        self._offered: dict[str, tuple[Member, KVHandle]] = {}  # by the id of the flight that is to read it: where
        self._moving: set[str] = set()  # request ids
        self._streams: dict[str, tuple[str, int]] = {}  # by flight id: where its layers go, and the blocks known there
        fleet.router.on_submit, fleet.router.on_land = self.started, self._landed

    def start(
        self, request_id: str, replica_id: str, from_prefill: bool = False, recompute: bool = False
    ) -> Future[bool]:
        """Move a request, in a worker. `from_prefill` copies blocks as the prompt is computed, and waits for the first
        token. `recompute` moves no keys and values."""
        return self._workers.submit(self._migrate, request_id, replica_id, from_prefill, recompute)

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    # The engine thread.

    def started(self, flight: Flight) -> None:
        """A request was given to a replica; if that one only prefills, let its layers go to one that decodes while they
        are computed."""
        router, request = self.fleet.router, flight.request
        is_apart = flight.replica_id in router.takers and router.decoders and self.fleet.facts.window is None
        if not is_apart or request.max_tokens - len(request.output_token_ids) < 2:
            return
        replica_id = router.pick(flight, router.decoders)
        num_cached = router.decoders.get(replica_id).num_cached_blocks(flight.view.block_hashes)
        self._streams[flight.flight_id] = (replica_id, num_cached)
        hashes = list(flight.view.block_hashes)
        router.send(replica_id, Expect(flight.flight_id, len(request.token_ids), hashes, num_cached))
        place = self.fleet.members.by_id[replica_id].facts.place
        router.send(flight.replica_id, Depart(flight.flight_id, place, num_cached))

    def left(self, left: Left) -> None:
        """A flight has sent all of its layers, and ended on its replica; or it could not."""
        router, flight = self.fleet.router, self.fleet.router.flights.get(left.flight_id)
        if flight is None:
            return
        if left.num_tokens is None:
            self._landed(flight)
            self._hand_over(flight)
            return
        # Without a stream that is known here it goes on at any replica, and computes its tokens again.
        (replica_id, num_cached), facts = self._streams.pop(left.flight_id, ("", 0)), self.fleet.facts
        num_bytes = (ceil_div(left.num_tokens, facts.block_size) - num_cached) * facts.bytes_per_block
        move = Move(flight.request.request_id, flight.replica_id, replica_id, left.num_tokens, num_bytes)
        move.last_token, move.by_layers = flight.request.token_times[-1], True
        self.num_bytes += num_bytes
        if router.move(flight, replica_id, Arriving(left.num_tokens, [], None, left.flight_id)):
            self._awaited[flight.flight_id] = move

    def _landed(self, flight: Flight) -> None:
        """A flight is not where it was: what was on its way from there, or to there, is not wanted."""
        if (stream := self._streams.pop(flight.flight_id, None)) is not None:
            self.fleet.router.send(stream[0], Unexpect(flight.flight_id))
        self._drop(*self._offered.pop(flight.flight_id, (None, None)))
        if not flight.request.is_finished:  # else its last token may be its first there
            self._awaited.pop(flight.flight_id, None)

    def lost(self, member: Member) -> None:
        """Its process is gone: nothing reads any more what it had put into shared memory."""
        if member.process is not None:
            remove_leftovers(f"minillm-{self.fleet.fleet_id}-{member.replica_id}-{member.process.pid}")

    def begun(self, flight: Flight, begun: Begun) -> None:
        """A flight has its first token."""
        offered = self._offered.pop(flight.flight_id, None)
        if offered is not None and not begun.took_in:
            self._drop(*offered)
        if (move := self._awaited.pop(flight.flight_id, None)) is not None:
            move.pause_seconds = flight.request.token_times[-1] - move.last_token
            move.num_steps, move.took_in = begun.num_steps, begun.took_in
            self.moves.append(move)
        elif not flight.request.is_finished and flight.flight_id not in self._streams:
            self._hand_over(flight)

    def empty(self, member: Member) -> None:
        """Move all flights of a replica that drains; those that cannot move end there."""
        router = self.fleet.router
        for flight in list(router.on(member.replica_id)):
            if router.takers:
                self.start(flight.request.request_id, router.pick(flight, router.takers))

    def _hand_over(self, flight: Flight) -> None:
        """From a replica that prefills to one that decodes."""
        router, request_id = self.fleet.router, flight.request.request_id
        if flight.replica_id in router.takers and router.decoders and request_id not in self._moving:
            self._moving.add(request_id)
            self.start(request_id, router.pick(flight, router.decoders), from_prefill=True)

    def _look(self, request_id: str, replica_id: str) -> tuple[Flight, str, Member, Member, int] | None:
        """Flight, its id, source, destination, and how many blocks the destination has already."""
        router, members = self.fleet.router, self.fleet.members
        flight, destination = router.by_request.get(request_id), members.by_id.get(replica_id)
        if flight is None or flight.replica_id in (None, replica_id):
            return None
        if destination is None or destination.state is not State.READY:
            return None
        known = router.view_of(replica_id).get(replica_id).num_cached_blocks(flight.view.block_hashes)
        return flight, flight.flight_id, members.by_id[flight.replica_id], destination, known

    def _go(self, flight: Flight, flight_id: str, source: Member, move: Move, taken: Any) -> bool:
        """The source has let go: submit it at the destination."""
        router = self.fleet.router
        num_tokens, entries, handle = taken
        if router.flights.get(flight_id) is not flight:  # aborted, or its source has died meanwhile
            self._drop(source, handle)
            return False
        move.num_tokens, move.num_bytes = num_tokens, move.num_bytes + (0 if handle is None else handle.num_bytes)
        times = flight.request.token_times
        move.last_token = times[-1] if times else self.fleet.llm.engine.clock()
        arriving = Arriving(num_tokens, entries, handle) if entries else None
        self.num_bytes += move.num_bytes
        if not router.move(flight, move.destination, arriving):
            self._drop(source, handle)
            return False
        self._awaited[flight.flight_id] = move
        if handle is not None:
            self._offered[flight.flight_id] = (source, handle)
        return True

    def _drop(self, source: Member | None, handle: KVHandle | None) -> None:
        """No replica reads it any more, or one has: let the source forget it."""
        if source is not None and handle is not None:
            source.call(self.fleet.members.numbers, "drop", handle)

    # A worker.

    def _migrate(self, request_id: str, replica_id: str, from_prefill: bool, recompute: bool) -> bool:
        try:
            found = self._in_engine_thread(lambda: self._look(request_id, replica_id))
            if found is None:
                return False
            flight, flight_id, source, destination, num_copied = found
            move = Move(request_id, source.replica_id, replica_id)
            for _ in range(0 if recompute else MOST_ROUNDS):
                copied = self._copy(flight_id, source, destination, num_copied, from_prefill)
                if copied is None:
                    return False
                num_copied = copied.end
                move.num_rounds += copied.handle is not None
                move.num_bytes += 0 if copied.handle is None else copied.handle.num_bytes
                if not copied.num_left and (copied.num_generated or not from_prefill):
                    break
            taken = self._call(source, "take_out", flight_id, num_copied, not recompute)
            return taken is not None and self._in_engine_thread(
                lambda: self._go(flight, flight_id, source, move, taken)
            )
        except RuntimeError:  # a replica has died, or the fleet is closed: the request goes on without this
            return False
        finally:
            self._moving.discard(request_id)

    def _copy(
        self, flight_id: str, source: Member, destination: Member, first: int, from_prefill: bool
    ) -> Copied | None:
        copied: Copied | None = self._call(source, "copy_blocks", flight_id, first, WAIT_SECONDS * from_prefill)
        if copied is not None and copied.handle is not None:
            try:
                self._call(destination, "stage_blocks", copied.hashes, copied.handle)
            except RuntimeError:  # it has died, or could not read them
                self._in_engine_thread(lambda: self._drop(source, copied.handle))
                raise
        return copied

    def _call(self, member: Member, method: str, *arguments: Any) -> Any:
        numbers = self.fleet.members.numbers
        return self._in_engine_thread(lambda: member.call(numbers, method, *arguments)).result()

    def _in_engine_thread(self, function: Any) -> Any:
        return self.fleet.thread.call(function).result()
