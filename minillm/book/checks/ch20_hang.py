"""The debugging exercise of chapter 20: workers that share an MLP, and must never wait for each other in vain.
Built in chapter 20."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from minillm.book.checks import Draw, FunctionChecker, Raised
from minillm.book.chips import Html, table
from minillm.parallel.links import Hang, ThreadLink, run_threads

VOCABULARY = 100
Request = tuple[str, int, int]  # name, first token, how many tokens to generate


class Comm:
    """What a worker shares with the others. Each of its methods is a collective: every rank has to call it.

    mlp(rows):  the next token of each row; the ranks share the weights, so that a rank needs the others for it.
    any(flag):  whether some rank handed in True.
    """

    def __init__(self, link: ThreadLink):
        self.rank, self.world_size, self.calls = link.rank, link.world_size, []
        self._link = link

    def mlp(self, rows: list[int]) -> list[int]:
        """Raises ValueError, before the other ranks hear of it, for a token that is not in the vocabulary."""
        for row in rows:
            if not 0 <= row < VOCABULARY:
                raise ValueError(f"token {row} is not in the vocabulary of {VOCABULARY}")
        self._meet("mlp", len(rows))
        return [next_token(row) for row in rows]

    def any(self, flag: bool) -> bool:
        return self._meet("any", bool(flag))

    def _meet(self, name: str, value: int) -> bool:
        """Exchange the call with all ranks; two different ones hang, as they would on a GPU."""
        self.calls.append(f"{name}({value})" if name == "mlp" else f"any({bool(value)})")
        code = torch.tensor([("mlp", "any").index(name), value])
        others = [other for other in range(self.world_size) if other != self.rank]
        waits = [self._link.start_exchange(code, other, code, other) for other in others]
        met = [wait() for wait in waits]
        if any(int(other[0]) != int(code[0]) for other in met):
            raise Hang(f"the ranks are in different calls, rank {self.rank} in {self.calls[-1]}")
        return bool(value) or any(bool(other[1]) for other in met)


def next_token(token: int) -> int:
    return (7 * token + 3) % VOCABULARY


def cluster(worker: Callable[[Comm, list[Request], int], Any], work: Sequence[list[Request]], most: int):
    """(what each rank returned, or the error), the calls that each rank made."""
    comms: dict[int, Comm] = {}

    def run(link: ThreadLink) -> Any:
        comms[link.rank] = Comm(link)
        return worker(comms[link.rank], work[link.rank], most)

    try:
        results = run_threads(run, [()] * len(work))
    except Exception as error:
        results = error
    return results, [comms[rank].calls if rank in comms else [] for rank in range(len(work))]


SCENE = ([("A", 5, 3), ("B", 8, 1)], [("C", 2, 2)], [("D", 9, 1), ("E", 120, 2)])


def trace_of(worker: Callable[[Comm, list[Request], int], Any]) -> Html:
    """Three ranks and five requests: the calls of each rank, one column for each, down to where they stop."""
    results, calls = cluster(worker, [list(requests) for requests in SCENE], 2)
    longest = max(map(len, calls))
    rows = [[str(place), *(own[place] if place < len(own) else "-" for own in calls)] for place in range(longest)]
    last = type(results).__name__ if isinstance(results, Exception) else "all have returned"
    rows.append(["end", *([last] + [""] * (len(calls) - 1))])
    return table(rows, ["call", *(f"rank {rank}" for rank in range(len(calls)))])


def served(
    comm: Comm, requests: list[Request], most: int, *, bad: str = "left out",
    refills: bool = True, extra: int = 0, limit: bool = True, joins: int = 10**9, nothing: list | None = None,
    low: int = 0, high: int = VOCABULARY,
) -> dict[str, list[int] | None]:  # fmt: skip
    """name -> tokens, None for a bad request; first come, first served. The keywords are mistakes."""
    good = {name for name, token, _ in requests if low <= token < high}
    answers = {name: [] if name in good or bad == "runs" else nothing for name, _, _ in requests}
    waiting, running = [one for one in requests if one[0] in good or bad != "left out"], {}
    while comm.any(bool(waiting or running)):
        room = most - len(running) if limit else len(waiting)
        for name, token, count in waiting[: min(room, joins) if refills or not running else 0]:
            running[name] = token, count
        waiting = [one for one in waiting if one[0] not in running]
        if bad == "takes a step":
            running = {name: one for name, one in running.items() if name in good}
        tokens = comm.mlp([token for token, _ in running.values()])
        for (name, (_, left)), token in zip(list(running.items()), tokens):
            answers[name].append(token)
            running[name] = token, left - 1
            if left == 1:
                del running[name]
    for _ in range(extra):
        comm.mlp([])
    return answers


def _on_ranks(worker: Callable[[Comm, list[Request], int], Any]) -> Callable:
    def of_all_ranks(work: list[list[Request]], most: int) -> tuple:
        results, calls = cluster(worker, work, most)
        if isinstance(results, Hang):
            ends = "; ".join(f"rank {rank}: {', '.join(own[-3:]) or 'no call'}" for rank, own in enumerate(calls))
            counts = ", ".join(str(len(own)) for own in calls)
            raise Hang(f"the ranks hang after {counts} calls. Their last calls: {ends}") from results
        if isinstance(results, Exception):
            raise results
        return results, [sum(call.startswith("mlp") for call in own) for own in calls]

    return of_all_ranks


def _why(got: Any, expected: Any, work: list[list[Request]], most: int) -> str | None:
    if isinstance(got, Raised):
        hang = "A rank without rows calls mlp([]), and all ranks must agree when to stop: that is what any is for."
        return hang if got.kind is Hang else None
    if got[0] != expected[0]:
        return "A list of tokens for each request, None if its first token is outside the vocabulary."
    return (
        f"At most {most} requests run at a time on each rank. All ranks make as many calls of mlp as the rank with the "
        "most steps needs. A request that cannot run costs no step."
    )


def _random(draw: Draw) -> tuple:
    work, number = [], 0
    for _ in range(draw.randint(1, 5)):
        requests = []
        for _ in range(draw.randint(0, 5)):
            token = draw.rng.choice((-1, 100, 105)) if draw.rng.random() < 0.2 else draw.randint(0, 100)
            requests.append((f"r{number}", token, draw.randint(1, 6)))
            number += 1
        work.append(requests)
    return work, draw.randint(1, 4)


check_repair_worker = FunctionChecker(
    "repair_worker",
    served,
    adapt=_on_ranks,
    returns=("the list of the ranks' answers", "the list of the ranks' numbers of calls of mlp"),
    examples=[([[("A", 5, 3)], [("B", 8, 1)]], 2), (list(SCENE), 2)],
    edges={
        "there is one rank": ([[("A", 5, 3)]], 1),
        "a rank has no requests, and takes part all the same": ([[], [("A", 5, 3)]], 4),
        "no rank has requests": ([[], [], []], 4),
        "one request runs at a time": ([[("A", 5, 2), ("B", 6, 2), ("C", 7, 2)], [("D", 1, 1)]], 1),
        "three requests fit at once": ([[("A", 1, 1), ("B", 2, 1), ("C", 3, 1)], []], 3),
        "a request ends while another goes on, and the next one joins": ([[("A", 1, 1), ("B", 2, 3), ("C", 3, 2)]], 2),
        "token 250 is not in the vocabulary": ([[("A", 250, 2)], [("B", 3, 2)]], 2),
        "no request can be served": ([[("A", -1, 2)], [("B", 100, 1)]], 2),
        "0 is the first token of the vocabulary, and 99 the last one": ([[("A", 0, 2)], [("B", 99, 1)]], 2),
        "a bad request comes first": ([[("A", 120, 1), ("B", 3, 2)], [("C", 4, 5)]], 1),
        "a bad request costs no step": ([[("A", 120, 1), ("B", 3, 2)], [("C", 4, 1)]], 1),
        "a bad request is among good ones": ([[("A", 3, 1), ("B", -5, 4), ("C", 4, 2), ("D", 5, 3)], []], 2),
        "requests are of different lengths": ([[("A", 1, 9)], [("B", 2, 1)], [("C", 3, 5)], []], 3),
    },
    random=_random,
    trials=25,
    explain=_why,
    hint="All ranks make the same calls in the same order, however many requests each of them has.",
    misconceptions={
        "A bad request never reaches mlp, which would raise ValueError: its answer is None.": dict(bad="runs"),
        "A request that cannot run takes no place and costs no step: leave it out before the first one.": dict(
            bad="takes a step"
        ),
        "A request joins as soon as there is room, not when all others have ended.": dict(refills=False),
        "After the last token no rank calls mlp again.": dict(extra=1),
        "At most `most` requests of a rank run at a time.": dict(limit=False),
        "All requests for which there is room join in the same step.": dict(joins=1),
        "The answer of a bad request is None, and not an empty list.": dict(nothing=[]),
        "Token 0 is in the vocabulary.": dict(low=1),
        "Token 99 is in the vocabulary of 100.": dict(high=VOCABULARY - 1),
    },
)
