"""One small schema for each feature of JSON Schema that real schemas use, and what a grammar makes of it. Chapter 19.

The kinds are those that JSONSchemaBench (Geng et al., 2025, arXiv:2501.10868) finds in 10,000 schemas; the schemas are
our own, in `schema_features.json`. Each has values that meet it and values that do not.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from minillm.sampling.grammar.params import StructuredOutputsParams
from minillm.sampling.grammar.protocol import CompiledGrammar, GrammarError
from minillm.sampling.grammar.vocabulary import Vocabulary

ENDING = b'"}],:'  # the bytes that bring JSON nearer to its end


@dataclass(frozen=True)
class Feature:
    """`valid` and `invalid` are values; the order of their keys is that of the properties."""

    name: str
    schema: dict[str, Any]
    valid: list[Any]
    invalid: list[Any]


FEATURES = tuple(Feature(**one) for one in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Verdict:
    """What became of one feature: "served", "refused", "too lax" (a text that `jsonschema` finds wrong came out, or an
    invalid value is accepted) or "too strict" (a valid value is not accepted). `told` is the refusal, or the text."""

    feature: str
    outcome: str
    texts: int = 0  # complete ones that were drawn and found valid
    told: str = ""


def judge(
    feature: Feature, compile_one: Callable[[StructuredOutputsParams], CompiledGrammar], vocabulary: Vocabulary,
    draws: int = 20, seed: int = 0,
) -> Verdict:  # fmt: skip
    """Compile the schema, draw texts through its masks, and ask `jsonschema` about each."""
    try:
        compiled = compile_one(StructuredOutputsParams(json=feature.schema))
    except ValueError as error:
        return Verdict(feature.name, "refused", told=str(error))
    checker = jsonschema.Draft202012Validator(
        feature.schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    drawn = (random_text(compiled, vocabulary, random.Random(seed + one)) for one in range(draws))
    texts = [text for text in drawn if text is not None]
    for text in texts:
        if not checker.is_valid(json.loads(text)):
            return Verdict(feature.name, "too lax", told=text)
    for values, is_valid in ((feature.valid, True), (feature.invalid, False)):
        for value in values:
            assert checker.is_valid(value) is is_valid or "format" in feature.name, (feature.name, value)
            if accepts(compiled, vocabulary, json.dumps(value, ensure_ascii=False)) is not is_valid:
                outcome = "too strict" if is_valid else "too lax"
                return Verdict(feature.name, outcome, len(texts), json.dumps(value, ensure_ascii=False))
    return Verdict(feature.name, "served", len(texts))


def accepts(compiled: CompiledGrammar, vocabulary: Vocabulary, text: str) -> bool:
    """Whether the whole text may be generated, in the tokenizer's tokens."""
    token_ids = vocabulary.tokenizer.encode(text, add_special_tokens=False)
    end = min(vocabulary.eos_token_ids)
    return compiled.start().validate([*token_ids, end]) == len(token_ids) + 1


def random_text(
    compiled: CompiledGrammar, vocabulary: Vocabulary, rng: random.Random, max_tokens: int = 120
) -> str | None:
    """A text drawn through the masks, without a model: any allowed token, more often one that closes something."""
    grammar, words, said = compiled.start(), np.empty(vocabulary.num_words, np.int32), b""
    for _ in range(max_tokens):
        try:
            grammar.fill_mask(words)
        except GrammarError:
            return None
        choices = vocabulary.unpack(words).tolist()
        ends = [one for one in choices if one in vocabulary.eos_token_ids]
        if ends and (len(choices) == len(ends) or rng.random() < 0.6):
            return said.decode()
        texts = {one: vocabulary.token_bytes[one] for one in choices if one not in ends}
        closing = [one for one, text in texts.items() if len(text) == 1 and text in ENDING]
        token_id = rng.choice(closing if closing and rng.random() < 0.4 else list(texts))
        grammar.accept(token_id)
        said += texts[token_id]
    return None
