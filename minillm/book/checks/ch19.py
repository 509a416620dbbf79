"""Checks of chapter 19: a walk, token lists, a template; `ch19_choices` has the select and the jump,
`ch19_text` the healing and the stream.
Built in chapter 19."""

from __future__ import annotations

from minillm.book.checks import Case, Checker, Draw, FunctionChecker, Timed
from minillm.book.checks.ch19_choices import check_jump, check_select_by_gain
from minillm.book.checks.ch19_oracle import Places, Slot, alive_by_rounds, lengths, lists, lists_again
from minillm.book.checks.ch19_text import check_heal, check_tell
from minillm.book.checks.patience import within

__all__ = [
    "Slot",
    "check_heal",
    "check_how_far",
    "check_jump",
    "check_select_by_gain",
    "check_tell",
    "check_template",
    "check_token_lists",
]

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


def _text_moves(*rows: dict[str, int]) -> list[dict[int, int]]:
    return [{ord(letter): target for letters, target in row.items() for letter in letters} for row in rows]


NUMBER = _text_moves({"-": 1, "012": 2}, {"012": 2}, {"012": 2, ".": 3}, {"012": 4}, {"012": 4})
TRAPS = _text_moves({"a": 1, "b": 2, "c": 3}, {"a": 1}, {"b": 4, "c": 1}, {"a": 3, "d": 1}, {})  # 1 and 4 are dead
ABC = _text_moves({"a": 1}, {"b": 2}, {"c": 3}, {})


def _random_moves(draw: Draw, states: int, letters: str = "abc") -> tuple[list[dict[int, int]], set[int]]:
    share = draw.rng.choice((0.3, 0.5, 0.8))
    moves = [
        {ord(letter): draw.randint(0, states) for letter in letters if draw.rng.random() < share} for _ in range(states)
    ]
    return moves, {state for state in range(states) if draw.rng.random() < 0.2}


def _text(draw: Draw, longest: int) -> bytes:
    return bytes(draw.rng.choice(b"abc") for _ in range(draw.randint(0, longest + 1)))


# 1 · how far


def _long_chain(draw: Draw) -> tuple:
    states, last = 30_000, draw.randint(15_000, 25_000)  # those after the last are dead
    moves = [{97: state + 1} | ({98: 0} if state < last else {}) for state in range(states)]
    return [*moves, {}], {last}, b"a" * draw.randint(last, 40_000)


check_how_far = FunctionChecker(
    "how_far",
    lengths,
    hint="First find the states from which an end can be reached, backwards from may_end; then walk.",
    examples=[(NUMBER, {2, 4}, text) for text in (b"-12.5", b"12", b"-", b"1.", b"x", b"1.2.3", b"20-1")],
    edges=[
        *(
            (TRAPS, may_end, text)
            for text in (b"", b"a", b"aa", b"b", b"bb", b"bc", b"c", b"caa", b"cad", b"cadd")
            for may_end in ({3}, {0, 3})
        ),
        (TRAPS, set(), b"ca"),
        ([{}], {0}, b"a"),
        ([{}], set(), b""),
        ([{255: 0, 0: 0}], {0}, bytes([255, 0, 1])),
        ([{97: state + 1} for state in range(30)] + [{}], {10}, b"a" * 20),
    ],
    random=lambda draw: (*_random_moves(draw, draw.randint(1, 10)), _text(draw, 8)),
    trials=150,
    returns=("valid", "viable"),
    misconceptions={
        "A state from which no end can be reached is dead: a prefix that leads there is not viable.": dict(dead=False),
        "First the valid length, then the viable one.": lambda *given: lengths(*given)[::-1],
        "The empty prefix counts, too: it is valid if 0 is in may_end.": dict(empty=False),
        "Look at each move once: list for each state the states that move into it, and use a queue.": dict(
            alive=alive_by_rounds
        ),
    },
    timed=(
        Timed(
            "an automaton of 30,000 states",
            _long_chain,
            hint="Look at each move once: list for each state the states that move into it, and use a queue.",
        ),
    ),
    forbid=_GRAMMAR,
)


# 2 · token lists


def _random_lists(draw: Draw) -> tuple:
    vocabulary = [_text(draw, 3) for _ in range(draw.randint(1, 10))]
    return *_random_moves(draw, draw.randint(1, 9)), vocabulary, draw.randint(0, len(vocabulary))


def _many_tokens(draw: Draw) -> tuple:
    """Each state can be left by an a; some tokens are b's, the others end in a c, which no state reads."""
    moves = [{97: state + 1, 98: state} for state in range(199)] + [{98: 199}]
    tails = [b"b" * draw.randint(3, 8) + b"c" * draw.randint(0, 3) for _ in range(1998)]
    return moves, {199}, [b"a", b"<end>", *tails], 1


def _lists_of_many(moves, may_end, vocabulary, end) -> list[list[int]]:
    stay = [token for token, data in enumerate(vocabulary) if data.count(b"b") == len(data)]
    return [[0, *stay]] * 199 + [[1, *stay]]


def _explain_lists(got, expected, moves, may_end, vocabulary, end) -> str | None:
    if any(list(row) != sorted(row) for row in got):
        return "The ids of a list go upwards."
    if [end in row for row in got] != [end in row for row in expected]:
        return "The end token is allowed where the text may end, whatever its bytes are, and nowhere else."
    return None


