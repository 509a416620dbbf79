"""Drafters in the engine: bad ones, wrong ones, failing ones, and a draft model with its own cache."""

from __future__ import annotations

import random

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.engine.engine import Engine
from minillm.engine.request import Request
from minillm.speculative.draft_model import ModelDrafter
from minillm.speculative.drafter import Draft
from minillm.staging import Download
from tests.helpers.kernel_cases import needs_triton
from tests.helpers.speculating import PROMPTS, make, say, tokens, write_models
from tests.helpers.tiny import VOCAB_SIZE, save_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


class BadDrafter:
    """Guesses of any length, of nothing in particular."""

    def __init__(self, vocab_size=VOCAB_SIZE):
        self.rng, self.vocab_size, self.forgotten = random.Random(0), vocab_size, []

    def propose(self, requests, counts):
        return [Draft([self.rng.randrange(self.vocab_size) for _ in range(self.rng.randint(0, 9))]) for _ in requests]

    def forget(self, request_id):
        self.forgotten.append(request_id)


@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(num_kv_blocks=9, block_size=4),
        dict(max_num_batched_tokens=5),
        dict(num_kv_blocks=9, block_size=4, preemption_mode="swap", host_kv_bytes=10**6),
    ],
)
def test_bad_guesses_change_nothing(folder, settings):
    params = [SamplingParams(max_tokens=16, ignore_eos=True, temperature=i % 2, seed=i) for i in range(len(PROMPTS))]
    expected = tokens(say(make(folder, None), params))
    llm = make(folder, None, **settings)
    engine = Engine(llm.model, config=llm.config, drafter=BadDrafter(), trace=llm.trace, num_speculative_tokens=6)
    llm.engine, llm.trace.enabled = engine, True
    for _ in range(2):
        outputs = say(llm, params)
        assert tokens(outputs) == expected
    if "num_kv_blocks" in settings:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    if "max_num_batched_tokens" in settings:
        assert max(llm.trace.totals("tokens").values()) <= 5
    assert engine.speculation.metrics.num_draft_tokens > 10
    assert settings or len(engine.speculation.metrics.drafted_per_position) == 6
    say(llm, params[:1], PROMPTS[:1])
    assert len(engine.runner.drafter.forgotten) >= 8


def test_guesses_do_not_preempt_anybody(folder):
    params = [SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0) for count in (2, 7, 7)]
    prompts = [[5 + i, 6, 7, 8, 9] for i in range(3)]
    # The others' third blocks are there when the first has ended.
    llm = make(folder, None, num_kv_blocks=7, block_size=4)
    llm.engine = Engine(llm.model, config=llm.config, drafter=Always())
    outputs = say(llm, params, prompts)
    assert sum(output.metrics.num_preemptions for output in outputs) == 0
    assert llm.engine.speculation.metrics.num_draft_tokens > 0


class Always(BadDrafter):
    def propose(self, requests, counts):
        return [Draft([1] * count) for count in counts]


def test_a_drafter_that_breaks_the_rules_is_named(folder):
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    llm = make(folder, None)
    llm.engine = Engine(llm.model, config=llm.config, drafter=BadDrafter(10**6))
    with pytest.raises(ValueError, match=r"BadDrafter drafted token id .* the vocabulary has 300 tokens"):
        say(llm, params)
    assert not llm.engine.has_unfinished
    drafter = llm.engine.runner.drafter
    for given, error, says in (
        (lambda requests: [], ValueError, r"BadDrafter.propose returned \[\] for"),
        (lambda requests: None, ValueError, "BadDrafter.propose returned None for"),
        (lambda requests: [[1, 2]] * len(requests), TypeError, r"BadDrafter drafted \[1, 2\]; allowed: a Draft"),
        (
            lambda requests: [Draft([1.0])] * len(requests),
            TypeError,
            "BadDrafter drafted token id 1.0; allowed: whole numbers",
        ),
        (
            lambda requests: [Draft([1, 2], torch.ones(1, 300))] * len(requests),
            ValueError,
            r"shape \(1, 300\) for 2 tokens; allowed: \(2, 300\)",
        ),
    ):
        drafter.propose = lambda requests, counts, given=given: given(requests)
        with pytest.raises(error, match=says):
            say(llm, params)
        assert not llm.engine.has_unfinished
    llm.engine.runner.drafter.propose = lambda requests, counts: [Draft() for _ in requests]
    assert tokens(say(llm, params)) == tokens(say(make(folder, None), params))


