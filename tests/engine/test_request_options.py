"""What a request may ask of its own logits and its own text, on every configuration: against a plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.engine.engine import Engine
from minillm.engine.request import Request
from minillm.model.attention import NoCacheAttention
from minillm.model.calibration import whole_sequences
from minillm.sampling.rules import banned_tokens, word_token_ids
from tests.helpers.speculating import PROMPTS, make, say, write_models
from tests.helpers.tiny import BEGIN, END, USER, VOCAB_SIZE, byte_tokenizer

NEVER, LENGTH = -math.inf, 8
CONFIGURATIONS = {
    "plain": {},
    "ahead": {"async_scheduling": True},
    "ngram": {"speculation": "ngram"},
    "draft model": {"speculation": "noisy"},
    "small steps": {"max_num_batched_tokens": 3, "max_num_seqs": 2},
    "few blocks": {"num_kv_blocks": 9, "block_size": 4},
}
Rule = Callable[[list[int], torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def llms(folder) -> dict[str, LLM]:
    return {
        name: make(folder, settings.get("speculation"), **{k: v for k, v in settings.items() if k != "speculation"})
        for name, settings in CONFIGURATIONS.items()
    }


def logits_of(llm: LLM, token_ids: list[int]) -> torch.Tensor:
    """Of the token behind `token_ids`, without an engine."""
    attention = NoCacheAttention(llm.model.config.layer_windows)
    return llm.model(whole_sequences([token_ids], all_logits=True), attention)[-1]


def naive(llm: LLM, prompt: list[int], rule: Rule = lambda ids, logits: logits) -> list[int]:
    """The greedy tokens of a plain loop."""
    output: list[int] = []
    for _ in range(LENGTH):
        output.append(int(rule(output, logits_of(llm, prompt + output).clone()).argmax()))
    return output


def encode(text: str) -> list[int]:
    return byte_tokenizer().encode(text, add_special_tokens=False)


def greedy(**options) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, **options)


def tokens_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def only(allowed: list[int]) -> Rule:
    def rule(output, logits):
        kept = torch.full_like(logits, NEVER)
        kept[allowed] = logits[allowed]
        return kept

    return rule


def without(words: list[list[int]]) -> Rule:
    def rule(output, logits):
        for word in words:
            before = word[:-1]
            if not before or output[-len(before) :] == before:
                logits[word[-1]] = NEVER
        return logits

    return rule


def no_token_twice(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[output] = NEVER
    return logits


def towards_its_length(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    added = torch.zeros_like(logits)
    added[10 + len(output)] = 4.0
    return logits + added


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_rules_of_one_request_hold_for_it_alone(llms, name):
    """Six requests in one batch: three with rules, three plain ones between them."""
    llm = llms[name]
    free = naive(llm, PROMPTS[0])
    word = byte_tokenizer().decode(free[1:3])
    banned = word_token_ids(lambda text: byte_tokenizer().encode(text, add_special_tokens=False), [word])
    asked = [
        (greedy(allowed_token_ids=[7, 30, 31, 32, 99]), only([7, 30, 31, 32, 99])),
        (greedy(), lambda output, logits: logits),
        (greedy(bad_words=[word]), without(banned)),
        (greedy(logits_processors=[no_token_twice, towards_its_length]),
         lambda output, logits: towards_its_length(output, no_token_twice(output, logits))),
    ]  # fmt: skip
    prompts = PROMPTS[:1] * len(asked) + PROMPTS[1:3]
    params = [one for one, _ in asked] + [greedy()] * 2
    rules = [rule for _, rule in asked] + [asked[1][1]] * 2
    expected = [naive(llm, prompt, rule) for prompt, rule in zip(prompts, rules)]
    assert tokens_of(say(llm, params, prompts)) == expected
    assert expected[0] != expected[1] != expected[3], "the rules change nothing here: the test would prove nothing"


def test_words_of_several_tokens_are_banned_at_their_last_one():
    assert banned_tokens([[5], [6, 7], [8, 9, 10]], []) == [5]
    assert banned_tokens([[5], [6, 7], [8, 9, 10]], [8, 6]) == [5, 7]
    assert banned_tokens([[6, 7], [8, 9, 10]], [6, 8, 9]) == [10]


def test_a_bad_word_never_comes_whatever_is_drawn(llms):
    """Drawn by chance: the words that come without the ban, and none with it."""
    llm = llms["plain"]
    drawn = {"temperature": 1.0, "seed": 3, "max_tokens": 30, "ignore_eos": True}
    free = [output.outputs[0].token_ids for output in say(llm, SamplingParams(**drawn))]
    words = [byte_tokenizer().decode(ids[at : at + 2]) for ids in free for at in (0, 9, 20)]
    words = [word for word in words if len(encode(word)) == 2]
    banned = [encode(word) for word in words]

    def found(ids):
        return [pair for pair in banned if pair in [ids[at : at + 2] for at in range(len(ids))]]

    assert any(found(ids) for ids in free), "no word comes without the ban: the test would prove nothing"
    for output in say(llm, SamplingParams(bad_words=words, **drawn)):
        assert found(output.outputs[0].token_ids) == []


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_failing_processor_ends_its_own_request(llms, name):
    def fails(output, logits):
        if len(output) == 3:
            raise RuntimeError("the function is broken")
        return logits

    def forgets(output, logits):
        return None

    def forbids(output, logits):
        return logits + NEVER

    llm = llms[name]
    params = [greedy(logits_processors=[fails]), greedy(), greedy(logits_processors=[forgets]),
              greedy(logits_processors=[forbids])]  # fmt: skip
    broken, healthy, empty, silent = (output.outputs[0] for output in say(llm, params))
    assert broken.finish_reason == empty.finish_reason == silent.finish_reason == "error"
    assert broken.error == "the function is broken" and broken.token_ids == naive(llm, PROMPTS[0])[:3]
    assert "forgets returned NoneType" in empty.error and empty.token_ids == []
    assert "leave no token" in silent.error and silent.token_ids == []
    assert healthy.token_ids == naive(llm, PROMPTS[1]) and healthy.finish_reason == "length"


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_several_samples_obey_the_same_rules_and_keep_their_seeds(llms, name):
    allowed = [3, 30, 31, 32, 99]
    rules = {"allowed_token_ids": allowed, "logits_processors": [no_token_twice]}
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=4, ignore_eos=True, **rules)
    [output] = say(llms[name], params, PROMPTS[:1])
    [again] = say(llms["plain"], params, PROMPTS[:1])
    for sample, other in zip(output.outputs, again.outputs):
        assert set(sample.token_ids) <= set(allowed) and len(set(sample.token_ids)) == 4
        assert name == "draft model" or sample.token_ids == other.token_ids


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logprobs_of_given_tokens_are_those_of_the_raw_logits(llms, name):
    llm, asked = llms[name], [4, 200, 17]
    params = [greedy(logprob_token_ids=asked), greedy(logprobs=2), greedy(), greedy(logprob_token_ids=[9])]
    named, best, plain, single = (output.outputs[0] for output in say(llm, params))
    assert plain.logprobs is None and [len(row) for row in best.logprobs] == [
        2 + (token not in list(row)[:2]) for token, row in zip(best.token_ids, best.logprobs)
    ]
    for sample, prompt, ids in ((named, PROMPTS[0], asked), (single, PROMPTS[3], [9])):
        assert sample.token_ids == naive(llm, prompt)
        for place, row in enumerate(sample.logprobs):
            reference = logits_of(llm, prompt + sample.token_ids[:place]).double().log_softmax(-1)
            assert list(row) == list(dict.fromkeys([sample.token_ids[place], *ids]))
            for token_id, entry in row.items():
                assert entry.logprob == pytest.approx(reference[token_id].item(), abs=1e-4)
                assert entry.rank == 1 + int((reference > reference[token_id] + 1e-6).sum())
        total = sum(row[token_id].logprob for row, token_id in zip(sample.logprobs, sample.token_ids))
        assert sample.cumulative_logprob == pytest.approx(total)


def test_a_processor_that_fails_for_one_of_several_samples_ends_that_one(llms):
    def fails(output, logits):
        if len(output) == 2 and output[0] != first:
            raise RuntimeError("not this one")
        return logits

    drawn = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 4, "ignore_eos": True}
    [free] = say(llms["plain"], SamplingParams(**drawn), PROMPTS[:1])
    first = free.outputs[0].token_ids[0]
    [output] = say(llms["plain"], SamplingParams(logits_processors=[fails], **drawn), PROMPTS[:1])
    ended = [sample.token_ids[0] != first for sample in free.outputs]
    assert any(ended) and not all(ended), "all samples begin alike: the test would prove nothing"
    for sample, other, failed in zip(output.outputs, free.outputs, ended):
        assert (sample.finish_reason, sample.error) == (("error", "not this one") if failed else ("length", None))
        assert sample.token_ids == (other.token_ids[:2] if failed else other.token_ids)


def test_what_a_rule_leaves_nothing_of_is_refused_when_it_is_added(llms):
    llm = llms["plain"]
    end = next(iter(llm.inputs.eos_token_ids))
    with pytest.raises(ValueError, match=r"min_tokens=2 forbids the stop tokens, and allowed_token_ids=\[1\]"):
        llm.generate([5], SamplingParams(min_tokens=2, allowed_token_ids=[end]), use_tqdm=False)
    with pytest.raises(ValueError, match="forbid all of allowed_token_ids"):
        ids = byte_tokenizer().encode("a", add_special_tokens=False)
        llm.generate([5], SamplingParams(bad_words=["a"], allowed_token_ids=ids), use_tqdm=False)
    with pytest.raises(ValueError, match=f"allowed_token_ids has token id {VOCAB_SIZE}"):
        llm.generate([5], SamplingParams(allowed_token_ids=[VOCAB_SIZE]), use_tqdm=False)
    with pytest.raises(ValueError, match=r"bad_words=.* has no tokenizer"):
        Engine(llm.model, config=llm.config).add_request(Request("0", [5], SamplingParams(bad_words=["a"]), 4))


def test_parameters_changed_after_they_were_made_are_checked_and_kept(llms):
    llm, params = llms["plain"], greedy()
    params.allowed_token_ids = [30]
    assert tokens_of(say(llm, params, PROMPTS[:1])) == [[30] * LENGTH]
    sink = llm.submit([5, 6], params)
    params.allowed_token_ids, params.max_tokens = [31], 2
    while llm.step():
        pass
    assert sink.output().outputs[0].token_ids == [30] * LENGTH
    params.temperature = "hot"
    with pytest.raises(TypeError, match="temperature='hot' is not allowed"):
        llm.generate([5], params, use_tqdm=False)


def said(llm: LLM, token_ids: list[int], **options) -> object:
    """The sample of a request whose tokens are forced one after the other."""

    def force(output, logits):
        forced = torch.full_like(logits, NEVER)
        forced[token_ids[len(output)]] = 0
        return forced

    params = SamplingParams(temperature=0.0, max_tokens=len(token_ids), logits_processors=[force], **options)
    sample = llm.generate([5, 6], params, use_tqdm=False)[0].outputs[0]
    streamed = "".join(delta.text for delta in llm.stream([5, 6], params))
    assert streamed == sample.text
    return sample


def test_the_stop_string_stays_where_it_is_asked_for(llms):
    llm, ids = llms["plain"], encode("the cat sat on the mat")
    assert said(llm, ids, stop="at sa").text == "the c"
    kept = said(llm, ids, stop="at sa", include_stop_str_in_output=True)
    assert kept.text == "the cat sa" and kept.stop_reason == "at sa" and kept.finish_reason == "stop"
    [cat] = set(encode("the cat")) - set(encode("the"))
    assert said(llm, ids, stop_token_ids=[cat]).text == byte_tokenizer().decode(ids[: ids.index(cat)])
    kept = said(llm, ids, stop_token_ids=[cat], include_stop_str_in_output=True)
    assert kept.text == byte_tokenizer().decode(ids[: ids.index(cat) + 1]) and kept.stop_reason == cat


def test_special_tokens_are_shown_where_they_are_asked_for(llms):
    ids = [*encode("a"), *encode(USER + USER), *encode("b"), *encode(END)]
    assert said(llms["plain"], ids, ignore_eos=True).text == "ab"
    for spaces in (True, False):
        shown = {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
        assert said(llms["plain"], ids, ignore_eos=True, **shown).text == f"a{USER}{USER}b{END}"
        assert said(llms["plain"], ids, **shown).text == f"a{USER}{USER}b"
    kept = said(llms["plain"], ids, skip_special_tokens=False, include_stop_str_in_output=True)
    assert kept.text == f"a{USER}{USER}b{END}" and BEGIN not in kept.text


def test_text_is_left_out_where_it_is_not_wanted(llms):
    sample = said(llms["plain"], encode("the cat"), detokenize=False, logprobs=0)
    assert sample.text == "" and sample.token_ids == encode("the cat")
    assert [entry.decoded_token for row in sample.logprobs for entry in row.values()] == [None] * len(sample.token_ids)
