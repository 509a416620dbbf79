"""Checks of chapter 14: buckets, static buffers, a trace explained, serving ahead, graphs cut.
Built in chapter 14.

`ch14_buffers` fills a student's buffers, with copies that land late; the other four have a module each.
"""

from __future__ import annotations

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch14_ahead import Ask, FakeRunner, check_serve_ahead
from minillm.book.checks.ch14_buckets import bill, check_choose_buckets
from minillm.book.checks.ch14_buffers import Row, Trial
from minillm.book.checks.ch14_pieces import check_cut_pieces
from minillm.book.checks.ch14_trace import Bar, check_explain_trace, made_up_trace

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

check_static_input = Checker(
    "static_input",
    hint="Two host buffers in turns; every number of the one that is next is right before the one copy.",
    forbid=("minillm.engine.graphs.Inputs", "minillm.engine.graphs.HostInputs"),
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
