"""The check of chapter 09's fair shares. Built in chapter 09."""

from __future__ import annotations

import functools

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch09_drives import BASES, POLICIES, Pair, drive, serve
from minillm.book.checks.ch09_oracle import FairShares, ask
from minillm.engine.request import Request

check_fair_queue = Checker(
    "fair_queue",
    forbid=POLICIES,
    allow=BASES,
    hint="The smallest counter first; lifted on arrival; charged by weight over share.",
)


@check_fair_queue.part("example")
def _fair_example(case: Case) -> None:
    pair = _fair(case, {"ann": 2.0})
    first = {
        name: ask(name, 10, user=user, at=at)
        for name, user, at in (("a1", "ann", 0.0), ("a2", "ann", 1.0), ("b1", "bob", 2.0), ("b2", "bob", 3.0))
    }
    for one in first.values():
        pair.tell("add", one)
    pair.pops("a1")
    _charged(case, pair, first["a1"], 10, "Ten tokens of the prompt, weight 1 each, over a share of 2.")
    pair.pops("b1")
    _charged(case, pair, first["b1"], 4, "Four tokens of the prompt; bob is not in shares, so bob's share is 1.")
    pair.pops("b2")
    _charged(case, pair, first["b1"], 7, "Six tokens of the prompt, and one output token of weight 2.")
    pair.pops("a2")


@check_fair_queue.part("edges")
def _fair_edges(case: Case) -> None:
    with case.hinting(
        "Lifted: to the smallest counter of the users who are present, never down, "
        "and only if none of the user's requests is present."
    ):
        pair = _fair(case, {})
        eve, ann, bob = (ask(f"{user[0]}1", 30, user=user) for user in ("eve", "ann", "bob"))
        pair.tell("add", eve), pair.abort(eve)
        pair.tell("add", ann), pair.tell("add", bob)
        pair.pops("a1"), _charged(case, pair, ann, 20, "Twenty tokens of a prompt.")
        pair.pops("b1"), _charged(case, pair, bob, 12, "Twelve tokens of a prompt.")
        pair.tell("add", ask("c1", 30, user="cem"))
        _counters(case, pair, "cem is new; ann is at 20 and bob at 12, and both are present. eve, at 0, is not.")
        pair.tell("add", ask("b2", 30, user="bob")), _counters(case, pair, "bob is present, so he is not lifted.")
        pair.abort(ann), pair.tell("add", ask("a2", 30, user="ann"))
        _counters(case, pair, "ann returns with 20, more than the smallest counter: a counter never falls.")
    with case.hinting("No request is present: the floor is the counter of the user of the request that left last."):
        pair = _fair(case, {})
        ann, bob = ask("a1", 50, user="ann"), ask("b1", 50, user="bob")
        pair.tell("add", bob), pair.pops("b1"), _charged(case, pair, bob, 40, "Forty tokens.")
        pair.tell("add", ann), _counters(case, pair, "Only bob is present, at 40.")
        pair.pops("a1"), _charged(case, pair, ann, 9, "Nine tokens: ann is at 49.")
        pair.abort(ann), pair.abort(bob)
        pair.tell("add", ask("c1", 5, user="cem")), _counters(case, pair, "bob left last, at 40; ann had left before.")
    with case.hinting(
        "Tokens below max_computed_tokens were charged before the preemption. The new tokens begin there."
    ):
        pair = _fair(case, {"ann": 4.0}, 3.0)
        ann = ask("a1", 8, 20, user="ann")
        pair.tell("add", ann), pair.pops("a1")
        ann.num_computed_tokens = ann.max_computed_tokens = 0
        _charged(case, pair, ann, 8, "The whole prompt of 8.")
        _charged(case, pair, ann, 1, "An output token of weight 3, over a share of 4.")
        ann.num_computed_tokens = 0
        (
            pair.tell("put_back", ann),
            pair.peek(),
            _counters(case, pair, "A preemption changes no counter."),
            pair.pops("a1"),
        )
        _charged(
            case,
            pair,
            ann,
            2,
            "Preempted after 9 tokens; the step computes 0 to 10, of which 9 and 10 are new, and both are output.",
        )
        hit = ask("a2", 20, user="ann")
        pair.tell("add", hit), pair.pops("a2")
        hit.num_computed_tokens = 16
        _charged(case, pair, hit, 4, "16 tokens came from the prefix cache; the other 4 of the prompt are new.")
        hit.num_computed_tokens, hit.max_computed_tokens = 22, 3
        _charged(case, pair, hit, 2, "The new tokens begin at 22, the larger of the two, so they are output tokens.")
    with case.hinting(
        "A user's own requests: the one that was put back last, then in the order of add. Ties between users: "
        "arrival_time of the next, then the name."
    ):
        pair = _fair(case, {})
        for name, user, at in (("z1", "zoe", 1.0), ("b1", "bob", 2.0), ("a1", "ann", 2.0), ("z2", "zoe", 5.0)):
            pair.tell("add", ask(name, user=user, at=at))
        pair.tell("join", ask("z0", user="zoe", at=0.5)), pair.tell("put_back", ask("z9", user="zoe", at=9.0))
        pair.tell("join", ask("b0", user="bob", at=0.5)), pair.tell("put_back", ask("b9", user="bob", at=0.1))
        pair.pops("b9 a1 b1 z9 z1 z2")
    _fair_absent(case)


