"""Checks of chapter 15: options chosen under a budget of bytes. Built in chapter 15."""

from __future__ import annotations

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch15_oracle import Option, best_choice
from minillm.book.checks.patience import within

BRUTE = "6^24 combinations are too many: of all choices that have spent the same bytes, keep one."
check_choose_options = Checker(
    "choose_options",
    hint="For every number of bytes that can be spent on the matrices so far, remember the smallest error.",
)


@check_choose_options.part("example")
def _options_example(case: Case) -> None:
    # The best gain a byte first is wrong.
    _chooses(case, [[Option(10, 0), Option(0, 60)], [Option(6, 10), Option(0, 50)]], 10)


@check_choose_options.part("edges")
def _options_edges(case: Case) -> None:
    _chooses(case, [[Option(5, 7)]], 5)
    _chooses(case, [[Option(5, 7), Option(3, 7), Option(4, 7)]], 9)  # the same error for fewer bytes
    _chooses(case, [[Option(4, 1), Option(2, 3)], [Option(4, 1), Option(2, 3)]], 100)  # more budget than anyone needs
    _chooses(case, [[Option(0, 9), Option(3, 2)], [Option(0, 4)]], 0)
    _chooses(case, [[Option(2, 5), Option(7, 8)], [Option(1, 9), Option(9, 0)]], 3)  # exactly the smallest
    _chooses(case, [[Option(3, 8), Option(1, 1)], [Option(2, 2), Option(6, 6)]], 7)  # more bytes can be worse
    _chooses(case, [[Option(6, 4), Option(5, 5), Option(1, 9)], [Option(6, 4), Option(5, 5), Option(1, 9)]], 11)
    too_little = ([[Option(5, 0)], [Option(4, 0), Option(3, 9)]], 7), ([[Option(1, 0)]], 0), ([[Option(0, 0)]], -1)
    for matrices, budget in too_little:
        case.raises(ValueError, case.student, matrices, budget, hint="Not even the smallest options fit.")


@check_choose_options.part("random")
def _options_random(case: Case) -> None:
    for _ in range(60):
        matrices = [_some_options(case, 9, 12) for _ in range(case.randint(1, 6))]
        least, most = (sum(kind(o.num_bytes for o in options) for options in matrices) for kind in (min, max))
        _chooses(case, matrices, case.randint(least, most + 3))
    for _ in range(3):
        matrices = [[Option(case.randint(1, 41), case.randint(0, 1000)) for _ in range(6)] for _ in range(24)]
        budget = 24 * case.randint(15, 25)
        with within(case, "24 matrices with 6 options each", BRUTE):
            case.call(matrices, budget)
        _chooses(case, matrices, budget)


def _some_options(case: Case, most_bytes: int, most_error: int) -> list[Option]:
    return [Option(case.randint(0, most_bytes), case.randint(0, most_error)) for _ in range(case.randint(1, 5))]


def _chooses(case: Case, matrices: list[list[Option]], budget: int) -> None:
    got = case.call(matrices, budget)
    told = f"for {len(matrices)} matrices and a budget of {budget} bytes" + (
        f", {[[tuple(o) for o in options] for options in matrices]}" if len(matrices) < 4 else ""
    )
    case.true(
        isinstance(got, list) and len(got) == len(matrices),
        f"the result {told} is {got!r}, not a list with a place for each matrix",
    )
    for place, options in zip(got, matrices):
        case.true(
            type(place) is int and 0 <= place < len(options),
            f"the result {told} holds {place!r}, which is not a place in a list of {len(options)} options",
        )
    size, error = (
        sum(getattr(options[place], name) for options, place in zip(matrices, got)) for name in Option._fields
    )
    case.true(size <= budget, f"the choice {got} {told} takes {size} bytes", hint="All matrices together must fit.")
    best_error, best_size, example = best_choice(matrices, budget)
    case.true(
        error == best_error,
        f"the choice {got} {told} loses {error}; a better choice exists: {example} loses {best_error}",
        hint=(
            "The best gain a byte first is not the best in sum; remember the smallest error for every number of bytes."
        ),
    )
    case.true(
        size == best_size,
        f"the choice {got} {told} takes {size} bytes; {example} loses as little, {error}, with {best_size}",
        hint="Ties go to fewer bytes.",
    )
