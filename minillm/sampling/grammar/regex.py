r"""Regular expressions: the text of one becomes a tree. Built in chapter 19.

    expression = sequence ("|" sequence)*
    sequence   = (atom quantifier?)*
    atom       = character | "." | "[" class "]" | "\" escape | "(" expression ")"
    quantifier = "*" | "+" | "?" | "{m}" | "{m,}" | "{,n}" | "{m,n}", and "?" after any: lazy is greedy, since only
                 which texts match counts

What Python's `re` would refuse is refused with its own words, so the parser may take a sound expression for granted.
What it accepts but a finite automaton cannot do, or this one does not, is named with its place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from minillm.sampling.grammar.characters import CharacterClass, Ranges, shorthand
from minillm.sampling.grammar.params import shortened

MAX_REPEATS = 1000  # as often as {m,n} may count
MAX_DEPTH = 100  # groups inside groups
SUPPORTED = (
    r"literals, escapes, . [...] (...) | * + ? {m,n} \d \w \s \D \W \S \n \t \r \xXX \uXXXX, and ^ $ at the ends"
)
CONTROL = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
ANY = ~CharacterClass.of((ord("\n"), ord("\n")))  # what "." stands for


@dataclass(frozen=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Sequence:
    """One part after the other; without parts, the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Either:
    """Any one of the options."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """A part `low` to `high` times; None: without end."""

    part: Node
    low: int
    high: int | None


Node = Chars | Sequence | Either | Repeat


def parse_regex(pattern: str) -> Node:
    """The tree of a regular expression. Raises ValueError naming what is wrong or not supported, and where."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"regex={shortened(pattern)} is no regular expression: {error}") from None
    return _Parser(pattern).parse()


def parse_choice(texts: tuple[str, ...]) -> Node:
    """The tree of "one of these texts"; nothing in them is special."""
    return Either(tuple(Sequence(tuple(map(_literal, text))) for text in texts))


def _literal(character: str) -> Chars:
    return Chars(((ord(character), ord(character)),))


class _Parser:
    def __init__(self, pattern: str):
        self.pattern = pattern
        self.place = 0  # of the character to read next
        self.depth = 0  # how many groups are open

    def parse(self) -> Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Either(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        if self.depth == 0:  # the whole text has to match, so an anchor at its end says nothing new
            self._take("^") or self._take(r"\A")
        while self.place < len(self.pattern) and self.pattern[self.place] not in "|)":
            if self.depth == 0 and re.compile(r"(\$|\\Z)(\||\Z)").match(self.pattern, self.place):
                self._take("$") or self._take(r"\Z")
            else:
                parts.append(self._quantified(self._atom()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _atom(self) -> Node:
        if self._take("("):
            return self._group()
        if self._take("["):
            return Chars(self._class().sure)
        if self._take("."):
            return Chars(ANY.sure)
        if self.pattern[self.place] in "^$":
            self._refuse("an anchor inside the expression", 1)
        return Chars(self._character(in_class=False).sure)

    def _group(self) -> Node:
        if self._take("?"):
            named = re.compile(r"P<\w+>").match(self.pattern, self.place)
            if named:
                self.place = named.end()
            elif not self._take(":"):
                self.place -= 2
                self._refuse(_name_of_group(self.pattern[self.place :]), 4)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError(
                f"regex={shortened(self.pattern)} has groups {self.depth} deep; "
                f"at most {MAX_DEPTH} are allowed: unfold some"
            )
        inside = self.parse()
        self.depth -= 1
        self._take(")")
        return inside

    def _quantified(self, part: Node) -> Node:
        found = re.compile(r"\*|\+|\?|\{(?!\})(\d*)(,?)(\d*)\}").match(self.pattern, self.place)
        if not found:
            return part
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(found[0], (None, None))
        if found[0][0] == "{":
            low = int(found[1] or 0)
            high = int(found[3]) if found[3] else None if found[2] else low
            if max(low, high or 0) > MAX_REPEATS:
                raise ValueError(
                    f"regex={shortened(self.pattern)} repeats {found[0]} at place {self.place}; "
                    f"at most {MAX_REPEATS} times are counted: use * or +, or bound the text by max_tokens"
                )
        self.place = found.end()
        if self._take("+"):
            self.place -= 1
            self._refuse("a possessive quantifier", 1)
        self._take("?")  # lazy
        return Repeat(part, low, high)

    def _class(self) -> CharacterClass:
        negated = self._take("^")
        content = CharacterClass((), ())
        first = True
        while first or self.pattern[self.place] != "]":
            first = False
            low = self._character(in_class=True)
            if self.pattern[self.place] == "-" and self.pattern[self.place + 1] != "]":
                self.place += 1
                high = self._character(in_class=True)
                low = CharacterClass.of((low.sure[0][0], high.sure[0][0]))
            content |= low
        self._take("]")
        return ~content if negated else content

    def _character(self, in_class: bool) -> CharacterClass:
        """One character, or what an escape stands for."""
        character = self.pattern[self.place]
        self.place += 1
        if character != "\\":
            return CharacterClass.of((ord(character), ord(character)))
        letter = self.pattern[self.place]
        self.place += 1
        if letter in "dwsDWS":
            return shorthand(letter)
        if letter in HEX_DIGITS:
            digits = self.pattern[self.place : self.place + HEX_DIGITS[letter]]
            self.place += len(digits)
            return CharacterClass.of((int(digits, 16), int(digits, 16)))
        if letter in CONTROL or (letter == "b" and in_class):
            letter = CONTROL.get(letter, "\b")
        elif letter.isascii() and letter.isalnum():
            self.place -= 2
            self._refuse(_name_of_escape(letter, in_class), 2)
        return CharacterClass.of((ord(letter), ord(letter)))

    def _take(self, text: str) -> bool:
        """Step over `text` if it comes next."""
        found = self.pattern.startswith(text, self.place)
        self.place += len(text) * found
        return found

    def _refuse(self, name: str, length: int) -> None:
        found = self.pattern[self.place : self.place + length]
        raise ValueError(
            f"regex={shortened(self.pattern)} has {name}, {found!r} at place {self.place}, "
            f"which is not supported; supported: {SUPPORTED}"
        )


def _name_of_group(text: str) -> str:
    if text.startswith(("(?=", "(?!", "(?<")):
        return "a look-around"
    if text.startswith(("(?P=", "(?(")):
        return "a back-reference"
    return {"(?>": "an atomic group", "(?#": "a comment"}.get(text[:3], "an inline flag")


def _name_of_escape(letter: str, in_class: bool) -> str:
    if letter in "bB":
        return "a word boundary"
    if letter in "AZ":
        return "an anchor inside the expression"
    if letter.isdigit():
        return "an octal escape" if in_class or letter == "0" else "a back-reference"
    return "an escape"