class Uniform(BadDrafter):
    """Draws by chance of its own, for every request, and says so."""

    def propose(self, requests, counts):
        draws = [[self.rng.randrange(VOCAB_SIZE) for _ in range(count)] for count in counts]
        return [Draft(draw, torch.full((len(draw), VOCAB_SIZE), 1 / VOCAB_SIZE)) for draw in draws]


def test_probs_of_a_draft_count_for_unseeded_requests_only(folder):
    params = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=i % 2, seed=i) for i in range(3)]
    mixed = [*params, SamplingParams(max_tokens=12, ignore_eos=True)]
    llm = make(folder, None)
    expected = tokens(say(llm, params, PROMPTS[:3]))
    llm.engine = Engine(llm.model, config=llm.config, drafter=Uniform())
    assert tokens(say(llm, mixed))[:3] == expected
    assert tokens(say(llm, params, PROMPTS[:3])) == expected
    forbidden = SamplingParams(max_tokens=12, structured_outputs={"regex": "x[abc]+"})
    with pytest.raises(ValueError, match=r"Uniform gives probs for token .* which the request's grammar forbids"):
        say(llm, forbidden)


def test_a_drafter_that_fails_or_an_id_used_again_leaves_nothing_behind(folder):
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    llm = make(folder, "perfect")
    drafter = llm.engine.runner.drafter
    forward = drafter.forward
    drafter.forward = lambda rows, token_ids: 1 / 0
    with pytest.raises(ZeroDivisionError):
        say(llm, params)
    drafter.forward = forward
    llm.engine.step()
    assert not drafter.states and drafter.manager.pool.num_free == drafter.manager.pool.num_blocks
    for speculation in ("ngram", "perfect"):
        engine = make(folder, speculation).engine
        for prompt in ([5, 6, 7, 8] * 6, [5, 6]):
            request = Request("a", prompt, params, 8, arrival_time=0.0)
            engine.add_request(request)
            while engine.has_unfinished:
                engine.step()
            assert request.output_token_ids == say(make(folder, None), params, [prompt])[0].outputs[0].token_ids


# In Triton the steps are recorded.
@pytest.mark.parametrize("backend", ["auto", pytest.param("triton", marks=needs_triton)])
def test_guesses_are_waited_for_once_a_step(tmp_path, backend, monkeypatch):
    """Requests that may guess equally many: the second to fourth guess are computed from tokens the host has not
    seen."""
    save_tiny_llama(tmp_path / "target", head_dim=16)
    llm, waits, asked = make(tmp_path, "perfect", attention_backend=backend), [], []
    monkeypatch.setattr(Download, "wait", lambda self, wait=Download.wait: (waits.append(self), wait(self))[1])
    drafter = llm.engine.runner.drafter
    propose = drafter.propose

    def watched(requests, counts):
        before = len(waits)
        drafts = propose(requests, counts)
        asked.append((counts, len(waits) - before, [len(draft.token_ids) for draft in drafts]))
        return drafts

    monkeypatch.setattr(drafter, "propose", watched)
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    outputs = say(llm, params, [[5, 6, 7], [8, 9, 10, 11, 12]])
    assert tokens(outputs) == tokens(say(make(tmp_path, None), params, [[5, 6, 7], [8, 9, 10, 11, 12]]))
    assert asked and all(num_waits == len({*counts} - {0}) and sizes == counts for counts, num_waits, sizes in asked)
    assert max(counts[0] for counts, _, _ in asked) > 1


