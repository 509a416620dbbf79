"""Faults found from outside: ids that are used again, errors and interrupts that reach the wrong caller."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress

import pytest

from minillm import LLM, SamplingParams
from minillm.engine.executor import InProcessExecutor
from minillm.engine.request import Request
from minillm.engine.thread import EngineThread
from minillm.kv_cache.manager import KVCacheManager
from tests.helpers.tiny import save_tiny_llama

GREEDY = dict(temperature=0.0, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(10, 40))}
ANOTHER = {"prompt_token_ids": list(range(100, 120))}
PATIENCE = 20  # seconds after which a wait counts as a hang


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path)
    return path


def make(folder, **settings) -> LLM:
    return LLM(
        folder, **dict(dtype="float32", device="cpu", max_model_len=128, block_size=4, num_kv_blocks=200) | settings
    )


def params(max_tokens: int = 8, **more) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **GREEDY | more)


def alone(folder, prompt, one) -> list[list[int]]:
    [output] = make(folder).generate(prompt, one, use_tqdm=False)
    return [sample.token_ids for sample in output.outputs]


def own_request(name: str, prompt=PROMPT, n: int = 1, max_tokens: int = 8, seed: int = 3) -> Request:
    wanted = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, n=n, ignore_eos=True)
    return Request(name, list(prompt["prompt_token_ids"]), wanted, max_tokens, seed=seed)


def run_dry(engine) -> dict[str, list[tuple[Request, int]]]:
    taken: dict[str, list] = {}
    for _ in range(200):
        for delta in engine.step():
            taken.setdefault(delta.request.request_id, []).append((delta.request, delta.token_id))
        if not engine.has_unfinished:
            break
    else:
        raise AssertionError("still working")
    engine.step()
    engine.scheduler.check_integrity()
    assert not engine.runner.requests.states and not engine.kv_cache.records
    return taken


class Failure(Exception):
    pass


class Late(InProcessExecutor):
    """Fails when a step is waited for: `fails(output)` says which.
    With `lazy` a step is computed no sooner than that."""

    def __init__(self, runner, fails, lazy: bool = False):
        super().__init__(runner)
        self.fails, self.lazy = fails, lazy

    def launch(self, output):
        executor, fails = self, self.fails(output)
        launched = None if self.lazy else self.runner.launch(output)

        class Launched:
            def wait(self):
                if fails:
                    raise Failure("a step that is waited for")
                return (launched or executor.runner.launch(output)).wait()

        return Launched()


# Request ids


@pytest.mark.parametrize("order", ["group first", "sample first"])
def test_an_id_that_a_sample_will_have_is_in_use(folder, order):
    engine = make(folder).engine
    names = [("a", 2), ("a_1", 1)]
    refused = False
    for name, n in names if order == "group first" else names[::-1]:
        try:
            engine.add_request(own_request(name, n=n, prompt=PROMPT if n == 2 else ANOTHER))
        except ValueError as error:
            assert "a_1" in str(error)
            refused = True
    taken = run_dry(engine)
    if not refused:  # else each has its own
        owners = {request for some in taken.values() for request, _ in some}
        assert len(owners) == 3


def test_the_id_of_a_request_is_in_use_while_its_samples_run(folder):
    llm = make(folder)
    engine = llm.engine
    first = own_request("a", n=2, max_tokens=12)
    engine.add_request(first)
    for _ in range(3):
        engine.step()
    engine.finish("stop", first)  # a stop string that only the caller sees
    with pytest.raises(ValueError, match="in use"):
        engine.add_request(own_request("a", n=2, max_tokens=12))
    run_dry(engine)


# Errors that reach the wrong caller, or nobody


def test_a_callback_that_fails_leaves_a_beam_search_alone(folder):
    expected = make(folder).beam_search(PROMPT, beam_width=2, max_tokens=6, ignore_eos=True)[0]
    llm = make(folder)

    def fail(sink, delta):
        raise Failure("a callback")

    sink = llm.submit(ANOTHER, params(), on_delta=fail)
    [found] = llm.beam_search(PROMPT, beam_width=2, max_tokens=6, ignore_eos=True)
    assert isinstance(sink.error, Failure)
    assert [beam.token_ids for beam in found.outputs] == [beam.token_ids for beam in expected.outputs]


def test_tokens_of_the_step_before_are_kept_when_the_next_one_fails(folder):
    """A request that ended in the step before is not in the one that fails."""
    llm = make(folder, async_scheduling=True)
    engine = llm.engine
    engine.executor = Late(engine.runner, lambda output: any(row.request_id == "1" for row in output.rows))
    ends = llm.submit(PROMPT, params(1))
    llm.step()
    fails = llm.submit(ANOTHER, params(4, logprobs=1))  # its step is waited for in the same turn
    for _ in range(5):
        with suppress(Failure):
            llm.step()
    assert isinstance(fails.error, Failure)
    assert ends.is_finished, "nobody will ever tell the caller"
    assert [ends.output().outputs[0].token_ids] == alone(folder, PROMPT, params(1))
    assert not llm.outputs.sinks


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_that_ended_while_a_step_was_taken_in_is_notified(folder, ahead, monkeypatch):
    """The first row has ended with its last token, the second one's interrupts the taking in."""
    llm = make(folder, async_scheduling=ahead)
    ends = llm.submit(PROMPT, params(3))
    broken = llm.submit(ANOTHER, params(8))
    llm.step(), llm.step()
    take = Request.take

    def interrupted(request, *args):
        if request is broken.request and len(ends.request.output_token_ids) == 3:
            raise KeyboardInterrupt
        return take(request, *args)

    monkeypatch.setattr(Request, "take", interrupted)
    for _ in range(5):
        with suppress(KeyboardInterrupt, Failure):
            llm.step()
    assert broken.is_finished
    assert ends.is_finished, "nobody will ever tell the caller"
    assert not llm.outputs.sinks


