"""A text as it appeared: pieces, each with its time. Built in chapter 00."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class TimedText:
    """A piece of text that a rung has just generated, and when."""

    text: str
    token_ids: tuple[int, ...]
    seconds: float  # since the request was made


Stream = Callable[[list[int], int, bool], Iterator[TimedText]]  # (prompt ids, max tokens, ignore end of sequence?)


@dataclass(frozen=True)
class Recording:
    """A whole run of one rung, to be replayed or measured."""

    rung: str
    said: tuple[TimedText, ...]
    complete: bool  # False when the time was up first
    num_streams: int = 1

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.said)

    @property
    def token_ids(self) -> list[int]:
        return [token for piece in self.said for token in piece.token_ids]

    @property
    def ttft(self) -> float:
        """Time to first token, seconds."""
        return self.said[0].seconds

    @property
    def tokens_per_second(self) -> float:
        """Of all streams together."""
        return self.num_streams * len(self.token_ids) / self.said[-1].seconds

    def text_at(self, seconds: float) -> str:
        """What had been generated `seconds` after the request: what a side-by-side replay shows."""
        return "".join(piece.text for piece in self.said if piece.seconds <= seconds)
