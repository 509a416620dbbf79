"""Checks of chapter 14: buckets, static buffers, a trace explained, serving ahead, graphs cut.
Built in chapter 14.

The references are in `ch14_oracle`; `ch14_buffers` fills a student's buffers, with copies that land late.
`ch14_trace` has the trace, `ch14_pieces` the cut into graphs.
"""

from __future__ import annotations

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch14_buffers import Trial
from minillm.book.checks.ch14_oracle import (
    Ask,
    Bar,
    FakeRunner,
    Row,
    bill,
    bucket_cost,
    buckets_forwards,
    buckets_of_all,
    made_up_trace,
    serve_by_the_rules,
)
from minillm.book.checks.ch14_pieces import check_cut_pieces
from minillm.book.checks.ch14_trace import check_explain_trace
from minillm.book.checks.patience import bounded

__all__ = [
    "Ask",
    "Bar",
    "FakeRunner",
    "Row",
    "bill",
    "check_choose_buckets",
    "check_cut_pieces",
    "check_explain_trace",
    "check_serve_ahead",
    "check_static_input",
    "made_up_trace",
]

check_choose_buckets = Checker(
    "choose_buckets",
    hint="The best sizes up to each size, from the smallest up; each builds on a smaller one.",
    forbid=("minillm.engine.graphs.bucket_sizes",),
)
check_static_input = Checker(
    "static_input",
    hint="Two host buffers in turns; every number of the one that is next is right before the one copy.",
    forbid=("minillm.engine.graphs.Inputs", "minillm.engine.graphs.HostInputs"),
)
check_serve_ahead = Checker(
    "serve_ahead",
    hint="Each turn: admit, launch, wait for the step before, free.",
    forbid=("minillm.engine.engine.Engine",),
)


@check_choose_buckets.part("example")
def _buckets_example(case: Case) -> None:
    _buckets(case, {1: 40, 3: 10, 4: 30, 7: 5, 8: 20}, 12, 50)
    _buckets(case, {2: 100, 9: 1}, 10, 4)


@check_choose_buckets.part("edges")
def _buckets_edges(case: Case) -> None:
    for counts, graph, eager in (({}, 3, 5), ({5: 1}, 3, 5), ({5: 1}, 5, 3), ({5: 1}, 4, 4), ({1: 2, 2: 2, 3: 2}, 0, 9),
                                 ({1: 1, 2: 1, 3: 1, 4: 1}, 10**6, 10**6), ({1: 4, 2: 4, 3: 4}, 4, 100),
                                 ({2: 3, 5: 1, 8: 1}, 3, 7), ({8: 2, 3: 5, 6: 2}, 6, 30), ({1: 1, 3: 2, 5: 1}, 4, 9),
                                 ({4: 5, 9: 1}, 2, 1), ({4: 5, 9: 1}, 2, 3), ({7: 10}, 0, 0), ({1: 1, 8: 1}, 7, 100),
                                 ({5: 1, 2: 1, 1: 3}, 4, 4), ({5: 4, 4: 3, 6: 1, 3: 2}, 6, 5),
                                 ({1: 6, 2: 3, 4: 3, 8: 1}, 6, 6)):  # fmt: skip
        _buckets(case, counts, graph, eager)
    counts = {size: case.randint(1, 60) for size in range(1, 400, 3)}
    _buckets(case, counts, 500, 800, large=True)


@check_choose_buckets.part("random")
def _buckets_random(case: Case) -> None:
    for _ in range(60):
        counts = {case.randint(1, 11): case.randint(1, case.rng.choice((3, 30))) for _ in range(case.randint(1, 8))}
        _buckets(case, counts, case.randint(0, case.rng.choice((4, 40))), case.randint(0, case.rng.choice((6, 60))))


