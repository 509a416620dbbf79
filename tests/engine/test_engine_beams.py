"""Beam search over the engine: blocks are shared, little memory and a small batch only cost time."""

from __future__ import annotations

import pytest

from minillm import LLM
from tests.helpers.tiny import VOCAB_SIZE, save_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(folder, eos_token_id=VOCAB_SIZE - 1)
    return str(folder)


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(folder, device="cpu")


def test_beams_share_blocks_and_copy_what_they_write(llm):
    llm.trace.enabled = True
    llm.trace.clear()
    llm.engine.kv_cache.pool.evict_all()
    prompt = {"prompt_token_ids": [7 + i % 40 for i in range(100)]}
    llm.beam_search(prompt, beam_width=4, max_tokens=10, ignore_eos=True)
    llm.trace.enabled = False
    assert sum(llm.trace.totals("tokens").values()) <= 100 + 4 * 10 + 10  # the prompt once, not for every beam
    assert sum(llm.trace.totals("copies").values()) > 0
    # 100 tokens in blocks of 16, and the beams' own ends
    assert max(llm.trace.totals("blocks used").values()) <= 6 + 4 * 2
    assert not llm.engine.has_unfinished


def test_beams_say_the_same_when_memory_is_short(folder, llm):
    prompt = {"prompt_token_ids": list(range(10, 30))}
    roomy = llm.beam_search(prompt, beam_width=4, max_tokens=12, ignore_eos=True)[0].outputs
    for mode, host in (("recompute", 0), ("swap", 10**6)):
        tight = LLM(folder, device="cpu", block_size=4, num_kv_blocks=12, preemption_mode=mode, host_kv_bytes=host)
        short = tight.beam_search(prompt, beam_width=4, max_tokens=12, ignore_eos=True)[0].outputs
        assert [beam.token_ids for beam in short] == [beam.token_ids for beam in roomy]


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
@pytest.mark.parametrize("limits", [
    dict(num_kv_blocks=8, block_size=4),
    dict(num_kv_blocks=32, block_size=1),
    dict(max_model_len=32),
    dict(max_model_len=32, max_num_batched_tokens=32, enable_chunked_prefill=False),
    dict(max_num_seqs=1),
    dict(max_num_seqs=3),
], ids=str)  # fmt: skip
def test_beams_that_fill_the_limits_exactly_are_served(folder, llm, limits, preemption_mode):
    """20 + 12 tokens. No two beams need fit side by side: those at rest make room for those that are not."""
    prompt = {"prompt_token_ids": list(range(10, 30))}
    roomy = llm.beam_search(prompt, beam_width=4, max_tokens=12, ignore_eos=True)[0].outputs
    host_kv_bytes = 10**6 if preemption_mode == "swap" else 0
    tight = LLM(folder, device="cpu", preemption_mode=preemption_mode, host_kv_bytes=host_kv_bytes, **limits)
    step, left = tight.engine.step, iter(range(1000))

    def counted():
        assert next(left, None) is not None, "1000 steps and no end"
        return step()

    tight.engine.step = counted
    exact = tight.beam_search(prompt, beam_width=4, max_tokens=12, ignore_eos=True)[0].outputs
    assert [beam.token_ids for beam in exact] == [beam.token_ids for beam in roomy]
    assert not tight.engine.has_unfinished
    tight.engine.scheduler.check_integrity()


def test_a_search_whose_request_is_aborted_ends_with_an_error(llm, monkeypatch):
    prompt = {"prompt_token_ids": [7 + i for i in range(20)]}
    step, steps = llm.engine.step, []

    def aborting():
        steps.append(len(steps))
        assert len(steps) < 20, "the search waits for ever"
        deltas = step()
        if len(steps) == 3:
            llm.engine.abort(next(iter(llm.engine.scheduler.requests)))
        return deltas

    monkeypatch.setattr(llm.engine, "step", aborting)
    with pytest.raises(RuntimeError, match="aborted in the middle of its beam search"):
        llm.beam_search(prompt, beam_width=2, max_tokens=10, ignore_eos=True)
    monkeypatch.undo()
    assert not llm.engine.has_unfinished and not llm.engine.kv_cache.tables
    assert len(llm.beam_search(prompt, beam_width=2, max_tokens=4, ignore_eos=True)[0].outputs) == 2
