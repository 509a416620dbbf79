"""The checkers of questions, by name: `check_06_pool_2` judges rule 2 of the code question "06.pool", and
`check_03_cache_bytes` the answer to the computed question "03.cache_bytes".

An exam imports them like the checkers of a chapter. They are made when they are asked for, from the question's own
reference.
"""

from __future__ import annotations

import re
from functools import cache

from minillm.book.checks import Case, Checker
from minillm.course.questions import Question, answered, bank, question, right
from minillm.course.questions.coding import CodeVariant
from minillm.course.questions.question import Variant

DRAWS = 64  # seeds that find all rules of a question; each has a handful
ANSWER = "answer"  # the part of a computed question
_NAME = re.compile(r"check_(\d\d)_(\w+)_(\d+)")


@cache
def rules(question_id: str) -> dict[str, CodeVariant]:
    """Every rule of a code question -> a variant with it, in alphabetical order."""
    found = {variant.rule: variant for seed in range(DRAWS) for variant in [question(question_id).variant(seed)]}
    return dict(sorted(found.items()))


def checker_name(one: Question, variant: CodeVariant | Variant | None) -> str:
    """The name under which this module has the checker of a variant."""
    if one.kind == "computed":
        return f"check_{one.id.replace('.', '_')}"
    return f"check_{one.id.replace('.', '_')}_{list(rules(one.id)).index(variant.rule) + 1}"


def answer_checker(one: Question) -> Checker:
    """Judges the answer to a computed question: its value by the seed of the exam, and its form alone without one."""
    check = Checker(one.id.replace(".", "_"))

    def judge(case: Case) -> None:
        case.comparisons += 1
        variant = one.variant(case.seed)
        try:
            if case.seed:
                right(case.student, variant.answer, one.tolerance, variant.slips)
            else:
                answered(case.student, isinstance(variant.answer, list))
        except AssertionError as error:
            case.fail(str(error))

    check.parts[ANSWER] = judge
    check._seal()
    return check


@cache
def _checker(name: str) -> Checker:
    if computed := [one for one in bank() if one.kind == "computed" and checker_name(one, None) == name]:
        return answer_checker(computed[0])
    match = _NAME.fullmatch(name)
    variants = list(rules(f"{match[1]}.{match[2]}").values()) if match else []
    if not match or not 1 <= int(match[3]) <= len(variants):
        raise AttributeError(f"module {__name__!r} has no checker {name!r}")
    return variants[int(match[3]) - 1].checker()


def __getattr__(name: str) -> Checker:
    if not name.startswith("check_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return _checker(name)
    except KeyError as error:
        raise AttributeError(f"module {__name__!r} has no checker {name!r}: {error.args[0]}") from error
