"""From a DFA over bytes to masks of tokens, and the grammar that walks it. Built in chapter 19."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minillm.sampling.grammar.automaton import NO_STATE, Automaton
from minillm.sampling.grammar.jump import jump_tokens
from minillm.sampling.grammar.protocol import check_rollback
from minillm.sampling.grammar.vocabulary import Vocabulary

ENDED = -2  # the state after an end-of-sequence token
MAX_MASK_BYTES = 16 << 20  # of one grammar: 1024 masks of 128k tokens
MAX_JUMPS = 10_000  # of one grammar


class TokenAutomaton:
    """The automaton over tokens instead of bytes, made where it is used.

    A state's mask is made when the first request comes there, by one walk of the vocabulary's trie, and kept: from then
    on it is a copy of vocab_size / 8 bytes. All that are kept take at most MAX_MASK_BYTES; beyond that the oldest goes.
    """

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary):
        self.automaton = automaton
        self.vocabulary = vocabulary
        self.masks = Kept(MAX_MASK_BYTES // (4 * vocabulary.num_words))  # {state: int32 [num_words]}
        self._forced: dict[int, bytes] = {}
        self._jumps = Kept(MAX_JUMPS)  # {(state, last token): tokens}

    def start(self) -> AutomatonGrammar:
        return AutomatonGrammar(self)

    def mask(self, state: int) -> np.ndarray:
        """The tokens that lead from `state` to a state, as words; to end is allowed where the automaton accepts."""
        mask = self.masks.get(state)
        if mask is None:
            allowed = self.vocabulary.trie.reached(self.automaton.table, state)  # [vocab_size]
            allowed[list(self.vocabulary.eos_token_ids)] = self.automaton.accepting[state]
            mask = self.masks[state] = self.vocabulary.pack(allowed)
        return mask

    def after(self, state: int, token_id: int) -> int:
        """The state behind a token, or NO_STATE if it may not come."""
        if state == ENDED or not 0 <= token_id < self.vocabulary.size:
            return NO_STATE
        text = self.vocabulary.token_bytes[token_id]
        if text is not None:
            return self.automaton.walk(text, state)
        ends = token_id in self.vocabulary.eos_token_ids and self.automaton.accepting[state]
        return ENDED if ends else NO_STATE

    def jump_tokens(self, grammar: AutomatonGrammar, state: int, last_token: int | None) -> list[int]:
        forced = self._forced.get(state)
        if forced is None:
            forced = self._forced[state] = b"" if state == ENDED else self.automaton.forced_bytes(state)
        if not forced:
            return []
        if (state, last_token) not in self._jumps:
            self._jumps[state, last_token] = jump_tokens(grammar, self.vocabulary, forced, last_token)
        return list(self._jumps[state, last_token])


class Kept(dict):
    """A dictionary that holds the last `capacity` entries (at least one) that were put into it."""

    def __init__(self, capacity: int):
        self.capacity = max(1, capacity)

    def __setitem__(self, key: object, value: object) -> None:
        super().__setitem__(key, value)
        if len(self) > self.capacity:
            del self[next(iter(self))]


class AutomatonGrammar:
    """A `Grammar` whose place is a state of the automaton; to go back is to forget the last states."""

    def __init__(self, rules: TokenAutomaton, token_ids: Sequence[int] = (), states: Sequence[int] = (0,)):
        self.rules = rules
        self.token_ids = list(token_ids)  # accepted so far
        self.states = list(states)  # before them and after each

    @property
    def is_terminated(self) -> bool:
        return self.states[-1] == ENDED

    def fill_mask(self, words: np.ndarray) -> None:
        words[:] = 0 if self.is_terminated else self.rules.mask(self.states[-1])

    def accept(self, token_id: int) -> None:
        state = self.rules.after(self.states[-1], token_id)
        if state == NO_STATE:
            raise ValueError(self.rules.vocabulary.refusal(token_id, self.is_terminated))
        self.states.append(state)
        self.token_ids.append(token_id)

    def validate(self, token_ids: Sequence[int]) -> int:
        state = self.states[-1]
        for count, token_id in enumerate(token_ids):
            state = self.rules.after(state, token_id)
            if state == NO_STATE:
                return count
        return len(token_ids)

    def rollback(self, count: int) -> None:
        check_rollback(count, len(self.token_ids))
        if count:
            del self.states[-count:], self.token_ids[-count:]

    def jump_tokens(self) -> list[int]:
        return self.rules.jump_tokens(self, self.states[-1], self.token_ids[-1] if self.token_ids else None)

    def copy(self) -> AutomatonGrammar:
        return AutomatonGrammar(self.rules, self.token_ids, self.states)
