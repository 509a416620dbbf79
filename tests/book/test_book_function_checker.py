"""The checker of functions: expected before the call, copies of every kind, mistakes known by name, secret seeds."""

from __future__ import annotations

import collections
import gc
import math
import random
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch

from minillm.book import checks
from minillm.book.checks import Checker, CheckFailed, FunctionChecker, Timed, seal
from minillm.book.checks.case import Case
from minillm.book.checks.ch19 import Slot
from minillm.book.checks.patience import bounded
from minillm.book.checks.snapshot import Given
from minillm.sampling.params import SamplingParams

SORT = "Smallest first."
DROPPED = "Equal numbers stay."
SLOW = "Sort once."


def ordered(values, *, key=None, unique=False):
    if any(value < 0 for value in values):
        raise ValueError("negative")
    return sorted(set(values) if unique else values, key=key)


def slow(values):
    start = time.process_time()
    while len(values) > 500 and time.process_time() < start + 1:
        pass
    return ordered(values)


def checker(**more) -> FunctionChecker:
    how = dict(
        examples=[([3, 1, 2],), ([],)],
        edges=lambda draw: [([5, 5],), ([-1],), ([draw.randint(0, 9)],)],
        random=lambda draw: ([draw.randint(0, 50) for _ in range(draw.randint(2, 9))],),
        raises=(ValueError,),
        returns="the sorted list",
        hint="In order.",
        misconceptions={SORT: partial(ordered, key=lambda v: -v), DROPPED: partial(ordered, unique=True), SLOW: slow},
        timed=(Timed("1,000 numbers", lambda draw: (list(range(1000)),), hint=SLOW, seconds=0.2),),
    )
    return FunctionChecker("ordered", ordered, **(how | more))


@pytest.fixture
def check():
    return checker()


def honest(values):
    if min(values, default=0) < 0:
        raise ValueError(values)
    return sorted(values)


def refused(check, student, part="example", **how) -> CheckFailed:
    with pytest.raises(CheckFailed) as caught:
        check(student, part, **how)
    return caught.value


@pytest.mark.parametrize("part", checks.PARTS)
@pytest.mark.parametrize("seed", [None, 5, 20_000_003])
def test_honest_work_passes_under_every_seed(check, part, seed, capsys):
    check(honest, part, seed)
    assert capsys.readouterr().out == f"✓ ordered: {part}\n"


def test_a_mistake_is_known_by_what_it_answers(check):
    said = refused(check, lambda values: sorted(values, reverse=True))
    assert said.hint == SORT and "the sorted list is wrong at [0]" in str(said)
    assert refused(check, lambda values: sorted(set(values)), "edges").hint == DROPPED
    assert refused(check, lambda values: values[:1]).hint == "In order."


def test_what_the_reference_raises_the_answer_must_raise(check):
    assert "expected it to raise ValueError" in str(refused(check, lambda values: sorted(values), "edges"))
    assert "raised KeyError" in str(refused(check, lambda values: {}[0]))


def test_hints_with_numbers_come_from_explain():
    check = checker(explain=lambda got, expected, values: f"{len(got)} of {len(values)} numbers came back.")
    assert refused(check, lambda values: values[:1]).hint == "1 of 3 numbers came back."
    assert refused(check, lambda values: None).hint == "In order."  # explain trips over None, and the check does not


def test_a_large_case_is_judged_by_the_clock_and_by_its_result(check):
    assert "1,000 numbers took more than 0.2 s of computing" in str(refused(check, lambda v: slow(v), "edges"))
    wrong = refused(check, lambda values: honest(values) if len(values) < 99 else [], "edges")
    assert "another length" in str(wrong)


