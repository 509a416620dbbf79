"""The first generator: one request at a time over a contiguous cache. Built in chapter 04.

It computes the prompt once, then one token a step. Chapter 05 puts a scheduler in its place,
which gives every step to many requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.engine.request import Request
from minillm.kv_cache.contiguous import ContiguousAttention, ContiguousKVCache
from minillm.model.batch import ForwardBatch
from minillm.model.decoder import Decoder
from minillm.sampling.logprobs import Logprob, gather_logprobs
from minillm.sampling.sampler import Sampler, SamplingMetadata, SamplingRow

LOGITS_CHUNK = 256  # prompt tokens whose logits are in memory at once, for prompt_logprobs


@dataclass(frozen=True)
class Prefilled:
    """A prompt that was computed: what every sample of it starts from."""

    cache: ContiguousKVCache
    attention: ContiguousAttention
    logits: Tensor  # [1, vocab_size], of the token that follows the prompt
    prompt_logprobs: list[dict[int, Logprob] | None] | None


@dataclass(frozen=True)
class SampledToken:
    token_id: int
    logprobs: dict[int, Logprob] | None
    finish_reason: str | None  # "stop" or "length" on the last token


class Generator:
    """Runs requests on a model. Each has a cache of its own, so several may be under way."""

    def __init__(self, model: Decoder, sampler: Sampler | None = None):
        self.model = model
        self.sampler = sampler or Sampler()

    def prefill(self, request: Request) -> Prefilled:
        """Compute the whole prompt; only its last token's logits, unless `prompt_logprobs` wants them all."""
        config, token_ids, count = self.model.config, request.prompt_token_ids, request.params.prompt_logprobs
        max_len = len(token_ids) + request.max_tokens
        cache = ContiguousKVCache(
            config.num_layers, config.num_kv_heads, config.head_dim, max_len, self.model.dtype, self.model.device
        )
        attention = ContiguousAttention(cache, config)
        prompt_logprobs = None if count is None else [None]
        chunk = len(token_ids) if count is None else LOGITS_CHUNK
        for start in range(0, len(token_ids), chunk):
            logits = self._forward(token_ids[start : start + chunk], start, attention, all_logits=count is not None)
            if count is not None:
                following = token_ids[start + 1 : start + chunk + 1]
                chosen = torch.tensor(following, dtype=torch.int64, device=self.model.device)
                prompt_logprobs += gather_logprobs(logits[: len(following)], chosen, [count] * len(following))
        return Prefilled(cache, attention, logits[-1:], prompt_logprobs)

    def decode(self, request: Request, prefilled: Prefilled, index: int = 0) -> Iterator[SampledToken]:
        """Sample `index` of the request, token by token, until a stop token or the limit.

        One sample of a prompt at a time: they take turns in the cache behind it.
        """
        output_token_ids: list[int] = []
        params, prompt, stop_token_ids = request.params, request.prompt_token_ids, request.stop_token_ids
        row = SamplingRow(params, request.sample_seed(index), prompt, output_token_ids, stop_token_ids)
        metadata = SamplingMetadata([row], self.model.config.vocab_size, self.model.device)
        prefilled.cache.truncate(len(prompt))
        # One batch serves every step: its tensors are advanced in place, nothing is made anew.
        batch = ForwardBatch.single([0], start=len(prompt), device=self.model.device)
        logits = prefilled.logits
        while True:
            sampled = self.sampler.sample(logits, metadata)
            token_id = sampled.token_ids.item()
            output_token_ids.append(token_id)
            num_tokens = len(output_token_ids)
            finish_reason = "length" if num_tokens == request.max_tokens else None
            if token_id in stop_token_ids and num_tokens >= params.min_tokens:
                finish_reason = "stop"
            yield SampledToken(token_id, sampled.logprobs and sampled.logprobs[0], finish_reason)
            if finish_reason:
                return
            metadata.advance(sampled.token_ids)
            batch.token_ids.copy_(sampled.token_ids)
            logits = self.model.forward(batch, prefilled.attention)
            batch.positions += 1
            batch.seq_lens += 1
            batch.max_seq_len += 1

    def logits_after(self, prefilled: Prefilled, request: Request, token_ids: Sequence[int]) -> Tensor:
        """Logits [1, vocab_size] of what follows the prompt and `token_ids`, which are computed anew (beam search)."""
        prompt_len = len(request.prompt_token_ids)
        prefilled.cache.truncate(prompt_len)
        if not token_ids:
            return prefilled.logits
        return self._forward(token_ids, prompt_len, prefilled.attention)

    def _forward(
        self, token_ids: Sequence[int], start: int, attention: ContiguousAttention, all_logits: bool = False
    ) -> Tensor:
        batch = ForwardBatch.single(token_ids, start, all_logits, self.model.device)
        return self.model.forward(batch, attention)
