"""Regular expressions by hand: what the automaton matches is what Python's `re` matches, and the limits hold."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, strategies as st

from minillm.sampling.grammar import automaton as automata
from minillm.sampling.grammar.automaton import NO_STATE, build_automaton
from minillm.sampling.grammar.characters import LAST, complement, union, utf8_sequences
from minillm.sampling.grammar.regex import parse_choice, parse_regex
from tests.helpers.tiny import examples

AGREED = 'ab1 \n-_"\\😀—'  # characters that Python puts into the same classes with and without re.ASCII
DISPUTED = "é٣日\u2003"  # a letter, a digit, another letter and a space by Unicode only


def compiled(pattern: str):
    return build_automaton(parse_regex(pattern))


def atoms() -> st.SearchStrategy[str]:
    classes = [
        "[ab]",
        "[^a]",
        "[a-z_]",
        r"[\d\-]",
        r"[^\w]",
        "[é-日]",
        r"[^\x00-\u00e8]",
        "[]b-]",
        r"[\W1]",
        r"[^\D]",
        r"[\u2000-\U0001F600]",
    ]
    literals = ["a", "b", "1", " ", "é", "日", "😀", r"\-", r"\n", r"\"", r"\\", r"\x61", r"\u00e9"]
    return st.sampled_from([*literals, ".", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", *classes])


def patterns() -> st.SearchStrategy[str]:
    quantifiers = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{2,}", "{,2}", "*?", "+?", "{0}"])

    def bigger(inner):
        grouped = inner.map("(?:{})".format)
        return st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda pair: "({}|{})".format(*pair)),
            st.tuples(grouped, quantifiers).map("".join),
        )

    return st.recursive(atoms(), bigger, max_leaves=4)


@examples(50)
@given(patterns(), st.lists(st.text(AGREED, max_size=5), min_size=5, max_size=20))
def test_it_matches_what_python_matches(pattern, texts):
    automaton = compiled(pattern)
    for text in texts:
        assert automaton.matches(text) == bool(re.fullmatch(pattern, text)), text


@examples(50)
@given(patterns(), st.lists(st.text(AGREED + DISPUTED, max_size=5), min_size=5, max_size=20))
def test_where_unicode_and_ascii_disagree_a_match_is_one_by_both(pattern, texts):
    automaton = compiled(pattern)
    for text in texts:
        if automaton.matches(text):
            assert re.fullmatch(pattern, text) and re.fullmatch(pattern, text, re.ASCII), text


@examples(40)
@given(patterns())
def test_it_is_minimal_and_every_state_can_be_reached_and_can_end(pattern):
    automaton = compiled(pattern)
    table, everything = automaton.table, set(range(automaton.num_states))
    moves = [set(row[row != NO_STATE].tolist()) for row in table]
    reached = closed({0}, moves)
    sources = [{state for state in everything if target in moves[state]} for target in everything]
    assert reached == everything == closed(set(np.flatnonzero(automaton.accepting).tolist()), sources)
    # Moore's partition: refined as a whole until nothing changes, it has as many blocks as there are states.
    block, num_blocks = automaton.accepting.astype(np.int64), 0
    while num_blocks < (num_blocks := len(np.unique(block))):
        rows = np.concatenate([block[:, None], np.where(table < 0, -1, block[table])], axis=1)
        block = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
    assert num_blocks == automaton.num_states


def closed(states: set[int], moves: list[set[int]]) -> set[int]:
    """All that can be reached from `states`."""
    todo = list(states)
    while todo:
        new = moves[todo.pop()] - states
        states |= new
        todo += new
    return states


@pytest.mark.parametrize("pattern, num_states", [
    ("[0-9]{1,3}", 4), ("a*b|c", 3), ("(a|b)*abb", 4), ("é", 3), ("(?:)", 1), ("(a?){3}", 4), ("x|xx|xxx", 4),
    ("(a*)*", 1), ("b|(aa)*", 4), (r"ab|c[^\w\W]", 3),
])  # fmt: skip
def test_known_automata_have_their_known_sizes(pattern, num_states):
    assert compiled(pattern).num_states == num_states


@pytest.mark.parametrize("pattern, texts", [
    ("^a$|^b", ["a", "b"]), (r"\Aab\Z", ["ab"]), ("a{", ["a{"]), ("{x}", ["{x}"]), ("a{,}", ["", "aa"]),
    ("[a-]", ["-"]), (r'\{"n": \d{2}\}', ['{"n": 07}']), ("(?P<name>a)b", ["ab"]), (r"[\]\b]", ["]", "\b"]),
    (r"\$\^", ["$^"]), ("a||b", ["", "b"]),
])  # fmt: skip
def test_small_print_of_pythons_syntax(pattern, texts):
    for text in texts:
        assert re.fullmatch(pattern, text) and compiled(pattern).matches(text)
    assert not compiled(pattern).matches("ax")


def test_utf8_sequences_are_exactly_the_bytes_of_the_characters():
    edges = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFF, 0x1000, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x3FFFF, 0x40000, LAST]
    for low, high in itertools.combinations_with_replacement(edges, 2):
        automaton = build_automaton(parse_regex(f"[\\U{low:08x}-\\U{high:08x}]"))
        for code in {near for edge in edges for near in (edge - 1, edge, edge + 1) if 0 <= near <= LAST}:
            if not 0xD800 <= code <= 0xDFFF:
                assert automaton.matches(chr(code)) == (low <= code <= high), (low, high, code)
        assert automaton.walk(b"\xed\xa0\x80") == NO_STATE  # a surrogate
        assert automaton.walk(b"\xc0\x80") == NO_STATE  # a longer way to write zero
    assert utf8_sequences(((0x61, 0xFF),)) == (((0x61, 0x7F),), ((0xC2, 0xC3), (0x80, 0xBF)))


def test_sets_of_characters():
    assert union([(5, 7)], [(1, 2), (3, 4), (9, 9)]) == ((1, 7), (9, 9))
    assert complement(((0, 9), (20, LAST))) == ((10, 19),)
    assert complement(()) == ((0, 0xD7FF), (0xE000, LAST))


def test_choice_takes_texts_as_they_are():
    automaton = build_automaton(parse_choice(("a.c", "(", "", "日本")))
    assert all(map(automaton.matches, ["a.c", "(", "", "日本"]))
    assert not any(map(automaton.matches, ["abc", "日", "a.c("]))


@pytest.mark.parametrize("pattern, forced", [
    ("yes, sir|yes, please", b"yes, "), ("a(b?)", b"a"), ("(ab)+c", b"ab"), ("é|è", b"\xc3"), ("abc", b"abc"),
    ("[ab]", b""), ("(?:)", b""),
])  # fmt: skip
def test_forced_bytes(pattern, forced):
    assert compiled(pattern).forced_bytes(0) == forced


@pytest.mark.parametrize("pattern, named", [
    ("(?=a)b", "a look-around, '(?=a' at place 0"), ("a(?!b)", "a look-around, '(?!b' at place 1"),
    ("(?<=a)b", "a look-around"), ("(?<!a)b", "a look-around"), (r"(a)\1", r"a back-reference, '\\1' at place 3"),
    ("(?P<x>a)(?P=x)", "a back-reference"), (r"a\b", "a word boundary"), (r"\Ba", "a word boundary"),
    ("x^", "an anchor inside the expression, '^' at place 1"), ("a$b", "an anchor inside"),
    ("(a$)", "an anchor inside"), ("a++", "a possessive quantifier"), ("(?>a)", "an atomic group"),
    ("(?i)a", "an inline flag"), ("(?i:a)", "an inline flag"), ("(?#no)a", "a comment"), (r"\07", "an octal escape"),
    (r"[\1]", "an octal escape"), (r"\N{DIGIT ONE}", "an escape"), ("(a)(?(1)b)", "a back-reference"),
])  # fmt: skip
def test_what_is_not_supported_is_named_with_its_place(pattern, named):
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        parse_regex(pattern)
    assert repr(pattern) in str(error.value) and "supported: literals" in str(error.value)


@pytest.mark.parametrize(
    "pattern", ["[a", "(", "a)", "*", "a**", "[b-a]", r"\q", "a{3,2}", "(?P<1>a)", "(" * 5000 + ")" * 5000]
)
def test_no_regular_expression_is_refused_in_pythons_words(pattern):
    with pytest.raises(ValueError, match=r"is no regular expression: |groups 101 deep"):
        parse_regex(pattern)


@pytest.mark.parametrize("pattern, said", [
    ("[ab]*a[ab]{20}", f"over {automata.MAX_DFA_STATES} states"),
    ("((a?){200}){200}", f"over {automata.MAX_NFA_STATES} states"),
    ("(((a{100}){100}){100})", f"over {automata.MAX_NFA_STATES} states"),
    (r"[^\x00-\U0010FFFF]", "it matches no text"),
    (r"a[^\w\W]b", "it matches no text"),
])  # fmt: skip
def test_what_cannot_be_built(pattern, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        compiled(pattern)


def test_counted_repetitions_have_a_limit():
    assert compiled("a{1000}").num_states == 1001
    with pytest.raises(ValueError, match=r"repeats \{1,1001\} at place 1; at most 1000"):
        parse_regex("a{1,1001}")
    with pytest.raises(ValueError, match="groups 101 deep; at most 100"):
        parse_regex("(" * 101 + "a" + ")" * 101)
