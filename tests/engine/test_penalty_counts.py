"""What penalties count is kept for the requests that go on, and always what counting the texts anew gives."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, strategies as st

from minillm import LLM, SamplingParams
from minillm.engine.request import Request
from minillm.sampling.metadata import SamplingMetadata, SamplingRow
from tests.helpers.speculating import NGRAM
from tests.helpers.tiny import VOCAB_SIZE, examples, save_tiny_llama

SETTINGS = {
    "plain": {},
    "few blocks": dict(num_kv_blocks=14),
    "swap": dict(num_kv_blocks=14, preemption_mode="swap", host_kv_bytes=2**20),
    "chunks": dict(max_num_batched_tokens=9),
    "ahead": dict(async_scheduling=True),
    "ahead, few blocks": dict(async_scheduling=True, num_kv_blocks=14),
    "drafts": dict(speculative_config=NGRAM),
}
PENALTIES = dict(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tiny_llama(path, eos_token_id=1)
    return path


def make(folder, **settings) -> LLM:
    return LLM(folder, device="cpu", dtype="float32", block_size=4, max_model_len=48, max_num_seqs=5, **settings)


class Watched:
    """The sampler of a runner, which checks each batch's counts before it draws."""

    def __init__(self, llm: LLM):
        self.runner, self.batches, self.num_kept = llm.engine.runner, [], 0
        self.sample, self.runner.sampler.sample = self.runner.sampler.sample, self.checked

    def checked(self, logits, metadata):
        self.batches.append(metadata)
        if (counts := metadata.counts) is not None:
            anew = SamplingMetadata(metadata.rows, VOCAB_SIZE).counts
            # A token in flight when the batch was built is in the text by now; its row is not kept for the next batch.
            certain = [at for at, length in enumerate(counts.lengths) if length >= 0 or not counts.num_advanced]
            assert torch.equal(counts.in_prompt[certain], anew.in_prompt[certain])
            assert torch.equal(counts.output_counts[certain], anew.output_counts[certain])
            self.num_kept += len(counts.rows) - len(counts.fresh)
        return self.sample(logits, metadata)


def random_request(rng: random.Random, name: str) -> Request:
    temperature = rng.choice([0.0, 2.0])
    settings = dict(temperature=temperature, seed=rng.randrange(9), n=rng.choice([1, 1, 3]) if temperature else 1)
    settings["ignore_eos"] = rng.random() < 0.7
    settings |= {key: value for key, value in PENALTIES.items() if rng.random() < 0.6}
    if rng.random() < 0.2:
        settings["structured_outputs"] = {"regex": "[ab]{3}cde[fg]+", "jump_forward": rng.random() < 0.7}
        settings["ignore_eos"] = False
    elif rng.random() < 0.2:
        settings["logprobs"] = 1
    max_tokens = rng.randint(1, 20)
    params = SamplingParams(**settings, max_tokens=max_tokens)
    prompt = rng.choices(range(5, 12), k=rng.randint(1, 12))
    return Request(name, prompt, params, max_tokens, seed=rng.randrange(99), eos_token_ids=frozenset([1]))


def disturb(rng: random.Random, engine) -> None:
    """What may come between two steps."""
    alive, running = list(engine.scheduler.requests.values()), engine.scheduler.running
    what = rng.choice(["abort", "preempt", "fork", "rewrite", "announce"])
    if not alive or engine.in_flight is not None:
        return
    chosen = rng.choice(alive)
    if what == "abort":
        engine.abort(chosen.request_id)
    elif what == "preempt" and running:
        engine.scheduler.preempt(rng.choice(running))
    elif what == "fork" and chosen.output_token_ids and not chosen.num_forks and chosen.params.n == 1:
        index = 1 + rng.randrange(10**6)
        if len(alive) < 8 and f"{chosen.group_id}_{index}" not in engine.scheduler.requests:
            engine.scheduler.fork(chosen, index)
    elif what == "rewrite" and chosen.output_token_ids:  # as a beam that goes on from another one's text
        if chosen.params.structured_outputs is None and chosen.num_computed_tokens < len(chosen.token_ids):
            chosen.token_ids[-1] = chosen.output_token_ids[-1] = rng.randrange(5, 12)
            engine.announcer.forget([chosen])
    elif what == "announce":
        engine.announcer.forget([chosen])