def test_a_draft_model_without_room_drafts_for_whom_it_can(folder):
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    llm = make(folder, "perfect", block_size=4, num_kv_blocks=60)
    drafter = llm.engine.runner.drafter
    assert isinstance(drafter, ModelDrafter)
    taken = drafter.manager.pool.allocate(45)
    assert tokens(say(llm, params)) == tokens(say(make(folder, None), params))
    assert 0 < llm.engine.speculation.metrics.num_draft_tokens < 4 * 29
    drafter.manager.pool.free(taken)
    say(llm, params)
    llm.engine.step()  # whoever has finished is forgotten before the next step
    assert not drafter.states and drafter.manager.pool.num_free == 60


def test_a_draft_model_shares_prefixes_too(folder):
    """The second request reads only what is new of its prompt, and guesses as well as the first."""
    llm = make(folder, "perfect", block_size=4)
    runner_rows, drafter = [], llm.engine.runner.drafter
    forward = drafter.forward

    def counted(rows, token_ids):
        runner_rows.extend(row.num_tokens for row in rows)
        return forward(rows, token_ids)

    drafter.forward = counted
    params = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.0)
    prompt = [5 + i % 7 for i in range(40)]
    first = say(llm, params, [prompt])
    assert max(runner_rows) == 41
    runner_rows.clear()
    assert tokens(say(llm, params, [prompt])) == tokens(first) and max(runner_rows) <= 4 + 1
    runner_rows.clear()
    [salted] = llm.generate({"prompt_token_ids": prompt, "cache_salt": "a"}, params, use_tqdm=False)
    assert [salted.outputs[0].token_ids] == tokens(first)[0] and max(runner_rows) == 41
    assert llm.engine.speculation.metrics.acceptance_rate == 1


def test_a_draft_model_reads_long_prompts_in_pieces_and_stops_where_it_was_not_trained(folder, tmp_path):
    save_tiny_llama(tmp_path / "short", max_position_embeddings=40)
    prompts = [[5 + i % 7 for i in range(30)], [60 + i % 11 for i in range(25)]]
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    spec = {"method": "draft_model", "model": tmp_path / "short"}
    llm = LLM(folder / "target", device="cpu", dtype="float32", max_num_batched_tokens=11, speculative_config=spec)
    assert tokens(say(llm, params, prompts)) == tokens(say(make(folder, None), params, prompts))
    metrics = llm.engine.speculation.metrics
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 10  # the same weights
    assert metrics.num_draft_tokens < 2 * 29 * 4 // 5


def test_memory_is_shared_with_the_draft_model(folder, monkeypatch):
    """Both caches and the draft's weights come out of what there is."""
    from minillm.engine import sizing

    monkeypatch.setattr(sizing, "CPU_CACHE_BYTES", 10**6)
    settings = dict(block_size=4, max_num_seqs=10**6, max_model_len=20)
    alone, both = (make(folder, speculation, **settings) for speculation in (None, "perfect"))
    block = sizing.block_bytes_of(alone.model, 4)
    weights = alone.model.config.num_parameters() * 4
    assert alone.engine.kv_cache.pool.num_blocks == 10**6 // block
    assert both.engine.kv_cache.pool.num_blocks == (10**6 - weights) // (2 * block)
    drafter = both.engine.runner.drafter
    assert drafter.manager.pool.num_blocks == both.engine.kv_cache.pool.num_blocks


def test_a_draft_model_with_other_tokens_is_refused(folder):
    with pytest.raises(ValueError, match="has a vocabulary of 301 tokens, the model has 300"):
        LLM(folder / "target", device="cpu", speculative_config={"method": "draft_model", "model": folder / "other"})
    with pytest.raises(ValueError, match="kv_retention does not"):
        LLM(
            folder / "target",
            kv_retention={"sinks": 1, "window": 8},
            speculative_config={"method": "draft_model", "model": folder / "noisy"},
        )