check_token_lists = FunctionChecker(
    "token_lists",
    lists,
    hint="Walk every token from every state once; then ask, backwards from may_end, which states reach an end by "
    "tokens.",
    examples=[
        (NUMBER, {2, 4}, [b"-", b"1", b"12", b".", b".2", b"1.0", b"0.", b"-1", b"--", b"x", b"<end>"], 10),
        (NUMBER, {2, 4}, [b"-", b"1.", b"<end>"], 2),  # nothing spells what comes after the point
    ],
    edges=[
        (NUMBER, {2, 4}, [b"", b"1", b"1", b"<end>", b"-1.", b".1", b"1.1"], 3),  # no bytes; twice the same
        (NUMBER, {2, 4}, [b"1", b"2", b"."], 1),  # the end's own bytes could be walked
        (TRAPS, {3}, [b"a", b"b", b"c", b"bc", b"aa", b"cad", b"ca", b""], 7),
        (TRAPS, {0}, [b"a", b"c"], 1),
        (TRAPS, set(), [b"a", b"c", b"e"], 2),
        (ABC, {3}, [b"ab", b"c", b"a", b"bc", b"."], 4),
        (ABC, {3}, [b"ab", b"b", b"a", b"."], 3),
        ([{255: 0}], {0}, [bytes([255]), bytes([255, 255]), bytes([255, 0]), b""], 3),
        ([{}], {0}, [b"a"], 0),
    ],
    random=_random_lists,
    trials=60,
    returns="the list of lists",
    misconceptions={
        "Among them are tokens that lead into a trap: byte by byte an end can be reached from there, by tokens it "
        "cannot.": dict(by="bytes"),
        "Among them are tokens that lead to states from which no end can be reached.": dict(by="not"),
        "An end may be several tokens away.": dict(by="one"),
        "A token without bytes is never allowed: it leads nowhere.": dict(empty=True),
        "The end token's own bytes do not matter: it is allowed in the states of may_end.": dict(spelled_end=True),
        "The end token is allowed where the text may end, whatever its bytes are, and nowhere else.": dict(
            anywhere=True
        ),
        "The ids of a list go upwards.": lambda *given: [
            sorted(row, key=lambda token: (token == given[3], token)) for row in lists(*given)
        ],
        "Walk every token from every state once, and remember where it leads; a round for each state is too slow.": (
            lists_again
        ),
    },
    explain=_explain_lists,
    timed=(
        Timed(
            "200 states and 2,000 tokens",
            _many_tokens,
            part="random",
            expected=_lists_of_many,
            hint="Walk every token from every state once, and remember where it leads; a round for each state is too "
            "slow.",
        ),
    ),
    forbid=_GRAMMAR,
)


# 3 · the template

DIGITS, LETTERS = frozenset(b"0123456789"), frozenset(b"abcdefghijklmnopqrstuvwxyz")

check_template = Checker(
    "template",
    hint="Keep all places (part, how many bytes it has taken) that the text may have reached.",
    forbid=_GRAMMAR,
)


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
    first, second = (bytes([byte]) for byte in "é".encode())
    _reads(case, ["é", Slot(frozenset(first + second), 1, 2)], [first, second + first, b"x"])
    _reads(case, ["aa", Slot(frozenset(b"a"), 0, 3), "aa"], [b"a", b"aaa", b"aaa", b"a"])
    _reads(case, [Slot(DIGITS, 0, 3), Slot(DIGITS, 0, 4)], [b"1234567", b"8"])  # as many as both hold, and no more
    template = case.run(case.student, ["a", Slot(DIGITS, 0, 2)])
    state = case.run(template.start)
    for token in (b"a1", b"b", b"a", b"a12"):  # all from the same state
        case.equal(
            case.run(template.read, state, token) is None,
            token == b"b",
            f"whether read(start, {token!r}) is None",
            hint="read must not change the state it is given, and returns None if no place is left.",
        )


@check_template.part("random")
def _template_random(case: Case) -> None:
    for _ in range(120):
        parts = [_random_part(case) for _ in range(case.randint(0, 5))]
        _reads(case, parts, [_text(case, 3) for _ in range(5)], alive=True)
    with within(
        case,
        "300 bytes in a template of 20 gaps",
        "Trying one division of the bytes after the other takes too long. Keep the set of all places reached so far.",
    ):
        template = case.run(case.student, [Slot(frozenset(b"a"), 5, 50) for _ in range(20)])
        state = case.run(template.read, case.run(template.start), b"a" * 300)
        ends = state is not None and case.run(template.may_end, state)
        other = state is not None and case.run(template.read, state, b"b")
    case.equal(ends, True, "may_end after 300 bytes in 20 gaps of 5 to 50")
    case.equal(other, None, "what read returns for a byte that no gap allows")


def _random_part(draw: Draw) -> str | Slot:
    if draw.rng.random() < 0.5:
        return _text(draw, 2).decode()
    low = draw.randint(0, 3)
    return Slot(frozenset(draw.rng.sample(b"abc", draw.randint(1, 4))), low, low + draw.randint(0, 3))


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
            hint="Return None if no place is left. A gap that has taken `high` bytes takes no more.",
        )
        case.true(
            after is not None or not reached,
            f"{told}: some valid text goes on like this, but read gave None",
            hint=(
                "A byte may belong to the gap or to the part after it: keep both places. "
                "A gap with low=0 may be passed without a byte."
            ),
        )
        if reached:
            state, places, said = after, reached, said + token
            case.equal(
                case.run(template.may_end, state),
                oracle.may_end(places),
                f"may_end after {said!r} in {parts}",
                hint=(
                    "The text may end if the place behind the last part is reached without reading more. "
                    "A byte that fits a gap and the part after it keeps both places."
                ),
            )
        elif not alive:
            return
