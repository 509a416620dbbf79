"""Checks of chapter 19: a prompt whose last word is healed, and calls told out of a stream. Built in chapter 19."""

from __future__ import annotations

from minillm.book.checks import Draw, FunctionChecker

_HEALING = tuple(f"minillm.{name}" for name in ("sampling.grammar.prefix.taken_back", "engine.healing.healed"))
_PARSERS = tuple(f"minillm.engine.tool_calls.{name}" for name in ("tool_parser", "ToolParser", "Hermes"))

# 6 · heal


def healed(
    token_ids, vocabulary, most, *, largest=True, stays=1, special=True, shorter=True, proper=True, gaps=True
) -> tuple[list[int], list[int]]:
    count = 0
    for size in range(1, min(most, len(token_ids) - stays) + 1):
        pieces = [vocabulary[token] for token in token_ids[-size:]]
        if special and b"" in pieces:
            break
        rest = b"".join(pieces)
        if any(text.startswith(rest) and (len(text) > len(rest) or not proper) for text in vocabulary):
            count = size
            if not largest:
                break
        elif not gaps:
            break
    kept = token_ids[: len(token_ids) - count]
    rest = b"".join(vocabulary[token] for token in token_ids[len(kept) :])
    allowed = [
        token
        for token, text in enumerate(vocabulary)
        if text and (text.startswith(rest) or (shorter and rest.startswith(text)))
    ]
    return kept, allowed


HIPPO = [b"", b"h", b"hi", b"hip", b"i", b"p", b" ", b" h", b"po", b"hippo", b"x"]


def _random_prompt(draw: Draw) -> tuple:
    vocabulary = [
        bytes(draw.rng.choice(b"ab") for _ in range(draw.rng.choice((0, 1, 1, 2, 2, 3, 4, 5)))) for _ in range(12)
    ]
    return [draw.randint(0, 12) for _ in range(draw.randint(1, 7))], vocabulary, draw.randint(0, 5)


def _explain_heal(got, expected, token_ids, vocabulary, most) -> str | None:
    if isinstance(got, tuple) and len(got) == 2 and got[0] != expected[0]:
        rest = b"".join(vocabulary[token] for token in token_ids[len(expected[0]) :])
        return f"Taken back should be {rest!r}: {len(token_ids) - len(expected[0])} tokens."
    return None


check_heal = FunctionChecker(
    "heal",
    healed,
    hint="Try every number of tokens up to `most`, and keep the largest that some longer token reaches over.",
    examples=[([10, 2], HIPPO, 3), ([10, 1, 4, 5], HIPPO, 3)],
    edges={
        "one token": ([1], HIPPO, 5),
        "a special token in front": ([10, 0, 1, 4], HIPPO, 5),
        "no token is longer": ([10, 8], HIPPO, 2),
        "nothing may be taken back": ([10, 2], HIPPO, 0),
        "a limit": ([10, 1, 4, 5], HIPPO, 2),
        "a space": ([10, 6], HIPPO, 1),
        "ends in a special token": ([1, 0], HIPPO, 2),
        "two tokens with the same text": ([0, 2], [b"", b"a", b"a", b"ab"], 4),
    },
    random=_random_prompt,
    trials=120,
    returns=("the tokens that are kept", "the allowed tokens"),
    explain=_explain_heal,
    misconceptions={
        "Take back as many tokens as a longer token can reach over, not the fewest.": dict(largest=False),
        "The first token stays, since a prompt needs one.": dict(stays=0),
        "A special token has no text: it is not taken back, and no token before it.": dict(special=False),
        "A token that is a beginning of the text may come, too: another one then goes on.": dict(shorter=False),
        "A token that only repeats the text does not reach over the end of the prompt.": dict(proper=False),
        "Where no token reaches over one token, one may reach over two: do not stop early.": dict(gaps=False),
    },
    forbid=_HEALING,
)

# 7 · tell


