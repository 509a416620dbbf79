"""Checks of chapter 19: a walk, token lists, a template; `ch19_choices` has the select and the jump.
Built in chapter 19."""

from __future__ import annotations

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch19_choices import check_jump, check_select_by_gain
from minillm.book.checks.ch19_oracle import Places, Slot, lengths, lists
from minillm.book.checks.patience import within

__all__ = ["Slot", "check_how_far", "check_jump", "check_select_by_gain", "check_template", "check_token_lists"]

_GRAMMAR = tuple(
    f"minillm.sampling.grammar.{name}"
    for name in (
        "automaton.build_automaton",
        "automaton.minimize",
        "automaton.determinize",
        "compiler.GrammarCompiler",
        "jump.JumpForward",
    )
)

check_how_far = Checker(
    "how_far",
    hint="First find the states from which an end can be reached, backwards from may_end; then walk.",
    forbid=_GRAMMAR,
)
check_token_lists = Checker(
    "token_lists",
    hint=(
        "Walk every token from every state once; then ask, backwards from may_end, which states reach an end by tokens."
    ),
    forbid=_GRAMMAR,
)
check_template = Checker(
    "template", hint="Keep all places (part, bytes of it that were read) where the text may be.", forbid=_GRAMMAR
)


def _text_moves(*rows: dict[str, int]) -> list[dict[int, int]]:
    return [{ord(letter): target for letters, target in row.items() for letter in letters} for row in rows]


NUMBER = _text_moves({"-": 1, "012": 2}, {"012": 2}, {"012": 2, ".": 3}, {"012": 4}, {"012": 4})
TRAPS = _text_moves({"a": 1, "b": 2, "c": 3}, {"a": 1}, {"b": 4, "c": 1}, {"a": 3, "d": 1}, {})  # 1 and 4 are dead


def _random_moves(case: Case, states: int, letters: str = "abc") -> tuple[list[dict[int, int]], set[int]]:
    share = case.rng.choice((0.3, 0.5, 0.8))
    moves = [
        {ord(letter): case.randint(0, states) for letter in letters if case.rng.random() < share} for _ in range(states)
    ]
    return moves, {state for state in range(states) if case.rng.random() < 0.2}


# 1 · how far


@check_how_far.part("example")
def _far_example(case: Case) -> None:
    for text in (b"-12.5", b"12", b"-", b"1.", b"x", b"1.2.3", b"20-1"):
        _goes(case, NUMBER, {2, 4}, text)


@check_how_far.part("edges")
def _far_edges(case: Case) -> None:
    for text in (b"", b"a", b"aa", b"b", b"bb", b"bc", b"c", b"caa", b"cad", b"cadd"):
        _goes(case, TRAPS, {3}, text)
        _goes(case, TRAPS, {0, 3}, text)
    _goes(case, TRAPS, set(), b"ca")
    _goes(case, [{}], {0}, b"a")
    _goes(case, [{}], set(), b"")
    _goes(case, [{255: 0, 0: 0}], {0}, bytes([255, 0, 1]))
    chain = [{97: state + 1} for state in range(3000)] + [{}]
    _goes(case, chain, {1000}, b"a" * 2000)
    with within(
        case,
        "an automaton of 3,000 states",
        "Look at each move once: keep for each state who moves into it, and a queue.",
    ):
        case.call([{97: state + 1, 98: 0} for state in range(30000)] + [{}], {30000}, b"a" * 40000)


@check_how_far.part("random")
def _far_random(case: Case) -> None:
    for _ in range(150):
        moves, may_end = _random_moves(case, case.randint(1, 9))
        _goes(case, moves, may_end, bytes(case.rng.choice(b"abc") for _ in range(case.randint(0, 9))))


def _goes(case: Case, moves, may_end, text: bytes) -> None:
    got = case.call(moves, may_end, text)
    expected, hint = lengths(moves, may_end, text), None
    if got == lengths(moves, may_end, text, dead=False) != expected:
        hint = "A state from which no end can be reached is dead: a beginning that leads there is not viable."
    elif got == expected[::-1] != expected:
        hint = "First the valid length, then the viable one."
    elif isinstance(got, tuple) and len(got) == 2 and got[0] == -1 and expected[0] == 0:
        hint = "The empty beginning counts too: it is valid if state 0 may end."
    case.is_a(got, tuple, "the result")
    case.equal(got, expected, f"(valid, viable) for {text!r}" if len(text) < 40 else "(valid, viable)", hint=hint)


