"""Masks of a batch in the sampler; the parameters; what is compiled once; forced text as tokens."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import minillm
from minillm import SamplingParams, StructuredOutputsParams
from minillm.sampling.grammar import tokens
from minillm.sampling.grammar.compiler import GrammarCompiler
from minillm.sampling.grammar.mask import GrammarMasks
from minillm.sampling.metadata import SamplingMetadata, SamplingRow
from minillm.sampling.sampler import Sampler
from tests.helpers.grammar_cases import allowed, byte_tokenizer, sentencepiece_tokenizer, tinyworld, tinyworld_compiler
from tests.helpers.tiny import byte_tokenizer as merging_tokenizer

DIGITS = StructuredOutputsParams(regex="[0-9]{1,3}")
VOCAB_SIZE = 1024


def start(**constraint):
    return tinyworld_compiler().compile(StructuredOutputsParams(**constraint)).start()


def ids(text: str) -> list[int]:
    return tinyworld().encode(text, add_special_tokens=False)


def test_rows_with_and_without_a_grammar_and_with_drafts():
    masks = GrammarMasks(VOCAB_SIZE)
    logits = torch.randn(7, VOCAB_SIZE)
    assert masks.fill([(None, ()), (None, [5, 6])]) is None
    choice, number = start(choice=["red", "rare"]), start(regex="[0-9]{1,2}")
    draft = [*ids("4"), *ids("2"), 1]
    for grammar, guesses in ((choice, []), (number, draft)):
        assert grammar.validate(guesses) == len(guesses)
    assert masks.fill([(None, [9]), (choice, ()), (number, draft)]) is masks
    masked = masks.apply(logits)
    expected = [None, None, allowed(choice, VOCAB_SIZE)]
    for token_id in draft:
        expected.append(allowed(number, VOCAB_SIZE))
        number.accept(token_id)
    number.rollback(3)
    for row, those in enumerate([*expected, None]):
        kept = set(range(VOCAB_SIZE)) if those is None else those
        assert set(masked[row].isfinite().nonzero()[:, 0].tolist()) == kept
        assert torch.equal(masked[row][masked[row].isfinite()], logits[row][masked[row].isfinite()])
    assert allowed(number, VOCAB_SIZE) == expected[3], "the grammar stands where it stood"
    assert logits.isfinite().all(), "new logits"
    with pytest.raises(ValueError, match="masks are of 7 rows and the logits of 2"):
        masks.apply(logits[:2])


def test_the_masks_grow_with_the_batch_and_forget_the_last_step():
    masks = GrammarMasks(1000)  # no whole number of words
    grammar = tinyworld_compiler().compile(DIGITS).start()
    for num_rows in (1, 40, 3):
        masks.words[:] = -1
        masked = masks.fill([(grammar, ())] * num_rows).apply(torch.zeros(num_rows, 1000))
        assert masked.shape == (num_rows, 1000)
        assert [set(row.isfinite().nonzero()[:, 0].tolist()) for row in masked] == [
            allowed(grammar, VOCAB_SIZE)
        ] * num_rows


def test_a_draft_that_the_grammar_refuses_leaves_it_where_it_was():
    grammar = start(regex="[0-9]{2}")
    before = allowed(grammar, VOCAB_SIZE)
    with pytest.raises(ValueError, match="may not come next"):
        GrammarMasks(VOCAB_SIZE).fill([(grammar, [*ids("7"), *ids("x")])])
    assert allowed(grammar, VOCAB_SIZE) == before


def metadata(*params: SamplingParams) -> SamplingMetadata:
    rows = [SamplingRow(one, seed, [5], [], frozenset([1])) for seed, one in enumerate(params)]
    return SamplingMetadata(rows, VOCAB_SIZE)


@pytest.mark.parametrize("settings", [
    {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 2.0, "top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5},
    {"temperature": 0.0, "repetition_penalty": 2.0}, {"temperature": 0.0, "logit_bias": {7: 100.0}},
])  # fmt: skip
@pytest.mark.parametrize("fused", [False, True])
def test_whatever_else_a_row_asks_for_the_grammar_has_the_last_word(settings, fused):
    grammar = tinyworld_compiler().compile(DIGITS).start()
    batch = metadata(SamplingParams(**settings), SamplingParams(**settings))
    for _ in range(5):
        batch.masks = GrammarMasks(VOCAB_SIZE).fill([(grammar, ()), (None, ())])
        logits = torch.randn(2, VOCAB_SIZE) * 10
        raw = logits.clone()
        token_id = int(Sampler(fused=fused).sample(logits, batch).token_ids[0])
        assert token_id in allowed(grammar, VOCAB_SIZE) and torch.equal(logits, raw)


def test_logprobs_are_of_the_raw_logits():
    grammar = tinyworld_compiler().compile(DIGITS).start()
    batch, logits = metadata(SamplingParams(temperature=0.0, logprobs=1)), torch.randn(1, VOCAB_SIZE)
    logits[0, 0] = 20.0  # no digit
    batch.masks = GrammarMasks(VOCAB_SIZE).fill([(grammar, ())])
    output = Sampler().sample(logits, batch)
    token_id = int(output.token_ids[0])
    assert output.logprobs[0][token_id].logprob == pytest.approx(float(logits.log_softmax(-1)[0, token_id]))
    assert len(output.logprobs[0]) == 2, "the best token of all is reported beside it"


def test_a_row_that_may_only_end_ends_before_min_tokens():
    done, open_ = start(regex="7"), start(regex="7?")
    done.accept(ids("7")[0])
    batch = metadata(*[SamplingParams(temperature=0.0, min_tokens=5)] * 3)
    batch.masks = GrammarMasks(VOCAB_SIZE).fill([(done, ()), (open_, ()), (None, ())])
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, 1] = 100
    assert Sampler().sample(logits, batch).token_ids.tolist() == [1, ids("7")[0], 0]


@pytest.mark.parametrize("given, said", [
    ({}, "has none; exactly one"), ({"regex": "a", "choice": ["a"]}, "has regex and choice; exactly one"),
    ({"json_object": False}, "has none"), ({"choice": []}, r"choice=\[\] leaves nothing"),
    ({"json": "{"}, "json='{' is not JSON"), ({"json": "3"}, "json=3 is JSON, but no schema"),
    ({"regexp": "a"}, "unknown field 'regexp'"),
])  # fmt: skip
def test_wrong_values(given, said):
    with pytest.raises(ValueError, match=said):
        SamplingParams(structured_outputs=given)


@pytest.mark.parametrize("given, said", [
    ({"choice": ["a", 3]}, r"choice\[1\]=3"), ({"choice": "ab"}, "choice='ab' is not allowed"),
    ({"regex": 3}, "regex=3 is not allowed"), ({"grammar": ["a"]}, "grammar="), ({"json": 3}, "json=3 is not allowed"),
    ({"json": {"enum": {1}}}, "cannot be written as JSON"), ({"json_object": 1}, "json_object=1"),
    ({"regex": "a", "jump_forward": "yes"}, "jump_forward='yes'"), ("a*", r"structured_outputs='a\*' is not allowed"),
])  # fmt: skip
def test_wrong_kinds(given, said):
    with pytest.raises(TypeError, match=said):
        SamplingParams(structured_outputs=given)


def test_parameters_are_made_of_a_dictionary_and_compared():
    params = SamplingParams(structured_outputs={"choice": ["a", "b"]})
    assert (
        params.structured_outputs == StructuredOutputsParams(choice=("a", "b"))
        and params.structured_outputs.kind == "choice"
    )
    assert StructuredOutputsParams(json={"type": "null"}) == StructuredOutputsParams(json='{"type": "null"}')
    assert hash(StructuredOutputsParams(json={})) and SamplingParams().structured_outputs is None
    with pytest.raises(ValueError, match="ignore_eos=True"):
        SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)
    assert "StructuredOutputsParams" in dir(minillm)


def test_the_parameters_load_nothing_heavy():
    program = (
        "import sys; from minillm import SamplingParams; SamplingParams(structured_outputs={'regex': 'a'}); "
        "print('llguidance' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
    )


def test_a_constraint_is_compiled_once_and_the_oldest_is_forgotten():
    compiler = GrammarCompiler(byte_tokenizer([b"a", b"b"]), 4, [0], cache_size=2)
    first = compiler.compile(StructuredOutputsParams(regex="a"))
    assert compiler.compile(StructuredOutputsParams(regex="a", jump_forward=True)) is first
    compiler.compile(StructuredOutputsParams(choice=["a"]))
    compiler.compile(StructuredOutputsParams(regex="a"))
    compiler.compile(StructuredOutputsParams(regex="b"))
    assert compiler.compile(StructuredOutputsParams(regex="a")) is first, "asked for later than the choice"
    with pytest.raises(ValueError, match=r"regex='\[ab\]\*a\[ab\]\{20\}' is not possible: its automaton has over"):
        compiler.compile(StructuredOutputsParams(regex="[ab]*a[ab]{20}"))


def test_a_mask_is_made_once_a_state(monkeypatch):
    rules = GrammarCompiler(tinyworld(), VOCAB_SIZE, [1]).compile(StructuredOutputsParams(regex="[a-z]*"))
    made = []
    reached = type(rules.vocabulary.trie).reached
    monkeypatch.setattr(
        type(rules.vocabulary.trie),
        "reached",
        lambda self, table, state: made.append(state) or reached(self, table, state),
    )
    for text in "once upon".split() * 2:
        grammar = rules.start()
        for token_id in ids(text):
            assert token_id in allowed(grammar, VOCAB_SIZE)
            grammar.accept(token_id)
    assert made == [0]


def test_the_masks_that_are_kept_have_a_bound(monkeypatch):
    monkeypatch.setattr(tokens, "MAX_MASK_BYTES", 3 * VOCAB_SIZE // 8)
    rules = GrammarCompiler(tinyworld(), VOCAB_SIZE, [1]).compile(StructuredOutputsParams(regex="[a-z]{9}"))
    byte, first = rules.vocabulary.single_bytes[ord("a")], allowed(rules.start(), VOCAB_SIZE)
    grammar, kept = rules.start(), []
    for _ in range(9):
        allowed(grammar, VOCAB_SIZE)
        kept.append(len(rules.masks))
        grammar.accept(byte)
    assert kept == [1, 2, 3, 3, 3, 3, 3, 3, 3] and 0 not in rules.masks
    assert allowed(grammar, VOCAB_SIZE) == {1} and allowed(rules.start(), VOCAB_SIZE) == first
    grammar.accept(1)
    assert allowed(grammar, VOCAB_SIZE) == set() and len(rules.masks) == 3


LONG = [f"{number:06d} wordwordword" for number in range(5000)]


@pytest.mark.parametrize("given, said", [
    ({"choice": LONG},
     "'000000 wordwordword'.*it takes over 50000 states to write down; give fewer or shorter choices"),
    ({"regex": "a" * 9999 + "(?=a)"}, "'aaa.*has a look-around, .* at place 9999"),
    ({"regex": "(" * 9999}, "is no regular expression"),
    ({"regex": "(a{100}){1000}" + "b" * 9999},
     "it takes over 50000 states to write down; nest fewer or smaller counted repetitions"),
     ({"json": {"enum": LONG, "not": {}}}, "Unimplemented keys"), ({"json": "{" + "x" * 9999}, "is not JSON"),
    ({"grammar": 'start: "' + "a" * 9999}, "is not possible"), ({"json": 'x' * 9999}, "is not JSON"),
])  # fmt: skip
def test_an_error_quotes_no_more_of_a_long_constraint_than_is_read(given, said):
    with pytest.raises(ValueError, match=f"(?s){said}") as error:
        tinyworld_compiler().compile(StructuredOutputsParams(**given))
    assert len(str(error.value)) < 1000 and re.search(r"\(\d{4,6} characters\)", str(error.value))


def test_jump_tokens_are_the_tokenizers_own_as_far_as_they_are_sure():
    grammar = start(regex=r'\{"name": "[a-z]+", "age": [0-9]{1,3}\}')
    whole, jumped = ids('{"name": "'), grammar.jump_tokens()
    assert jumped == whole[: len(jumped)] and len(whole) - 1 <= len(jumped)
    grammar = start(choice=["The answer is: yes", "The answer is: no"])
    assert tinyworld().decode(grammar.jump_tokens()) == "The answer is:", 'a space may belong to " yes"'
    assert start(choice=["yes", "no"]).jump_tokens() == [] == start(regex="a?").jump_tokens()


@pytest.mark.parametrize("make", [tinyworld, merging_tokenizer, sentencepiece_tokenizer])
@pytest.mark.parametrize(
    "text",
    [
        "the cat sat on the mat",
        "name: abab",
        "日本語 naïve 😀",
        "  two  spaces\n\n",
        "é",
        "<|end|>",
        "</s><s>",
        "<tool>",
    ],
)
def test_all_of_a_text_without_choice_is_jumped_and_joins_to_it(make, text):
    tokenizer = make()
    rules = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id]).compile(
        StructuredOutputsParams(choice=[text])
    )
    texts = rules.vocabulary.token_bytes
    jumped = rules.start().jump_tokens()
    special = any(name in text for name in tokenizer.get_added_vocab())
    assert b"".join(texts[token_id] for token_id in jumped).decode() in ([text, ""] if special else [text])
    # From behind each token that can begin it, what was said stays, and the rest joins to it.
    for token_id in sorted(allowed(rules.start(), len(tokenizer))):
        grammar = rules.start()
        grammar.accept(token_id)
        rest = b"".join(texts[other] for other in grammar.jump_tokens())
        assert text.encode().startswith(texts[token_id] + rest)
        whole = texts[token_id].decode(errors="ignore").encode() == texts[token_id]
        assert special or not whole or texts[token_id] + rest == text.encode()
        assert grammar.token_ids == [token_id] and grammar.states == [0, rules.after(0, token_id)]


def test_a_character_that_is_only_begun_is_not_jumped():
    assert [start(regex="a[é-ü]").jump_tokens(), start(regex="[é-ü]").jump_tokens()] == [ids("a"), []]


def test_unpacking_is_the_same_on_another_device():
    masks = GrammarMasks(1000)
    masks.fill([(start(regex=".+"), ()), (start(regex="[0-9]"), ())])
    assert torch.equal(masks._unpack(), masks._unpack_there())
    assert np.isneginf(masks._unpack().numpy()).any()