def test_elements_of_a_tuple_are_compared_under_their_names():
    def both(values):
        return min(values), [torch.tensor(values).double(), 0.1]

    check = FunctionChecker(
        "both", both, examples=[([3, 4],)], random=lambda draw: ([1],), returns=("least", "rest"), rtol=1e-12
    )
    assert "least is wrong" in str(refused(check, lambda values: (0, both(values)[1])))
    assert "a list, not a tuple" in str(refused(check, lambda values: list(both(values))))
    assert "rest is wrong at [0]: another dtype" in str(
        refused(check, lambda v: (min(v), [torch.tensor(v).float(), 0.1]))
    )
    assert "in another order: return (least, rest)" in refused(check, lambda values: both(values)[::-1]).hint


def test_a_detour_over_float32_is_recognised():
    third = FunctionChecker(
        "third", lambda x: x / 3, examples=[(torch.ones(2).double(),)], random=lambda draw: (draw.randn(3).double(),)
    )
    assert "pass through float32" in refused(third, lambda x: (x.float() / 3).double()).hint
    said = refused(third, lambda x: x.float() / 3)
    assert "another dtype" in str(said) and "float64" in str(said)


def test_a_small_number_that_is_a_little_wrong_is_no_detour_over_float32():
    half = FunctionChecker("half", lambda x: (x, x / 2), examples=[(0.004,)], random=lambda draw: (0.004,))
    assert "pass through float32" in refused(half, lambda x: (x, x / 2 * (1 + 1e-7))).hint
    assert "pass through float32" not in refused(half, lambda x: (x, x / 2 + 5e-6)).hint


