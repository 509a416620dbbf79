"""Limits on what an answer may compute, attacked: each of these hung, left something behind, or misjudged."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from minillm.book.checks import CheckFailed, FunctionChecker, patience
from minillm.book.checks.case import Case
from minillm.book.checks.ch20_ranks import check_left_ring
from minillm.book.checks.patience import Limit, bounded, stopped_after, within
from minillm.course.grading.stop import TimeIsUp, stop

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # they are ended


def ended(threads: set[threading.Thread]) -> bool:
    deadline = time.monotonic() + 30
    while threads & set(threading.enumerate()):
        assert time.monotonic() < deadline, threads
        time.sleep(0.01)
    return True


def checker(**how) -> FunctionChecker:
    usual = dict(examples=[([3, 1, 2],)], random=lambda draw: ([draw.randint(0, 9) for _ in range(3)],), seconds=0.1)
    return FunctionChecker("ordered", sorted, **(usual | how))


def refused(check, student) -> CheckFailed:
    with pytest.raises(CheckFailed) as caught:
        check(student, "example")
    return caught.value


def test_an_answer_that_waits_for_threads_that_compute_is_stopped_and_they_end():
    """The system's own alarm wakes the thread that computes, and not the one that waits for it."""

    def spins(value):
        while True:
            pass

    def waits_for_them(values):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(spins, values))

    before = set(threading.enumerate())
    assert "a small case took more than 0.1 s" in str(refused(checker(), waits_for_them))
    assert ended(set(threading.enumerate()) - before)


def test_a_thread_ends_although_it_was_joined_when_the_answer_was_stopped():
    """Python 3.11 says of it that it is not alive, and it computes."""
    counted = [0]

    def counts():
        while True:
            counted[0] += 1

    def waits_for_it(values):
        threads.append(thread := threading.Thread(target=counts, daemon=True))
        thread.start()
        thread.join()

    threads = []
    assert "a small case took more than 0.1 s" in str(refused(checker(), waits_for_it))
    assert ended(set(threads))
    number = counted[0]
    time.sleep(0.05)
    assert counted[0] == number


def test_a_thread_that_waits_for_work_is_left_to_it():
    """It was begun by the answer that is stopped, and serves the next one."""

    def slow(values):
        pool.submit(sorted, values).result()
        while True:
            pass

    with ThreadPoolExecutor(1) as pool:
        assert "a small case took more than 0.1 s" in str(refused(checker(), slow))
        for _ in range(3):
            checker(seconds=5)(lambda values: pool.submit(sorted, values).result(timeout=5), "example")


def test_an_answer_that_raises_an_error_of_its_own_when_it_is_stopped_is_too_slow():
    def raises(values):
        try:
            while True:
                pass
        except BaseException:
            raise ValueError("no answer found") from None

    assert "a small case took more than 0.1 s" in str(refused(checker(), raises))


def test_a_timer_that_an_answer_leaves_on_ends_no_process():
    with within(Case(None, "profiled", "", 0), "it", ""):
        signal.setitimer(signal.ITIMER_PROF, 0.01, 0.01)
    sum(range(5 * 10**6))  # the signal's default action is to end the process
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_where_no_thread_can_be_started_the_clock_is_read_afterwards(monkeypatch):
    def fails(thread):
        raise RuntimeError("can't start new thread")

    case, before = Case(None, "alone", "", 0), signal.getsignal(signal.SIGPROF)
    monkeypatch.setattr(threading.Thread, "start", fails)
    checker(seconds=5)(sorted, "example")
    with pytest.raises(CheckFailed, match=r"the sum took more than 0.01 s"), within(case, "the sum", "", 0.01):
        sum(range(5 * 10**6))
    assert signal.getsignal(signal.SIGPROF) == before


def test_what_is_timed_has_one_thread_of_torch():
    number = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with within(Case(None, "torch", "", 0), "it", ""):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(number)


def test_a_graders_alarm_waits_until_a_limit_is_set_or_taken_back(monkeypatch):
    """It left the handler of the limit behind, which counts as a change by the answer."""
    rings = []

    def rung(method):
        def rings_in(limit):
            stop(0, sys._getframe())  # raises nothing
            rings.append(method.__name__)
            method(limit)

        return rings_in

    for method in (Limit._begin_to_watch, Limit._end_watch):
        monkeypatch.setattr(Limit, method.__name__, rung(method))
    with stopped_after(Case(None, "graded", "", 0), "it", "", 5), pytest.raises(TimeIsUp):
        stop(0, sys._getframe())
    assert rings == ["_begin_to_watch", "_end_watch"]


def test_ranks_that_never_end_are_stopped(monkeypatch):
    monkeypatch.setattr(check_left_ring, "seconds", 0.1)

    def left_ring(*given):
        while True:
            pass

    with pytest.raises(CheckFailed, match=r"took more than 0.1 s of computing"):
        check_left_ring.judge(left_ring, "example")


