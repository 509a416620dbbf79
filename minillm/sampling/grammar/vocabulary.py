"""The vocabulary as bytes: what each token writes, as a list and as a trie. Built in chapter 19."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from minillm.rounding import ceil_div
from minillm.sampling.grammar.characters import Ranges, written_with

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANCHOR = "\x02"  # a character that merges with no other
SPACE = "▁"  # how tokenizers like SentencePiece write a space


class Vocabulary:
    """The tokens that text can be made of. Special and added tokens are none of them, whatever they look like.

    `token_bytes[t]` is None for a token that may never be said. Raises ValueError for a tokenizer whose tokens are no
    byte strings.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Collection[int]):
        self.tokenizer = tokenizer
        self.size = vocab_size
        self.num_words = ceil_div(vocab_size, 32)  # int32 words of a mask
        self.eos_token_ids = frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size)
        if not self.eos_token_ids:
            raise ValueError("structured_outputs needs an end-of-sequence token to end a text, and the model has none")
        self.token_bytes = _token_bytes(tokenizer, vocab_size)
        for token_id in self.eos_token_ids:
            self.token_bytes[token_id] = None
        self._longer: dict[int, np.ndarray] = {}

    @cached_property
    def sorted_texts(self) -> list[bytes]:
        return sorted(filter(None, self.token_bytes))

    @cached_property
    def all_texts(self) -> list[bytes | None]:
        """What each token writes, added tokens too; None for an end of the text and for an id without a token."""
        texts = list(self.token_bytes)
        for token_id, token in self.tokenizer.added_tokens_decoder.items():
            if token_id < self.size and token_id not in self.eos_token_ids:
                texts[token_id] = token.content.encode()
        return texts

    @cached_property
    def trie(self) -> Trie:
        return Trie(self.token_bytes)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Bytes of each token, int64 [size]; 0 for one that may never be said."""
        return np.array([len(text or b"") for text in self.token_bytes])

    @cached_property
    def longest(self) -> int:
        return int(self.lengths.max())

    @cached_property
    def single_bytes(self) -> dict[int, int]:
        """The token that is nothing but a byte, for each byte that has one."""
        return {
            text[0]: token_id for token_id, text in enumerate(self.token_bytes) if text is not None and len(text) == 1
        }

    def pack(self, allowed: np.ndarray) -> np.ndarray:
        """A mask as words: bool [size] becomes int32 [num_words]."""
        padded = np.zeros(self.num_words * 32, bool)
        padded[: self.size] = allowed
        return np.packbits(padded, bitorder="little").view(np.int32)

    def unpack(self, words: np.ndarray) -> np.ndarray:
        """The token ids of a mask."""
        return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))

    @cached_property
    def missing_bytes(self) -> frozenset[int]:
        """Bytes that cannot be said alone. Most vocabularies have them all, and then no grammar can get stuck."""
        return frozenset(range(256)) - self.single_bytes.keys()

    @cached_property
    def characters(self) -> Ranges | None:
        """The characters that a text without dead ends may hold; None if these are all.

        Those of which each byte is a token, and those that are a token themselves, unless another token ends inside
        them: from there only bytes could go on. A character that is only a part of longer tokens is none of them.
        """
        if not self.missing_bytes:
            return None
        present = np.zeros(256, bool)
        present[list(self.single_bytes)] = True
        holds = written_with(present)
        cuts = {
            text[place:]
            for text in filter(None, self.token_bytes)
            for place in range(-3, 0)
            if text[place:][:1] >= b"\xc0"
        }
        for text in self.token_bytes:
            character = _decoded(text) or ""
            if len(character) == 1 and not any(text[:length] in cuts for length in range(1, len(text))):
                holds[ord(character)] = True
        edges = np.flatnonzero(np.diff(np.concatenate([[False], holds, [False]])))
        return tuple(zip(edges[::2].tolist(), (edges[1::2] - 1).tolist(), strict=True))

    @cached_property
    def sayable(self) -> np.ndarray:
        """The tokens that text is made of, as words."""
        return self.pack(self.lengths > 0)

    @cached_property
    def ends(self) -> np.ndarray:
        """The end-of-sequence tokens, as words. One is never text, though its characters may be."""
        return self.pack(np.isin(np.arange(self.size), list(self.eos_token_ids)))

    def tokens_along(self, text: bytes) -> list[int]:
        """The tokens that begin with all of `text`, or that it begins with.
        A look at every token: not for each step."""
        return [
            token_id
            for token_id, written in enumerate(self.token_bytes)
            if written and (text.startswith(written) or written.startswith(text))
        ]

    def can_spell(self, text: bytes) -> bool:
        """Whether tokens can write a text that begins with `text`."""
        if not self.missing_bytes:
            return True
        places = {0}  # in `text`, where a token may begin
        for place in range(len(text)):
            if place in places:
                places |= {place + len(self.token_bytes[token_id]) for token_id in self.tokens_along(text[place:])}
        return max(places) >= len(text)

    def longer_than(self, length: int) -> np.ndarray:
        """The tokens of more bytes, as words."""
        if length not in self._longer:
            self._longer[length] = self.pack(self.lengths > length)
        return self._longer[length]

    def can_say(self, token_id: int) -> bool:
        return 0 <= token_id < self.size and self.token_bytes[token_id] is not None

    def refusal(self, token_id: int, is_terminated: bool) -> str:
        """Why a grammar does not take a token."""
        text = self.token_bytes[token_id] if self.can_say(token_id) else None
        why = "the text has ended" if is_terminated else "take one that its mask allows"
        return f"token {token_id} ({text!r}) may not come next in the grammar: {why}"

    def encode_after(self, token_id: int | None, text: str) -> list[int]:
        """The tokens the tokenizer makes of `text` where it follows a token, which stays as it is.

        Empty if the tokens would not say exactly this text: it looks like a special token, or a normalizer changes it.
        """
        before = None if token_id is None else self.token_bytes[token_id]
        for context in filter(None, (_decoded(before), ANCHOR)):
            token_ids = self._encode_behind(context, text)
            if token_ids:
                return token_ids
        return []

    def _encode_behind(self, context: str, text: str) -> list[int]:
        """The last tokens of `context + text`, if they are all of `text` and nothing else."""
        token_ids = self.tokenizer.encode(context + text, add_special_tokens=False)
        written = [self.token_bytes[token_id] or b"" if token_id < self.size else b"" for token_id in token_ids]
        wanted, first = text.encode(), len(token_ids)
        missing = len(wanted)
        while missing > 0 and first > 0:
            first -= 1
            missing -= len(written[first])
        return token_ids[first:] if b"".join(written[first:]) == wanted else []


class Trie:
    """All tokens in one tree of bytes, so that a common beginning is walked once.

    Node 0 is the root; the nodes of a depth follow each other, and so do the children of a node.
    """

    def __init__(self, token_bytes: list[bytes | None]):
        texts = [(text, token_id) for token_id, text in enumerate(token_bytes) if text]
        order = np.array([token_id for _, token_id in sorted(texts)], dtype=np.int64)
        ordered = [text for text, _ in sorted(texts)]
        lengths = np.array([len(text) for text in ordered], dtype=np.int64)
        flat = np.frombuffer(b"".join(ordered), np.uint8)
        begins = np.cumsum(lengths) - lengths  # where each token begins in `flat`

        node = np.zeros(len(order), np.int64)  # of each token, as deep as the loop has come
        parents, bytes_, num_nodes = [np.array([-1])], [np.array([0], np.uint8)], 1
        for depth in range(lengths.max(initial=0)):
            longer = np.flatnonzero(lengths > depth)
            parent, byte = node[longer], flat[begins[longer] + depth]
            # In sorted order equal beginnings stand together, so a node begins where anything changes.
            fresh = np.ones(len(longer), bool)
            fresh[1:] = (parent[1:] != parent[:-1]) | (byte[1:] != byte[:-1])
            node[longer] = num_nodes - 1 + np.cumsum(fresh)
            parents.append(parent[fresh])
            bytes_.append(byte[fresh])
            num_nodes += int(fresh.sum())

        self.byte = np.concatenate(bytes_)  # uint8 [num_nodes]: what leads to a node
        self.token_node = np.zeros(len(token_bytes), np.int64)  # where each token ends; the root for one never said
        self.token_node[order] = node
        self.num_children = np.bincount(np.concatenate(parents)[1:], minlength=num_nodes)
        self.first_child = 1 + np.cumsum(self.num_children) - self.num_children

    def reached(self, table: np.ndarray, state: int) -> np.ndarray:
        """The tokens that lead a DFA from `state` to a state, bool [vocab_size]. `table` is int32 [num_states, 256].

        A depth is walked at once, and what lies behind a dead end is not walked: the work grows with the living nodes
        and their children, at most the bytes of the whole vocabulary.
        """
        alive = np.zeros(len(self.byte), bool)
        for nodes in self._walk(table, state):
            alive[nodes] = True
        return alive[self.token_node]

    def _walk(self, table: np.ndarray, state: int) -> Iterator[np.ndarray]:
        nodes, states = np.array([0]), np.array([state])
        while len(nodes):
            count = self.num_children[nodes]
            children = np.arange(count.sum()) + np.repeat(self.first_child[nodes] - np.cumsum(count) + count, count)
            states = table[np.repeat(states, count), self.byte[children]]
            nodes, states = children[states >= 0], states[states >= 0]
            yield nodes


def _decoded(text: bytes | None) -> str | None:
    """None for what is no whole text."""
    try:
        return text and text.decode()
    except UnicodeDecodeError:
        return None


def _token_bytes(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[bytes | None]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str())["decoder"] if backend is not None else None
    parts = [part["type"] for part in (decoder or {}).get("decoders", [decoder or {"type": "none"}])]
    if "ByteLevel" in parts:
        read = _byte_level
    elif "ByteFallback" in parts or "Metaspace" in parts:
        read = _byte_fallback
    else:
        raise ValueError(
            f"structured_outputs cannot read the tokens of a tokenizer with the decoder {', '.join(parts)}; "
            "supported: fast tokenizers with the decoder ByteLevel, ByteFallback or Metaspace"
        )
    never = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    texts: list[bytes | None] = [None] * vocab_size  # a model may have more rows than its tokenizer has tokens
    for token, token_id in backend.get_vocab(with_added_tokens=False).items():
        if token_id < vocab_size and token_id not in never:
            texts[token_id] = read(token) or None
    return texts


def _byte_level(token: str) -> bytes | None:
    """GPT-2's way: each byte is written as a printable character."""
    values = [CHARACTER_BYTES.get(character) for character in token]
    return None if None in values else bytes(values)


def _byte_fallback(token: str) -> bytes:
    """SentencePiece's way: text with ▁ for a space, and <0xE2> for a byte that no token's text holds."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(SPACE, " ").encode()


def _character_bytes() -> dict[str, int]:
    """Latin-1's visible characters stand for themselves; the other bytes take the characters from 256 on, in order."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(others)}


CHARACTER_BYTES = _character_bytes()
