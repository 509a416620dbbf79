"""Texts that begin as given, and token healing, against a look at every token of the bundled vocabulary."""

from __future__ import annotations

import random

import pytest

from minillm.sampling.grammar.compiler import GrammarCompiler
from minillm.sampling.grammar.params import StructuredOutputsParams
from minillm.sampling.grammar.prefix import taken_back

from ..helpers.grammar_cases import allowed, byte_tokenizer, tinyworld, tinyworld_compiler

TEXT = (
    'Once upon a time there was a little hedgehog named Finn. He said: "Hello!" <|user|>Été 😀 is warm, isn\'t it?\n42'
)


def begins(text: str):
    return tinyworld_compiler().compile(StructuredOutputsParams(begin=text))


def test_each_mask_along_a_prefix_is_the_oracles():
    rules = begins(" hedgehog é")
    texts = rules.vocabulary.token_bytes
    for seed in range(30):
        rng, grammar, place = random.Random(seed), rules.start(), 0
        while place < len(rules.prefix):
            rest = rules.prefix[place:]
            oracle = {
                one for one, text in enumerate(texts) if text and (rest.startswith(text) or text.startswith(rest))
            }
            assert allowed(grammar, 1024) == oracle
            token_id = rng.choice(sorted(oracle))
            grammar.accept(token_id)
            place += len(texts[token_id])
        assert len(allowed(grammar, 1024)) == 1024  # free, the end too
        grammar.rollback(1)
        assert allowed(grammar, 1024) == oracle
        with pytest.raises(ValueError, match="may not come next"):
            grammar.accept(next(one for one in range(1024) if one not in oracle))


def test_every_cut_takes_back_the_tokens_that_could_go_on():
    """The oracle tries every number of tokens, and looks for each at every token of the vocabulary."""
    vocabulary = tinyworld_compiler().vocabulary
    for cut in range(1, len(TEXT)):
        token_ids = tinyworld().encode(TEXT[:cut])
        oracle = 0
        for count in range(1, len(token_ids)):
            pieces = [vocabulary.token_bytes[one] for one in token_ids[-count:]]
            if None in pieces:
                break
            rest = b"".join(pieces)
            if any(text and text != rest and text.startswith(rest) for text in vocabulary.token_bytes):
                oracle = count
        assert taken_back(token_ids, vocabulary) == oracle, TEXT[:cut]


def test_no_place_is_reached_from_which_nothing_leads_on():
    """Without a token for b alone, a token a is a dead end."""
    compiler = GrammarCompiler(byte_tokenizer([b"a", b"ab", b"bc", b"c"]), 6, [0])
    grammar = compiler.compile(StructuredOutputsParams(begin="abd"[:2])).start()
    assert allowed(grammar, 6) == {2, 3}  # a and then bc, which reaches over the end; or ab
    with pytest.raises(ValueError, match="no tokens for this text"):
        compiler.compile(StructuredOutputsParams(begin="abba"))
    grammar = compiler.compile(StructuredOutputsParams(begin="abc")).start()
    assert allowed(grammar, 6) == {2, 3}
    grammar.accept(2)
    assert allowed(grammar, 6) == {4}
    assert grammar.validate([4, 0, 1]) == 3 and grammar.validate([5]) == 0
