"""A grammar that begins at a marker, against an oracle on bytes that looks at every token of the vocabulary."""

from __future__ import annotations

import json
import random

import pytest

from minillm.sampling.grammar.compiler import GrammarCompiler
from minillm.sampling.grammar.params import StructuredOutputsParams
from minillm.sampling.grammar.protocol import GrammarError
from minillm.sampling.params import SamplingParams

from ..helpers.grammar_cases import allowed, byte_tokenizer, sentencepiece_tokenizer, tinyworld, tinyworld_compiler

NUMBER = {"regex": "[0-9]{1,2}[.]"}
PIECES = [b"a", b"b", b"ab", b"aba", b"ba1", b"b7.", b"babx", b"abab", b"1", b"2", b".", b"1.", b"aab2"]
END = 0


def small(**constraint):
    tokenizer = byte_tokenizer(PIECES)
    return GrammarCompiler(tokenizer, len(PIECES) + 2, [END]).compile(StructuredOutputsParams(**constraint))


def marked(after: str, budget: int | None = None, **constraint):
    return StructuredOutputsParams(**(constraint or NUMBER), after=after, thinking_token_budget=budget)


def expected(rules, said: bytes) -> set[int]:
    """What may follow: the text so far and each token, and what stands behind the first marker in them."""
    automaton = rules.grammar.automaton
    found = set()
    for token_id, text in enumerate(rules.vocabulary.all_texts):
        if token_id in rules.vocabulary.eos_token_ids:
            _, mark, rest = said.partition(rules.marker)
            state = automaton.walk(rest) if mark else -1
            ends = state >= 0 and bool(automaton.accepting[state])
        elif text is None:
            ends = False
        else:
            _, mark, rest = (said + text).partition(rules.marker)
            ends = not mark or automaton.walk(rest) >= 0
            if said.count(rules.marker) and rules.vocabulary.token_bytes[token_id] is None:
                ends = False  # behind the marker no special token is text
        if ends:
            found.add(token_id)
    return found


@pytest.mark.parametrize("after", ["b", "ab", "aba", "abab", "aab", "ba"])
def test_each_mask_is_the_oracles_on_overlapping_tokens(after):
    rules = small(**NUMBER, after=after)
    for seed in range(15):
        rng, grammar, said = random.Random(seed), rules.start(), b""
        for _ in range(12):
            choices = allowed(grammar, rules.vocabulary.size)
            assert choices == expected(rules, said), (after, said)
            token_id = rng.choice(sorted(choices))
            grammar.accept(token_id)
            if grammar.is_terminated:
                break
            said += rules.vocabulary.all_texts[token_id]


def test_each_mask_is_the_oracles_on_the_bundled_tokenizer():
    compiler = tinyworld_compiler()
    for after in ("</think>", " So:", "<|assistant|>"):
        rules = compiler.compile(marked(after))
        text = f"Tom has 3 plums, and so{after[:3]} {after}42."
        token_ids = tinyworld().encode(text, add_special_tokens=False)
        grammar, said = rules.start(), b""
        for token_id in token_ids:
            assert allowed(grammar, rules.vocabulary.size) == expected(rules, said)
            grammar.accept(token_id)
            said += rules.vocabulary.all_texts[token_id]
        assert said == text.encode()
        grammar.accept(tinyworld().eos_token_id)
        assert grammar.is_terminated


@pytest.mark.parametrize("inner", [NUMBER, {"json": {"enum": [[1], "ab", {"a": 1}]}}], ids=["ours", "library"])
@pytest.mark.parametrize("budget", [None, 0, 3])
def test_what_is_taken_back_was_never_there(inner, budget):
    rules = tinyworld_compiler().compile(marked("ab", budget, **inner))
    for seed in range(6):
        rng, grammar, said = random.Random(seed), rules.start(), []
        for _ in range(25):
            if rng.random() < 0.3:
                count = rng.randint(0, len(said))
                grammar.rollback(count)
                said = said[: len(said) - count]
            if rng.random() < 0.3:
                grammar = grammar.copy()
            fresh = rules.start()
            for token_id in said:
                fresh.accept(token_id)
            assert fresh.is_terminated == grammar.is_terminated
            if grammar.is_terminated:
                continue
            choices = allowed(grammar, 1024)
            assert choices == allowed(fresh, 1024)
            near = [one for one in choices if (rules.text(one) or b"x")[:1] in b"ab[{"] or sorted(choices)
            draft = [rng.choice(near), rng.randrange(1024)]
            count = grammar.validate(draft)
            assert count >= 1 and allowed(grammar, 1024) == choices
            with pytest.raises((ValueError, GrammarError)):
                grammar.accept(next(one for one in range(1024) if one not in choices))
            grammar.accept(draft[0])
            said.append(draft[0])
        with pytest.raises(ValueError, match="rollback"):
            grammar.rollback(len(said) + 1)


