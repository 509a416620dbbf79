"""The sampler: logits of many requests in, one token each out. Built in chapter 01.

Requests with different parameters share one pass: every parameter is a column, one value a row.
What no row uses is None and costs nothing, so a greedy batch is a single argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minillm.kernels.sampling import sample as draw
from minillm.sampling import filters
from minillm.sampling.logprobs import Logprob, gather_logprobs
from minillm.sampling.noise import gumbel_noise
from minillm.sampling.params import SamplingParams

if TYPE_CHECKING:
    from minillm.sampling.grammar.mask import GrammarMasks


@dataclass(frozen=True)
class SamplerOutput:
    token_ids: Tensor  # [num_rows] int64
    logprobs: list[dict[int, Logprob] | None] | None  # one entry a row; None when no row asked


class Sampler:
    """Chooses tokens. Keeps no state: a row's token depends on its logits and its own request only.

    `fused` draws in our own kernels (chapter 14), which neither sort nor write the noise down; None does so on a GPU.
    """

    def __init__(self, fused: bool | None = None):
        self.fused = fused

    @torch.inference_mode()
    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """One token a row. logits [num_rows, vocab_size] float32, raw from the model, left as they are."""
        token_ids = self.choose(logits, metadata)
        if not metadata.logprob_rows:
            return SamplerOutput(token_ids, None)
        rows = metadata.logprob_rows
        found = gather_logprobs(logits[rows], token_ids[rows], metadata.logprob_counts)
        by_row = dict(zip(rows, found))
        return SamplerOutput(token_ids, [by_row.get(row) for row in range(len(token_ids))])

    def choose(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        logits = metadata.adjust(logits)
        if metadata.all_greedy:
            return logits.argmax(dim=-1)  # of equal logits the smallest id
        if logits.is_cuda and self.fused is None or self.fused:
            return metadata.draw_fused(logits)
        noise = gumbel_noise(metadata.seeds, metadata.positions, metadata.vocabulary)
        sampled = noise.add_(metadata.filter(logits)).argmax(dim=-1)
        return torch.where(metadata.is_greedy, logits.argmax(dim=-1), sampled) if metadata.any_greedy else sampled


@dataclass(frozen=True)
class SamplingRow:
    """What the sampler must know of one request. `output_token_ids` is the request's own growing list."""

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_token_ids: frozenset[int]  # end-of-sequence ids too: banned until `min_tokens` are there
    position: int | None = None  # of the token to draw among the outputs, where some are drawn but not known here yet


