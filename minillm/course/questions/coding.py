"""Code questions: a reference with a drawn rule, and the checker that follows from it.

The source of the reference is the solution in the key, and what expected values are computed with. So one text decides
what is right, and a drawn parameter (another tie-break, another order, another layout) cannot be right in one of them
and wrong in the other.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minillm.book.checks import PARTS, Checker

TRIALS = 60  # random calls of the last part


@dataclass(frozen=True)
class CodeVariant:
    """One drawn code question.

    text:     what the function does, Markdown; the drawn rule stands in bold.
    solution: source of one function with a docstring; the stub is its head.
    examples, edges: arguments of calls. draw: arguments of a random call.
    mistakes: a plausible wrong body's source -> what is wrong with it; each fails the checker.
    rule:     the drawn parameter, in words.
    """

    text: str
    solution: str
    examples: tuple[tuple, ...]
    edges: tuple[tuple, ...]
    draw: Callable[[random.Random], tuple]
    rule: str
    mistakes: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self._head.name

    @property
    def stub(self) -> str:
        """The function as the student first sees it."""
        lines = self.solution.strip("\n").splitlines()
        return "\n".join([*lines[: self._head.body[0].end_lineno], "    raise NotImplementedError"])

    @property
    def marked_solution(self) -> str:
        """The solution with nbgrader's marks around the body."""
        lines, end = self.solution.strip("\n").splitlines(), self._head.body[0].end_lineno
        body = ["    ### BEGIN SOLUTION", *lines[end:], "    ### END SOLUTION"]
        return "\n".join([*lines[:end], *body])

    @property
    def function(self) -> Callable:
        return function_of(self.solution, __name__)

    def example_lines(self) -> list[str]:
        """The examples as assertions, which need nothing but the student's function."""
        return [f"assert {self._call(args)} == {self.function(*copy.deepcopy(args))!r}" for args in self.examples]

    def checker(self) -> Checker:
        """Judges a student's function by the reference, in the three parts of every exercise."""
        check = Checker(self.name, hint=f"The rule of this variant: {self.rule}.")
        reference = self.function
        cases = {"example": lambda case: self.examples, "edges": lambda case: self.edges}
        cases["random"] = lambda case: [self.draw(case.rng) for _ in range(TRIALS)]

        def judge(case, part: str) -> None:
            for args in cases[part](case):
                expected = reference(*copy.deepcopy(args))
                case.equal(case.call(*copy.deepcopy(args)), expected, self._call(args))

        for part in PARTS:
            check.part(part)(lambda case, part=part: judge(case, part))
        return check

    @property
    def _head(self) -> ast.FunctionDef:
        [function] = ast.parse(self.solution.strip("\n")).body
        return function

    def _call(self, args: tuple) -> str:
        return f"{self.name}({', '.join(map(repr, args))})"


def function_of(source: str, module: str) -> Callable:
    """The one function that a source defines, as if it stood in `module`."""
    namespace: dict[str, Any] = {"__name__": module}
    exec(source, namespace)
    [head] = ast.parse(source.strip("\n")).body
    return namespace[head.name]
