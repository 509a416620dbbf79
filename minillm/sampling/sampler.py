"""The sampler: logits of many requests in, one token each out. Built in chapter 01.

Requests with different parameters share one pass: every parameter is a column, one value a row.
What no row uses is None and costs nothing, so a greedy batch is a single argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.kernels import native_sampling
from minillm.sampling.logprobs import Logprob, LogprobTensors, NamedScores, dictionaries, score_named, score_tokens
from minillm.sampling.metadata import SamplingMetadata
from minillm.sampling.noise import gumbel_noise


@dataclass(frozen=True)
class SamplerOutput:
    """What was drawn, where it was drawn: the host has to read it with `read`."""

    token_ids: Tensor  # [num_rows] int64
    scores: LogprobTensors | None = None  # of the rows that asked for log-probabilities
    score_rows: Sequence[int] = ()
    score_counts: Sequence[int] = ()
    named: NamedScores | None = None  # of the rows that asked for the log-probabilities of certain tokens

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What `read` needs in host memory."""
        return (self.token_ids, *(self.scores or ()), *(self.named.tensors if self.named else ()))

    def read(self, token_ids: Tensor, *scores: Tensor) -> tuple[list[int], list[dict[int, Logprob] | None] | None]:
        """The tokens, one entry a row of log-probabilities, None where a row did not ask; of `tensors` on the host."""
        if not scores:
            return token_ids.tolist(), None
        by_row = {}
        if self.scores is not None:
            by_row = dict(zip(self.score_rows, dictionaries(LogprobTensors(*scores[:5]), self.score_counts)))
        if self.named is not None:
            by_row |= self.named.read(*scores[-3:])
        return token_ids.tolist(), [by_row.get(row) for row in range(len(token_ids))]

    @property
    def logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """One entry a row; None when no row asked. Waits for a GPU."""
        return self.read(*self.tensors)[1]


class Sampler:
    """Chooses tokens. Keeps no state: a row's token depends on its logits and its own request only.

    `fused`: True draws in Triton's kernels (chapter 14), False in torch's operations, None in the device's fastest way.
    """

    def __init__(self, fused: bool | None = None):
        self.fused = fused

    @torch.inference_mode()
    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """One token a row. logits [num_rows, vocab_size] float32, raw from the model, left as they are."""
        ruled = logits if metadata.rules is None else metadata.rules.apply(logits)
        token_ids = self.choose(ruled, metadata)
        named = score_named(logits, token_ids, metadata.named) if metadata.named else None
        rows, counts = metadata.logprob_rows, metadata.logprob_counts
        if not rows:
            return SamplerOutput(token_ids, named=named)
        scored, chosen = logits, token_ids
        if len(rows) < len(token_ids):
            scored, chosen = (part.index_select(0, metadata.logprob_index) for part in (logits, token_ids))
        return SamplerOutput(token_ids, score_tokens(scored, chosen, counts), rows, counts, named)

    def choose(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        logits = metadata.adjust(logits)
        if self.fused is None and native_sampling.draws(logits):
            return metadata.draw_native(logits)  # the same tokens
        if metadata.all_greedy:
            return logits.argmax(dim=-1)  # of equal logits the smallest id
        if (logits.is_cuda and self.fused is None) or self.fused:
            return metadata.draw_fused(logits)
        noise = gumbel_noise(metadata.seeds, metadata.positions, metadata.vocabulary)
        sampled = noise.add_(metadata.filter(logits)).argmax(dim=-1)
        return torch.where(metadata.is_greedy, logits.argmax(dim=-1), sampled) if metadata.any_greedy else sampled
