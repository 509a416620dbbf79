"""The drawings and the traces of chapter 07: what they tell, and what a replay counts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from minillm import LLM, SamplingParams
from minillm.book import prefix_figures
from minillm.book.prefix_traces import Turn, best_of_all, chats, offline_optimum, prefill_tokens, replay


def test_the_idea_shows_a_chain_a_pool_and_two_hits():
    alt = prefix_figures.chain_and_pool().alt
    assert "a hash of its tokens and of the hash before" in alt and "owns blocks 4 and 1 too" in alt


def test_the_moments_tell_owners_and_places():
    state = prefix_figures.BlockState
    alt = prefix_figures.moments([("A ends", [state("S0", 0, 2), state("S1", 2, 0), state("", 0, 1)])]).alt
    assert "A ends: S0 (no. 2), S1 (2), empty (no. 1)" in alt


def test_the_figures_carry_their_numbers():
    curves = {"optimum": {0: [60.0, 80.0]}, "LRU": {0: [41.0, 79.0]}}
    alt = prefix_figures.hits([75, 600], curves, {0: 80.0}, 260).alt
    assert "0 shared tokens: optimum 60% to 80%, LRU 41% to 79%, at most 80%" in alt
    alt = prefix_figures.agent_loop([4000, 4600], [0, 4000]).alt
    assert "2 prompts of an agent loop, from 4,000 to 4,600 tokens; all but the last 600" in alt
    assert prefix_figures.lifetimes([0, 1], [0.2, 1.25], 0.25, "dear from 0.06 on").alt == "dear from 0.06 on"


def test_measured_figures_need_only_numbers():
    quartiles = ([9.0, 4.0], [10.0, 5.0], [12.0, 6.0])
    alt = prefix_figures.time_to_first_token([0, 512], quartiles, 528, lambda cached: 6 - cached / 100).alt
    assert "falls in proportion to what is left to compute" in alt
    shares = {"temperature 2.0": np.array([[50, 6], [91, 7]])}
    assert "number of votes" in prefix_figures.votes([1, 16], shares, 97.0, 2161, 2161).alt
    assert "none in the first layer" in prefix_figures.changed_values(np.array([[0.0, 0.0], [0.1, 0.4]])).alt


def test_the_offline_optimum_is_what_a_search_finds_and_lru_never_more():
    rng = random.Random(1)
    for room in (4, 5) * 5:
        trace = [Turn([rng.randint(0, 1) for _ in range(rng.randint(2, 6))], [rng.randint(0, 1)] * 2) for _ in range(6)]
        found = sum(offline_optimum(trace, room, 2))
        assert found == best_of_all(trace, room, 2) >= sum(replay(trace, room, 2))


def test_a_chat_begins_with_all_of_the_turn_before():
    trace = chats(32, num_chats=3, num_turns=4)
    assert len(trace) == 12 and len({tuple(turn.prompt[:32]) for turn in trace}) == 1
    longer = [turn for turn in trace if len(turn.prompt) > 32 + 60]
    assert all(any(turn.prompt[: len(old.prompt + old.answer)] == old.prompt + old.answer for old in trace)
               for turn in longer)  # fmt: skip


def test_a_replay_counts_whole_blocks_and_never_the_last_token():
    turns = [Turn(list(range(8)), [90, 91]), Turn(list(range(8)), [92, 93]), Turn(list(range(9)), [94, 95])]
    assert replay(turns, 16, block_size=4) == [0, 4, 8]
    with pytest.raises(ValueError, match="cannot hold turn 0"):
        replay(turns, 2, block_size=4)


def test_prompt_tokens_that_are_computed():
    llm = LLM("tinyworld", dtype="float32", block_size=4, num_kv_blocks=64)
    prompt = {"prompt_token_ids": llm.get_tokenizer().encode("Once upon a time there was a fox who")[:9]}
    once = SamplingParams(max_tokens=3, temperature=0.0)
    assert prefill_tokens(llm, lambda: llm.generate(prompt, once, use_tqdm=False)) == 9
    assert prefill_tokens(llm, lambda: llm.generate(prompt, once, use_tqdm=False)) == 1
