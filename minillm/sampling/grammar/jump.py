"""Jump-forward: text that a grammar forces is written without asking the model. Built in chapter 19.

The model would have had to write it in tokens, so it becomes tokens as the tokenizer makes them:
what it was trained on. Two things keep that from being exact. Tokens said already stay as they are.
And the last tokens may be others when more text follows (`":` before a space, `": "` before a name),
so whatever a token could bridge is left to the model.
"""

from __future__ import annotations

import numpy as np

from minillm.sampling.grammar.protocol import Grammar
from minillm.sampling.grammar.vocabulary import Vocabulary


def jump_tokens(grammar: Grammar, vocabulary: Vocabulary, forced: bytes, last_token: int | None) -> list[int]:
    """Tokens of as much of `forced` as is sure. `grammar` stands behind `last_token`, and is left there."""
    text = _whole_characters(forced)
    token_ids = vocabulary.encode_after(last_token, text) if text else []
    if not token_ids:
        return []
    sure = _first_bridge(grammar.copy(), vocabulary, text.encode())
    ends = np.cumsum(vocabulary.lengths[token_ids])  # of each token, in bytes of the text
    return token_ids[: int(np.searchsorted(ends, sure, side="right"))]


def _whole_characters(forced: bytes) -> str:
    """As much as is whole characters: all that the next character can be may begin with the same byte."""
    try:
        return forced.decode()
    except UnicodeDecodeError as error:
        return forced[: error.start].decode()


def _first_bridge(grammar: Grammar, vocabulary: Vocabulary, text: bytes) -> int:
    """The first place in `text` from which an allowed token reaches over its end; the length of `text` if none does.

    Found by walking there byte by byte, with the tokens that are nothing but a byte.
    """
    words = np.empty(vocabulary.num_words, np.int32)
    for place, byte in enumerate(text):
        rest = len(text) - place
        if rest < vocabulary.longest:
            grammar.fill_mask(words)
            if (words & vocabulary.longer_than(rest)).any():
                return place
        if byte not in vocabulary.single_bytes:
            return place
        grammar.accept(vocabulary.single_bytes[byte])
    return len(text)