# 2 · token lists


@check_token_lists.part("example")
def _lists_example(case: Case) -> None:
    _allows(case, NUMBER, {2, 4}, [b"-", b"1", b"12", b".", b".2", b"1.0", b"0.", b"-1", b"--", b"x", b"<end>"], 10)
    _allows(case, NUMBER, {2, 4}, [b"-", b"1.", b"<end>"], 2)  # nothing spells what comes after the point


@check_token_lists.part("edges")
def _lists_edges(case: Case) -> None:
    _allows(case, NUMBER, {2, 4}, [b"", b"1", b"1", b"<end>", b"-1.", b".1", b"1.1"], 3)  # no bytes; twice the same
    _allows(case, NUMBER, {2, 4}, [b"1", b"2", b"."], 1)  # the end's own bytes could be walked
    _allows(case, TRAPS, {3}, [b"a", b"b", b"c", b"bc", b"aa", b"cad", b"ca", b""], 7)
    _allows(case, TRAPS, {0}, [b"a", b"c"], 1)
    _allows(case, TRAPS, set(), [b"a", b"c", b"e"], 2)
    _allows(case, _text_moves({"a": 1}, {"b": 2}, {"c": 3}, {}), {3}, [b"ab", b"c", b"a", b"bc", b"."], 4)
    _allows(case, _text_moves({"a": 1}, {"b": 2}, {"c": 3}, {}), {3}, [b"ab", b"b", b"a", b"."], 3)
    _allows(case, [{255: 0}], {0}, [bytes([255]), bytes([255, 255]), bytes([255, 0]), b""], 3)
    _allows(case, [{}], {0}, [b"a"], 0)


@check_token_lists.part("random")
def _lists_random(case: Case) -> None:
    for _ in range(60):
        moves, may_end = _random_moves(case, case.randint(1, 8))
        vocabulary = [
            bytes(case.rng.choice(b"abc") for _ in range(case.randint(0, 4))) for _ in range(case.randint(1, 9))
        ]
        _allows(case, moves, may_end, vocabulary, case.randint(0, len(vocabulary)))
    moves = [{97: state + 1, 98: state} for state in range(199)] + [{98: 199}]
    vocabulary = [b"a", b"<end>"] + [b"b" * case.randint(3, 7) + b"c" * case.randint(0, 2) for _ in range(1998)]
    with within(
        case,
        "200 states and 2,000 tokens",
        "Walk every token from every state once, and remember where it leads; a round for each state is too slow.",
    ):
        _allows(case, moves, {199}, vocabulary, 1, oracle=False)


def _allows(case: Case, moves, may_end, vocabulary, end: int, oracle: bool = True) -> None:
    got = case.call(moves, may_end, vocabulary, end)
    if not oracle:
        return case.equal(len(got), len(moves), "the number of lists")
    expected, hint = lists(moves, may_end, vocabulary, end), None
    for by, said in (
        (
            "bytes",
            (
                "Among them are tokens that lead into a trap: byte by byte an end can be reached from there, "
                "by tokens it cannot."
            ),
        ),
        ("nothing", "Among them are tokens that lead to states from which no end can be reached."),
    ):
        if hint is None and got == lists(moves, may_end, vocabulary, end, by) != expected:
            hint = said
    if hint is None and isinstance(got, list) and any(isinstance(row, list) and row != sorted(row) for row in got):
        hint = "The ids of a list go upwards."
    elif (
        hint is None
        and isinstance(got, list)
        and any(token != end and vocabulary[token] == b"" for row in got for token in row)
    ):
        hint = "A token without bytes is never allowed: it leads nowhere."
    elif hint is None and isinstance(got, list) and [end in row for row in got] != [end in row for row in expected]:
        hint = "The end token is allowed where the text may end, whatever its bytes are, and nowhere else."
    case.equal(got, expected, f"the lists of {len(vocabulary)} tokens, end={end}\n  the list", hint=hint)


# 3 · the template

DIGITS, LETTERS = frozenset(b"0123456789"), frozenset(b"abcdefghijklmnopqrstuvwxyz")