def _fair_absent(case: Case) -> None:
    with case.hinting("An aborted request is never returned; it is present until leave."):
        pair = _fair(case, {})
        waiting = [ask(name, user=name[0], at=float(i)) for i, name in enumerate(("a1", "a2", "b1"))]
        for one in waiting:
            pair.tell("add", one)
        pair.abort(waiting[0])
        pair.all_there(), pair.pops("a2 b1"), pair.peek()
    with case.hinting("A request that joined is present until it leaves."):
        pair = _fair(case, {})
        ann, twin, bob = ask("a1", 30, user="ann"), ask("a1_1", 30, user="ann"), ask("b1", 30, user="bob")
        pair.tell("add", ann), pair.pops("a1"), pair.tell("join", twin), pair.abort(ann)
        pair.tell("add", bob), pair.pops("b1"), _charged(case, pair, bob, 10, "Ten tokens.")
        (
            pair.tell("add", ask("a2", user="ann")),
            _counters(case, pair, "ann has a request that joined, so she is not lifted."),
        )
    running = [
        ask(name, user=user, at=at) for name, user, at in (("b1", "bob", 0.0), ("a2", "ann", 2.0), ("a1", "ann", 1.0))
    ]
    pair.order(running, "By the user's counter, then by arrival_time.")


@check_fair_queue.part("random")
def _fair_random(case: Case) -> None:
    for _ in range(15):
        pair = _fair(case, {"a": 2.0, "b": 4.0}, case.randint(2, 10) / 2)
        drive(
            case,
            pair,
            [],
            60,
            "abcd",
            after=lambda request, pair=pair: _charged(case, pair, request, case.randint(1, 12), "A random charge."),
        )
        _counters(case, pair, "At the end of a random run.")
    for round_ in range(3):
        shares, seed = {"a": 1.0, "b": 2.0}, case.randint(0, 10**6)
        aborted = case.rng.sample(range(20), 4)
        serve(case, functools.partial(FairShares, shares, 2.5), (shares, 2.5), seed, ("a", "b", "c"), aborted, round_)


def _fair(case: Case, shares: dict[str, float], output_weight: float = 2.0) -> Pair:
    return Pair(case, FairShares(dict(shares), output_weight), dict(shares), output_weight)


def _counters(case: Case, pair: Pair, hint: str) -> None:
    case.close(dict(pair.mine.queue.counters), pair.reference.counters, "the counters", hint=hint)


def _charged(case: Case, pair: Pair, request: Request, tokens: int, hint: str) -> None:
    """A step of `tokens` new tokens, told as the scheduler tells it: before the request moves on."""
    pair.tell("charge", request, tokens)
    _counters(case, pair, hint)
    request.num_computed_tokens = max(request.num_computed_tokens, request.max_computed_tokens) + tokens
    request.max_computed_tokens = request.num_computed_tokens
