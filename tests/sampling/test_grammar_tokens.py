"""Masks of tokens against brute force, for vocabularies of several kinds; every walk ends in a text that matches."""

from __future__ import annotations

import itertools
import random
import re

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from minillm import StructuredOutputsParams
from minillm.sampling.grammar.compiler import GrammarCompiler
from minillm.sampling.grammar.vocabulary import Vocabulary
from tests.helpers import tiny
from tests.helpers.grammar_cases import (
    END,
    allowed,
    byte_tokenizer,
    random_walk,
    sentencepiece_tokenizer,
    tinyworld,
    tinyworld_compiler,
)

ALPHABET = ["a", "b", "é", "è", "日"]  # é and è share their first byte
LONGEST = 4
TOKENS = [
    *"a b ab ba aa aab bbb éa aé日 è日 éé".encode().split(),
    *(bytes([byte]) for byte in sorted(set("éè日".encode()))),
    b"a\xc3", b"\xa9b", b"\xa9\xc3", b"\xe6\x97", b"\x97\xa5", b"\xa5a", b"\x97\xa5\xe6", b"\xff", b"c",
]  # fmt: skip


def bounded_patterns() -> st.SearchStrategy[str]:
    """Expressions whose texts are made of ALPHABET and have at most LONGEST characters."""
    atom = st.sampled_from([*ALPHABET, "[ab]", "[é日]", "[è-é]", "[a-bè日]"]).map(lambda text: (text, 1))

    def bigger(inner):
        return st.one_of(
            st.tuples(inner, inner).map(lambda pair: (pair[0][0] + pair[1][0], pair[0][1] + pair[1][1])),
            st.tuples(inner, inner).map(lambda pair: (f"(?:{pair[0][0]}|{pair[1][0]})", max(pair[0][1], pair[1][1]))),
            inner.map(lambda part: (f"(?:{part[0]})?", part[1])),
            inner.map(lambda part: (f"(?:{part[0]}){{0,2}}", 2 * part[1])),
        )

    return st.recursive(atom, bigger, max_leaves=6).filter(lambda part: part[1] <= LONGEST).map(lambda part: part[0])


@tiny.seeded
@given(bounded_patterns(), st.integers(0, 2**32))
def test_a_token_is_allowed_if_and_only_if_a_valid_text_begins_so(pattern, seed):
    texts = ("".join(chosen) for length in range(LONGEST + 1) for chosen in itertools.product(ALPHABET, repeat=length))
    valid = {text.encode() for text in texts if re.fullmatch(pattern, text)}
    viable = {text[:end] for text in valid for end in range(len(text) + 1)}
    size = len(TOKENS) + 2
    grammar = (
        GrammarCompiler(byte_tokenizer(TOKENS), size, [END]).compile(StructuredOutputsParams(regex=pattern)).start()
    )
    rng, said = random.Random(seed), b""
    while True:
        inside = {index + 2 for index, token in enumerate(TOKENS) if said + token in viable}
        assert allowed(grammar, size) == inside | ({END} if said in valid else set()), (pattern, said)
        assert all(grammar.validate([token_id]) == (token_id in inside) for token_id in range(1, size))
        if not inside:
            break
        token_id = rng.choice(sorted(inside))
        grammar.accept(token_id)
        said += TOKENS[token_id - 2]


