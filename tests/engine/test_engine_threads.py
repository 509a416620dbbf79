"""Several threads use one LLM at once: each call gets what is its own, as if it were alone."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from minillm import LLM, SamplingParams
from minillm.engine.lock import FairLock
from minillm.engine.sink import OutputSink
from minillm.programs import State, gen
from tests.helpers.tiny import save_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [3 + i, 7 * i % 250 + 3, *range(5, 5 + i % 9)]} for i in range(32)]
TALK = [{"role": "user", "content": "the cat"}]


@pytest.fixture
def llm(tmp_path) -> LLM:
    save_tiny_llama(tmp_path)
    return LLM(tmp_path, device="cpu", dtype="float32", block_size=4, num_kv_blocks=300)


def tokens_of(outputs) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def generate(llm: LLM, prompts=PROMPTS) -> list[list[int]]:
    return tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False))


def stream(llm: LLM) -> list[int]:
    return [token for delta in llm.stream(PROMPTS[5], GREEDY) for token in delta.token_ids]


def submit(llm: LLM) -> list[list[int]]:
    submission = llm.submit(PROMPTS[6], GREEDY)
    while not submission.is_finished:
        llm.step()
    return tokens_of([submission.output()])


def program(llm: LLM) -> str:
    state = State(llm, "the cat")
    state += gen("one", max_tokens=6, temperature=0.0)
    for branch in (branches := state.fork(2)):
        branch += gen("two", max_tokens=5, temperature=0.0)
    state.join(branches)
    return state.text


CALLS = {
    "generate": generate,
    "samples": lambda llm: tokens_of(
        llm.generate(PROMPTS[:3], SamplingParams(n=3, seed=1, max_tokens=9), use_tqdm=False)
    ),
    "chat": lambda llm: tokens_of(llm.chat([TALK, TALK], GREEDY, use_tqdm=False)),
    "stream": stream,
    "submit": submit,
    "beams": lambda llm: tokens_of(llm.beam_search(PROMPTS[:2], beam_width=3, max_tokens=8)),
    "program": program,
}


def start_inside_a_step(llm: LLM, call) -> threading.Thread:
    """Start `call` in a thread as soon as a step is computed, which ends when the thread waits for its turn."""
    execute, thread = llm.engine.runner.execute, threading.Thread(target=call, daemon=True)

    def first(output):
        llm.engine.runner.execute = execute
        thread.start()
        while not llm.engine.lock.num_waiting:
            time.sleep(0.001)
        return execute(output)

    llm.engine.runner.execute = first
    return thread


def test_two_threads_generate_in_the_same_steps(llm):
    halves = PROMPTS[:16], PROMPTS[16:]
    expected = [generate(llm, half) for half in halves]
    before, found = llm.engine.num_steps, []
    thread = start_inside_a_step(llm, lambda: found.append(generate(llm, halves[1])))
    assert generate(llm, halves[0]) == expected[0]
    thread.join()
    assert found == [expected[1]] and llm.engine.num_steps == before + 13  # the second call joins in the second step
    assert not (llm.engine.has_unfinished or llm.outputs.sinks)


def test_every_call_gets_its_own_whatever_other_threads_ask_for(llm):
    alone = {name: call(llm) for name, call in CALLS.items()}
    with ThreadPoolExecutor(2 * len(CALLS)) as pool:
        together = [(name, pool.submit(call, llm)) for name, call in [*CALLS.items()] * 2]
    assert [(name, found.result()) for name, found in together] == [*alone.items()] * 2
    assert not (llm.engine.has_unfinished or llm.outputs.sinks or llm.outputs.raw)


def test_a_failed_step_is_told_to_the_callers_of_all_threads(llm):
    execute, caught = llm.engine.runner.execute, []

    def fail_when_both_run(output):
        return 1 / 0 if len(llm.outputs.sinks) == 32 else execute(output)

    def call(prompts):
        try:
            generate(llm, prompts)
        except Exception as error:
            caught.append(error)

    llm.engine.runner.execute = fail_when_both_run
    thread = start_inside_a_step(llm, lambda: call(PROMPTS[16:]))
    call(PROMPTS[:16])
    thread.join()
    own, told = sorted(caught, key=lambda error: isinstance(error, RuntimeError))
    assert isinstance(own, ZeroDivisionError) and told.__cause__ is own and "another caller's step" in str(told)
    llm.engine.runner.execute = execute
    assert not llm.outputs.sinks and len(generate(llm)) == 32


def test_close_ends_the_calls_of_other_threads(llm):
    failures = []

    def other():
        with pytest.raises(RuntimeError, match="closed") as caught:
            generate(llm)
        failures.append(caught.value)

    thread = start_inside_a_step(llm, other)
    llm.submit(PROMPTS[0], GREEDY)
    llm.step()
    llm.close()
    thread.join()
    assert len(failures) == 1 and not llm.outputs.sinks


def test_abort_from_another_thread_ends_the_call(llm):
    def other():
        llm.engine.abort(*llm.engine.scheduler.requests)

    thread = start_inside_a_step(llm, other)
    outputs = llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
    thread.join()
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * 3 and not llm.engine.has_unfinished


def test_the_lock_goes_to_the_thread_that_has_waited_longest():
    lock, order = FairLock(), []

    def work(name):
        for _ in range(3):
            with lock, lock:
                order.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    with lock:
        for number, thread in enumerate(threads):
            thread.start()
            while lock.num_waiting <= number:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert "".join(order[:4]) == "abab" and sorted(order) == sorted("aaabbb") and lock.num_waiting == 0


@pytest.mark.parametrize("prompt", [0, 1])
def test_an_interrupt_while_tokens_are_handed_out_leaves_no_thread_without_its_own(llm, monkeypatch, prompt):
    """It hits the step's first token, or its last: then nothing is under way any more that another step could bring."""
    expected, add, main = generate(llm, PROMPTS[:2]), OutputSink.take, threading.get_ident()

    def interrupted(self, delta):
        if threading.get_ident() == main and self.request.prompt_token_ids == PROMPTS[prompt]["prompt_token_ids"]:
            raise KeyboardInterrupt
        return add(self, delta)

    monkeypatch.setattr(OutputSink, "take", interrupted)
    with ThreadPoolExecutor(1) as pool:
        with llm.lock:
            other = pool.submit(generate, llm, PROMPTS[1:2])
            while not llm.lock.num_waiting:
                time.sleep(0.01)
            mine = llm.submit(PROMPTS[0], GREEDY)
        while True:
            try:
                if not llm.step():
                    break
            except KeyboardInterrupt:
                break
        try:
            assert other.result(timeout=60) == expected[1:]
        except RuntimeError as error:
            assert "KeyboardInterrupt" in str(error) and "call again" in str(error)
    mine.withdraw()
    monkeypatch.undo()
    assert not llm.outputs.sinks and not llm.engine.has_unfinished
    assert generate(llm, PROMPTS[:2]) == expected


