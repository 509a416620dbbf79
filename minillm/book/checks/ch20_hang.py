"""The debugging exercise of chapter 20: workers that share an MLP, and must never wait for each other in vain.
Built in chapter 20."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from minillm.book.checks import Case, Checker, CheckFailed
from minillm.book.chips import Html, table
from minillm.parallel.links import Hang, ThreadLink, run_threads

VOCABULARY = 100
Request = tuple[str, int, int]  # name, first token, how many tokens to generate

check_repair_worker = Checker(
    "repair_worker",
    hint="All ranks make the same calls in the same order, however many requests each of them has.",
)


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
        return worker(comms[link.rank], list(work[link.rank]), most)

    try:
        results = run_threads(run, [()] * len(work))
    except Exception as error:
        results = error
    return results, [comms[rank].calls if rank in comms else [] for rank in range(len(work))]


SCENE = ([("A", 5, 3), ("B", 8, 1)], [("C", 2, 2)], [("D", 9, 1), ("E", 120, 2)])


def trace_of(worker: Callable[[Comm, list[Request], int], Any]) -> Html:
    """Three ranks and five requests: the calls of each rank, one column for each, down to where they stop."""
    results, calls = cluster(worker, SCENE, 2)
    longest = max(map(len, calls))
    rows = [[str(place), *(own[place] if place < len(own) else "-" for own in calls)] for place in range(longest)]
    last = type(results).__name__ if isinstance(results, Exception) else "all have returned"
    rows.append(["end", *([last] + [""] * (len(calls) - 1))])
    return table(rows, ["call", *(f"rank {rank}" for rank in range(len(calls)))])


@check_repair_worker.part("example")
def _example(case: Case) -> None:
    _serve(case, [[("A", 5, 3)], [("B", 8, 1)]], 2)
    _serve(case, list(SCENE), 2)


@check_repair_worker.part("edges")
def _edges(case: Case) -> None:
    _serve(case, [[("A", 5, 3)]], 1)
    _serve(case, [[], [("A", 5, 3)]], 4)  # a rank without requests takes part all the same
    _serve(case, [[], [], []], 4)
    _serve(case, [[("A", 5, 2), ("B", 6, 2), ("C", 7, 2)], [("D", 1, 1)]], 1)  # one at a time
    _serve(case, [[("A", 250, 2)], [("B", 3, 2)]], 2)  # not in the vocabulary
    _serve(case, [[("A", -1, 2)], [("B", 100, 1)]], 2)  # nothing that can be served
    _serve(case, [[("A", 0, 2)], [("B", 99, 1)]], 2)  # the first and the last token of the vocabulary
    _serve(case, [[("A", 120, 1), ("B", 3, 2)], [("C", 4, 5)]], 1)
    _serve(case, [[("A", 120, 1), ("B", 3, 2)], [("C", 4, 1)]], 1)  # a bad request costs no step
    _serve(case, [[("A", 3, 1), ("B", -5, 4), ("C", 4, 2), ("D", 5, 3)], []], 2)
    _serve(case, [[("A", 1, 9)], [("B", 2, 1)], [("C", 3, 5)], []], 3)


@check_repair_worker.part("random")
def _random(case: Case) -> None:
    for _ in range(25):
        work, names = [], iter(range(10**6))
        for _ in range(case.randint(1, 5)):
            requests = []
            for _ in range(case.randint(0, 5)):
                token = case.rng.choice((-1, 100, 105)) if case.rng.random() < 0.2 else case.randint(0, 100)
                requests.append((f"r{next(names)}", token, case.randint(1, 6)))
            work.append(requests)
        _serve(case, work, case.randint(1, 4))


def _serve(case: Case, work: list[list[Request]], most: int) -> None:
    told = f"{len(work)} rank{'s' * (len(work) > 1)} with {work}, at most {most} at a time"

    def worker(comm: Comm, requests: list[Request], limit: int) -> Any:
        name, given = getattr(case.student, "__name__", "the worker"), list(requests)
        try:
            answers = case.student(comm, given, limit)
            case.equal(
                given,
                requests,
                f"the list of requests after the call ({told})",
                hint="Copy the list before you take requests out of it.",
            )
            return answers
        except (Hang, CheckFailed):
            raise
        except NotImplementedError as error:
            case.fail(f"{name} is not written yet: it raises NotImplementedError", cause=error, hint="")
        except Exception as error:
            case.fail(f"{name} raised {type(error).__name__}: {error} ({told})", cause=error)

    results, calls = cluster(worker, work, most)
    if isinstance(results, Hang):
        ends = "; ".join(f"rank {rank}: {', '.join(own[-3:]) or 'no call'}" for rank, own in enumerate(calls))
        counts = ", ".join(str(len(own)) for own in calls)
        case.fail(f"{told}: the ranks hang after {counts} calls. Their last calls: {ends}",
                  hint="A rank without rows calls mlp([]), and all ranks must agree when to stop.")  # fmt: skip
    if isinstance(results, Exception):
        raise results
    steps = 0
    for rank, (requests, got) in enumerate(zip(work, results)):
        expected, own = _expected(requests, most)
        steps = max(steps, own)
        case.equal(
            got,
            expected,
            f"the answers of rank {rank} ({told})",
            hint="A list of tokens for each request, None if its first token is outside the vocabulary.",
        )
    counts = [sum(call.startswith("mlp") for call in own) for own in calls]
    case.equal(
        counts,
        [steps] * len(work),
        f"the number of calls of mlp on each rank ({told})",
        hint="As many as the rank with the most steps needs. A request that cannot run costs no step.",
    )


def _expected(requests: list[Request], most: int) -> tuple[dict[str, list[int] | None], int]:
    """The answers of one rank, and the steps that it needs: first come, first served."""
    answers: dict[str, list[int] | None] = {}
    free = [0] * most
    for name, token, count in requests:
        if not 0 <= token < VOCABULARY:
            answers[name] = None
            continue
        place = free.index(min(free))
        free[place] += count
        tokens = [token]
        for _ in range(count):
            tokens.append(next_token(tokens[-1]))
        answers[name] = tokens[1:]
    return answers, max(free)