KINDS = {
    "tinyworld": (tinyworld, 1024),
    "byte level, merges inside characters": (tiny.byte_tokenizer, tiny.VOCAB_SIZE),
    "sentencepiece": (sentencepiece_tokenizer, 280),  # the model has a few rows more than the tokenizer
}
PATTERNS = [
    r"[a-z]{2,5}-\d+", r"(yes|no|perhaps)", r'"[^"\\\n]{0,8}"', "[à-ÿ日本]{1,6}", r"\S{1,6}@\S{1,4}\.(com|org)",
    "(😀|😃)+ [👍🏽]*", r"\d{1,3}(\.\d{1,3}){3}", "[^a-z]{3}", r"\W\D\S", "(?:)", " name: [ab]+",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_walk_ends_in_a_text_that_python_matches(kind, pattern):
    make, vocab_size = KINDS[kind]
    tokenizer = make()
    rules = GrammarCompiler(tokenizer, vocab_size, [tokenizer.eos_token_id]).compile(
        StructuredOutputsParams(regex=pattern)
    )
    for seed in range(4):
        for jump in (False, True):
            tokens = random_walk(rules.start(), vocab_size, {tokenizer.eos_token_id}, seed, jump=jump)
            assert not set(tokens) & set(tokenizer.added_tokens_decoder)
            text = b"".join(rules.vocabulary.token_bytes[token_id] for token_id in tokens).decode()
            assert re.fullmatch(pattern, text), text
            # Behind a prompt the tokenizer says the same as the bytes.
            anchor = tokenizer.encode("a", add_special_tokens=False)
            assert (
                tokenizer.decode([*anchor, *tokens], clean_up_tokenization_spaces=False)
                == tokenizer.decode(anchor) + text
            )


def test_the_bytes_of_tokens():
    vocabulary = Vocabulary(sentencepiece_tokenizer(), 280, [2])
    ids = sentencepiece_tokenizer().convert_tokens_to_ids
    assert [vocabulary.token_bytes[ids(token)] for token in ("▁name", "<0xE2>", "é")] == [
        b" name",
        b"\xe2",
        b"\xc3\xa9",
    ]
    assert [vocabulary.token_bytes[ids(token)] for token in ("<s>", "</s>", "<unk>", "<tool>")] == [None] * 4
    assert vocabulary.token_bytes[275:] == [None] * 5
    vocabulary = Vocabulary(tinyworld(), 1024, [1])
    for text in ("naïve 日本 😀\n\t", '{"a": 12}'):
        tokens = tinyworld().encode(text, add_special_tokens=False)
        assert b"".join(vocabulary.token_bytes[token_id] for token_id in tokens) == text.encode()
    assert sum(text is None for text in vocabulary.token_bytes) == len(tinyworld().added_tokens_decoder)


def test_several_ends_and_none():
    rules = GrammarCompiler(byte_tokenizer([b"a", b"b"]), 4, [0, 3, 99]).compile(StructuredOutputsParams(regex="a?"))
    assert allowed(rules.start(), 4) == {0, 2, 3}, "b is an end-of-sequence token here"
    for end in (0, 3):
        grammar = rules.start()
        grammar.accept(end)
        assert grammar.is_terminated and allowed(grammar, 4) == set()
    with pytest.raises(ValueError, match="the model has none"):
        GrammarCompiler(byte_tokenizer([b"a"]), 3, []).compile(StructuredOutputsParams(regex="a"))


def test_a_tokenizer_without_bytes_is_refused():
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    pieces.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="[UNK]")
    with pytest.raises(
        ValueError, match=r"with the decoder WordPiece; supported: .*ByteLevel, ByteFallback or Metaspace"
    ):
        Vocabulary(tokenizer, 3, [0])


def test_a_vocabulary_that_lacks_bytes_never_gets_stuck():
    compiler = GrammarCompiler(byte_tokenizer([b"a", b"b", b"abc", b"cab"]), 6, [END])
    rules = compiler.compile(StructuredOutputsParams(regex="[abc]{1,9}"))
    for seed in range(20):
        random_walk(rules.start(), 6, {END}, seed)
    with pytest.raises(
        ValueError, match=r"'ac' is not possible: .* no text that can be written.* the vocabulary has no token"
    ):
        compiler.compile(StructuredOutputsParams(regex="ac"))


def test_fifty_thousand_tokens():
    rng = np.random.default_rng(0)
    words = {bytes(rng.choice(list(b"abcdefghij "), size=int(rng.integers(2, 12)))) for _ in range(60_000)}
    tokens = [*(bytes([byte]) for byte in range(256)), *sorted(words)][:50_000]
    size = len(tokens) + 2
    compiler = GrammarCompiler(byte_tokenizer(tokens), size, [END])
    for pattern in (r'\{"name": "[a-z ]{1,30}", "n": \d{1,5}\}', ".*", "[^b]{2,60}", "cab( ca+b){0,9}"):
        grammar, automaton = (
            (rules := compiler.compile(StructuredOutputsParams(regex=pattern))).start(),
            rules.automaton,
        )
        for step in range(3):
            found = allowed(grammar, size)
            state = grammar.states[-1]
            expected = {index + 2 for index, token in enumerate(tokens) if automaton.walk(token, state) >= 0}
            assert found - {END} == expected
            grammar.accept(sorted(expected)[(step * 7919) % len(expected)])


def test_there_and_back():
    rules = tinyworld_compiler().compile(StructuredOutputsParams(regex="[a-z]{1,8} [0-9]+"))
    tokens = [*tinyworld().encode("the 42", add_special_tokens=False), 1]
    grammar, masks = rules.start(), []
    for token_id in tokens:
        masks.append(allowed(grammar, 1024))
        assert token_id in masks[-1]
        grammar.accept(token_id)
    twin = grammar.copy()
    assert grammar.is_terminated and grammar.validate([tokens[0]]) == 0
    with pytest.raises(ValueError, match="the text has ended"):
        grammar.accept(1)
    for place in range(len(tokens) - 1, -1, -1):
        grammar.rollback(1)
        assert allowed(grammar, 1024) == masks[place] and not grammar.is_terminated
        assert grammar.validate(tokens[place:]) == len(tokens) - place
    assert twin.is_terminated
    assert grammar.validate([*tokens[:2], 1, *tokens[2:]]) == 2
    assert grammar.validate([]) == 0
    with pytest.raises(ValueError, match=rf"token {tokens[-2]} \(b'2'\) may not come next"):
        grammar.accept(tokens[-2])
    for bad in (0, 2, 1024, -1):
        with pytest.raises(ValueError, match=rf"token {bad} \(None\) may not come next"):
            grammar.accept(bad)
    assert allowed(grammar, 1024) == masks[0], "a refused token moves nothing"
    for count in (1, -1):
        with pytest.raises(ValueError, match="0 tokens were accepted"):
            grammar.rollback(count)
