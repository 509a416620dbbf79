"""A grammar that begins behind a marker: free text first, then the constraint. Built in chapter 19.

    Three and four make seven. </think>{"sum": 7}
    any token but the end      marker  tokens that the grammar allows

The marker is matched in bytes. It may be one token, several tokens, or end inside of one; its first occurrence counts.
A token that reaches over the end of the marker is allowed if the grammar allows the rest of its text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minillm.sampling.grammar.params import StructuredOutputsParams, shortened
from minillm.sampling.grammar.protocol import CompiledGrammar, Grammar, GrammarError, check_rollback
from minillm.sampling.grammar.vocabulary import Vocabulary


class MarkedRules:
    """A compiled grammar and the marker in front of it. `budget` is the most tokens before the marker is forced; None
    sets no limit. Raises ValueError for a marker that no tokens of the vocabulary spell."""

    def __init__(self, grammar: CompiledGrammar, params: StructuredOutputsParams, vocabulary: Vocabulary):
        self.grammar, self.vocabulary = grammar, vocabulary
        self.marker, self.budget = params.after.encode(), params.thinking_token_budget
        self.texts = vocabulary.all_texts
        self.free = vocabulary.pack(np.array([text is not None for text in self.texts]))
        self._crossing: dict[int, dict[int, bytes]] = {}
        self._words: dict[int, np.ndarray] = {}
        self._endings: dict[int, list[int]] = {}
        self._begins: dict[bytes, bool] = {b"": True}
        if not self.ending(0):
            raise ValueError(
                f"after={shortened(params.after)} is not possible: the vocabulary has no tokens for this text"
            )

    def start(self, prompt_token_ids: Sequence[int] = ()) -> MarkedGrammar:
        """The grammar of a request. A marker at the end of its prompt counts, also with white space behind it; and a
        marker that the prompt begins may be completed."""
        text = b""
        for token_id in reversed(prompt_token_ids):
            text = (self.text(token_id) or b"") + text
            if len(text.rstrip()) >= len(self.marker):
                break
        found = text.rfind(self.marker)
        if found >= 0 and not text[found + len(self.marker) :].strip():
            return MarkedGrammar(self, 0, self.grammar.start())
        return MarkedGrammar(self, self._place(text))

    def text(self, token_id: int) -> bytes | None:
        return self.texts[token_id] if 0 <= token_id < self.vocabulary.size else None

    def follow(self, place: int, token_id: int) -> tuple[int, bytes | None]:
        """How many bytes of the marker end the text behind a token; and where the token completes the marker, the rest
        of its text."""
        text = self.marker[:place] + self.texts[token_id]
        found = text.find(self.marker)
        return (0, text[found + len(self.marker) :]) if found >= 0 else (self._place(text), None)

    def words(self, place: int) -> np.ndarray:
        """The mask of the free part, int32 [num_words]: without the end, and without tokens that complete the marker
        and go on as the grammar may not begin."""
        if place not in self._words:
            allowed = np.ones(self.vocabulary.size, bool)
            for token_id, rest in self.crossing(place).items():
                allowed[token_id] = self.begins(rest) is not None
            self._words[place] = self.free & self.vocabulary.pack(allowed)
        return self._words[place]

    def crossing(self, place: int) -> dict[int, bytes]:
        """The tokens that complete the marker, each with the rest of its text."""
        if place not in self._crossing:
            begun, size = self.marker[:place], len(self.marker)
            texts = ((token_id, begun + text) for token_id, text in enumerate(self.texts) if text is not None)
            self._crossing[place] = {
                token_id: text[text.find(self.marker) + size :] for token_id, text in texts if self.marker in text
            }
        return self._crossing[place]

    def begins(self, rest: bytes) -> Grammar | None:
        """The grammar behind the bytes `rest`, which it reads one by one; None if it may not begin so."""
        if not self._begins.get(rest, True):
            return None
        grammar = self.grammar.start()
        try:
            for byte in rest:
                grammar.accept(self.vocabulary.single_bytes[byte])
        except (KeyError, ValueError, GrammarError):
            self._begins[rest] = False
            return None
        return grammar

    def ending(self, place: int) -> list[int]:
        """The tokens that complete the marker, as the tokenizer makes them; empty if there are none."""
        if place not in self._endings:
            self._endings[place] = self._spelled(self.marker[place:]) or (self.ending(0) if place else [])
        return self._endings[place]

    def _spelled(self, text: bytes) -> list[int]:
        """Tokens of exactly this text: the tokenizer's, or single bytes."""
        ways = []
        try:
            ways.append(self.vocabulary.tokenizer.encode(text.decode(), add_special_tokens=False))
            ways.append(self.vocabulary.encode_after(None, text.decode()))
        except UnicodeDecodeError:
            pass
        ways.append([self.vocabulary.single_bytes.get(byte, -1) for byte in text])
        for token_ids in ways:
            texts = [self.text(token_id) for token_id in token_ids]
            if None not in texts and b"".join(texts) == text:
                return token_ids
        return []

    def _place(self, text: bytes) -> int:
        """The length of the longest beginning of the marker that `text`, which does not hold it, ends in."""
        longest = min(len(self.marker) - 1, len(text))
        return next((size for size in range(longest, 0, -1) if text.endswith(self.marker[:size])), 0)


