"""The front without processes: replicas that are made up here generate, die and come back in random order. Every
request has each of its tokens once."""

from __future__ import annotations

import pickle
from collections import deque
from random import Random

import pytest

from minillm import SamplingParams
from minillm.book.roads.models import config_of
from minillm.engine.config import EngineConfig
from minillm.engine.request import Request
from minillm.engine.routing import make_router_policy
from minillm.sampling.noise import derive_seed
from minillm.serving.replicas.front import FleetEngine
from minillm.serving.replicas.messages import Abort, Arriving, Begun, Ended, Facts, Submit, Tokens
from minillm.serving.router import MOST_DEATHS, Router
from minillm.trace import Trace

EOS = 1


def token_of(prompt: list[int], seed: int, index: int, position: int) -> int:
    """What any replica generates there; never a stop token."""
    return 2 + derive_seed(derive_seed(seed + sum(prompt), index), position) % 200


class World:
    """Replicas that are lists: what they were sent, and what is on its way back."""

    def __init__(self, policy: str, seed: int = 0):
        self.rng = Random(seed)
        self.router = Router(make_router_policy(policy), self.send, block_size=4)
        facts = Facts(config_of("llama"), 256, 500, 4, True, "", None, 0, 1, "")
        self.engine = FleetEngine(EngineConfig("none"), facts, self.router, Trace(enabled=False))
        self.flights: dict[str, dict[str, list]] = {}  # replica -> flight id -> [Submit, tokens of its output]
        self.back: dict[str, deque] = {}  # replica -> messages that the front has not heard
        self.heard: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.errors: dict[str, BaseException | None] = {}
        self.requests: dict[str, Request] = {}
        self.engine.on_end = lambda group, error: self.errors.__setitem__(group, error)

    def send(self, replica_id: str, message) -> None:
        message = pickle.loads(pickle.dumps(message))  # as it is now
        flights = self.flights[replica_id]
        if isinstance(message, Submit):
            assert message.flight_id not in flights and message.spec.request_id == message.flight_id
            assert message.spec.params.n == 1 and message.spec.params.seed is not None
            flights[message.flight_id] = [message, list(message.output_token_ids)]
        elif isinstance(message, Abort):
            for flight_id in message.flight_ids:
                flights.pop(flight_id, None)

    def join(self, replica_id: str, role: str = "both") -> None:
        self.flights[replica_id], self.back[replica_id] = {}, deque()
        self.router.join(replica_id, role)

    def kill(self, replica_id: str) -> list:
        """Some of what it said last may still be read; the rest is gone with it."""
        for _ in range(self.rng.randrange(1 + len(self.back[replica_id]))):
            self.hear(replica_id)
        del self.flights[replica_id], self.back[replica_id]
        return self.router.lost(replica_id)

    def generate(self, replica_id: str) -> None:
        """A step of a replica: one to three tokens of each flight."""
        for flight_id, (submit, output) in list(self.flights[replica_id].items()):
            spec, first = submit.spec, len(output) == len(submit.output_token_ids)
            position, limit = len(output), spec.max_tokens
            for _ in range(min(self.rng.randrange(1, 4), limit - len(output))):
                output.append(token_of(list(spec.prompt_token_ids), spec.seed, spec.index, len(output)))
            begun = Begun(0.0, 0, {}, None, 1, False) if first else None
            reason = "length" if len(output) == limit else None
            self.back[replica_id].append(Tokens(flight_id, position, output[position:], None, reason, None, begun))
            if reason:
                del self.flights[replica_id][flight_id]

    def hear(self, replica_id: str) -> None:
        message = self.back[replica_id].popleft()
        self.engine.take(message) if isinstance(message, Tokens) else self.engine.fail(message)
        for delta in self.engine.step():
            name = delta.request.request_id
            assert name not in self.ends
            self.heard.setdefault(name, []).append(delta.token_id)
            if delta.finish_reason is not None:
                self.ends[name] = delta.finish_reason

    def ask(self, name: str, num_tokens: int = 20, n: int = 1, seed: int | None = None, **params) -> Request:
        prompt = [self.rng.randrange(9)] * self.rng.randrange(1, 30)
        asked = SamplingParams(max_tokens=num_tokens, n=n, seed=seed, **params)
        request = Request(name, prompt, asked, num_tokens, seed=self.rng.randrange(1000) if seed is None else seed,
                          eos_token_ids=frozenset({EOS}))  # fmt: skip
        self.requests[name] = request
        self.engine.add_request(request)
        return request

    def check(self, request: Request) -> None:
        for index in range(request.params.n):
            name = f"{request.request_id}_{index}" if index else request.request_id
            wanted = [token_of(request.prompt_token_ids, request.seed, index, at) for at in range(request.max_tokens)]
            assert self.heard[name] == wanted and self.ends[name] == "length"

    def check_idle(self) -> None:
        assert not (self.router.flights or self.router.by_request or self.router.stranded or any(self.flights.values()))
        for view in (*self.router.takers, *self.router.decoders):
            assert (view.num_tokens, view.num_requests) == (0, 0)
        scheduler = self.engine.scheduler
        assert not (scheduler.requests or scheduler.running or scheduler.samples or list(scheduler.waiting))


