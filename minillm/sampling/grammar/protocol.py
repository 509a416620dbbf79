"""What the engine asks of a grammar, whichever way it was made. Built in chapter 19."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class GrammarError(RuntimeError):
    """A grammar cannot go on, though all that was said is allowed: it has run into a limit, or the vocabulary has no
    token for what would follow. It stays where it is. Its request ends with this error, and no other.
    """


class CompiledGrammar(Protocol):
    """A constraint made ready for one vocabulary; all requests with the same constraint share it."""

    def start(self) -> Grammar: ...


class Grammar(Protocol):
    """Where one request stands in its grammar. After `accept` of an end-of-sequence token it is terminated."""

    @property
    def is_terminated(self) -> bool: ...

    def fill_mask(self, words: np.ndarray) -> None:
        """Write into `words`, int32 [ceil(vocab_size / 32)]: bit t % 32 of word t // 32 says whether token t may come
        next. End-of-sequence tokens may where the text may end; other special tokens never may. Raises GrammarError.
        """

    def accept(self, token_id: int) -> None:
        """Move on by a token. Raises ValueError, and stays where it is, if the token may not come next;
        or GrammarError."""

    def validate(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, one after the other, could be accepted. Changes nothing."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""

    def jump_tokens(self) -> list[int]:
        """Tokens of the text that is sure to come next; empty where there is a choice (chapter 19, jump-forward).
        Raises GrammarError."""

    def copy(self) -> Grammar:
        """An independent grammar at the same place."""


def check_rollback(count: int, num_accepted: int) -> None:
    if not 0 <= count <= num_accepted:
        raise ValueError(
            f"rollback({count}) is not allowed; {num_accepted} tokens were accepted, so 0 to {num_accepted} are"
        )
