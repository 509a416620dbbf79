"""Tokenizers as llama.cpp's converter writes them into a GGUF file's metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def learned(text: str, vocab_size: int = 400) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Tokens and merges of byte-level BPE, learned across the whole of `text`: many reach over the edges of words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def byte_level(
    vocab: dict[str, int], merges: list[tuple[str, str]], pre: str, special: dict[str, int] | None = None, **more: Any
) -> dict[str, Any]:
    """`special` are more tokens and their types, `more` more keys of tokenizer.ggml."""
    tokens = [*sorted(vocab, key=vocab.get), *(special or {})]
    types = [NORMAL] * len(vocab) + list((special or {}).values())
    return keys(model="gpt2", pre=pre, tokens=tokens, token_type=types, merges=list(map(" ".join, merges)), **more)


def sentencepiece(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The score of a token says when it is merged."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    ranks = {"".join(pair): rank for rank, pair in enumerate(model["merges"])}
    added = {**tokenizer.added_tokens_decoder}
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    types = [
        (UNKNOWN if token == tokenizer.unk_token else CONTROL if added[index].special else USER_DEFINED)
        if index in added
        else BYTE
        if token.startswith("<0x")
        else NORMAL
        for index, token in enumerate(tokens)
    ]
    return keys(model="llama", tokens=tokens, token_type=types, scores=[-float(ranks.get(t, 1e6)) for t in tokens])


def keys(**values: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def write(path: Path, metadata: dict[str, Any], architecture: str = "llama") -> Path:
    """A file of nothing but a vocabulary."""
    writer = gguf.GGUFWriter(str(path), architecture)
    kinds = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
    for key, value in metadata.items():
        kinds[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