def _buckets(case: Case, counts: dict[int, int], graph: int, eager: int, large: bool = False) -> None:
    if large:
        got = bounded(
            case,
            4_000_000,
            (
                f"There are {len(counts)} sizes here, so it cannot be every set of them. "
                "What is best up to a size does not depend on what follows."
            ),
            case.student,
            counts,
            graph,
            eager,
        )
    else:
        got = case.call(counts, graph, eager)
    told = f"for counts={counts if len(counts) < 12 else f'{len(counts)} sizes'}, graph={graph}, eager={eager}"
    case.true(
        isinstance(got, tuple) and len(got) == 2 and isinstance(got[0], list),
        f"the result is {got!r}, not (sizes, cost) with a list of sizes",
    )
    sizes, cost = got
    case.is_a(sizes, list, "sizes", of=int)
    case.true(
        sizes == sorted(set(sizes)) and all(size > 0 for size in sizes),
        f"sizes are {sizes}; expected rising numbers from 1 on, none twice",
    )
    right = (buckets_forwards if large else buckets_of_all)(counts, graph, eager)
    mine, best = bucket_cost(counts, sizes, graph, eager), bucket_cost(counts, right, graph, eager)
    facts = lambda sizes: "{}: {} padded rows, {} graphs, {} steps without one".format(
        sizes if len(sizes) < 20 else f"{len(sizes)} sizes", *bill(counts, sizes)
    )
    case.equal(
        cost,
        mine,
        f"cost {told}, of the sizes {sizes}\n  cost",
        hint=f"{facts(sizes)}. A step takes the smallest graph that holds it; only those larger than all have none.",
    )
    case.true(
        mine == best,
        f"sizes are {sizes} {told}, which cost {mine}; expected {right}, which cost {best}",
        hint=f"{facts(sizes)}. {facts(right)}.",
    )
    case.equal(
        sizes,
        right,
        f"sizes {told}\n  sizes",
        hint=f"Both cost {best}. Fewer graphs first, then the smaller list as Python compares lists.",
    )


@check_static_input.part("example")
def _static_example(case: Case) -> None:
    trial = Trial(case, 4, 3, 4)
    for step in range(3):
        trial.fill([Row(10 + step, 5 + step, [3, 7]), Row(20 + step, step, [9])])
    trial.finish()


@check_static_input.part("edges")
def _static_edges(case: Case) -> None:
    trial = Trial(case, 4, 3, 4)
    # Full, full tables.
    trial.fill([Row(1, 11, [2, 5, 6]), Row(2, 9, [8, 3, 4]), Row(3, 8, [7, 9, 10]), Row(4, 0, [11])])
    trial.fill([Row(5, 3, [2])])
    trial.fill([Row(6, 4, [12, 13])])  # the same host buffer as the first: three rows and a block fewer
    trial.fill([])
    trial.fill([Row(7, 0, [14]), Row(8, 1, [15]), Row(9, 2, [16])])
    trial.fill([Row(7, 1, [14]), Row(8, 2, [15]), Row(9, 3, [16])])
    trial.fill([Row(8, 3, [15]), Row(9, 4, [16, 2])])  # the first has ended, the others move up
    trial.refuses([Row(5, 0, [1 + i]) for i in range(5)])
    trial.fill([Row(9, 5, [16, 2])])  # whose copy is on its way is not what was refused
    trial.finish()
    one = Trial(case, 1, 1, 16)
    for step in range(4):
        one.fill([Row(step, 15 - step, [1 + step])])
    one.finish()
    two = Trial(case, 2, 2, 4)
    # A block comes, a request leaves, a block is copied.
    for tables in (([5], [6]), ([5], [6]), ([5, 7], [6]), ([5, 7], [8]), ([5, 9], [8]), ([5, 9], [8])):
        two.fill([Row(3, len(table) * 4 - 1, list(table)) for table in tables])
    two.finish()
    same, table = Trial(case, 1, 3, 4), []
    for position in range(12):  # one list, as a sequence keeps it: it grows, and in the end a block is copied
        if position % 4 == 0:
            table.append(5 + position)
        if position == 10:
            table[0] = 2
        same.fill([Row(position, position, table)])
    same.finish()


@check_static_input.part("random")
def _static_random(case: Case) -> None:
    for _ in range(4):
        size, columns, block_size = case.randint(1, 9), case.randint(1, 6), case.rng.choice((1, 4, 5, 16))
        trial = Trial(case, size, columns, block_size)
        for _ in range(12):
            rows = []
            for _ in range(case.randint(0, size + 1)):
                blocks = case.rng.sample(range(1, 100), case.randint(1, columns + 1))
                rows.append(
                    Row(
                        case.randint(0, 1000),
                        case.rng.choice((len(blocks) * block_size - 1, case.randint(0, len(blocks) * block_size))),
                        blocks,
                    )
                )
            trial.fill(rows)
        trial.finish()


@check_serve_ahead.part("example")
def _ahead_example(case: Case) -> None:
    _serves(case, [Ask("A", 5, 0), Ask("B", 3, 0), Ask("C", 2, 0)], 2, {"A": [4, 7, 0], "B": [5, 6, 8], "C": [3, 9]})


