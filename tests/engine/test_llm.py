"""LLM from end to end: transformers' tokens, seeds, stops, streams, log-probabilities, beams, chats."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from minillm import LLM, SamplingParams
from minillm.engine.outputs import RequestOutput
from tests.helpers.tiny import VOCAB_SIZE, save_tiny_llama, seeded

PROMPTS = ["the cat", "日本 10 crêpes", "😀", "then the naïve cat ate the mat, the mat, the mat"]
EOS = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tiny-llama")


@pytest.fixture(scope="module")
def oracle(folder):
    return save_tiny_llama(folder)


@pytest.fixture(scope="module")
def llm(folder, oracle) -> LLM:
    return LLM(str(folder), device="cpu")


def ask(llm: LLM, prompts, **params) -> list[RequestOutput]:
    return llm.generate(prompts, SamplingParams(**params), use_tqdm=False)


def one(llm: LLM, prompt="the cat", **params):
    return ask(llm, prompt, **params)[0].outputs[0]


def test_greedy_tokens_equal_transformers(llm, oracle):
    for output in ask(llm, PROMPTS, temperature=0.0, max_tokens=40):
        ids = torch.tensor([output.prompt_token_ids])
        expected = oracle.generate(ids, do_sample=False, max_new_tokens=40)[0, ids.shape[1] :].tolist()
        assert output.outputs[0].token_ids == expected


def test_logprobs_equal_the_log_softmax_of_transformers_logits(llm, oracle):
    params = dict(temperature=0.7, seed=3, top_k=30, repetition_penalty=1.5, max_tokens=12, ignore_eos=True)
    [output] = ask(llm, PROMPTS[3], logprobs=4, prompt_logprobs=2, **params)
    sample, prompt_len = output.outputs[0], len(output.prompt_token_ids)
    ids = output.prompt_token_ids + sample.token_ids
    with torch.inference_mode():
        reference = oracle(torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)  # [num_tokens, vocab_size]

    assert len(output.prompt_logprobs) == prompt_len and output.prompt_logprobs[0] is None
    assert len(sample.logprobs) == len(sample.token_ids) == 12
    entries = [(position, row, 2) for position, row in enumerate(output.prompt_logprobs) if row]
    entries += [(prompt_len + step, row, 4) for step, row in enumerate(sample.logprobs)]
    assert len(entries) == len(ids) - 1
    for position, row, count in entries:
        best = reference[position - 1].topk(count).indices.tolist()
        assert next(iter(row)) == ids[position] and set(row) == {ids[position], *best}
        for token_id, entry in row.items():
            assert entry.logprob == pytest.approx(reference[position - 1, token_id].item(), abs=1e-4)
            text = llm.get_tokenizer().decode([token_id])
            # Half a character: tests/engine/test_logprob_texts.py.
            assert entry.decoded_token == text or text.endswith("\ufffd")
    total = sum(reference[prompt_len + step - 1, token].item() for step, token in enumerate(sample.token_ids))
    assert sample.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_prompt_logprobs_of_a_prompt_in_many_chunks_equal_those_in_one(llm, monkeypatch):
    [whole] = ask(llm, PROMPTS[3], temperature=0.0, prompt_logprobs=0)
    monkeypatch.setattr("minillm.engine.scheduler.PROMPT_LOGPROBS_CHUNK", 3)
    [chunked] = ask(llm, PROMPTS[3], temperature=0.0, prompt_logprobs=0)
    assert chunked.outputs[0].token_ids == whole.outputs[0].token_ids
    assert len(chunked.prompt_logprobs) == len(whole.prompt_logprobs) > 9
    for first, second in zip(chunked.prompt_logprobs[1:], whole.prompt_logprobs[1:]):
        assert first.keys() == second.keys()
        assert [e.logprob for e in first.values()] == pytest.approx([e.logprob for e in second.values()], abs=1e-4)


def test_no_logprobs_unless_asked(llm):
    [output] = ask(llm, "the cat")
    sample = output.outputs[0]
    assert (output.prompt_logprobs, sample.logprobs, sample.cumulative_logprob) == (None, None, None)


def test_a_seed_says_the_same_whatever_is_asked_beside_it(llm, folder):
    alone = one(llm, seed=11, max_tokens=20)
    other = SamplingParams(seed=5, temperature=2.0, n=2)
    asked = llm.generate(["😀", "the cat"], [other, SamplingParams(seed=11, max_tokens=20)], use_tqdm=False)
    assert asked[1].outputs[0].token_ids == alone.token_ids
    assert one(LLM(str(folder), device="cpu", seed=5), seed=11, max_tokens=20).token_ids == alone.token_ids
    assert one(llm, seed=12, max_tokens=20).token_ids != alone.token_ids


def test_without_a_seed_the_llms_seed_decides(folder, oracle):
    def say(seed: int) -> list[list[int]]:
        fresh = LLM(str(folder), device="cpu", seed=seed)
        return [output.outputs[0].token_ids for output in ask(fresh, ["the cat"] * 3, temperature=1.5)]

    first = say(0)
    assert first == say(0) != say(1)
    assert len({tuple(tokens) for tokens in first}) == 3  # requests of one LLM differ


def test_samples_differ_and_each_can_be_had_again(llm):
    params = dict(temperature=1.5, seed=4, max_tokens=10)
    three = ask(llm, "the cat", n=3, **params)[0].outputs
    assert [sample.index for sample in three] == [0, 1, 2]
    assert len({tuple(sample.token_ids) for sample in three}) == 3
    assert ask(llm, "the cat", n=3, **params)[0].outputs == three
    assert one(llm, **params).token_ids == three[0].token_ids
    five = ask(llm, "the cat", n=5, **params)[0].outputs
    assert [sample.token_ids for sample in five[:3]] == [sample.token_ids for sample in three]


def test_results_come_in_the_order_of_the_prompts(llm):
    prompts = [*PROMPTS, {"prompt_token_ids": [5, 6, 7]}, {"prompt": "the cat"}]
    outputs = ask(llm, prompts, temperature=0.0, max_tokens=5)
    assert [output.prompt for output in outputs] == [*PROMPTS, None, "the cat"]
    assert outputs[4].prompt_token_ids == [5, 6, 7]
    assert outputs[0].prompt_token_ids == outputs[5].prompt_token_ids == llm.get_tokenizer().encode("the cat")
    for prompt, output in zip(prompts, outputs):
        assert ask(llm, prompt, temperature=0.0, max_tokens=5)[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert len({output.request_id for output in outputs}) == 6
    assert ask(llm, []) == []


def test_each_prompt_may_have_its_own_parameters(llm):
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (1, 7, 3)]
    outputs = llm.generate(["the cat"] * 3, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 7, 3]


def test_metrics(llm):
    [output] = ask(llm, "the cat", max_tokens=4)
    metrics = output.metrics
    assert metrics.arrival_time < metrics.first_token_time <= metrics.finished_time
    assert 0 < metrics.ttft <= metrics.e2e_latency
    assert (metrics.num_cached_tokens, metrics.num_preemptions, output.finished) == (0, 0, True)


FORCE_EOS = {EOS: 100.0}


def test_end_of_sequence_stops_unless_ignored(llm):
    sample = one(llm, temperature=0.0, logit_bias=FORCE_EOS)
    assert (sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason) == ([EOS], "", "stop", None)
    sample = one(llm, temperature=0.0, logit_bias=FORCE_EOS, ignore_eos=True, max_tokens=5)
    assert (sample.token_ids, sample.finish_reason) == ([EOS] * 5, "length")


def test_all_end_of_sequence_ids_stop(tmp_path):
    save_tiny_llama(tmp_path, eos_token_id=[1, 40])
    llm = LLM(str(tmp_path), device="cpu")
    for token_id in (1, 40):
        sample = one(llm, temperature=0.0, logit_bias={token_id: 100.0})
        assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == ([token_id], "stop", None)


def test_min_tokens_holds_the_end_back(llm):
    sample = one(llm, temperature=0.0, logit_bias=FORCE_EOS, min_tokens=3)
    assert len(sample.token_ids) == 4 and sample.token_ids[-1] == EOS and EOS not in sample.token_ids[:3]


def test_stop_token_ids_end_the_text_and_are_no_part_of_it(llm):
    free = one(llm, temperature=0.0, max_tokens=20, ignore_eos=True)
    at = next(i for i in range(3, 20) if free.token_ids[i] not in free.token_ids[:i])
    token_id = free.token_ids[at]
    sample = one(llm, temperature=0.0, max_tokens=20, ignore_eos=True, stop_token_ids=[token_id])
    assert sample.token_ids == free.token_ids[: at + 1]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", token_id)
    assert sample.text == one(llm, temperature=0.0, max_tokens=at, ignore_eos=True).text


def test_stop_strings_over_token_borders(llm):
    params = dict(temperature=0.9, seed=2, max_tokens=60, ignore_eos=True)
    free = one(llm, **params)
    for start, length in ((5, 6), (11, 9), (20, 3)):
        stop = free.text[start : start + length]
        sample = one(llm, stop=[stop, "never there"], **params)
        assert sample.text == free.text[: free.text.find(stop)]
        assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
        assert sample.token_ids == free.token_ids[: len(sample.token_ids)]
        assert len(sample.token_ids) < 60


def test_max_tokens_and_max_model_len_bound_the_text(llm, folder):
    assert len(one(llm, temperature=0.0, ignore_eos=True, max_tokens=9).token_ids) == 9
    small = LLM(str(folder), device="cpu", max_model_len=20)
    for max_tokens in (None, 500):
        [output] = ask(small, "the cat", temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
        sample = output.outputs[0]
        assert len(output.prompt_token_ids) + len(sample.token_ids) == 20 and sample.finish_reason == "length"
    [output] = ask(small, {"prompt_token_ids": [5] * 19}, temperature=0.0, ignore_eos=True)
    assert len(output.outputs[0].token_ids) == 1


STREAMED = st.fixed_dictionaries(
    {"seed": st.integers(0, 50), "temperature": st.sampled_from([0.0, 0.8, 3.0]), "max_tokens": st.integers(1, 25)},
    optional={
        "stop": st.lists(st.sampled_from([" ", "t", "the", "a", "é", "�", ", th"]), min_size=1, max_size=3),
        "stop_token_ids": st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40),
        "ignore_eos": st.booleans(),
        "repetition_penalty": st.sampled_from([0.5, 1.5]),
        "logit_bias": st.just({EOS: 5.0}),
    },
)


@seeded
@given(STREAMED, st.sampled_from(PROMPTS))
def test_a_stream_says_what_generate_says(llm, params, prompt):
    sample = one(llm, prompt, **params)
    deltas = list(llm.stream(prompt, SamplingParams(**params)))
    assert "".join(delta.text for delta in deltas) == sample.text
    assert [token_id for delta in deltas for token_id in delta.token_ids] == sample.token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [sample.finish_reason]
    assert all(stop not in sample.text for stop in params.get("stop", ()))


def test_the_text_is_that_of_the_tokens(llm):
    for prompt in PROMPTS:
        sample = one(llm, prompt, seed=1, temperature=3.0, max_tokens=60, ignore_eos=True)
        assert sample.text == llm.get_tokenizer().decode(sample.token_ids, skip_special_tokens=True)


def test_streams_may_take_turns(llm):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    turns = list(zip(*(llm.stream(prompt, params) for prompt in PROMPTS[:2])))
    for column, output in enumerate(expected):
        assert [turn[column].token_ids[0] for turn in turns] == output.outputs[0].token_ids


def test_chat_uses_the_template_and_one_begin_token(llm):
    conversation = [{"role": "user", "content": "the cat"}]
    params = SamplingParams(temperature=0.0, max_tokens=6)
    [answer] = llm.chat(conversation, params, use_tqdm=False)
    text = "<|begin|><|user|>user: the cat<|user|>assistant:"
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    assert (answer.prompt, answer.prompt_token_ids, ids.count(0)) == (text, ids, 1)
    expected = ask(llm, {"prompt_token_ids": ids}, temperature=0.0, max_tokens=6)[0].outputs[0].token_ids
    assert answer.outputs[0].token_ids == expected
    several = llm.chat([conversation, conversation * 2], params, use_tqdm=False)
    assert [output.prompt.count("the cat") for output in several] == [1, 2]


def test_beam_search_equals_transformers(llm, oracle):
    for output in llm.beam_search(PROMPTS[:2], beam_width=3, max_tokens=8, ignore_eos=True, length_penalty=1.0):
        ids = torch.tensor([output.prompt_token_ids])
        expected = oracle.generate(
            ids, num_beams=3, num_return_sequences=3, do_sample=False, max_new_tokens=8, min_new_tokens=8,
            eos_token_id=VOCAB_SIZE - 1,
        )  # fmt: skip
        assert [beam.token_ids for beam in output.outputs] == expected[:, ids.shape[1] :].tolist()
        scores = [beam.cumulative_logprob for beam in output.outputs]
        assert scores == sorted(scores, reverse=True)
        assert all(beam.finish_reason == "length" for beam in output.outputs)
        whole = {"prompt_token_ids": output.prompt_token_ids + output.outputs[0].token_ids}
        rows = ask(llm, whole, max_tokens=1, prompt_logprobs=0)[0].prompt_logprobs[ids.shape[1] :]
        assert sum(next(iter(row.values())).logprob for row in rows) == pytest.approx(scores[0], abs=1e-3)


def test_beams_end_at_end_of_sequence(tmp_path):
    save_tiny_llama(tmp_path, eos_token_id=list(range(1, VOCAB_SIZE, 2)))
    [output] = LLM(str(tmp_path), device="cpu").beam_search("the cat", beam_width=4, max_tokens=6)
    for beam in output.outputs:
        ends = [token_id % 2 == 1 for token_id in beam.token_ids]
        assert beam.finish_reason == ("stop" if ends[-1] else "length") and not any(ends[:-1])
    assert any(beam.finish_reason == "stop" for beam in output.outputs)


def test_the_progress_bar_counts_requests_and_tokens(llm, capfd):
    llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    shown = capfd.readouterr().err
    assert "4/4" in shown and "tokens/s" in shown
    ask(llm, PROMPTS)
    assert capfd.readouterr().err == ""


def test_importing_minillm_loads_no_torch(root):
    program = "import sys, minillm; print('torch' in sys.modules, minillm.__version__, 'LLM' in dir(minillm))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.split() == ["False", "0.1.0", "True"]