class MarkedGrammar:
    """A `Grammar` that is free up to the marker, and then the inner one's.

    `places[i]` says how many bytes of the marker end the text behind i free tokens; `counts` has, for the token that
    completes the marker and each token behind it, how many tokens the inner grammar has accepted of it.
    """

    def __init__(
        self,
        rules: MarkedRules,
        place: int,
        inner: Grammar | None = None,
        places: Sequence[int] = (),
        counts: Sequence[int] = (),
    ):
        self.rules, self.inner = rules, inner
        self.places, self.counts = list(places) or [place], list(counts)
        self.begins_inside = inner is not None and not counts

    @property
    def is_terminated(self) -> bool:
        return self.inner is not None and self.inner.is_terminated

    def fill_mask(self, words: np.ndarray) -> None:
        if self.inner is not None:
            self.inner.fill_mask(words)
        elif forced := self._forced():
            words[:] = 0
            words.view(np.uint32)[forced[0] // 32] = 1 << forced[0] % 32
        else:
            words[:] = self.rules.words(self.places[-1])

    def accept(self, token_id: int) -> None:
        if self.inner is not None:
            self.inner.accept(token_id)
            self.counts.append(1)
            return
        forced = self._forced()
        if self.rules.text(token_id) is None or (forced and forced[0] != token_id):
            raise ValueError(self.rules.vocabulary.refusal(token_id, False))
        place, rest = self.rules.follow(self.places[-1], token_id)
        if rest is None:
            self.places.append(place)
            return
        inner = self.rules.begins(rest)
        if inner is None:
            raise ValueError(self.rules.vocabulary.refusal(token_id, False))
        self.inner = inner
        self.counts.append(len(rest))

    def validate(self, token_ids: Sequence[int]) -> int:
        copy = self.copy()
        for count, token_id in enumerate(token_ids):
            if copy.inner is not None:
                return count + copy.inner.validate(token_ids[count:])
            try:
                copy.accept(token_id)
            except (ValueError, GrammarError):
                return count
        return len(token_ids)

    def rollback(self, count: int) -> None:
        check_rollback(count, len(self.counts) + len(self.places) - 1)
        inside = min(count, len(self.counts))
        if inside:
            if inside == len(self.counts) and not self.begins_inside:
                self.inner = None
            else:
                self.inner.rollback(sum(self.counts[-inside:]))
            del self.counts[-inside:]
        if count > inside:
            del self.places[inside - count :]

    def jump_tokens(self) -> list[int]:
        if self.inner is not None:
            return self.inner.jump_tokens()
        forced = self._forced()
        return [*forced, *self.rules.grammar.start().jump_tokens()] if forced else []

    def copy(self) -> MarkedGrammar:
        inner = None if self.inner is None else self.inner.copy()
        copy = MarkedGrammar(self.rules, 0, inner, self.places, self.counts)
        copy.begins_inside = self.begins_inside
        return copy

    def _forced(self) -> list[int]:
        """What is left of the marker where the budget of free tokens is spent."""
        budget, taken = self.rules.budget, len(self.places) - 1
        if budget is None or taken < budget:
            return []
        return self.rules.ending(self.places[budget])[taken - budget :]
