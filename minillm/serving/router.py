"""Router: which replica serves which sample, and where it goes on when its replica dies. Built in chapter 22.

    start        a policy picks a replica                    -> Submit
    failover     its replica has died                        -> Submit elsewhere, with the tokens so far
    move         its keys and values have arrived elsewhere  -> Submit there, with them
    end          it has its last token, or was aborted       -> Abort, if a replica still works on it

A sample on one replica is a flight with an id of its own, and messages of any other flight of that sample are dropped:
so no token comes twice. The replica continues behind the tokens that the front has: so none is lost. All requests have
a seed here, also those that brought none, so that a sampled text goes on as it would have. The router does no I/O: it
hands messages to `send`. All methods belong to one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from minillm.engine.request import Request, RequestSpec
from minillm.engine.routing import FleetView, RequestView, RouterPolicy
from minillm.kv_cache.prefix import extend_chain, root_hash
from minillm.serving.replicas.messages import Abort, Arriving, Submit

MOST_DEATHS = 5  # of replicas, one after the other, without a token of a sample in between


@dataclass(eq=False)
class Flight:
    """A sample of a request, and where it is. `flight_id` changes with each replica."""

    request: Request  # the front's: it has all tokens
    spec: RequestSpec  # what replicas are asked
    view: RequestView
    replica_id: str | None = None  # None while no replica takes requests
    flight_id: str = ""
    number: int = 0  # how many replicas it was given to
    num_counted: int = 0  # tokens that its replica's load has of it
    num_deaths: int = 0  # of its replicas since its last token
    num_failovers: int = 0  # in all


class Router:
    """Keeps the flights, and a `FleetView` of the replicas that take requests. With replicas that decode alone
    (`role="decode"`), new requests go to the others, and `move` takes them over."""

    def __init__(
        self,
        policy: RouterPolicy,
        send: Callable[[str, Any], None],
        identity: str = "",
        block_size: int = 16,
        hashes_prompts: bool = True,
    ):
        self.policy, self.send = policy, send
        self.on_submit: Callable[[Flight], object] = lambda flight: None  # it was given to a replica
        self.on_land: Callable[[Flight], object] = lambda flight: None  # it is about to leave its replica
        self.identity, self.block_size, self.hashes_prompts = identity, block_size, hashes_prompts
        self.takers, self.decoders = FleetView(), FleetView()  # takers: of new requests
        self.flights: dict[str, Flight] = {}  # by flight id
        self.by_request: dict[str, Flight] = {}  # by the id of the front's request
        self.stranded: dict[str, Flight] = {}  # without a replica, by the same
        self.num_failovers = self.num_moves = 0

    # Replicas.

    def join(self, replica_id: str, role: str = "both") -> None:
        """A replica takes requests from now on; those that had none go to it. `role`: "both", "prefill", "decode"."""
        (self.decoders if role == "decode" else self.takers).add(replica_id)
        stranded, self.stranded = self.stranded, {}
        for flight in stranded.values():
            self._launch(flight)

    def leave(self, replica_id: str) -> None:
        """It takes no further requests; those that it has stay there."""
        for view in (self.takers, self.decoders):
            if replica_id in view:
                view.remove(replica_id)

    def lost(self, replica_id: str) -> list[Flight]:
        """It has died: its flights go on elsewhere. Returns those that may not, since each replica that they were given
        to has died without giving a token; the caller ends them."""
        self.leave(replica_id)
        hopeless = []
        for flight in list(self.on(replica_id)):
            self._land(flight, is_told=True)
            flight.num_deaths += 1
            if flight.num_deaths >= MOST_DEATHS:
                hopeless.append(flight)
                continue
            flight.num_failovers += 1
            self.num_failovers += 1
            self._launch(flight)
        return hopeless

    def on(self, replica_id: str) -> Iterator[Flight]:
        """The flights on a replica."""
        return (flight for flight in self.by_request.values() if flight.replica_id == replica_id)

    def cached(self, replica_id: str, removed: list[bytes], stored: list[bytes]) -> None:
        """What a replica reports of its prefix cache."""
        view = self.view_of(replica_id)
        view.removed(replica_id, removed)
        view.stored(replica_id, stored)

    def view_of(self, replica_id: str) -> FleetView:
        return self.decoders if replica_id in self.decoders else self.takers

    # Requests.

    def start(self, request: Request, near: Flight | None = None) -> Flight:
        """Give a request, or a sample that splits off one, to a replica: to that of `near`, if it takes requests."""
        params = request.params.clone()
        params.n = 1  # the samples are flights of their own
        params.seed = request.seed if params.seed is None else params.seed
        if request.index:
            params.prompt_logprobs = None  # the first sample reports them
        spec = replace(request.spec, params=params)
        flight = Flight(request, spec, self.request_view(request))
        self.by_request[request.request_id] = flight
        self._launch(flight, near and near.replica_id)
        return flight

    def request_view(self, request: Request) -> RequestView:
        """What a policy sees of it; the hashes are those that a replica's cache makes of the same prompt."""
        hashes: list[bytes] = []
        if self.hashes_prompts:
            root = root_hash(identity=self.identity, block_size=self.block_size, salt=request.cache_salt)
            num_full = (request.num_prompt_tokens - 1) // self.block_size
            extend_chain(hashes, root, request.prompt_token_ids, self.block_size, num_full)
        return RequestView(request.request_id, request.num_prompt_tokens, hashes, self.block_size, request.max_tokens)

    def generated(self, flight: Flight, num_tokens: int) -> None:
        """Its replica has generated tokens of it."""
        flight.num_deaths = 0
        flight.num_counted += num_tokens
        self.view_of(flight.replica_id).generated(flight.replica_id, num_tokens)

    def end(self, request: Request, is_told: bool = False) -> None:
        """It has ended. `is_told`: its replica knows. Nothing happens if it has ended before."""
        flight = self.by_request.pop(request.request_id, None)
        if flight is not None:
            self.stranded.pop(request.request_id, None)
            self._land(flight, is_told)

    def move(self, flight: Flight, replica_id: str, arriving: Arriving | None) -> bool:
        """Go on at another replica, which the keys and values have gone to; the last one has let it go. False, and it
        goes on at any replica, if that one takes no requests any more."""
        self._land(flight, is_told=True)
        self.num_moves += 1
        if replica_id not in self.takers and replica_id not in self.decoders:
            self._launch(flight)
            return False
        self._submit(flight, replica_id, arriving)
        return True

    def pick(self, flight: Flight, view: FleetView) -> str:
        """What the policy says. Raises RuntimeError for a policy that names a replica that is not there."""
        replica_id = self.policy.pick(flight.view, view)
        if replica_id not in view:
            raise RuntimeError(
                f"the router policy {type(self.policy).__name__} picked {replica_id!r}; "
                f"there are {', '.join(repr(one.replica_id) for one in view)}"
            )
        return replica_id

    def _launch(self, flight: Flight, wanted: str | None = None) -> None:
        """Submit it somewhere, or let it wait for a replica. One that decodes alone can compute a prompt too, where no
        other is left."""
        self._land(flight, is_told=True)
        view = self.takers or self.decoders
        if not view:
            self.stranded[flight.request.request_id] = flight
        else:
            self._submit(flight, wanted if wanted in view else self.pick(flight, view))

    def _submit(self, flight: Flight, replica_id: str, arriving: Arriving | None = None) -> None:
        request = flight.request
        flight.number += 1
        flight.replica_id, flight.flight_id = replica_id, f"{request.request_id}#{flight.number}"
        flight.num_counted = len(request.token_ids)
        self.flights[flight.flight_id] = flight
        self.view_of(replica_id).started(replica_id, flight.num_counted)
        spec = replace(flight.spec, request_id=flight.flight_id, group_id=flight.flight_id)
        self.send(replica_id, Submit(flight.flight_id, spec, list(request.output_token_ids), arriving))
        if arriving is None:
            self.on_submit(flight)

    def _land(self, flight: Flight, is_told: bool) -> None:
        """It is on no replica any more."""
        if self.flights.pop(flight.flight_id, None) is None:
            return
        self.on_land(flight)
        self.view_of(flight.replica_id).finished(flight.replica_id, flight.num_counted)
        if not is_told:
            self.send(flight.replica_id, Abort([flight.flight_id]))
        flight.replica_id = None