@pytest.mark.parametrize(
    "prompt, is_inside",
    [
        ("Think. </think>", True),
        ("Think. </think>\n\n ", True),
        ("Once </think> he said", False),
        ("<think>", False),
        ("</thin", False),
        ("", False),
    ],
)
def test_a_marker_at_the_end_of_the_prompt_counts(prompt, is_inside):
    rules = tinyworld_compiler().compile(marked("</think>"))
    grammar = rules.start(tinyworld().encode(prompt, add_special_tokens=False) if prompt else [])
    ids = {text: token_id for token_id, text in enumerate(rules.vocabulary.token_bytes) if text in (b"7", b"x")}
    assert (ids[b"x"] in allowed(grammar, 1024)) != is_inside and ids[b"7"] in allowed(grammar, 1024)


def test_a_marker_that_the_prompt_begins_is_completed_by_the_text():
    rules = tinyworld_compiler().compile(marked("</think>"))
    grammar = rules.start(tinyworld().encode("So: </thi", add_special_tokens=False))
    for token_id in tinyworld().encode("nk>", add_special_tokens=False):
        grammar.accept(token_id)
    assert grammar.inner is not None


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_marker_is_forced_when_the_budget_is_spent(budget):
    rules = tinyworld_compiler().compile(marked("</think>", budget))
    for seed in range(4):
        rng, grammar, said = random.Random(seed), rules.start(), []
        while grammar.inner is None:
            choices = allowed(grammar, 1024)
            assert len(said) < budget or len(choices) == 1
            said.append(rng.choice(sorted(choices)))
            grammar.accept(said[-1])
        assert len(said) <= budget + len(rules.ending(0))
        text = b"".join(rules.text(one) for one in said)
        assert text.count(b"</think>") == 1 and text.endswith(b"</think>")
    spent = rules.start()
    for token_id in tinyworld().encode("a b c d e f", add_special_tokens=False)[:budget]:
        spent.accept(token_id)
    jump = spent.jump_tokens()
    assert jump[: len(rules.ending(0))] == rules.ending(0)


def test_half_of_a_marker_is_not_said_twice():
    """The budget ends inside of the marker."""
    tokens = tinyworld().encode("Yes </thi", add_special_tokens=False)
    rules = tinyworld_compiler().compile(marked("</think>", len(tokens)))
    grammar, said = rules.start(), list(tokens)
    for token_id in tokens:
        grammar.accept(token_id)
    while grammar.inner is None:
        [token_id] = allowed(grammar, 1024)
        grammar.accept(token_id)
        said.append(token_id)
    assert b"".join(rules.text(one) for one in said) == b"Yes </think>"


def test_an_added_token_is_a_marker():
    tokenizer = sentencepiece_tokenizer()
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [2])
    rules = compiler.compile(marked("<tool>", 2))
    tool = tokenizer.convert_tokens_to_ids("<tool>")
    assert rules.ending(0) == [tool]
    grammar = rules.start()
    assert tool in allowed(grammar, len(tokenizer)) and 2 not in allowed(grammar, len(tokenizer))
    grammar.accept(tool)
    assert tool not in allowed(grammar, len(tokenizer))
    for token_id in (3 + ord("4"), 3 + ord(".")):  # as bytes
        grammar.accept(token_id)
    grammar.accept(2)
    assert grammar.is_terminated


def test_json_begins_inside_of_the_token_that_ends_the_marker():
    rules = small(json={"const": 1}, after="ba")
    crossing = PIECES.index(b"ba1") + 2
    grammar = rules.start()
    assert crossing in allowed(grammar, len(PIECES) + 2)
    grammar.accept(crossing)
    grammar.accept(END)
    assert grammar.is_terminated
    grammar.rollback(2)
    assert grammar.inner is None and END not in allowed(grammar, len(PIECES) + 2)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"after": ""}, "after='' is not allowed"),
        ({"after": 3}, "after=3 is not allowed"),
        ({"after": "\ud800"}, "lone surrogate"),
        ({"thinking_token_budget": 3}, "name the marker"),
        ({"after": "x", "thinking_token_budget": -1}, "thinking_token_budget=-1"),
        ({"after": "x", "thinking_token_budget": 1.5}, "thinking_token_budget=1.5"),
        ({"begin": "a"}, "exactly one"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_marker_is_named(fields, words):
    with pytest.raises((ValueError, TypeError), match=words.replace("(", r"\(")):
        SamplingParams(structured_outputs={"regex": "a"} | fields)


def test_a_marker_without_tokens_is_refused():
    with pytest.raises(ValueError, match="no tokens for this text"):
        small(**NUMBER, after="é")


def test_a_marked_grammar_and_the_plain_one_are_two_grammars():
    compiler = tinyworld_compiler()
    plain, first, second = (compiler.compile(StructuredOutputsParams(**NUMBER, **more)) for more in (
        {}, {"after": "</think>"}, {"after": "</think>", "thinking_token_budget": 4},
    ))  # fmt: skip
    assert first.grammar is plain and second.grammar is plain and first is not second
    assert json.dumps(first.ending(0)) == json.dumps(second.ending(0))
