"""Transcript: a text that two write, you and the model, and its tokens. Built in chapter 19.

    parts       "The cat" " sat"      " on the mat"      "\\nThe"  " dog"
                 written                said               written
    token_ids   [ .   .   .       |     .   .   .   ]                       settled: they never change
    written                                              "\\nThe dog"        one piece, tokenized when it is asked for

What is written is tokenized as one piece, from the last thing said to the next, so that the tokens do not depend on how
a program cuts its strings. What was said keeps the tokens it was said in: a prefix cache holds just these, and to
tokenize the text anew may give others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from minillm.engine.detokenizer import Detokenizer
from minillm.engine.outputs import CompletionOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Transcript:
    """`special_tokens`: whether the tokenizer puts its own before the text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special_tokens: bool = True):
        self.tokenizer, self.special_tokens = tokenizer, special_tokens
        self.parts: list[str] = []
        self.token_ids: list[int] = []
        self.written = ""
        self.num_inherited = 0  # parts that were there before this copy was made

    def write(self, text: str) -> None:
        self.parts.append(text)
        self.written += text

    def say(self, text: str, token_ids: Sequence[int], rest: str = "") -> None:
        """The model has said `text`. `token_ids` are from now on those of everything but `rest`,
        the end of the text."""
        self.parts.append(text)
        self.token_ids, self.written = list(token_ids), rest

    def tokens(self, more: str = "") -> list[int]:
        """The tokens of the text as it is now, with `more` written behind it."""
        text = self.written + more
        if not text:
            return list(self.token_ids)
        special_tokens = self.special_tokens and not self.token_ids
        return self.token_ids + self.tokenizer.encode(text, add_special_tokens=special_tokens)

    def copy(self) -> Transcript:
        """The same text, to be continued in another way."""
        other = Transcript(self.tokenizer, self.special_tokens)
        other.parts, other.token_ids, other.written = list(self.parts), list(self.token_ids), self.written
        other.num_inherited = len(self.parts)
        return other

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def added(self) -> str:
        """The text since this copy was made."""
        return "".join(self.parts[self.num_inherited :])


def kept_tokens(
    decode: Callable[[list[int]], str], prompt: list[int], sample: CompletionOutput, begins_whole: bool = False
) -> tuple[list[int], str]:
    """Which tokens of a sample its text consists of, and the text left of a token that a stop string cut through.

    `begins_whole` is the `Detokenizer`'s: whether a grammar spoke."""
    if not isinstance(sample.stop_reason, str):  # the token that ended it, if one did, is no part of the text
        return sample.token_ids[: -1 if sample.finish_reason == "stop" else None], ""
    detokenizer, kept, length = Detokenizer(decode, prompt, begins_whole=begins_whole), 0, 0
    for count, token_id in enumerate(sample.token_ids, 1):
        detokenizer.add(token_id)
        if length < len(detokenizer.text) <= len(sample.text):
            kept, length = count, len(detokenizer.text)
    return sample.token_ids[:kept], sample.text[length:]
