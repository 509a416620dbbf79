"""A grammar that cannot go on ends its own request, says why, and changes no token of the others."""

from __future__ import annotations

import numpy as np
import pytest
from llguidance import LLParserLimits

from minillm import LLM, SamplingParams
from minillm.engine.engine import Engine
from minillm.programs import State, gen
from minillm.sampling.grammar import library
from minillm.speculative.drafter import Draft
from tests.helpers.speculating import NGRAM
from tests.helpers.tiny import byte_tokenizer, save_tiny_llama

PROMPTS = [[5, 6, 7, 8, 5, 6], [20, 21, 22], [9] * 12, [5, 6, 7]]
A, B, C = byte_tokenizer().convert_tokens_to_ids(["a", "b", "c"])
AMBIGUOUS = 'start: "a" x\nx: x x | "b" | "c" | "b" x "c"'  # the longer it is, the more ways there are to read it
NESTED = 'start: "b" start "c" | "a"'  # which takes little to parse


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    save_tiny_llama(path / "target", eos_token_id=1)
    save_tiny_llama(path / "draft", seed=3, eos_token_id=1)
    return path


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    monkeypatch.setattr(library, "LIMITS", LLParserLimits(step_max_items=60, verbose_errors=False))


def make(folder, speculation=None, **settings) -> LLM:
    if speculation == "draft":
        speculation = {"method": "draft_model", "model": folder / "draft"}
    return LLM(folder / "target", device="cpu", dtype="float32", speculative_config=speculation, **settings)


def grammar(
    text: str = AMBIGUOUS, temperature: float = 0.0, bias: dict | None = None, jump: bool = False, **settings
) -> SamplingParams:
    """Written on until it cannot be: the end is what the model likes least."""
    structured = dict(grammar=text, jump_forward=jump)
    settings = dict(max_tokens=40, seed=1) | settings
    return SamplingParams(
        temperature=temperature, logit_bias={1: -100.0} | (bias or {}), structured_outputs=structured, **settings
    )


def say(llm: LLM, params, prompts=PROMPTS) -> list:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    llm.engine.scheduler.check_integrity()
    assert not (llm.engine.has_unfinished or llm.engine.kv_cache.tables)
    return outputs


def ended(outputs) -> list:
    return [
        [(sample.token_ids, sample.text, sample.finish_reason, sample.error) for sample in output.outputs]
        for output in outputs
    ]


