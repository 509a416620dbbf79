"""SamplingMetadata: the parameters of a batch as columns, one value a row. Built in chapter 01."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minillm.kernels import native_sampling
from minillm.kernels.sampling import sample as draw
from minillm.sampling import filters
from minillm.sampling.counts import TokenCounts
from minillm.sampling.params import SamplingParams
from minillm.sampling.rules import Rules
from minillm.staging import upload

if TYPE_CHECKING:
    from minillm.sampling.grammar.mask import GrammarMasks

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
FILTERS = ("min_p", "top_k", "top_p")
BIAS = {"bias": np.float32, "bias_until": np.int64, "bias_rows": np.int64, "bias_token_ids": np.int64}


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
    """The requests of a batch as columns. Built when the batch changes, then kept up to date by `advance`.
    Rows that were in `last`, the batch before, keep what was counted of their texts."""

    def __init__(
        self,
        rows: Sequence[SamplingRow],
        vocab_size: int,
        device: torch.device | str = "cpu",
        last: SamplingMetadata | None = None,
    ):
        self.rows = rows
        self.params = [row.params for row in rows]
        self.vocab_size = vocab_size
        self.device = device
        self.masks: GrammarMasks | None = None  # of the step to come: what the grammars of its rows allow
        self.has_grammars = any(params.structured_outputs is not None for params in self.params)
        self.rules = Rules.of(rows, vocab_size, device)
        self.named = [(at, one.logprob_token_ids) for at, one in enumerate(self.params) if one.logprob_token_ids]
        self.logprob_rows = [
            at for at, one in enumerate(self.params) if one.logprobs is not None and not one.logprob_token_ids
        ]
        self.logprob_counts = [self.params[index].logprobs for index in self.logprob_rows]
        # Draft tokens with probabilities of their own (chapter 18).
        self.drafted: tuple[Tensor, Tensor, Tensor] | None = None
        positions = [len(row.output_token_ids) if row.position is None else row.position for row in rows]
        # Every column goes to the device in one copy, which is not waited for.
        columns = {
            "positions": np.asarray(positions, np.int64),
            "logprob_index": np.asarray(self.logprob_rows, np.int64),
        }
        counts = None if last is None else last.counts
        self.counts: TokenCounts | None = None  # where a row has penalties
        columns |= self._draw_columns() | self._penalty_columns(counts) | self._bias_columns()
        sent = dict(zip(columns, upload(*columns.values(), device=device)))
        self.positions, self.logprob_index = sent.pop("positions"), sent.pop("logprob_index")  # [num_rows]
        self._take_draw(sent)
        self.penalties = {name: sent[name] for name in PENALTIES if name in sent}
        if self.counts is not None:
            self.counts.take(sent, counts, device)
        self.bias, self.bias_until, self.bias_rows, self.bias_token_ids = (sent.get(name) for name in BIAS)

    def adjust(self, logits: Tensor) -> Tensor:
        """Bias, bans, penalties and grammars: what a greedy row obeys too.
        New logits, or the same if nothing applies."""
        raw = logits
        if self.bias is not None:
            values = torch.where(self.positions[self.bias_rows] < self.bias_until, self.bias, 0.0)
            logits = logits.index_put((self.bias_rows, self.bias_token_ids), values, accumulate=True)
        if self.counts is not None:  # of a banned token's -inf they leave -inf
            logits = filters.apply_penalties(logits, self.counts.in_prompt, self.counts.output_counts, **self.penalties)
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
        """What `filter`, the noise and both argmaxes say, in two launches and four more for top-k and top-p."""
        temperature = self.temperature.view(-1)
        return draw(logits, temperature, self.seeds, self.positions, self.is_greedy, *self.all_filters)

    def draw_native(self, logits: Tensor) -> Tensor:
        """What `filter`, the noise and both argmaxes say, in one pass of the C kernel where no row has a filter."""
        if self.all_greedy:
            return native_sampling.draw(logits)
        if not self.used_filters:
            return native_sampling.draw(logits, self.temperature, self.seeds, self.positions, self.is_greedy)
        sampled = native_sampling.draw(self.filter(logits), None, self.seeds, self.positions)
        return torch.where(self.is_greedy, native_sampling.draw(logits), sampled) if self.any_greedy else sampled

    def advance(self, token_ids: Tensor) -> None:
        """Every row has got its next token. token_ids int64 [num_rows]."""
        if self.bias is not None or not self.all_greedy:  # else nothing asks where a row stands
            self.positions += 1
        if self.counts is not None:
            self.counts.advance(token_ids)

    def _draw_columns(self) -> dict[str, np.ndarray]:
        """[num_rows] each; none where every row is greedy, and no filter where no row uses one."""
        params = self.params
        self.all_greedy = all(one.is_greedy for one in params)
        self.any_greedy = any(one.is_greedy for one in params)
        if self.all_greedy:
            return {}
        # 0 and -1 keep all, and so does a k over the vocabulary.
        top_k = [min(one.top_k, self.vocab_size) if one.top_k > 0 else self.vocab_size for one in params]
        self.largest_k = max(top_k)
        columns = {
            "is_greedy": np.asarray([one.is_greedy for one in params]),
            "temperature": np.asarray([1.0 if one.is_greedy else one.temperature for one in params], np.float32),
            "seeds": np.asarray([row.seed for row in self.rows], np.int64),
        }
        filters = {
            "min_p": np.asarray([one.min_p for one in params], np.float32),
            "top_k": np.asarray(top_k, np.int64),
            "top_p": np.asarray([one.top_p for one in params], np.float32),
        }
        unused = {"min_p": 0.0, "top_k": self.vocab_size, "top_p": 1.0}
        self.used_filters = {name for name, values in filters.items() if (values != unused[name]).any()}
        return columns | (filters if self.used_filters else {})

    def _take_draw(self, sent: dict[str, Tensor]) -> None:
        if self.all_greedy:
            return
        self.is_greedy, self.seeds = sent["is_greedy"], sent["seeds"]
        self.temperature = sent["temperature"][:, None]  # [num_rows, 1]
        self.vocabulary = torch.arange(self.vocab_size, device=self.device)
        self.min_p, self.top_k, self.top_p = (sent.get(name) if name in self.used_filters else None for name in FILTERS)
        self.all_filters = [sent.get(name) for name in FILTERS]  # one variant of a kernel serves all

    def _penalty_columns(self, last: TokenCounts | None) -> dict[str, np.ndarray]:
        """The three penalties [num_rows], and what the counts of prompts and outputs are made from."""
        if not any(one.has_penalties for one in self.params):
            return {}
        self.counts = TokenCounts(self.rows, self.vocab_size, last)
        columns = {name: np.asarray([getattr(one, name) for one in self.params], np.float32) for name in PENALTIES}
        return columns | self.counts.columns()

    def _bias_columns(self) -> dict[str, np.ndarray]:
        """`logit_bias` holds for ever; the ban on ending is a bias of -inf that holds until `min_tokens`."""
        entries = []  # (value, until which output position, row, token id)
        for index, row in enumerate(self.rows):
            entries += [(value, 2**62, index, token_id) for token_id, value in row.params.logit_bias.items()]
            if row.params.min_tokens:
                until = row.params.min_tokens
                entries += [(filters.NEVER, until, index, token_id) for token_id in sorted(row.stop_token_ids)]
        if not entries:
            return {}
        return {name: np.asarray(values, kind) for (name, kind), values in zip(BIAS.items(), zip(*entries))}