@check_serve_ahead.part("edges")
def _ahead_edges(case: Case) -> None:
    _serves(case, [], 2, {})
    _serves(case, [Ask("A", 1, 0)], 3, {"A": [5]})
    _serves(case, [Ask("A", 4, 0)], 1, {"A": [0]})  # stops at once: a step too many
    _serves(case, [Ask("A", 4, 9)], 1, {"A": [1, 2, 3, 4]})
    _serves(case, [Ask("A", 3, 7)], 1, {"A": [1, 2, 7]})  # both reasons at once: nothing is launched too many
    _serves(case, [Ask(name, 1, 0) for name in "ABCDE"], 2, {name: [1] for name in "ABCDE"})
    _serves(case, [Ask("A", 9, 0), Ask("B", 9, 0)], 1, {"A": [1, 0], "B": [2, 0]})  # B must wait for A's blocks
    _serves(
        case,
        [Ask("A", 3, 0), Ask("B", 3, 5), Ask("C", 3, 0), Ask("D", 2, 0)],
        3,
        {"A": [0], "B": [5], "C": [1, 0], "D": [1, 5]},
    )
    # Every request has a stop token of its own.
    _serves(case, [Ask("A", 6, 1), Ask("B", 6, 2)], 2, {"A": [2, 2, 1], "B": [1, 1, 1, 2]})
    # In no order of names.
    _serves(case, [Ask("Zoe", 2, 0), Ask("Ann", 3, 0), Ask("Max", 2, 0)], 2, {"Zoe": [1, 1], "Ann": [2, 0], "Max": [0]})


@check_serve_ahead.part("random")
def _ahead_random(case: Case) -> None:
    for _ in range(40):
        asks = [
            Ask(f"r{number}", case.randint(1, 8), case.randint(0, 3)) for number in "461038257"[: case.randint(1, 9)]
        ]  # in no order of names
        _serves(case, asks, case.randint(1, 5), {ask.name: [case.randint(0, 6) for _ in range(9)] for ask in asks})


def _serves(case: Case, asks: list[Ask], places: int, tokens: dict[str, list[int]]) -> None:
    tokens = {name: [*said, *[6] * 12] for name, said in tokens.items()}
    mine, other = FakeRunner(tokens), FakeRunner(tokens)
    expected = serve_by_the_rules(asks, other, places)
    with case.hinting(f"{case.hint} The first calls are {_told(other.log[:8])}"):
        got = case.run(case.student, asks, mine, places)
    told = f"for {asks} in {places} places"
    for index, (call, right) in enumerate(zip(mine.log, other.log)):
        if call != right:
            before = f" after {_told(mine.log[max(0, index - 3) : index])}" if index else ""
            case.fail(
                f"call {index} of the runner is {_told([call])}, expected {_told([right])},{before} {told}",
                hint=_why_call(call, right, mine, index),
            )
    case.equal(
        len(mine.log),
        len(other.log),
        f"the number of calls of the runner {told}\n  the number of calls",
        hint=(
            f"The last ones are {_told(other.log[-3:])}. Serve until no request is left, nothing is in flight, "
            "and all blocks are free."
        ),
    )
    case.equal(
        got,
        expected,
        f"the result {told}\n  the result",
        hint=(
            "A token of a step that was launched before the end was known is dropped. "
            "The stop token itself belongs to the output."
        ),
    )


def _why_call(call: tuple, right: tuple, runner: FakeRunner, index: int) -> str:
    if (call[0], right[0]) == ("wait", "launch"):
        return (
            "The next step is launched first, then the host waits for the one before: "
            "so the device always has something to do."
        )
    if (call[0], right[0]) == ("launch", "wait"):
        return (
            f"There is no request to launch in this turn: {', '.join(call[1])} has ended, or has no place. "
            "A place is only free when `free` was called."
        )
    if call[0] == right[0] == "launch":
        more, fewer = (
            [name for name in call[1] if name not in right[1]],
            [name for name in right[1] if name not in call[1]],
        )
        if more:
            return (
                f"{more[0]} needs no more tokens, or there is no place for it yet. "
                "Of max_tokens, count what is in flight too."
            )
        return (
            f"{fewer[0]} is not known to have ended, and there is a place."
            if fewer
            else "In the order in which they entered."
        )
    if right[0] == "free":
        return (
            f"{right[1]} has ended and is in no step in flight: its blocks are free now, "
            "and another request may be waiting for them."
        )
    if call[0] == "free":
        return (
            f"{call[1]} is freed in the wrong place: at the end of the turn in which no step in flight has it any "
            "more, in the order of entering."
        )
    return "Each turn: admit, launch, wait for the step that the turn before launched, free."


def _told(log: list[tuple]) -> str:
    return ", ".join(f"{name}({', '.join(what) if isinstance(what, list) else what})" for name, what in log)