def test_blocks_of_a_step_that_fails_late_are_no_prefix(folder):
    prompt, one = {"prompt_token_ids": [7 + (3 * i) % 200 for i in range(60)]}, params(6)
    llm = make(folder, async_scheduling=True, max_num_batched_tokens=16)
    engine, count = llm.engine, []
    for part in (*engine.runner.cache.keys, *engine.runner.cache.values):
        part.fill_(3.0)  # what lies in a block that was never computed
    engine.executor = Late(
        engine.runner, lambda output: bool(output.rows) and (count.append(1) or len(count) == 3), lazy=True
    )
    sink = llm.submit(prompt, one)
    with pytest.raises(Failure):
        for _ in range(10):
            llm.step()
    assert isinstance(sink.error, Failure)
    [output] = llm.generate(prompt, one, use_tqdm=False)
    assert [output.outputs[0].token_ids] == alone(folder, prompt, one)


class BrokenGrammar:
    """Fails in one method, once it is armed."""

    def __init__(self, grammar, method, state):
        self.grammar, self.method, self.state = grammar, method, state

    def __getattr__(self, name):
        if name == self.method and self.state["armed"]:
            raise Failure(name)
        found = getattr(self.grammar, name)
        if name == "copy":
            return lambda: BrokenGrammar(found(), self.method, self.state)
        return found


