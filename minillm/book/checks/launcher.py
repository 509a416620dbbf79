"""The checker of an exercise that is a launcher with its kernel: what it gives, and what its programs touch.
Built in chapter 10."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minillm.book.checks.case import Case
from minillm.book.checks.function import Arguments, FunctionChecker
from minillm.book.checks.kernels import ONCE, count_launches, no_torch, record, refuse_borrowed
from minillm.book.checks.snapshot import detached
from minillm.book.checks.touched import Plan, Seen, Touch, judge_programs
from minillm.book.traffic import Traffic

Near = Mapping[torch.dtype, tuple[float, float]]  # dtype -> (rtol, atol)
_HALF = 2e-2  # a float16 within this of the right number was rounded more than once


@dataclass
class Launch:
    """One call of a launcher: its arguments, and what its programs have to do.

    args: what the launcher is called with, and the reference.
    told: behind the names in messages, where the arguments need it: "for 3 queries, 8 keys".
    plan: what each program of the first kernel touches, judged where there is one; touches: what all programs touch
    together. launches: how many there are; once: the hint where there are more or fewer.
    again: the same call has to give the same bits.
    hint: what came out -> a hint where no misconception fits, or None. near: tolerances of this call alone.
    before, after: what is to be judged of the traffic before the values, and of the arguments after them.
    wanted: what has to come out, where the reference is not asked.
    """

    args: Arguments
    told: str = ""
    plan: Plan | None = None
    touches: tuple[Touch, ...] = ()
    launches: int = 1
    once: str = ONCE
    again: bool = False
    hint: Callable[[Tensor, Tensor], str | None] = lambda got, expected: None
    near: tuple[float, float] | None = None
    before: Callable[[Case, Traffic, Seen | None], None] = lambda case, traffic, seen: None
    after: Callable[[Case], None] = lambda case: None
    wanted: Tensor | None = None


class KernelChecker(FunctionChecker):
    """Compares what a student's launcher gives with the book's, and its traffic with what the work needs.

    As a FunctionChecker, except:

    reference:   from the launcher's arguments to what it has to give, in float64; with switches that are mistakes. A
                 misconception is such a function too: it has no kernel, so the proofs judge its values alone.
    launch:      from a `Case` and a row of the table of cases to a `Launch`; it draws the tensors.
    near:        dtype -> (rtol, atol).
    names:       the launcher's parameters, by which messages call them, where it writes into one of them.
    fills:       the parameter that it writes into; it is NaN before, or, where `changes`, holds numbers that are read.
    nearly:      the hint for a float16 that was rounded more than once.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., Tensor],
        launch: Callable[..., Launch],
        *,
        near: Near,
        names: tuple[str, ...] = (),
        fills: str = "",
        changes: bool = False,
        nearly: str = "",
        trials: int | tuple = 12,
        **how: Any,
    ) -> None:
        super().__init__(name, reference, trials=trials, **how)
        self.launch, self.near, self.names, self.nearly = launch, near, names, nearly
        self.fills, self.changes = fills, changes
        self._seal()

    def _judge_case(self, case: Case, given: Arguments, note: str = "") -> None:
        launch = given[0] if isinstance(given[0], Launch) else self.launch(case, *given)
        if launch.wanted is None:
            launch.wanted = self.reference(*detached(launch.args))
        if any(case.student is wrong for wrong in self.misconceptions.values()):
            self._judge_values(case, case.student(*launch.args).to(self._dtype(launch)), launch)
            return
        refuse_borrowed(case)
        if self.fills:
            self._judge_filled(case, launch)
        else:
            self._judge_returned(case, launch)

    def _judge_returned(self, case: Case, launch: Launch) -> None:
        got, traffic, ops = record(case, launch.args)
        no_torch(case, ops)
        if launch.plan is not None:
            count_launches(case, traffic, launch.launches, f" {launch.told}", launch.once)
            judge_programs(case, traffic, launch.plan)
        launch.before(case, traffic, None)
        case.is_a(got, self._dtype(launch), f"the output {launch.told}")
        self._judge_values(case, got, launch)
        if launch.again:
            second, _, _ = record(case, launch.args)
            told = "the output of a second run"
            case.equal(second, got, told, hint="The same sums in the same order give the same bits.")

    def _judge_filled(self, case: Case, launch: Launch) -> None:
        tensors = {name: one for name, one in zip(self.names, launch.args) if isinstance(one, Tensor)}
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        _, traffic, ops = record(case, launch.args, in_place=True)
        count_launches(case, traffic)
        seen = Seen(case, traffic, tensors)
        if not self.changes:  # before the count of torch operations: numpy leaves no trace but this one
            seen.unread(self.fills)
        no_torch(case, ops)
        for name in tensors.keys() - {self.fills}:
            case.equal(tensors[name], before[name], name, hint=f"{name} is read only.")
        launch.before(case, traffic, seen)
        if not self.changes:
            seen.written(self.fills)
        launch.args = tuple(before.get(name, one) for name, one in zip(self.names, launch.args))
        self._judge_values(case, tensors[self.fills], launch)
        launch.after(case)
        for touch in launch.touches:
            seen.judge(touch)

    def _judge_values(self, case: Case, got: Tensor, launch: Launch) -> None:
        rtol, atol = self._near(launch)
        what = self.fills or f"the output {launch.told}\n  the output"
        case.diagnose = functools.partial(self._why, launch)
        try:
            case.close(got, launch.wanted, what, rtol=rtol, atol=atol)
        finally:
            case.diagnose = lambda outcome: None

    def _why(self, launch: Launch, got: Tensor) -> str | None:
        if not isinstance(got, Tensor) or got.shape != launch.wanted.shape:
            return None
        if (
            self.nearly
            and got.dtype is torch.float16
            and torch.allclose(got.double(), launch.wanted.double(), _HALF, _HALF)
        ):
            return self.nearly
        return next(self._fitting(launch, got), None) or launch.hint(got, launch.wanted)

    def _fitting(self, launch: Launch, got: Tensor) -> Iterator[str]:
        """The hints of the misconceptions that give what was got."""
        near = self._near(launch)
        for hint, wrong in self.misconceptions.items():
            mistaken = wrong(*detached(launch.args))
            if torch.allclose(got.double(), mistaken.double(), *near, equal_nan=True):
                yield hint

    def _near(self, launch: Launch) -> tuple[float, float]:
        return launch.near or self.near[self._dtype(launch)]

    def _dtype(self, launch: Launch) -> torch.dtype:
        return next(one.dtype for one in launch.args if isinstance(one, Tensor) and one.dtype.is_floating_point)

    def _check_other_cases(self, case: Case) -> None:
        """A kernel that has learnt the fixed cases by heart fails the random ones."""
