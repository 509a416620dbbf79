"""Text as the target itself goes on: what a draft head will be asked about. Built in chapter 18.

A document of the corpus takes any of its turns of phrase; a greedy model takes one of them, again and again. A head
that has read the corpus alone has seen the texts that it drafts only now and then.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from .. import LLM, SamplingParams
from ..zoo import corpus, tokenizer as bpe
from .config import TrainingConfig

STEPS_AT_ONCE = 8  # of training, whose rows are made together: a large batch
DOCUMENTS_AT_ONCE = 64
LONGEST = 192  # tokens of a continuation
SHORTEST = 16  # characters of a story's beginning


class OwnText:
    """Rows of what the model in `base` generates greedily after beginnings from the corpus."""

    def __init__(self, base: Path, dtype: torch.dtype, device: torch.device):
        kind = dict(device=str(device), dtype=str(dtype).removeprefix("torch."))
        self.llm = LLM(str(base), **kind, max_num_seqs=DOCUMENTS_AT_ONCE, num_kv_blocks=4096)
        self.longest = self.llm.model.config.max_position_embeddings
        self.made: list[tuple[np.ndarray, np.ndarray]] = []
        self.made_for: tuple[int, int, int] | None = None

    def rows(self, config: TrainingConfig, step: int, tokenizer: Tokenizer, count: int, length: int):
        """Token ids and loss weights of step number `step`, both [count, length]: a function of the configuration and
        the number, as `minillm.training.batch` is."""
        number, place = divmod(step, STEPS_AT_ONCE)
        if self.made_for != (number, count, length):
            rng = random.Random(f"own text/{config.seed}/{number}")
            documents = self._documents(rng, tokenizer, config.answer_weight)
            self.made = [packed(documents, count, length) for _ in range(STEPS_AT_ONCE)]
            self.made_for = number, count, length
        return self.made[place]

    def _documents(
        self, rng: random.Random, tokenizer: Tokenizer, answer_weight: float
    ) -> Iterator[tuple[list[int], list[float]]]:
        texts = corpus.documents(corpus.TRAIN_SEED, start=rng.randrange(10**12))
        params = SamplingParams(temperature=0.0, max_tokens=min(LONGEST, self.longest))
        begin = [tokenizer.token_to_id(bpe.BEGIN)]
        while True:
            beginnings = [beginning(next(texts), rng) for _ in range(DOCUMENTS_AT_ONCE)]
            encoded = tokenizer.encode_batch_fast(beginnings, add_special_tokens=False)
            prompts = [(begin + one.ids)[: self.longest - 1] for one in encoded]
            for prompt, output in zip(prompts, self.llm.generate(prompts, params, use_tqdm=False)):
                own = output.outputs[0].token_ids
                yield prompt + own, [1.0] * len(prompt) + [answer_weight] * len(own)


def beginning(document: corpus.Document, rng: random.Random) -> str:
    """A part of a document to go on from: up to one of its answers, or of a story up to anywhere in its first half."""
    if document.questions:
        return rng.choice(document.questions)[0]
    text = document.text[: rng.randint(SHORTEST, max(SHORTEST, len(document.text) // 2))]
    return text.rpartition(". ")[0] or text if rng.random() < 0.5 else text


def packed(documents: Iterator, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows filled with documents one behind the other, each row from the beginning of one."""
    tokens, weights = np.zeros((count, length), dtype=np.int64), np.zeros((count, length), dtype=np.float32)
    for row in range(count):
        filled = 0
        while filled < length:
            ids, worth = next(documents)
            n = min(len(ids), length - filled)
            tokens[row, filled : filled + n], weights[row, filled : filled + n] = ids[:n], worth[:n]
            filled += n
    return tokens, weights