@pytest.mark.parametrize("settings", SETTINGS)
def test_kept_counts_are_those_of_the_texts_whatever_happens(folder, settings):
    llm = make(folder, **SETTINGS[settings])
    engine, watched = llm.engine, Watched(llm)

    @examples(8)
    @given(st.integers(0, 2**32))
    def run(seed):
        rng = random.Random(seed)
        for step in range(40):
            if rng.random() < 0.3 and len(engine.scheduler.requests) < 9:
                engine.add_request(random_request(rng, f"{seed}-{step}"))
            if rng.random() < 0.2:
                disturb(rng, engine)
            engine.step()
        while engine.has_unfinished:
            engine.step()

    run()
    assert watched.num_kept


@pytest.mark.parametrize("waited", [(0, 1), (1, 0), (0,), (1,), ()], ids=str)
def test_a_step_that_is_computed_twice_keeps_no_wrong_count(folder, waited):
    """Also where the host hears of one of the two alone, and they have drawn different tokens."""
    llm = make(folder)
    engine = llm.engine
    for name in "ab":
        params = SamplingParams(temperature=0.0, **PENALTIES, max_tokens=20, ignore_eos=True)
        engine.add_request(Request(name, [5, 6, 7, 5], params, 20))
    engine.step(), engine.step()
    output = engine._schedule()
    watched = Watched(llm)
    launched = [engine.runner.launch(output)]
    watched.sample = lambda logits, metadata, sample=watched.sample: sample(-logits, metadata)
    launched.append(engine.runner.launch(output))
    drawn = [step.sampled.token_ids.tolist() for step in launched]
    assert drawn[0] != drawn[1]
    for place in waited:
        launched[place].wait()
    rows = [row._replace(start=row.start + 1, block_ids=()) for row in output.rows[:1]]
    for _ in range(3):
        output.rows, output.arrived, output.finished = rows, [], []
        engine.runner.execute(output)
        rows = [row._replace(start=row.start + 1) for row in rows]


def test_a_text_is_read_once_while_others_come_and_go(folder):
    """In each step a request joins, and the one that has run longest leaves."""
    llm = make(folder, max_num_batched_tokens=64)
    engine, watched = llm.engine, Watched(llm)
    lengths = [9, 4, 12, 7, 5, 11, 6, 8]
    for at, length in enumerate(lengths):
        params = SamplingParams(temperature=0.0, **PENALTIES, max_tokens=4, ignore_eos=True)
        engine.add_request(Request(str(at), [5 + at] * length, params, 4))
        engine.step()
    read = [metadata.counts.num_tokens_read for metadata in watched.batches]
    assert read == lengths
    assert all(len(metadata.rows) == 4 for metadata in watched.batches[3:])


def row(prompt: list[int], output: list[int], position: int | None = None) -> SamplingRow:
    return SamplingRow(SamplingParams(repetition_penalty=1.5), 0, prompt, output, frozenset(), position)


def test_only_a_row_whose_text_is_certain_goes_on():
    prompt, output = [1, 2], [3]
    before = SamplingMetadata([row(prompt, output), row([4], ended := [5], 2), row(prompt, output)], 9)

    def kept(*rows: SamplingRow) -> list[int | None]:
        return SamplingMetadata(rows, 9, last=before).counts.sources

    assert kept(row(prompt, output), row([4], ended)) == [0, None]  # of the second a token was on its way
    before.advance(torch.tensor([6, 7, 8]))
    output.append(6)
    assert kept(row(prompt, output)) == [None]  # the host does not know yet what was drawn
    before.counts.arrived()
    assert kept(row([4], [5]), row(prompt, output), row(prompt, list(output))) == [None, 0, None]
    assert kept(row([1, 2], output)) == [None]
    output.append(7)  # another one than was drawn
    assert kept(row(prompt, output)) == [None]