@pytest.mark.parametrize("policy", ["round_robin", "power_of_two", "least_tokens", "prefix_aware"])
def test_every_token_once_whatever_dies_and_moves(policy):
    world, rng = World(policy, seed=5), Random(9)
    aborted, names, kills, moves = set(), iter(range(10**6)), 0, 0
    for name in ("a", "b", "c"):
        world.join(name)
    for step in range(4000):
        what, up = rng.random(), list(world.flights)
        if what < 0.02 and up:
            hopeless = world.kill(rng.choice(up))
            assert not hopeless, "five deaths in a row without a token are not drawn here"
            kills += 1
        elif what < 0.06 and len(up) < 4:
            world.join(next(name for name in "abcd" if name not in up), "decode" if rng.random() < 0.3 else "both")
        elif what < 0.16 and len(world.requests) < 200:
            world.ask(str(next(names)), rng.randrange(1, 30), rng.choice((1, 1, 1, 3)), rng.choice((None, 7)))
        elif what < 0.17 and world.engine.scheduler.requests:
            one = rng.choice(list(world.engine.scheduler.requests.values()))
            aborted.add(one.group_id)
            world.engine.abort(one.request_id)
        elif what < 0.22 and up and world.router.flights:  # a migration that went well, or whose target is gone
            flight = rng.choice(list(world.router.flights.values()))
            world.flights.get(flight.replica_id, {}).pop(flight.flight_id, None)
            world.router.move(flight, rng.choice("abcd"), Arriving(3, [None], None))
            moves += 1
        elif up:
            replica_id = rng.choice(up)
            world.generate(replica_id)
            while world.back[replica_id] and rng.random() < 0.8:
                world.hear(replica_id)
        if step > 3000 and not up:
            world.join("a")
    if not world.router.takers:
        world.join("z")
    while world.engine.scheduler.requests:
        for replica_id in list(world.flights):
            world.generate(replica_id)
            while world.back[replica_id]:
                world.hear(replica_id)
    for request in world.requests.values():
        if request.request_id not in aborted:
            world.check(request)
    for replica_id in list(world.flights):
        while world.back[replica_id]:
            world.hear(replica_id)
    world.check_idle()
    assert kills > 30 and moves > 30 and len(world.requests) == 200 and world.router.num_failovers > 20


def test_requests_wait_for_a_replica_where_there_is_none():
    world = World("least_tokens")
    request = world.ask("0")
    assert list(world.router.stranded) == ["0"]
    gone = world.ask("1")
    world.engine.abort("1")
    world.join("a")
    while world.engine.scheduler.requests:
        world.generate("a")
        world.hear("a")
    world.check(request)
    assert gone.is_finished and "1" not in world.heard
    world.check_idle()


def test_a_request_on_which_every_replica_dies_is_given_up():
    world = World("round_robin")
    poison = world.ask("0")
    for number in range(MOST_DEATHS - 1):
        world.join(f"r{number}")
        assert world.kill(f"r{number}") == []
    world.join("last")
    [flight] = world.kill("last")
    assert flight.request is poison and flight.num_deaths == MOST_DEATHS
    world.engine.abort("0", error=RuntimeError("five"))
    world.check_idle()


def test_samples_go_where_the_prompt_is_cached_and_have_their_own_flights():
    world = World("round_robin")
    world.join("a")
    world.join("b")
    request = world.ask("0", 5, n=3, seed=4)
    assert len(world.router.flights) == 1  # the others wait until the prompt is computed
    [holder] = [replica_id for replica_id, flights in world.flights.items() if flights]
    world.generate(holder)
    world.hear(holder)
    assert len(world.flights[holder]) == (3 if "0" not in world.ends else 2)
    while world.engine.scheduler.requests:
        world.generate(holder)
        while world.back[holder]:
            world.hear(holder)
    world.check(request)
    world.check_idle()


def test_tokens_that_do_not_follow_are_refused():
    world = World("round_robin")
    world.join("a")
    world.ask("0")
    [flight_id] = world.flights["a"]
    with pytest.raises(RuntimeError, match="replica a sent token 3 of request 0, which has 0"):
        world.engine.take(Tokens(flight_id, 3, [5], None, None, None, None))
    assert world.engine.take(Tokens("0#99", 0, [5], None, None, None, None)) is None  # of another flight


def test_a_replica_that_cannot_go_on_says_why():
    world = World("round_robin")
    world.join("a")
    world.ask("0")
    [flight_id] = world.flights["a"]
    world.engine.fail(Ended(flight_id, "MemoryError()"))
    assert "replica a ended request 0: MemoryError()" in str(world.errors["0"])
    assert "0" not in world.engine.scheduler.requests


def test_functions_that_cannot_travel_are_refused_by_name():
    world = World("round_robin")
    world.join("a")
    with pytest.raises(ValueError, match=r"logits_processors=.*cannot be sent to another process"):
        world.ask("0", logits_processors=[lambda tokens, logits: logits])
    world.check_idle()


def test_a_policy_that_names_no_replica_is_told_so():
    class Lost:
        def pick(self, request, replicas):
            return "nowhere"

    world = World("round_robin")
    world.router.policy = Lost()
    world.join("a")
    with pytest.raises(RuntimeError, match="the router policy Lost picked 'nowhere'; there are 'a'"):
        world.ask("0")
