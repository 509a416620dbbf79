"""Calibration: a few texts walk through the layers, and each product's inputs are watched. Built in chapter 16.

    hidden of all texts -> layer 0: observe its four products, quantize them, compute it again -> hidden -> layer 1 ...

So a layer is quantized for the inputs it will really get, with the errors of the layers before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minillm.model.attention import NoCacheAttention
from minillm.model.batch import ForwardBatch
from minillm.model.decoder import Decoder
from minillm.model.decoder_layer import DecoderLayer
from minillm.quantization.statistics import InputStatistics
from minillm.zoo import corpus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TOKENS = 512  # of a sequence; a longer text becomes several
MIN_TOKENS = 256  # in all; statistics of fewer say nothing
BATCH_TOKENS = 2048  # through a layer at once


def calibration_sequences(
    tokenizer: PreTrainedTokenizerBase, num_documents: int = 64, seed: int = 0, file: str | Path | None = None
) -> list[list[int]]:
    """Token ids to calibrate with: documents of the corpus, or a text file, cut into as many pieces as it gives.

    Raises ValueError for the seed that measurements are made with, and for too little text.
    """
    if file is None:
        if seed == corpus.HELD_OUT_SEED:
            raise ValueError(
                f"seed={seed} is the held-out text that quality is measured on; calibrate with another one, such as 0"
            )
        sequences = corpus_sequences(tokenizer, num_documents, seed)
        what, way_out = f"{num_documents} documents", "raise num_documents"
    else:
        ids = tokenizer(Path(file).expanduser().read_text(encoding="utf-8"))["input_ids"]
        sequences = [ids[start : start + MAX_TOKENS] for start in range(0, len(ids), MAX_TOKENS)][:num_documents]
        what, way_out = str(file), "take a longer text"
    if (count := sum(map(len, sequences))) < MIN_TOKENS:
        raise ValueError(
            f"calibration text of {count} tokens ({what}) is too little; at least {MIN_TOKENS} are needed: {way_out}"
        )
    return sequences


def corpus_sequences(tokenizer: PreTrainedTokenizerBase, num_documents: int, seed: int) -> list[list[int]]:
    """The first documents of the corpus under `seed`, all tasks mixed."""
    return [
        encode_document(tokenizer, document)[:MAX_TOKENS] for document in islice(corpus.documents(seed), num_documents)
    ]


def encode_document(tokenizer: PreTrainedTokenizerBase, document: corpus.Document) -> list[int]:
    """As training saw it: a beginning token, then each segment encoded by itself."""
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return sum((tokenizer.encode(text, add_special_tokens=False) for text, _ in document.segments), begin)


class CalibrationWalk:
    """The hidden states of all sequences in front of one layer; `advance` takes them through it."""

    def __init__(self, decoder: Decoder, sequences: list[list[int]]):
        self.attention = NoCacheAttention.of(decoder)
        self.batches = list(batches_of(sequences, decoder.device))
        self.rotary = [decoder.rotary(batch.positions) for batch in self.batches]
        self.hidden = [decoder.embed(batch.token_ids) for batch in self.batches]  # each [num_tokens, hidden_size]

    def observe(self, layer: DecoderLayer) -> dict[str, InputStatistics]:
        """Compute the layer, and watch what its products get; by their places in it."""
        products = layer.linears()
        statistics = {
            name: InputStatistics(linear.in_features, self.hidden[0].device) for name, linear in products.items()
        }
        hooks = [
            linear.register_forward_pre_hook(lambda _, arguments, seen=statistics[name]: seen.add(arguments[0]))
            for name, linear in products.items()
        ]
        try:
            for _ in self._through(layer):
                pass
        finally:
            for hook in hooks:
                hook.remove()
        return statistics

    def advance(self, layer: DecoderLayer) -> None:
        """Compute the layer, as it is now, for good."""
        self.hidden = list(self._through(layer))

    def _through(self, layer: DecoderLayer) -> Iterator[torch.Tensor]:
        for hidden, rotary, batch in zip(self.hidden, self.rotary, self.batches):
            yield layer(hidden, rotary, self.attention, batch)


def batches_of(
    sequences: list[list[int]], device: torch.device | str = "cpu", all_logits: bool = False
) -> Iterator[ForwardBatch]:
    """Whole sequences, several to a batch, up to BATCH_TOKENS tokens unless one alone has more."""
    waiting: list[list[int]] = []
    for ids in sequences:
        if waiting and sum(map(len, waiting)) + len(ids) > BATCH_TOKENS:
            yield whole_sequences(waiting, device, all_logits)
            waiting = []
        waiting.append(ids)
    if waiting:
        yield whole_sequences(waiting, device, all_logits)


def whole_sequences(
    sequences: list[list[int]], device: torch.device | str = "cpu", all_logits: bool = False
) -> ForwardBatch:
    """A batch of sequences that bring all of their tokens; logits of every token, or of none."""
    lengths = torch.tensor([len(ids) for ids in sequences], device=device)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    token_ids = torch.tensor([token for ids in sequences for token in ids], dtype=torch.int64, device=device)
    longest = max(map(len, sequences))
    return ForwardBatch(
        token_ids=token_ids,
        positions=torch.cat([torch.arange(len(ids), device=device) for ids in sequences]),
        query_start_loc=starts,
        seq_lens=lengths,
        block_table=None,
        slot_mapping=None,
        max_query_len=longest,
        logits_indices=torch.arange(len(token_ids) if all_logits else 0, device=device),
        max_seq_len=longest,
    )


def perplexity(decoder: Decoder, sequences: list[list[int]]) -> float:
    """exp of the mean negative log-likelihood of every token but each sequence's first."""
    attention = NoCacheAttention.of(decoder)
    total, count = 0.0, 0
    for batch in batches_of(sequences, decoder.device, all_logits=True):
        logprobs = decoder(batch, attention).log_softmax(-1)[:-1]  # [num_tokens - 1, vocab_size]
        following = logprobs.gather(1, batch.token_ids[1:, None])[:, 0]
        same_sequence = batch.positions[1:] > 0
        total -= following[same_sequence].double().sum().item()
        count += int(same_sequence.sum())
    return float(torch.exp(torch.tensor(total / max(count, 1), dtype=torch.float64)))
