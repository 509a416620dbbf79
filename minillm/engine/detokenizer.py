"""Incremental detokenizer: text as tokens arrive, whole characters only, no stop string shown. Built in chapter 01.

A character may be spread over several tokens (an emoji is four bytes), and a token's text may
depend on the one before (a word's leading space). So a token is decoded together with a short
window before it, and text is held back while it could still change or turn into a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from os.path import commonprefix
from typing import Protocol

from minillm.sampling.logprobs import Logprob

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no whole character
CONTEXT_TOKENS = 5  # tokens of the prompt that the first window begins with
CHARACTER_TOKENS = 4  # tokens before one that may have begun its character: in UTF-8 no character has more bytes


class Detokenizer:
    """Turns one request's tokens into text.

    `decode` maps a list of token ids to their text. `text` is all that may be shown so far. It is final when
    `stop_string` names the stop string that was met, or `finish` was called. Of several stop strings the one that
    completes first ends the text; one that completes within the first `min_tokens` tokens does not count.
    A prompt may end in half a character, which the first token then completes; `begins_whole` says that it never does,
    since the text has characters of its own from its first byte on (a grammar's, chapter 19). With `keeps_stop` the
    stop string stays at the end of the text.

    A decoder like SentencePiece's takes neighbouring byte tokens for text only if all of them together are text; one
    byte too many, and each becomes U+FFFD. `invalid_byte` is the token of such a byte, from `invalid_byte_token`: text
    that would change if it came next is held back. The new tokens begin with the text of `taken_back`, the last tokens
    of the prompt, which is not shown again (token healing, chapter 19).
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        begins_whole: bool = False,
        keeps_stop: bool = False,
        invalid_byte: int | None = None,
        taken_back: Sequence[int] = (),
    ):
        self.keeps_stop = keeps_stop
        self.decode = decode
        self.stop = stop
        self.min_tokens = min_tokens
        self.invalid_byte = invalid_byte
        self.text = ""
        self.stop_string: str | None = None
        self._held = ""  # whole characters that may be the beginning of a stop string
        self._num_tokens = 0
        # [context, decoded already | new, not yet final]
        self._window = list(prompt_token_ids[-CONTEXT_TOKENS:])
        while begins_whole and self._window and decode(self._window).endswith(REPLACEMENT):
            self._window.pop()
        self._num_read = len(self._window)
        read = [*self._window, *taken_back]
        self._read_text = decode(read).rstrip(REPLACEMENT) if read else ""
        self._too_early: list[str] = []  # what was whole after new tokens with which no stop string counts

    def add(self, token_id: int) -> str:
        """Take the next token, return the text that may be shown now: often the token's own, sometimes none."""
        self._num_tokens += 1
        self._window.append(token_id)
        text = self.decode(self._window)
        if len(text) <= len(self._read_text):
            return ""  # a special token that has no text
        piece = text[len(self._read_text) :]
        if not self._is_final(text):
            return self._show_if_stopped(piece.rstrip(REPLACEMENT))
        # The window slides: what was new is the next token's context.
        del self._window[: self._num_read]
        self._num_read = len(self._window)
        self._read_text = self.decode(self._window)
        return self._show(piece)

    def whole(self, token_ids: Sequence[int]) -> str:
        """The text of all tokens at once, which a new detokenizer would come to one by one, without stop strings."""
        text = self.decode([*self._window, *token_ids])
        return text[len(self._read_text) :]

    def finish(self) -> str:
        """No token follows: return what was held back, half characters as U+FFFD."""
        if self.stop_string is not None:
            return ""
        shown = self._show(self.decode(self._window)[len(self._read_text) :])
        rest, self._held = self._held, ""
        self.text += rest
        return shown + rest

    def _is_final(self, text: str) -> bool:
        """Whether the text of the window stays as it is, whatever comes next."""
        if text.endswith(REPLACEMENT):
            return False
        return self.invalid_byte is None or self.decode([*self._window, self.invalid_byte]).startswith(text)

    def _show(self, piece: str) -> str:
        """Add new text; return what of it cannot belong to a stop string."""
        if self.stop:
            piece, self._held, self.stop_string = self._split(piece)
            self._too_early.clear()
        self.text += piece
        return piece

    def _show_if_stopped(self, piece: str) -> str:
        """A stop string ends the text even where another token could have changed it."""
        if self.stop and self._num_tokens <= self.min_tokens:
            self._too_early.append(piece)
        elif self.stop and self._split(piece)[2] is not None:
            return self._show(piece)
        return ""

    def _split(self, piece: str) -> tuple[str, str, str | None]:
        """(what may be shown, what must wait, the stop string that ended it)"""
        # The longest, but for bytes that have come to mean something else.
        early = max(filter(piece.startswith, self._too_early), key=len, default="")
        shown, held = self._divided(self._held + early)
        text = held + piece[len(early) :]
        if self._num_tokens > self.min_tokens and (found := list(self._completed(text, len(held)))):
            end, start, stop_string = min(found)  # of two that complete together, the longer one
            return shown + text[: end if self.keeps_stop else start], "", stop_string
        more, held = self._divided(text)
        return shown + more, held, None

    def _divided(self, text: str) -> tuple[str, str]:
        """(what no stop string begins with, what one may begin with)"""
        longest = max(map(len, self.stop)) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[start:]) for stop in self.stop):
                return text[:start], text[start:]
        return text, ""

    def _completed(self, text: str, begin: int) -> Iterator[tuple[int, int, str]]:
        """(end, start, stop string) of the first occurrence of each that completes in text[begin:]."""
        for stop in self.stop:
            start = text.find(stop, max(0, begin + 1 - len(stop)))
            if start >= 0:
                yield start + len(stop), start, stop


class Backend(Protocol):
    """What of a `tokenizers.Tokenizer` is needed here."""

    def token_to_id(self, token: str) -> int | None: ...
    def decode(self, token_ids: list[int]) -> str: ...


def invalid_byte_token(tokenizer: Backend) -> int | None:
    """The token of a byte that is no text behind whole characters; None if the tokenizer has no tokens for such bytes,
    or decodes all bytes one by one."""
    for byte in reversed(range(0x80, 0x100)):
        token_id = tokenizer.token_to_id(f"<0x{byte:02X}>")
        if token_id is not None and tokenizer.decode([token_id]) == REPLACEMENT:
            return token_id
    return None


def token_text(decode: Callable[[list[int]], str], token_id: int, before: Sequence[int]) -> str:
    """The text of one token that follows the tokens `before`, as in vLLM's `Logprob.decoded_token`.

    A token that ends inside a character has no text. The token that completes the character has all of it, and whatever
    else the tokens that began it hold.
    """
    text = decode([token_id])
    if not text.endswith(REPLACEMENT):
        return text
    for count in range(1, min(len(before), CHARACTER_TOKENS) + 1):
        context = list(before[-count:])
        text = decode([*context, token_id])
        if not text.endswith(REPLACEMENT):
            while context and decode(context[-1:]).endswith(REPLACEMENT):
                context.pop()
            return text[len(commonprefix([decode(context), text])) :]  # noqa: RUF071  (of texts, not of paths)
    return ""


def with_texts(
    row: dict[int, Logprob] | None, decode: Callable[[list[int]], str] | None, before: list[int]
) -> dict[int, Logprob] | None:
    """The log-probabilities of the tokens that may follow `before`, each with its text; None leaves texts out."""
    if row is None or decode is None:
        return row
    return {one: replace(entry, decoded_token=token_text(decode, one, before)) for one, entry in row.items()}