def test_a_last_operation_that_is_long_is_judged_and_nothing_stays_behind():
    """The signal that comes during it is handled when the limit is being left."""
    gc.unfreeze()
    case, before = Case(None, "long", "", 0), signal.getsignal(signal.SIGPROF)
    for size in (4 * 10**6, 8 * 10**6):
        with (
            pytest.raises(CheckFailed, match=r"the search took more than 0.05 s"),
            within(case, "the search", "", 0.05),
        ):
            2.5 in range(size)  # noqa: B015
        sum(range(10**7))
        assert signal.getsignal(signal.SIGPROF) == before and gc.get_freeze_count() == 0


def test_limits_within_limits_each_stop_their_own():
    case = Case(None, "nested", "", 0)

    def spins():
        while True:
            pass

    with pytest.raises(CheckFailed, match=r"outer took more than 0.2 s"), stopped_after(case, "outer", "", 0.2):
        with pytest.raises(CheckFailed, match=r"inner took more than 0.1 s"), within(case, "inner", "", 0.1):
            spins()
        with within(case, "inner", "", 5):
            spins()


def test_a_profiler_goes_on():
    heard, old = [], signal.signal(signal.SIGPROF, lambda *received: heard.append(received))
    signal.setitimer(signal.ITIMER_PROF, 0.02, 0.02)
    try:
        with within(Case(None, "profiled", "", 0), "the sum", ""):
            sum(range(5 * 10**6))
            number = len(heard)
            assert number
        sum(range(5 * 10**6))
        assert len(heard) > number
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)


def test_an_answer_that_swallows_the_stop_of_its_lines_is_too_slow():
    def slow(values):
        for number in range(5_000):
            try:
                values[number % 3]
            except:  # noqa: E722
                continue
        return values

    def endless(values):
        while True:
            try:  # noqa: SIM105
                values[0]
            except:  # noqa: E722
                pass

    for limit in range(1_000, 1_006):  # whichever line it falls on
        with pytest.raises(CheckFailed, match=f"slow was stopped after {limit:,} lines") as failed:
            bounded(Case(slow, "slow", "", 0), limit, "Too slow.", slow, [1, 2, 3])
        assert failed.value.hint == "Too slow."
    before = sys.gettrace()
    with pytest.MonkeyPatch.context() as patched, pytest.raises(CheckFailed, match="endless was stopped after 1,000"):
        patched.setattr(patience, "BOUNDED_SECONDS", 0.2)
        bounded(Case(endless, "endless", "", 0), 1_000, "Too slow.", endless, [1, 2, 3])
    assert sys.gettrace() is before


def test_one_line_that_takes_long_is_told_as_time(monkeypatch):
    def long(values):
        return 2.5 in range(4 * 10**6)

    monkeypatch.setattr(patience, "BOUNDED_SECONDS", 0.05)
    with pytest.raises(CheckFailed, match=r"long took more than 0.05 s of computing"):
        bounded(Case(long, "long", "", 0), 1_000, "Too slow.", long, [1])


def test_other_cases_that_never_end_cost_their_seconds_and_no_more():
    """A right one among them is enough, and three that do not end are, too."""

    def ends_on(*sizes):
        def answer(values):
            while len(values) not in sizes:
                pass
            return sorted(values)

        return answer

    sizes = iter((1, 2, 3, 1, 1, 1, 1))
    check = checker(random=lambda draw: ([7] * next(sizes),))
    check(ends_on(3), "example", seed=1)
    with pytest.raises(CheckFailed, match=r"none of 3 other cases is, and 3 took more than 0.1 s") as failed:
        check(ends_on(3), "example", seed=1)
    assert failed.value.hint == "Does a loop never end?" and list(sizes) == [1]


def test_other_cases_may_end_python():
    def answer(values):
        if values == [3, 1, 2]:
            return [1, 2, 3]
        raise SystemExit

    with pytest.raises(CheckFailed, match="none of 20 other cases is"):
        checker()(answer, "example", seed=7)


def test_a_collector_that_an_answer_switches_off_is_on_again():
    def answers(values):
        gc.disable()
        return sorted(values)

    checker(seconds=5)(answers, "example")
    assert gc.isenabled()


def test_a_forked_process_has_limits_of_its_own():
    def spins():
        while True:
            pass

    with stopped_after(Case(None, "parent", "", 0), "it", "", 60):
        child = os.fork()
        if child == 0:
            code = 1
            signal.alarm(20)  # a limit that does nothing ends the child, and not the suite
            try:
                with stopped_after(Case(None, "child", "", 0), "it", "", 0.1):
                    spins()
            except CheckFailed:
                code = 7
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
