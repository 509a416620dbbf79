"""The drawings of chapter 06 and what it writes down of an engine's steps: what they tell, in words."""

from __future__ import annotations

from types import SimpleNamespace

from minillm import LLM, SamplingParams
from minillm.book import paging_figures
from minillm.book.pool_watch import state_of, watch


def test_the_idea_shows_tables_a_pool_and_a_copy_on_write():
    alt = paging_figures.table_and_pool().alt
    assert "table of request A lists blocks 2, 5 and 4" in alt and "block 3 is free" in alt
    assert "share the full block 1" in alt and "B writes into a copy, block 3" in alt


def test_a_memory_map_shows_every_state():
    picture = paging_figures.memory_maps({"left": [0, 1, 2, 3, 4] * 60, "right": [4] * 300}, "two maps of 300 KV slots")
    assert picture.alt == "two maps of 300 KV slots"


def test_a_pool_is_told_with_its_tables():
    blocks = {1: ("A", ["Once", "upon"]), 3: ("B", ["Hello"])}
    tables, told = {"A": (1,), "B": (3,), "C": ()}, {"A": "", "B": "", "C": "waiting"}
    alt = paging_figures.pool_and_tables(blocks, tables, told, "Step 2").alt
    assert "12 blocks of 4 KV slots, and 3 block tables. Step 2: A [1]; B [3]; C waiting." in alt


def test_the_figures_carry_their_numbers():
    pieces = {"the limit": (23.4, 7.0)}
    alt = paging_figures.block_sizes([1, 16, 256], [99.0, 97.6, 78.3], [99.0, 97.5, 78.0], [33, 32, 25], pieces).alt
    assert "from 99% and 33 with blocks of 1 to 78% and 25 with blocks of 256" in alt
    beams = [(1, 2), (1, 3)]
    assert "2 beams" in paging_figures.beam_tables(beams, {1: 2, 2: 1, 3: 1}, "Step 1: 3 blocks instead of 4").alt
    assert "equal at 20 tokens" in paging_figures.crossover(100.0, 20.0, 1600.0, "a model").alt
    assert "equal at inf" in paging_figures.crossover(10.0, 20.0, 1600.0, "a model").alt  # swapping never wins


def test_the_measured_figures_say_what_they_draw():
    seconds = {1: (0.009, 0.0091, 0.0089), 16: (0.0012, 0.0012, 0.0013)}
    assert "attention in one layer against block size" in paging_figures.attention_by_block(seconds, 0.0005).alt
    measured = {"recompute": {16: 0.01, 64: 0.02}, "swap": {16: 0.001, 64: 0.001}}
    alt = paging_figures.back_in_place(measured, [16, 64], {"recompute": [0.01, 0.02], "swap": [0.001, 0.001]}).alt
    assert "recomputed and swapped, measured over predictions" in alt


def test_the_watch_sees_every_step_and_leaves_the_engine_as_it_was():
    llm = LLM("tinyworld", dtype="float32", block_size=4, num_kv_blocks=16, async_scheduling=False)
    with watch(llm) as steps:
        [out] = llm.generate("Once upon a time", SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert sum(step.tokens for step in steps) == len(out.prompt_token_ids) + 5  # the last token is only sampled
    assert all(step.used == len(step.tables[out.request_id]) for step in steps)
    assert "schedule" not in vars(llm.engine.scheduler)


def test_the_state_of_a_request_in_words():
    def step(tables=(), preempted=(), waiting=()):
        return SimpleNamespace(tables=dict.fromkeys(tables), preempted=preempted, waiting=waiting)

    steps = [step(waiting=["r"]), step(["r"]), step(preempted=["r"], waiting=["r"]), step(waiting=["r"]), step()]
    assert [state_of("r", steps, i) for i in range(5)] == ["waiting", "", "preempted", "preempted, waits", "finished"]