ROADS = {
    "plain": {},
    "ahead": dict(async_scheduling=True),
    "ngram": dict(speculation=NGRAM),
    "draft": dict(speculation="draft"),
    "few blocks": dict(num_kv_blocks=24, block_size=4),
    "ngram, ahead, chunks": dict(speculation=NGRAM, async_scheduling=True, max_num_batched_tokens=6),
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize(
    "kind", [{}, dict(temperature=1.0, n=2), dict(jump=True), dict(stop="bbbbbbbb"), dict(logprobs=1)], ids=str
)
def test_only_its_own_request_ends(folder, road, kind):
    plain, llm = make(folder), make(folder, **ROADS[road])
    [alone] = say(plain, grammar(**kind), PROMPTS[:1])
    for sample in alone.outputs:
        assert (
            sample.finish_reason == "error"
            and "outgrown what the grammar's parser can follow: " in sample.error
            and "Too many items (limit 60" in sample.error
        )
        assert sample.text[0] == "a" and 4 < len(sample.text) == len(sample.token_ids) < 20
    others = [
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
        grammar(NESTED, max_tokens=20, bias={B: 5.0}),
        grammar(NESTED, bias={A: 9.0}),
    ]
    expected = ended(alone_each(plain, others))
    assert [outputs[0][2] for outputs in expected] == ["length", "length", "stop"]
    assert ended(say(llm, [grammar(**kind), *others])) == ended([alone]) + expected
    assert ended(say(llm, [*others, grammar(**kind)], [*PROMPTS[1:], PROMPTS[0]])) == expected + ended([alone])
    if "speculation" in ROADS[road] and not kind:
        assert llm.engine.speculation.metrics.num_accepted_tokens > 0


def alone_each(llm: LLM, params: list[SamplingParams]) -> list:
    return [say(llm, one, [prompt])[0] for one, prompt in zip(params, PROMPTS[1:])]


def test_requests_with_the_same_grammar_do_not_use_up_each_others_limits(folder, monkeypatch):
    """All share what the lexer has learned, and it learns no more than so many states."""
    monkeypatch.setattr(library, "LIMITS", LLParserLimits(max_lexer_states=30, verbose_errors=False))
    text = "start: /[ab]*a[ab]{20}c/"
    params = [grammar(text, temperature=1.0, seed=seed, max_tokens=60) for seed in range(6)]
    prompts = [PROMPTS[0]] * 6
    alone = [ended(say(make(folder), one, prompts[:1]))[0] for one in params]
    assert {sample[2] for [sample] in alone} == {"error"} and len({len(sample[0]) for [sample] in alone}) > 1
    llm = make(folder)
    assert ended(say(llm, params, prompts)) == alone
    assert [ended(say(llm, one, prompts[:1]))[0] for one in params] == alone


def test_a_guess_that_the_grammar_cannot_follow_costs_nothing(folder):
    """The text goes another way: what a guess ran into is none of its business."""

    class Guesses:
        def propose(self, requests, counts):
            return [Draft([B] * count) for count in counts]

        def forget(self, request_id):
            pass

    text = 'start: y+\ny: "c" | x "d"\nx: x x | "b"'
    plain, llm = make(folder), make(folder)
    llm.engine = Engine(llm.model, config=llm.config, drafter=Guesses(), num_speculative_tokens=12)
    params = [grammar(text, bias={C: 5.0}), grammar(text, bias={B: 5.0})]
    first, second = ended(say(llm, params, PROMPTS[:2]))
    assert [first, second] == ended(say(plain, params, PROMPTS[:2]))
    assert first[0][1:3] == ("c" * 40, "length") and second[0][2] == "error" and set(second[0][1]) == {"b"}


@pytest.mark.parametrize("num_streams", [1, 2])
def test_a_stream_ends_and_says_why(folder, num_streams):
    llm = make(folder)
    [expected] = say(llm, grammar(), PROMPTS[:1])
    streams = [llm.stream({"prompt_token_ids": PROMPTS[0]}, grammar()) for _ in range(num_streams)]
    other = llm.stream(
        {"prompt_token_ids": PROMPTS[1]}, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    )
    deltas, others = [list(stream) for stream in streams], list(other)
    for heard in deltas:
        assert "".join(delta.text for delta in heard) == expected.outputs[0].text
        assert [token for delta in heard for token in delta.token_ids] == expected.outputs[0].token_ids
        assert [delta.finish_reason for delta in heard] == [None] * (len(heard) - 1) + ["error"]
        assert heard[-1].error == expected.outputs[0].error and heard[0].error is None
    assert [len(others), others[-1].finish_reason, llm.engine.has_unfinished] == [30, "length", False]


def test_a_submission_has_what_was_said_and_a_program_fails(folder):
    llm = make(folder)
    submission = llm.submit({"prompt_token_ids": PROMPTS[0]}, grammar())
    with State(llm, "the cat") as state, State(llm, "the mat") as other:
        state += gen(
            "one", temperature=0.0, max_tokens=40, logit_bias={1: -100.0}, structured_outputs=dict(grammar=AMBIGUOUS)
        )
        other += gen("two", temperature=0.0, max_tokens=50, ignore_eos=True)
        with pytest.raises(RuntimeError, match=r"the program failed: .*Too many items"):
            state["one"]
        assert len(other.output("two").outputs[0].token_ids) == 50
    assert submission.output().outputs[0].finish_reason == "error" and submission.error is None
    assert not llm.engine.has_unfinished


def test_a_mask_that_accept_does_not_keep_to_ends_the_request_too(folder, monkeypatch):
    llm = make(folder)
    monkeypatch.setattr(library.LibraryGrammar, "fill_mask", lambda grammar, words: words.fill(-1))
    params = [grammar(NESTED, bias={C: 100.0}), SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)]
    (first,), (second,) = ended(say(llm, params, PROMPTS[:2]))
    assert first[:3] == ([], "", "error") and "token 69 (b'c') may not come next in the grammar" in first[3]
    assert second[2:] == ("length", None) and len(second[0]) == 5


def test_a_grammar_that_raised_stands_where_it_stood(folder):
    rules = make(folder).inputs.compile(grammar())
    words, walked = np.empty(10, np.int32), rules.start()
    walked.accept(A)
    with pytest.raises(library.GrammarError, match="Too many items"):
        for _ in range(50):
            walked.fill_mask(words)
            walked.accept(B)
    count = len(walked.token_ids)
    assert count > 4
    with pytest.raises(library.GrammarError):
        walked.fill_mask(words)
    assert len(walked.token_ids) == count and walked.validate([B]) == walked.copy().validate([B]) == 1
    walked.rollback(3)
    walked.fill_mask(words)
    assert words[B // 32] >> B % 32 & 1


@pytest.mark.parametrize("road", ROADS)
def test_all_samples_of_a_prompt_end_where_the_first_mask_fails(folder, monkeypatch, road):
    llm, params = make(folder, **ROADS[road]), grammar(NESTED, temperature=1.0, n=3)
    llm.inputs.compile(params)

    def fails(grammar, words):
        raise library.GrammarError("no mask today")

    monkeypatch.setattr(library.LibraryGrammar, "fill_mask", fails)
    first, second = ended(
        say(llm, [params, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)], PROMPTS[:2])
    )
    assert first == [([], "", "error", "no mask today")] * 3
    assert second[0][2:] == ("length", None) and len(second[0][0]) == 5
