"""Ctrl-C, and finalizers, at any moment: no lock stays taken, and no message of a worker is lost. No process starts."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from minillm import LLM
from minillm.engine import lock as module
from minillm.engine.distributed.group import WorkerGroup
from minillm.engine.distributed.model import RemoteModel
from minillm.engine.distributed.zygote import Zygote
from minillm.engine.lock import FairLock


def in_a_thread(work: Callable[[], object]) -> bool:
    """Whether it ends within some seconds."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


@pytest.mark.parametrize("is_taken", [False, True])
def test_an_interrupt_at_any_call_leaves_the_lock_to_others(is_taken):
    """At every call and return where Python looks for signals, but one: the very beginning of `__exit__`."""
    for number in range(200):
        lock, seen, held = FairLock(), [], threading.Event()

        def strike(frame, event, argument, seen=seen, number=number):
            if frame.f_code.co_filename != module.__file__ or event not in ("call", "c_return"):
                return
            if (event, frame.f_code.co_name) != ("call", "__exit__"):
                seen.append(f"{event} {frame.f_code.co_name} {getattr(argument, '__name__', '')}")
                if len(seen) == number + 1:
                    raise KeyboardInterrupt

        def work(lock=lock, strike=strike):
            sys.setprofile(strike)
            try:
                with lock, lock:
                    lock.call_soon(lambda: None)
                lock.call_soon(lambda: None)
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)

        def hold(lock=lock, held=held):
            with lock:
                held.set()
                while not lock.num_waiting:
                    pass

        if is_taken:
            threading.Thread(target=hold, daemon=True).start()
            held.wait()
        assert in_a_thread(work), seen
        assert in_a_thread(lambda lock=lock: lock.__enter__().__exit__()), seen
        assert lock._owner is None and not lock._waiting and not lock._soon, seen
        if len(seen) <= number:
            break
    assert number > 15


def test_what_an_interrupt_ends_at_the_end_of_a_turn_is_done_again():
    lock, done = FairLock(), []

    def withdraw():
        done.append(len(done))
        if len(done) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), lock:
        lock.call_soon(withdraw)
    assert done == [0, 1] and lock._owner is None


def test_workers_that_a_finalizer_ends_in_the_middle_of_a_message_are_ended_after_it(monkeypatch):
    """Python collects an LLM that stands in a circle while another one starts a worker."""
    zygote, asked = Zygote(preload=False), []

    def ask(what, about, fds=()):
        asked.append((what, "begins"))
        if what == "fork":
            zygote.kill([7])
        asked.append((what, "ends"))
        return 12

    monkeypatch.setattr(zygote, "_ask", ask)
    assert in_a_thread(lambda: zygote.fork({}, []))
    assert asked == [(what, moment) for what in ("fork", "kill") for moment in ("begins", "ends")]
    assert in_a_thread(lambda: zygote.kill([8])) and asked[-1] == ("kill", "ends")


def test_an_interrupt_while_an_llm_is_made_ends_its_workers(monkeypatch):
    """Whatever holds on to the traceback, as a notebook does, would else hold on to them."""
    model, ended = RemoteModel.__new__(RemoteModel), []
    monkeypatch.setattr(RemoteModel, "close", lambda self: ended.append(self))
    monkeypatch.setattr(LLM, "_load_model", lambda self: model)

    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("minillm.engine.llm.load_tokenizer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LLM("tinyworld", tensor_parallel_size=2)
    assert ended == [model]


@pytest.mark.parametrize("kind", ["ok", "failed"])
def test_an_interrupt_while_a_message_is_read_does_not_lose_it(kind):
    group = WorkerGroup.__new__(WorkerGroup)

    def recv_bytes():
        os.kill(os.getpid(), signal.SIGINT)
        return pickle.dumps((3, kind, "value"))

    group.connections, group._inbox, group._failed = [SimpleNamespace(recv_bytes=recv_bytes)], {}, {}
    with pytest.raises(KeyboardInterrupt):
        group._take(0)
    assert (group._inbox, group._failed) == (
        ({(0, 3): ("ok", "value")}, {}) if kind == "ok" else ({}, {0: ("failed", "value")})
    )