@pytest.mark.parametrize("method", ["start", "fill_mask", "accept", "jump_tokens", "is_terminated", "copy"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_grammar_that_fails_ends_its_own_request(folder, method, ahead):
    llm = make(folder, async_scheduling=ahead)
    state = {"armed": method in ("start", "copy")}
    compile_grammar = llm.engine.runner.compile_grammar

    class Broken:
        def __init__(self, compiled):
            self.compiled = compiled

        def start(self):
            if method == "start":
                raise Failure("start")
            return BrokenGrammar(self.compiled.start(), method, state)

    llm.engine.use_grammars(lambda params: Broken(compile_grammar(params)))
    other = llm.submit(PROMPT, params(12))
    llm.step(), llm.step()
    wanted = {"regex": "[a-z]{3}(hello)+[a-z ]{2,12}", "jump_forward": method == "jump_tokens"}
    n = 2 if method == "copy" else 1
    broken = llm.submit(ANOTHER, SamplingParams(temperature=1.0, seed=1, n=n, max_tokens=10, structured_outputs=wanted))
    for turn in range(60):
        state["armed"] |= turn == 2
        try:
            if not llm.step():
                break
        except Failure:
            pass
    assert broken.is_finished
    assert other.error is None
    assert [other.output().outputs[0].token_ids] == alone(folder, PROMPT, params(12))


def test_an_aborted_beam_leaves_nothing_in_the_runner(folder):
    """Beams that wait for room have been announced anew to nobody when the search ends."""
    llm = make(folder, num_kv_blocks=24, max_model_len=60)
    steps = []

    def abort(sink, delta):
        steps.append(1)
        if len(steps) == at:
            llm.engine.abort(*llm.outputs.raw)

    for at in range(1, 14):
        steps.clear()
        llm.submit(ANOTHER, params(20), on_delta=abort)
        with pytest.raises(RuntimeError, match="abort"):
            llm.beam_search(PROMPT, beam_width=4, max_tokens=16, ignore_eos=True)
        while llm.step():
            pass
        llm.step()
        assert not llm.engine.runner.requests.states, at
        llm.engine.scheduler.check_integrity()


# EngineThread


def bounded(function, *args):
    """What `function` returns, or raised; AssertionError when it hangs."""
    found: list = []

    def run():
        try:
            found.append(function(*args))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE / 4)
    assert found, f"{function} hangs"
    return found[0]


@pytest.mark.parametrize("what", ["pause", "call"])
@pytest.mark.parametrize("when", ["before start", "after close"])
def test_what_a_thread_that_does_not_run_cannot_do_is_said(folder, what, when):
    thread = EngineThread(make(folder))
    if when == "after close":
        thread.start().close()
    ask = thread.pause if what == "pause" else lambda: thread.call(lambda: 1).result()
    answer = bounded(ask)
    assert answer in (None, 1) or isinstance(answer, Exception)


def test_a_thread_that_was_closed_takes_no_request_after_another_start(folder):
    thread = EngineThread(make(folder)).start()
    thread.close()
    with pytest.raises(RuntimeError):
        thread.start()
    with pytest.raises(RuntimeError):
        thread.submit(PROMPT, params())


@pytest.mark.parametrize("beside", ["close", "abort"])
def test_a_request_submitted_beside(folder, beside):
    """The submitting thread is held up between taking the id and telling the engine."""
    llm = make(folder)
    thread = EngineThread(llm).start()
    tell, registered, go_on = thread.tell, threading.Event(), threading.Event()
    submitter: list[int] = []

    def slow(message):
        if threading.get_ident() in submitter and "a" in thread.streams:
            registered.set()
            go_on.wait(2)
        tell(message)

    thread.tell = slow
    streams = []

    def submit():
        submitter.append(threading.get_ident())
        streams.append(thread.submit(PROMPT, params(60), request_id="a"))

    other = threading.Thread(target=submit)
    other.start()
    assert registered.wait(PATIENCE)
    closing = threading.Thread(target=thread.close if beside == "close" else lambda: thread.abort("a"))
    closing.start()
    closing.join(1)
    go_on.set()
    closing.join(PATIENCE), other.join(PATIENCE)
    assert streams[0].finished.wait(PATIENCE / 4), "the stream never ends"
    assert streams[0].sink.samples[0].finish_reason == "abort"
    thread.tell = tell
    thread.close()
    assert not llm.outputs.raw and not llm.engine.has_unfinished


def test_a_callback_that_exits_does_not_end_the_text_thread(folder):
    with EngineThread(make(folder)) as thread:

        def leave(delta):
            raise SystemExit(1)

        first = thread.submit(PROMPT, params(), on_delta=leave)
        second = thread.submit(ANOTHER, params())
        assert first.finished.wait(PATIENCE / 4), "the stream that failed never ends"
        assert second.output(PATIENCE / 4).outputs[0].token_ids == alone(folder, ANOTHER, params())[0]


def test_a_callback_may_close_the_thread(folder):
    llm = make(folder)
    thread = EngineThread(llm).start()
    stream = thread.submit(PROMPT, params(60), on_delta=lambda delta: thread.close())
    other = thread.submit(ANOTHER, params(60))
    assert stream.finished.wait(PATIENCE / 4) and other.finished.wait(PATIENCE / 4)
    thread.close()
    for one in thread._threads:
        one.join(PATIENCE / 4)
        assert not one.is_alive()
    assert not llm.outputs.raw and not llm.engine.has_unfinished


# A forked child


def in_child(function) -> str:
    """What `function` raised in a forked child; "hangs" where it did not return."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE // 4)
        try:
            answer = f"returned {function()!r}"
        except BaseException as error:
            answer = repr(error)
        os.write(write, answer.encode()[:1000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer or "hangs"


def test_a_stream_that_a_child_goes_on_with(folder):
    llm = make(folder)
    stream = llm.stream(PROMPT, params(20))
    next(stream)
    assert "process" in in_child(lambda: list(stream))


@pytest.mark.parametrize("what", ["pause", "call", "output", "iterate", "abort", "drain", "submit"])
def test_an_engine_thread_in_a_child(folder, what):
    with EngineThread(make(folder)) as thread:
        thread.pause()
        stream = thread.submit(PROMPT, params(20))
        ask = {
            "pause": thread.pause,
            "call": lambda: thread.call(lambda: 1).result(),
            "output": stream.output,
            "iterate": lambda: list(stream),
            "abort": stream.abort,
            "drain": thread.drain,
            "submit": lambda: thread.submit(PROMPT, params()).output(),
        }[what]
        answer = in_child(ask)
        assert answer != "hangs"
        assert what == "abort" or "process" in answer, answer


# Reentrance


def test_a_callback_that_asks_for_a_step_is_refused(folder):
    llm = make(folder)
    first = llm.submit(PROMPT, params(6), on_delta=lambda sink, delta: llm.step())
    second = llm.submit(ANOTHER, params(6))
    for _ in range(20):
        try:
            if not llm.step():
                break
        except Exception:
            pass
    assert first.error is not None
    assert [second.output().outputs[0].token_ids] == alone(folder, ANOTHER, params(6))


def test_an_interrupt_is_heard_by_all_whatever_a_callback_raises(folder):
    llm = make(folder)

    def interrupt(sink, delta):
        raise KeyboardInterrupt

    def fail(sink, delta):
        if delta.finish_reason == "abort":
            raise Failure("a callback")

    sinks = [llm.submit(PROMPT, params(), on_delta=one) for one in (interrupt, fail, None)]
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    assert all(sink.is_finished for sink in sinks)
    assert not llm.outputs.sinks and not llm.engine.has_unfinished


def test_a_stream_says_that_a_step_of_another_thread_has_failed(folder):
    llm = make(folder)
    stream = llm.stream(PROMPT, params())
    next(stream)

    def fail(output):
        raise Failure("a step")

    llm.engine.runner.execute = llm.engine.runner.launch = fail
    with pytest.raises(Failure):
        llm.step()
    [last] = stream
    assert last.finish_reason == "abort" and "Failure" in (last.error or "")


def test_an_interrupt_while_a_failed_step_is_put_away_is_no_reason_to_notify_fewer(folder):
    llm = make(folder)

    def interrupt(sink, delta):
        if delta.finish_reason == "abort":
            raise KeyboardInterrupt

    def fail(output):
        raise Failure("a step")

    sinks = [llm.submit(PROMPT, params(), on_delta=one) for one in (interrupt, None)]
    llm.step()
    llm.engine.runner.execute = llm.engine.runner.launch = fail
    with pytest.raises((Failure, KeyboardInterrupt)):
        llm.step()
    assert all(sink.is_finished for sink in sinks)
    assert not llm.outputs.sinks and not llm.engine.has_unfinished


def test_a_kv_cache_of_ones_own_may_take_the_place_of_the_engines(folder):
    """As exercise 06 does, before the first request: the scheduler asks the one that it has now."""
    first, second = make(folder, enable_prefix_caching=False), make(folder, enable_prefix_caching=False)
    there = second.engine.kv_cache
    own = KVCacheManager(there.pool.num_blocks, there.block_size, enable_prefix_caching=False)
    second.engine.kv_cache = second.engine.scheduler.kv_cache = own
    said = [llm.generate([PROMPT, ANOTHER], params(), use_tqdm=False) for llm in (first, second)]
    tokens = [[answer.outputs[0].token_ids for answer in answers] for answers in said]
    assert tokens[0] == tokens[1]
