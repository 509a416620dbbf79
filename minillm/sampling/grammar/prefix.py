"""A text that begins as given and is free from there on; and token healing, which is made of it. Built in chapter 19.

prompt         Once upon a time there was a li          the tokenizer cuts the last word:  ▁ l i
kept           Once upon a time there was a             taken back: " li"
the next token begins with " li", or " li" begins with it:  " little", " lion", " li", " l", " "
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from minillm.sampling.grammar.mask import ANY_TOKEN
from minillm.sampling.grammar.params import shortened
from minillm.sampling.grammar.protocol import check_rollback
from minillm.sampling.grammar.vocabulary import Vocabulary


class PrefixRules:
    """The compiled constraint. Raises ValueError for a text that no tokens of the vocabulary begin."""

    def __init__(self, text: str, vocabulary: Vocabulary, name: str = "begin"):
        self.prefix, self.vocabulary = _bytes_of(text), vocabulary
        self._words: dict[int, np.ndarray] = {}
        self._alive = self._places_with_a_way_on()
        if 0 not in self._alive:
            raise ValueError(f"{name}={shortened(text)} is not possible: the vocabulary has no tokens for this text")

    def start(self) -> PrefixGrammar:
        return PrefixGrammar(self)

    def words(self, place: int) -> np.ndarray:
        """The mask where `place` bytes of the prefix are written, int32 [num_words]."""
        if place not in self._words:
            allowed = np.zeros(self.vocabulary.size, bool)
            for token_id in self.vocabulary.tokens_along(self.prefix[place:]):
                allowed[token_id] = self.after(place, token_id) is not None
            self._words[place] = self.vocabulary.pack(allowed)
        return self._words[place]

    def after(self, place: int, token_id: int) -> int | None:
        """How many bytes of the prefix are written behind a token; None if it may not come."""
        rest = self.prefix[place:]
        text = self.vocabulary.token_bytes[token_id] if 0 <= token_id < self.vocabulary.size else None
        if not rest:
            return place
        if text is None or not (rest.startswith(text) or text.startswith(rest)):
            return None
        place = min(len(self.prefix), place + len(text))
        return place if place in self._alive else None

    def _places_with_a_way_on(self) -> set[int]:
        if not self.vocabulary.missing_bytes:
            return set(range(len(self.prefix) + 1))
        alive = {len(self.prefix)}
        for place in reversed(range(len(self.prefix))):
            lengths = (
                len(self.vocabulary.token_bytes[one]) for one in self.vocabulary.tokens_along(self.prefix[place:])
            )
            if any(min(place + length, len(self.prefix)) in alive for length in lengths):
                alive.add(place)
        return alive


class PrefixGrammar:
    """A `Grammar` whose place is the number of bytes of the prefix that are written; behind the prefix it allows every
    token, and leaves the end of the text to the request."""

    is_terminated = False

    def __init__(self, rules: PrefixRules, places: Sequence[int] = (0,)):
        self.rules, self.places = rules, list(places)

    def fill_mask(self, words: np.ndarray) -> None:
        place = self.places[-1]
        words[:] = ANY_TOKEN if place == len(self.rules.prefix) else self.rules.words(place)

    def accept(self, token_id: int) -> None:
        place = self.rules.after(self.places[-1], token_id)
        if place is None:
            raise ValueError(self.rules.vocabulary.refusal(token_id, False))
        self.places.append(place)

    def validate(self, token_ids: Sequence[int]) -> int:
        place: int | None = self.places[-1]
        for count, token_id in enumerate(token_ids):
            if (place := self.rules.after(place, token_id)) is None:
                return count
        return len(token_ids)

    def rollback(self, count: int) -> None:
        check_rollback(count, len(self.places) - 1)
        if count:
            del self.places[-count:]

    def jump_tokens(self) -> list[int]:
        return []

    def copy(self) -> PrefixGrammar:
        return PrefixGrammar(self.rules, self.places)


def taken_back(token_ids: Sequence[int], vocabulary: Vocabulary) -> int:
    """How many tokens at the end of a prompt have to be generated anew, so that each token of the vocabulary can come
    that reaches over the end of the prompt. 0 where no token does. The first token always stays."""
    found, text = 0, b""
    for count in range(1, len(token_ids)):
        piece = vocabulary.token_bytes[token_ids[-count]]
        if piece is None or len(piece) + len(text) >= vocabulary.longest:
            break
        text = piece + text
        if _is_extended(text, vocabulary.sorted_texts):
            found = count
    return found


def _is_extended(text: bytes, ordered: Sequence[bytes]) -> bool:
    """Whether one of the texts, which are in order, begins with `text` and goes on."""
    place = bisect_right(ordered, text)
    return place < len(ordered) and ordered[place].startswith(text)


def _bytes_of(text: str) -> bytes:
    """Bytes that are no text travel in a string as lone surrogates (PEP 383)."""
    return text.encode("utf-8", "surrogateescape")