def test_a_stream_that_is_dropped_within_a_step_is_withdrawn_after_it(llm, monkeypatch):
    """Python drops a generator that stands in a circle wherever it happens to collect garbage."""
    expected, reader, allocate = generate(llm), llm.stream("the dog", GREEDY), llm.engine.kv_cache.allocate_slots
    next(reader), next(reader)
    dropped = []

    def collect(*args):
        if not dropped:
            dropped.append(reader.close())
            assert llm.engine.has_unfinished and len(llm.outputs.sinks) == 33, "in the middle of the step"
        return allocate(*args)

    monkeypatch.setattr(llm.engine.kv_cache, "allocate_slots", collect)
    assert generate(llm) == expected
    assert dropped and not llm.outputs.sinks and not llm.engine.has_unfinished


def test_what_a_finalizer_asks_for_waits_for_nothing():
    """Whatever the lock is at: taken, in this very thread too, or being handed over."""
    lock, done = FairLock(), []
    lock.call_soon(lambda: done.append("free"))
    assert done == ["free"]
    with lock:
        lock.call_soon(lambda: done.append("taken"))
        assert done == ["free"]
    assert done == ["free", "taken"]
    with lock._guard:
        lock.call_soon(lambda: done.append("handed over"))
    with lock:
        pass
    assert done[2:] == ["handed over"]