@pytest.mark.parametrize(
    "value, spoil",
    [
        ([1, [2]], lambda v: v[1].clear()),
        ({1, 2}, lambda v: v.clear()),
        ({"a": {1}}, lambda v: v["a"].add(2)),
        (collections.deque([1, 2]), lambda v: v.popleft()),
        (collections.Counter("ab"), lambda v: v.update("a")),
        (bytearray(b"ab"), lambda v: v.clear()),
        (numpy.ones(2), lambda v: v.fill(0)),
        (torch.ones(2), lambda v: v.zero_()),
        ((torch.ones(2), {1}), lambda v: v[0].zero_()),
        (SamplingParams(stop=["a"]), lambda v: v.stop.append("b")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_change_of_an_argument_reaches_the_judge(value, spoil):
    seen = []
    check = Checker("kept")

    @check.part("example")
    def _example(case):
        case.call(value)
        seen.append(value)
        case.true(True, "")

    before = repr(value)
    said = refused(check, spoil)
    assert "changed one of its arguments" in str(said) and "before:" in str(said)
    assert repr(said.call.args[0]) == before == repr(checks.last_call().args[0])
    check(lambda v: None, "example")


def test_the_answer_has_its_own_copy_and_its_aliases():
    row, cache = [0, 0], torch.zeros(4, 6)
    given = Given(([row, row], cache, cache[1:3, ::2]), {})
    [first, second], whole, part = given.args
    assert first is second and first is not row
    assert (
        part.stride() == cache[1:3, ::2].stride()
        and part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    )
    assert given.change() is None
    second[0] = 1
    assert given.change().place == "[0][0][0][0]" and row == [0, 0]


def test_an_object_that_cannot_be_copied_is_handed_over():
    stream = (i for i in range(3))
    assert Given((stream, [stream]), {}).args[1][0] is stream


def test_the_last_call_can_be_made_again(check):
    refused(check, lambda values: values)
    call = checks.last_call()
    assert call.args == ([3, 1, 2],) and call.again(honest) == [1, 2, 3] and call.again(lambda v: v.clear()) is None
    assert checks.last_call().args == ([3, 1, 2],)


def test_a_notebook_shows_the_message_and_the_answers_own_lines(check):
    def helper(values):
        return {}[values[0]]

    shown = refused(check, lambda values: helper(values))._render_traceback_()
    text = "\n".join(shown)
    assert shown[0].startswith("CheckFailed: ordered: example:") and "KeyError: 3" in text
    assert "of helper: return {}[values[0]]" in text and "case.py" not in text and "checks/" not in text
    assert 2 <= text.count("\n") + 1 <= 9


def test_an_answer_known_by_heart_fails_under_a_secret_seed(check):
    recorded = {(3, 1, 2): [1, 2, 3], (): []}

    def by_heart(values):
        return recorded.get(tuple(values))

    check(by_heart, "example")
    assert "none of 20 other cases" in str(refused(check, by_heart, seed=77))
    assert "the sorted list is wrong" in str(refused(check, by_heart, "random", seed=77))


def test_another_seed_draws_other_sizes():
    sizes: dict = {}
    for seed in (None, 1, 2):
        seen = sizes[seed] = []
        checker()(lambda values: seen.append(len(values)) or honest(values), "random", seed)
    assert sizes[1] != sizes[2] != sizes[None]


def test_a_case_must_be_a_tuple():
    assert "a case is a tuple of arguments, not [3, 1]" in str(refused(checker(examples=[[3, 1]]), honest))


def test_a_class_is_recognised_by_the_words_of_its_failure():
    class Zero:
        def first(self):
            return 0

    pool = Checker("pool", hint="In general.", misconceptions={"Ids begin at 1.": Zero})
    pool.part("example")(lambda case: case.equal(case.run(case.student().first), 1, "the first id"))
    for hint, value in (("Ids begin at 1.", 0), ("In general.", 2)):
        student = type("Student", (), {"first": lambda self, value=value: value})
        assert refused(pool, student).hint == hint


def spies(values):
    import sys

    return sys._getframe(1).f_locals["expected"]


def imports(values):
    from minillm.book.checks.ch19_oracle import lengths

    return lengths(values)


def by_name(values):
    import importlib

    return importlib.import_module("minillm.book.checks.ch19_oracle").lengths(values)


def asks_the_checks(values):
    return checks.last_call().args


def inspects(values):
    import inspect

    return inspect.stack()


def untraced(values):
    import sys

    sys.settrace(None)


def referrers(values):
    import gc

    return gc.get_referrers(values)


class Inside:
    def __call__(self, values):
        return imports(values)


@pytest.mark.parametrize("cheat", [spies, imports, by_name, asks_the_checks, inspects, untraced, referrers, Inside()])
def test_an_answer_that_looks_at_its_judge_is_refused(check, cheat):
    assert "An answer has no business with what judges it" in str(refused(check, cheat))


def test_types_that_the_checks_hand_out_may_be_used():
    check = FunctionChecker("slots", lambda n: n, examples=[(1,)], random=lambda draw: (1,))
    check(lambda n: Slot(frozenset(), 0, n).high, "example")


@pytest.mark.parametrize(
    "module, name",
    [
        ("compare", "first_difference"),
        ("case", "first_difference"),
        ("checker", "refuse_reference"),
        ("snapshot", "Given"),
    ],
)
def test_a_rebound_judge_is_noticed(check, monkeypatch, module, name):
    monkeypatch.setattr(f"minillm.book.checks.{module}.{name}", lambda *args, **kwargs: None)
    assert f"minillm.book.checks.{module}.{name} was rebound" in str(refused(check, honest))


def test_a_judge_with_another_body_is_noticed(check, monkeypatch):
    def close(self, *args, **kwargs):
        self.comparisons += 1

    monkeypatch.setattr(checks.Case.close, "__code__", close.__code__)
    assert "Case.close was rebound" in str(refused(check, honest))


def test_a_rebound_library_function_is_noticed(monkeypatch):
    mine = seal.Seal()
    assert mine.broken() is None
    for owner, name in ((math, "isclose"), (random.Random, "randrange"), (torch, "randn"), (time, "process_time")):
        with monkeypatch.context() as rebound:
            rebound.setattr(owner, name, lambda *_, **__: 0)
            assert mine.broken() == f"{owner.__name__}.{name}"
    assert mine.broken() is None


def test_lent_arguments_are_the_callers_own_and_may_not_change():
    check, mine = Checker("lent"), [1]
    check.part("example")(
        lambda case: case.true(case.run(case.student, mine, lend=True) is not mine, "It kept the list.")
    )
    assert "It kept the list" in str(refused(check, lambda v: v))
    assert "changed one of its arguments" in str(refused(check, lambda v: v.append(2)))
    check(lambda v: list(v), "example")


def test_a_call_that_a_line_cannot_hold_is_offered_again(check):
    many = checker(examples=[([0] * 100 + [-0],), (list(range(60, 0, -1)),)])
    assert "last_call() has these arguments" in refused(many, lambda values: values)._render_traceback_()[-1]
    assert "last_call" not in str(refused(check, lambda values: values)._render_traceback_())


def test_no_chapters_checks_use_those_of_another_chapter():
    folder = Path(checks.__file__).parent
    found = {
        f"{file.name} imports ch{other}"
        for file in folder.glob("ch*.py")
        for other in re.findall(r"minillm\.book\.checks\.ch(\d\d)", file.read_text(encoding="utf-8"))
        if other != file.name[2:4]
    }
    assert found == set()


def test_a_loop_that_never_ends_is_stopped():
    def endless(values):
        while values:
            pass

    check = checker(seconds=0.1, timed=())
    said = refused(check, endless)
    assert "a small case took more than 0.1 s of computing" in str(said) and "loop never end" in said.hint
    assert "of endless: " in "\n".join(said._render_traceback_())


def test_what_other_threads_compute_is_not_the_answers():
    """As a thread would that an earlier test or cell has left behind."""
    ends = threading.Event()

    def spins():
        while not ends.is_set():
            pass

    def waits_and_answers(values):
        start = time.thread_time()
        while values == [3, 1, 2] and time.thread_time() - start < 0.15:
            pass
        return honest(values)

    others = [threading.Thread(target=spins) for _ in range(2)]
    for thread in others:
        thread.start()
    try:
        checker(seconds=0.25, timed=())(waits_and_answers, "example")
    finally:
        ends.set()
        for thread in others:
            thread.join()


def test_old_objects_cost_the_answer_nothing():
    """A full collection of a large process can take a second, which would count as the answer's."""
    seen = []
    gc.unfreeze()

    def answers(values):
        seen.append(gc.get_freeze_count())
        return honest(values)

    checker()(answers, "edges")
    assert max(seen) > 10_000 and gc.get_freeze_count() == 0


def test_who_has_frozen_the_old_objects_keeps_them_so():
    gc.freeze()
    try:
        checker()(honest, "edges")
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the thread is ended
def test_an_answer_that_leaves_the_work_to_a_thread_is_stopped_too():
    ends, threads = threading.Event(), []

    def spins():
        while not ends.is_set():
            pass

    def leaves_it(values):
        threads.append(thread := threading.Thread(target=spins, daemon=True))
        thread.start()
        while thread.is_alive():
            time.sleep(0.01)

    try:
        assert "a small case took more than 0.1 s" in str(refused(checker(seconds=0.1, timed=()), leaves_it))
    finally:
        ends.set()
        threads[0].join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_that_is_lost_in_a_callback_of_the_garbage_collector_comes_again():
    """Hypothesis registers such a callback; an answer that builds a list for ever was stopped there, and went on."""
    lost, before = [], signal.getsignal(signal.SIGPROF)

    def loses_the_first(phase, info):
        def notes(*received):
            lost.append(received)
            signal.signal(signal.SIGPROF, stops)
            stops(*received)

        if not lost and callable(stops := signal.getsignal(signal.SIGPROF)) and stops is not before:
            signal.signal(signal.SIGPROF, notes)
            while not lost:
                sum(range(1_000))

    kept = []

    def builds_for_ever(values):
        while len(kept) < 6_000_000:
            kept.append([values])
        return values

    gc.callbacks.append(loses_the_first)
    try:
        said = refused(checker(seconds=0.1, timed=()), builds_for_ever)
    finally:
        gc.callbacks.remove(loses_the_first)
    number = len(kept)
    assert lost and number < 6_000_000 and "a small case took more than 0.1 s of computing" in str(said)


def test_lines_are_counted_although_the_garbage_collector_has_callbacks():
    def counts(values):
        kept = []
        while len(kept) < 200_000:
            kept.append([values])

    def long_callback(phase, info):
        for _ in range(2_000):
            pass

    gc.callbacks.append(long_callback)
    try:
        with pytest.raises(CheckFailed, match="stopped after 4,000 lines"):
            bounded(Case(counts, "counts", "", 0), 4_000, "", counts, [1])
    finally:
        gc.callbacks.remove(long_callback)
    assert gc.isenabled()


def test_a_note_on_a_case_is_told():
    check = checker(examples={"the largest comes first": ([9, 2],), "nothing is sorted": ([],)})
    assert refused(check, lambda values: values[:1]).hint == "Here the largest comes first. In order."
    assert refused(check, lambda values: sorted(values, reverse=True)).hint == SORT


@pytest.mark.parametrize(
    "spoil",
    [
        lambda check: setattr(check, "trials", 0),
        lambda check: setattr(check, "reference", honest),
        lambda check: setattr(check, "judge", lambda *args: None),
        lambda check: check.cases.update(example=[([],)]),
        lambda check: check.cases["example"].clear(),
        lambda check: check.parts.update(example=lambda case: case.true(True, "")),
    ],
)
def test_a_changed_check_is_noticed(check, spoil):
    check(honest, "example")
    spoil(check)
    assert "the check ordered itself was rebound" in str(refused(check, honest))


def test_a_part_is_judged_by_one_function(check):
    with pytest.raises(ValueError, match="has its part 'edges' already"):
        check.part("edges")


def test_a_tuple_in_the_place_of_an_error_is_told_as_it_is():
    def halves(number):
        if number % 2:
            raise ValueError("odd")
        return number // 2, number // 2

    checker = FunctionChecker(
        "halves", halves, examples=[(3,)], random=lambda draw: (2,), raises=(ValueError,), returns=("first", "second")
    )
    with pytest.raises(CheckFailed, match=r"returned \(1, 2\); expected it to raise ValueError"):
        checker(lambda number: (number // 2, number - number // 2), "example")


def half(number):
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number // 2


def test_the_message_of_an_error_names_its_numbers():
    check = FunctionChecker(
        "half",
        half,
        examples=[(7,)],
        random=lambda draw: (draw.randint(0, 9),),
        raises=(ValueError,),
        named=lambda number: [number],
    )
    check.judge(half, "example")

    def says_nothing(number):
        raise ValueError("odd")

    with pytest.raises(CheckFailed, match="it must name 7"):
        check.judge(says_nothing, "example")


def test_an_answer_may_be_adapted_to_what_is_judged():
    """A generator is read to its end; the reference and the misconceptions are generators, too."""

    def counting(last):
        yield from range(last)

    check = FunctionChecker(
        "counting",
        counting,
        adapt=lambda answer: lambda last: list(answer(last)),
        examples=lambda draw: {"there are three": (3,)},
        random=lambda draw: (draw.randint(0, 9),),
        hint="From 0 on.",
        misconceptions={"The last one is left out.": lambda last: iter(range(last + 1))},
    )
    check.judge(counting, "example")
    check.judge(counting, "random")
    with pytest.raises(CheckFailed) as failed:
        check.judge(lambda last: iter(range(last + 1)), "example")
    assert failed.value.hint == "The last one is left out."
    with pytest.raises(CheckFailed) as failed:
        check.judge(lambda last: iter(range(1, last)), "example")
    assert failed.value.hint == "Here there are three. From 0 on."