def _told(text, begin, end, hold, behind) -> tuple[str, list[str]]:
    told, calls = "", []
    while (at := text.find(begin)) >= 0:
        stop = text.find(end, at + len(begin) if behind else 0)
        told += text[:at]
        if stop < 0:
            return told, calls
        calls.append(text[at + len(begin) : stop])
        text = text[stop + len(end) :]
    return told + text[: len(text) - hold(text, begin)], calls


def _may_begin(text, begin) -> int:
    return next((size for size in range(min(len(begin) - 1, len(text)), 0, -1) if begin.startswith(text[-size:])), 0)


def _last_may_begin(text, begin) -> int:
    return next((size for size in range(1, min(len(begin), len(text) + 1)) if begin.startswith(text[-size:])), 0)


def telling(pieces, begin, end, *, hold=_may_begin, behind=True, joined=True, whole=str) -> list[tuple[str, list[str]]]:
    found, text, told, calls = [], "", "", []
    for piece in pieces:
        text = text + piece if joined else piece
        more, all_calls = _told(text, begin, end, hold, behind)
        if not joined:
            told, calls = "", []
        found.append((more[len(told) :], [whole(call) for call in all_calls[len(calls) :]]))
        told, calls = more, all_calls
    return found


MARKS = ("<tool>", "</tool>")
PARTS = ("<tool>", "</tool>", "<", "<t", "ool>", "tool>", "x", " ", "</", '{"a": 1}', "", "<<tool>")


def _random_pieces(draw: Draw) -> tuple:
    text = "".join(draw.rng.choice(PARTS) for _ in range(draw.randint(1, 9)))
    cuts = sorted(draw.randint(0, len(text) + 1) for _ in range(draw.randint(0, 9)))
    pieces = [text[low:high] for low, high in zip([0, *cuts], [*cuts, len(text)])]
    return pieces, *MARKS


check_tell = FunctionChecker(
    "tell",
    telling,
    hint="Keep what was not sent yet, and look for the marks in all of it.",
    examples=[
        (["Yes. <to", 'ol>{"a"', ": 1}</tool", "> Done."], *MARKS),
        (["a < b", "", " <tool"], *MARKS),
    ],
    edges={
        "a mark, letter by letter": (list("x<tool>y</tool>z"), *MARKS),
        "two calls in one piece": (["<tool>a</tool><tool>b</tool>"], *MARKS),
        "what looked like a mark": (["<too", "l", "s>"], *MARKS),
        "the end mark alone is text": (["a</tool>b<tool>c</tool>"], *MARKS),
        "a mark inside of a call": (["<tool>a<tool>b</tool>c"], *MARKS),
        "a mark behind its own beginning": (["<", "<tool", ">x</tool>"], *MARKS),
        "a call that does not end": (["t<tool>x</too"], *MARKS),
        "an empty call": (["<tool></tool>"], *MARKS),
        "spaces belong to the call": (["<tool> a\n</tool>"], *MARKS),
        "marks that repeat": (["xaa", "b1", "aab2", "aaa", "b3bb4bb"], "aab", "bb"),
        "both marks are the same": (["a|b|", "c|d"], "|", "|"),
        "no piece": ([], *MARKS),
    },
    random=_random_pieces,
    trials=150,
    returns="what is told after each piece",
    misconceptions={
        "A mark may be spread over several pieces.": dict(joined=False),
        "Hold back what may be the beginning of a mark, until the next piece.": dict(hold=lambda text, begin: 0),
        "Text that cannot begin a mark is sent at once.": dict(hold=lambda text, begin: min(len(begin) - 1, len(text))),
        "Hold back the longest suffix that may begin a mark, not the shortest.": dict(hold=_last_may_begin),
        "The end mark counts behind the begin mark; in front of it, it is text.": dict(behind=False),
        "Return the source of a call unchanged, spaces included.": dict(whole=str.strip),
    },
    forbid=_PARSERS,
)
