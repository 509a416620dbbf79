"""Tokenizers of several kinds made in memory, and random walks through a grammar."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from minillm.model.checkpoint import load_tokenizer
from minillm.sampling.grammar.compiler import GrammarCompiler
from minillm.sampling.grammar.protocol import Grammar
from minillm.sampling.grammar.vocabulary import CHARACTER_BYTES
from minillm.zoo import bundled

END = 0
WRITTEN = {byte: character for character, byte in CHARACTER_BYTES.items()}


def byte_tokenizer(tokens: Sequence[bytes]) -> PreTrainedTokenizerFast:
    """Byte-level: token 0 is the end, 1 another special one, then the given byte strings in order (no merges)."""
    written = ["<end>", "<other>", *("".join(WRITTEN[byte] for byte in token) for token in tokens)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(written)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<other>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", clean_up_tokenization_spaces=False)


@lru_cache(maxsize=1)
def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2 has it: a space is ▁, a character without a token is bytes, and a text begins with a space."""
    pieces = ["▁", "a", "b", "n", "m", "e", ":", "▁a", "ab", "▁ab", "na", "me", "name", "▁name", "é"]
    written = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab"), ("n", "a"), ("m", "e"), ("na", "me"), ("▁", "name")]
    vocabulary = {token: index for index, token in enumerate(written)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken(name, special=False) for name in ("<tool>", "[tool]")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


def pieces_tokenizer(pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    """Whole characters without bytes to fall back on: 0 is <unk>, which stands for what no piece says, 2 the end."""
    written = ["<unk>", "<s>", "</s>", *pieces]
    tokenizer = Tokenizer(
        models.BPE({token: index for index, token in enumerate(written)}, [], unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


@lru_cache(maxsize=1)
def tinyworld() -> PreTrainedTokenizerFast:
    return load_tokenizer(bundled()["tinyworld"])


@lru_cache(maxsize=1)
def tinyworld_compiler() -> GrammarCompiler:
    return GrammarCompiler(tinyworld(), 1024, [tinyworld().eos_token_id])


def allowed(grammar: Grammar, vocab_size: int) -> set[int]:
    """The tokens of a mask, read bit by bit as the protocol says."""
    words = np.full(-(-vocab_size // 32), 0x55555555, np.int32)
    grammar.fill_mask(words)
    return {token_id for token_id in range(vocab_size) if int(words[token_id // 32]) >> token_id % 32 & 1}


def random_walk(
    grammar: Grammar,
    vocab_size: int,
    ends: set[int],
    seed: int,
    max_tokens: int = 400,
    hurry: float = 0.2,
    jump: bool = False,
) -> list[int]:
    """Tokens drawn from the masks until the end, without it; `hurry` is how often the end is taken where it may be."""
    rng = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        for token_id in grammar.jump_tokens() if jump else []:
            grammar.accept(token_id)
            tokens.append(token_id)
        choices = allowed(grammar, vocab_size)
        assert choices, f"nothing may follow {tokens}"
        if choices & ends and (choices <= ends or rng.random() < hurry):
            grammar.accept(min(choices & ends))
            assert grammar.is_terminated
            return tokens
        tokens.append(rng.choice(sorted(choices - ends)))
        grammar.accept(tokens[-1])
    raise AssertionError(f"no end in {max_tokens} tokens")