@check_template.part("example")
def _template_example(case: Case) -> None:
    parts = ['{"age": ', Slot(DIGITS, 1, 3), ', "name": "', Slot(LETTERS, 1, 8), '"}']
    _reads(case, parts, [b'{"', b"age", b'": ', b"1", b"5", b", ", b'"name', b'": "', b"ida", b'"}'])
    _reads(case, parts, [b'{"age": 12', b'345, "'])  # four digits
    _reads(case, parts, [b'{"age": 123, "name": "i', b'da"}'])
    _reads(case, parts, [b'{"age": , "'])  # a slot needs its least


@check_template.part("edges")
def _template_edges(case: Case) -> None:
    _reads(case, [], [b"", b"a"])
    _reads(case, ["", "ab", ""], [b"a", b"", b"b", b"b"])
    _reads(case, [Slot(LETTERS, 0, 2), "ab"], [b"ab", b"ab", b"a"])  # slot or text?
    _reads(case, [Slot(LETTERS, 2, 3), "ab"], [b"abab"])
    _reads(case, [Slot(LETTERS, 0, 0), "x"], [b"a"])
    _reads(case, [Slot(LETTERS, 0, 0), "x"], [b"x"])
    _reads(case, [Slot(DIGITS, 0, 2), Slot(LETTERS, 0, 1), "", Slot(DIGITS, 1, 2)], [b"1", b"2", b"3", b"4", b"5"])
    _reads(
        case, ["é", Slot(frozenset("é".encode()), 1, 2)], ["é".encode()[:1], "é".encode()[1:] + "é".encode()[:1], b"x"]
    )
    _reads(case, ["aa", Slot(frozenset(b"a"), 0, 3), "aa"], [b"a", b"aaa", b"aaa", b"a"])
    template = case.run(case.student, ["a", Slot(DIGITS, 0, 2)])
    state = case.run(template.start)
    for token in (b"a1", b"b", b"a", b"a12"):  # all from the same state
        before = case.run(template.read, state, token) is None
        case.equal(
            before,
            token == b"b",
            f"whether read(start, {token!r}) is None",
            hint="read must not change the state it is given; no places left is None.",
        )


@check_template.part("random")
def _template_random(case: Case) -> None:
    for _ in range(120):
        parts = [
            Slot(
                frozenset(case.rng.sample(b"abc", case.randint(1, 4))),
                low := case.randint(0, 3),
                low + case.randint(0, 3),
            )
            if case.rng.random() < 0.5
            else "".join(case.rng.choice("abc") for _ in range(case.randint(0, 3)))
            for _ in range(case.randint(0, 5))
        ]
        _reads(
            case,
            parts,
            [bytes(case.rng.choice(b"abc") for _ in range(case.randint(0, 4))) for _ in range(5)],
            alive=True,
        )
    parts = [Slot(frozenset(b"a"), 0, 50) for _ in range(20)]
    with within(
        case,
        "300 bytes in a template of 20 slots",
        "Trying one way after the other never ends. Keep a set of places: the same place need not be there twice.",
    ):
        template = case.run(case.student, parts)
        case.true(
            case.run(template.read, case.run(template.start), b"a" * 300) is not None,
            "300 bytes fit into 20 slots of up to 50, but read says None",
        )


def _reads(case: Case, parts: list, tokens: list[bytes], alive: bool = False) -> None:
    """alive: tokens that may not come are tried and left out, so that the text goes on."""
    template, oracle = case.run(case.student, parts), Places(parts)
    state, places, said = case.run(template.start), oracle.start(), b""
    for token in [b"", *tokens]:
        after, reached = case.run(template.read, state, token), oracle.read(places, token)
        told = f"after {said!r}, reading {token!r}, in {parts}"
        case.true(
            after is None or reached,
            f"{told}: no valid text goes on like this, but read gave a state",
            hint="No places left is None; and mind `high`.",
        )
        case.true(
            after is not None or not reached,
            f"{told}: some valid text goes on like this, but read gave None",
            hint=(
                "A byte may belong to the slot or to what follows it: keep both places. "
                "Parts that may be empty can be left at once."
            ),
        )
        if reached:
            state, places, said = after, reached, said + token
            ends = case.run(template.may_end, state)
            case.is_a(ends, bool, f"what may_end returns after {said!r}")
            case.equal(
                ends,
                oracle.may_end(places),
                f"may_end after {said!r} in {parts}",
                hint=(
                    "It may end when the place behind the last part is reached without reading. "
                    "A byte that fits a slot and what follows it keeps both places."
                ),
            )
        elif not alive:
            return