class SamplingMetadata:
    """The requests of a batch as columns. Built when the batch changes, then kept up to date by `advance`."""

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device | str = "cpu"):
        self.rows = rows
        self.params = [row.params for row in rows]
        self.vocab_size = vocab_size
        self.device = device
        self.masks: GrammarMasks | None = None  # of the step to come: what the grammars of its rows allow
        self.has_grammars = any(params.structured_outputs is not None for params in self.params)
        positions = [len(row.output_token_ids) if row.position is None else row.position for row in rows]
        self.positions = self._tensor(positions)  # [num_rows]
        self._build_draw()
        self._build_penalties()
        self._build_bias()
        self.logprob_rows = [index for index, params in enumerate(self.params) if params.logprobs is not None]
        self.logprob_counts = [self.params[index].logprobs for index in self.logprob_rows]
        self.drafted: tuple[Tensor, Tensor, Tensor] | None = None  # guesses to be checked by chance (chapter 18)

    def adjust(self, logits: Tensor) -> Tensor:
        """Penalties, bias, bans and grammars: what a greedy row obeys too. New logits, or the same if nothing applies."""
        raw = logits
        if self.penalties:
            logits = filters.apply_penalties(logits, self.in_prompt, self.output_counts, **self.penalties)
        if self.bias is not None:
            values = torch.where(self.positions[self.bias_rows] < self.bias_until, self.bias, 0.0)
            logits = logits.index_put((self.bias_rows, self.bias_token_ids), values, accumulate=True)
        return logits if self.masks is None else self._apply_masks(raw, logits)

    def _apply_masks(self, raw: Tensor, logits: Tensor) -> Tensor:
        """A grammar may leave nothing but tokens that `min_tokens` bans: such a row is allowed to end."""
        masked = self.masks.apply(logits)
        if self.bias is None:
            return masked
        stuck = masked.amax(dim=-1, keepdim=True) == filters.NEVER  # [num_rows, 1]
        return torch.where(stuck, self.masks.apply(raw), masked)

    def filter(self, logits: Tensor) -> Tensor:
        """Temperature, then the filters in vLLM's order."""
        logits = logits / self.temperature
        if self.min_p is not None:
            logits = filters.min_p_filter(logits, self.min_p)
        if self.top_k is not None:
            logits = filters.top_k_filter(logits, self.top_k, self.largest_k)
        if self.top_p is not None:
            logits = filters.top_p_filter(logits, self.top_p)
        return logits

    def probs(self, logits: Tensor) -> Tensor:
        """What rows that are not greedy are drawn from: [num_rows, vocab_size], each row sums to 1."""
        return self.filter(self.adjust(logits)).softmax(dim=-1)

    def draw_fused(self, logits: Tensor) -> Tensor:
        """What `filter`, the noise and both argmaxes say, in three launches."""
        temperature = self.temperature.view(-1)
        return draw(logits, temperature, self.seeds, self.positions, self.is_greedy, self.min_p, self.top_k, self.top_p)

    def advance(self, token_ids: Tensor) -> None:
        """Every row has got its next token. token_ids int64 [num_rows]."""
        self.positions += 1
        if self.penalties:
            self.output_counts.scatter_add_(1, token_ids[:, None], torch.ones_like(self.output_counts[:, :1]))

    def _build_draw(self) -> None:
        self.all_greedy = all(params.is_greedy for params in self.params)
        self.any_greedy = any(params.is_greedy for params in self.params)
        if self.all_greedy:
            return
        self.is_greedy = self._tensor([params.is_greedy for params in self.params], torch.bool)
        temperatures = [1.0 if params.is_greedy else params.temperature for params in self.params]
        self.temperature = self._tensor(temperatures, torch.float32)[:, None]  # [num_rows, 1]
        self.seeds = self._tensor([row.seed for row in self.rows])
        self.vocabulary = torch.arange(self.vocab_size, device=self.device)
        self.min_p = self._column("min_p", unused=0.0)
        self.top_p = self._column("top_p", unused=1.0)
        # 0 and -1 keep all, and so does a k over the vocabulary.
        top_k = [min(params.top_k, self.vocab_size) if params.top_k > 0 else self.vocab_size for params in self.params]
        self.largest_k = max(top_k)
        self.top_k = self._tensor(top_k) if min(top_k) < self.vocab_size else None

    def _build_penalties(self) -> None:
        self.penalties: dict[str, Tensor] = {}
        if not any(params.has_penalties for params in self.params):
            return
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            self.penalties[name] = self._tensor([getattr(params, name) for params in self.params], torch.float32)
        shape = (len(self.rows), self.vocab_size)
        self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=self.device)
        self.output_counts = torch.zeros(shape, device=self.device)
        for index, row in enumerate(self.rows):
            self.in_prompt[index, self._tensor(row.prompt_token_ids)] = True
            self.output_counts[index] = torch.bincount(self._tensor(row.output_token_ids), minlength=self.vocab_size)

    def _build_bias(self) -> None:
        """`logit_bias` holds for ever; the ban on ending is a bias of -inf that holds until `min_tokens`."""
        entries = []  # (row, token id, value, until which output position)
        for index, row in enumerate(self.rows):
            entries += [(index, token_id, value, 2**62) for token_id, value in row.params.logit_bias.items()]
            if row.params.min_tokens:
                until = row.params.min_tokens
                entries += [(index, token_id, filters.NEVER, until) for token_id in sorted(row.stop_token_ids)]
        self.bias = None
        if entries:
            indices, token_ids, values, until = zip(*entries)
            self.bias_rows, self.bias_token_ids = self._tensor(indices), self._tensor(token_ids)
            self.bias, self.bias_until = self._tensor(values, torch.float32), self._tensor(until)

    def _column(self, name: str, unused: float) -> Tensor | None:
        values = [getattr(params, name) for params in self.params]
        return None if all(value == unused for value in values) else self._tensor(values, torch.float32)

    def _tensor(self, values: Sequence, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)
