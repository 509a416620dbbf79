"""Tokens that cannot be said: an <unk>, an end that is an ordinary token, characters that the vocabulary lacks."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, strategies as st

from minillm import StructuredOutputsParams
from minillm.sampling.grammar.compiler import GrammarCompiler
from minillm.sampling.grammar.library import LibraryGrammar
from tests.helpers import tiny
from tests.helpers.grammar_cases import (
    END,
    allowed,
    byte_tokenizer,
    pieces_tokenizer,
    random_walk,
    sentencepiece_tokenizer,
    tinyworld,
)
from tests.sampling.test_grammar_tokens import TOKENS, bounded_patterns

PIECES = [*"▁abcdefghijklmnopqrstuvwxyz0123456789_-.,:;!()", *'"{}[]', "é", "na", "▁x", '":', '",', "tr"]
BYTES = [*(bytes([byte]) for byte in range(256)), b"ab", b'"a', b'": ', b'", ', b"tr", b"\xc3\xa9", b"x\xc3"]
VOCABULARIES = {
    "bytes, an end that is a letter": (byte_tokenizer(BYTES), 2 + len(BYTES), {0, 2 + ord("a")}),
    "bytes, an end that is a quote": (byte_tokenizer(BYTES), 2 + len(BYTES) + 7, {0, 2 + ord('"')}),
    "sentencepiece, an end that is a token": (sentencepiece_tokenizer(), 280, {2, 265, 270}),
    "pieces without bytes": (pieces_tokenizer(PIECES), 3 + len(PIECES), {2}),
    "pieces, an end that is a letter": (pieces_tokenizer(PIECES), 3 + len(PIECES) + 2, {2, 4, 30}),
    "merging bytes": (tiny.byte_tokenizer(), tiny.VOCAB_SIZE, {tiny.byte_tokenizer().eos_token_id, 40, 70}),
    "tinyworld": (tinyworld(), 1024, {1, 300, 400}),
}
CONSTRAINTS = {
    "a string": {"json": {"type": "string", "maxLength": 6}},
    "an object": {"json": {"type": "object",
                           "properties": {"name": {"type": "string", "maxLength": 4}, "n": {"type": "integer"}},
                           "required": ["n"], "additionalProperties": False}},
    "an enum with what may lack tokens": {"json": {"enum": ["é", "tram", "x日", 12]}},
    "any object": {"json_object": True},
    "nested brackets": {"grammar": 'start: "(" start ")" | "x" | /[a-cé]{1,3}/'},
    "optional ends": {"grammar": 'start: "na"* ("tr" | "é")?'},
    "one text": {"grammar": 'start: "tr: na"'},
}  # fmt: skip


@pytest.mark.parametrize("kind", VOCABULARIES)
@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_a_mask_holds_exactly_what_accept_takes(kind, constraint):
    """Where the text is forced, the one token of the mask is the tokenizer's,
    and accept takes the same text in others."""
    tokenizer, vocab_size, ends = VOCABULARIES[kind]
    compiler = GrammarCompiler(tokenizer, vocab_size, ends)
    try:
        rules = compiler.compile(StructuredOutputsParams(**CONSTRAINTS[constraint]))
    except ValueError as error:
        assert "the vocabulary has no tokens for what it begins with," in str(error)
        assert constraint == "one text" or "quote" in kind
        return
    num_steps = 0
    for seed in range(5):
        grammar, rng = rules.start(), random.Random(seed)
        for _ in range(25):
            try:
                mask = allowed(grammar, vocab_size)
            except RuntimeError as error:
                assert "the vocabulary has no token for" in str(error) and compiler.vocabulary.missing_bytes
                break
            taken = {token_id for token_id in range(vocab_size) if grammar.validate([token_id])}
            if grammar._forced:
                assert len(mask) == 1 and mask <= taken
            else:
                assert mask == taken
            assert not mask & ends or ends <= mask
            jumped = grammar.jump_tokens()
            assert grammar.validate(jumped) == len(jumped)
            num_steps += 1
            assert bool(mask) != grammar.is_terminated
            if grammar.is_terminated:
                break
            grammar.accept(rng.choice(sorted(mask)))
    assert num_steps > 5


@pytest.mark.parametrize("constraint, begins", [
    ({"json": {"enum": ["日"]}}, "'\"日\"'"), ({"grammar": 'start: "日"'}, "'日'"),
    ({"grammar": 'start: "ab" "日" "c"'}, "'ab日c'"), ({"json": {"const": "x日"}}, "'\"x日\"'"),
    ({"grammar": 'start: "A" | "B"'}, None),
])  # fmt: skip
def test_what_cannot_be_begun_is_refused_when_it_is_compiled(constraint, begins):
    said = (
        f"no tokens for what it begins with, {begins}; supported"
        if begins
        else "no token for anything that may come next"
    )
    compiler = GrammarCompiler(pieces_tokenizer(PIECES), 3 + len(PIECES), {2})
    with pytest.raises(ValueError, match=f"is not possible: .*the vocabulary has {re.escape(said)}"):
        compiler.compile(StructuredOutputsParams(**constraint))


def test_the_tokenizers_forced_token_cannot_be_said_but_others_can():
    compiler = GrammarCompiler(byte_tokenizer([b'"', b"a", b"b", b"ab", b'b"', b'ab"c']), 8, {0, 3})  # a is an end
    grammar = compiler.compile(StructuredOutputsParams(json={"const": "ab"})).start()
    assert isinstance(grammar, LibraryGrammar) and allowed(grammar, 8) == {2}
    grammar.accept(2)
    assert allowed(grammar, 8) == {5} == {token_id for token_id in range(8) if grammar.validate([token_id])}
    assert grammar.jump_tokens() == []
    grammar.accept(5)
    assert allowed(grammar, 8) == {2} and grammar.jump_tokens() == [2]


def test_a_character_that_is_a_token_needs_no_bytes():
    tokenizer = pieces_tokenizer([*PIECES, "日", "x日本", "ñ本"])
    compiler = GrammarCompiler(tokenizer, len(tokenizer), {2})
    written = compiler.vocabulary.token_bytes
    for pattern, first in (
        ("日", {"日"}),
        ("[a-cé日\U0001f600]{2}", {*"abcé日"}),
        ("x日?a|é+", {"x", "é"}),
        ("[^a-z0-9]日", {*' _-.,:;!()"{}[]é日'}),
    ):
        rules = compiler.compile(StructuredOutputsParams(regex=pattern))
        assert {written[token_id].decode() for token_id in allowed(rules.start(), len(tokenizer))} == first
        for seed in range(8):
            tokens = random_walk(rules.start(), len(tokenizer), {2}, seed, jump=seed % 2 == 1)
            assert re.fullmatch(pattern, b"".join(written[token_id] for token_id in tokens).decode())
    for pattern in ("本", "x日本", "añ"):  # 本 is no token, though tokens hold it
        with pytest.raises(
            ValueError, match=r"no text that can be written; .* the vocabulary has no token for a character of it"
        ):
            compiler.compile(StructuredOutputsParams(regex=pattern))


def test_no_token_ends_inside_a_character_that_bytes_cannot_complete():
    compiler = GrammarCompiler(
        byte_tokenizer(
            [b"a", "é".encode(), "ä".encode(), b"\xc3", b"\xa4", "日".encode(), b"a\xe6\x97", "本".encode()]
        ),
        10,
        {END},
    )
    # é: not behind \xc3; 日: not behind a\xe6\x97
    for pattern, first in (("[éä]", {4, 5}), ("a?[éäa]", {2, 4, 5}), ("[日本a]", {2, 9})):
        rules = compiler.compile(StructuredOutputsParams(regex=pattern))
        assert allowed(rules.start(), 10) == first
        for seed in range(10):
            random_walk(rules.start(), 10, {END}, seed)


@tiny.seeded
@given(bounded_patterns(), st.sets(st.sampled_from(TOKENS)), st.integers(0, 2**32))
def test_no_walk_gets_stuck_whatever_the_vocabulary_lacks(pattern, tokens, seed):
    tokens = sorted(tokens)
    compiler = GrammarCompiler(byte_tokenizer(tokens), len(tokens) + 2, {END})
    try:
        rules = compiler.compile(StructuredOutputsParams(regex=pattern))
    except ValueError as error:
        assert "no text that can be written" in str(error)
        return
    walked = random_walk(rules.start(), len(tokens) + 2, {END}, seed)
    assert re.fullmatch(pattern, b"".join(tokens[token_id - 2] for token_id in walked).decode())
