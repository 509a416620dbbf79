"""Checkers: the same judge in the notebook, in pytest, in nbgrader and on Colab. Built in chapter 00.

A chapter's checkers are in `minillm.book.checks.chNN`. An answer that is a function is judged by a `FunctionChecker`,
which is given a right answer, cases and known mistakes (its docstring is the guide):

    check_top_p = FunctionChecker("top_p", kept, examples=[(torch.tensor([0.5, 0.3, 0.2]), 0.7)], random=_random)

A class is driven beside the book's by a `beside.ClassChecker`, a launcher with its kernel by a
`launcher.KernelChecker`; where there is no single right outcome, a `trial.TrialChecker` plays trials. What fits none of
them is judged by a `Checker`, part by part:

    check_pool = Checker("pool", hint="The lowest ids go first.", misconceptions={"Block 0 is ...": HandsOutZero})

    @check_pool.part("example")
    def _example(case):
        pool = case.run(case.student, 4)
        case.equal(case.run(pool.allocate, 2), [1, 2])

In each way a graded cell says `check_top_p(top_p_filter, "example")`, and after a failure `last_call()`
has the arguments.
"""

from minillm.book.checks.case import Case, Raised
from minillm.book.checks.checker import PARTS, Checker, last_call
from minillm.book.checks.draw import Draw
from minillm.book.checks.failure import CheckFailed, LastCall
from minillm.book.checks.function import FunctionChecker, Timed

__all__ = [
    "PARTS",
    "Case",
    "CheckFailed",
    "Checker",
    "Draw",
    "FunctionChecker",
    "LastCall",
    "Raised",
    "Timed",
    "last_call",
]
