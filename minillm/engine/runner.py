"""ModelRunner: one step of the scheduler becomes one forward pass and one draw. Built in chapter 05.

SchedulerOutput -> block copies -> ForwardBatch -> Decoder.forward -> logits -> Sampler -> tokens for each row
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, chain, islice, takewhile
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minillm.engine.graphs import DecodeGraphs, logits_wanted, tokens_of
from minillm.engine.pieces import PieceGraphs
from minillm.engine.request import Request
from minillm.engine.scheduler import SampledToken, ScheduledRequest, SchedulerOutput
from minillm.kv_cache.paged import PagedKVCache
from minillm.kv_cache.transfer import BlockTransfer
from minillm.model.attention import AttentionBackend
from minillm.model.batch import ForwardBatch
from minillm.model.decoder import Decoder
from minillm.sampling.grammar.mask import GrammarMasks
from minillm.sampling.logprobs import LogprobTensors, dictionaries, score_tokens
from minillm.sampling.sampler import Sampler, SamplerOutput, SamplingMetadata, SamplingRow
from minillm.speculative.rejection import Drafted
from minillm.staging import Download, upload
from minillm.trace import Trace


class ModelRunner:
    """Owns the model and the memory of the cache; knows nothing of queues."""

    def __init__(
        self,
        model: Decoder,
        cache: PagedKVCache,
        attention: AttentionBackend,
        sampler: Sampler | None = None,
        trace: Trace | None = None,
        graphs: DecodeGraphs | None = None,
        transfer: BlockTransfer | None = None,
        pieces: PieceGraphs | None = None,
    ):
        self.model, self.cache, self.attention = model, cache, attention
        self.sampler = sampler or Sampler()
        self.trace = trace or Trace(enabled=False)
        self.graphs, self.pieces = graphs, pieces
        self.transfer = transfer
        self.masks = GrammarMasks(model.config.vocab_size, model.device)
        self._sampled_rows: list[ScheduledRequest] = []  # of the last step
        self._sampled: Tensor | None = None  # and their tokens, on the device
        self._metadata: SamplingMetadata | None = None

    def execute(self, output: SchedulerOutput) -> list[list[SampledToken]]:
        """Compute a step. For each row as many sampled tokens as it wants samples; prompt log-probabilities, where
        they are wanted, go to the request itself.
        """
        return self.launch(output).wait()

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Start a step. A GPU computes it while the caller goes on; `wait` for its tokens, and launch at most one other
        step before. A row may need the token that the last launched step samples: it never leaves the device.
        """
        if output.moves:
            with self.trace.span("move blocks"):
                (self.transfer or self.cache).move(output.moves)
        if not output.rows:
            return LaunchedStep(output, None, [], self.trace)
        logits, scored = self.forward(output.rows)
        with self.trace.span("sample"):
            num_last = len(logits) - sum(count for _, count in scored)
            prompts = self._score_prompts(logits[num_last:], scored)
            return LaunchedStep(output, self._sample(output.rows, logits[:num_last]), prompts, self.trace)

    def forward(
        self, rows: list[ScheduledRequest], token_ids: Tensor | None = None
    ) -> tuple[Tensor, list[tuple[ScheduledRequest, int]]]:
        """One forward pass: the logits that `build_batch` says. A draft model passes the tokens that it drew last,
        `token_ids` [len(rows)] on the device, where each row processes the one that the host has not seen."""
        with self.trace.span("build batch"):
            recorded = self.graphs is not None and self.graphs.serves(rows)
            batch, scored = (self.graphs.fill(rows), []) if recorded else self.build_batch(rows)
            if token_ids is None:
                self._feed_sampled(batch.token_ids, rows)
            else:
                batch.token_ids[: len(rows)] = token_ids
        with self.trace.span("forward"):
            if not recorded:
                in_pieces = self.pieces is not None and self.pieces.serves(batch)
                return self.pieces.forward(batch) if in_pieces else self.model.forward(batch, self.attention), scored
            logits = self.graphs.run(batch)
        wanted = logits_wanted(rows)  # all there are, but for padding and what a draft model catches up on
        if wanted[-1] == len(wanted) - 1:
            return logits[: len(wanted)], scored
        return logits.index_select(0, *upload(wanted, device=self.model.device)), scored

    def build_batch(self, rows: list[ScheduledRequest]) -> tuple[ForwardBatch, list[tuple[ScheduledRequest, int]]]:
        """The flat batch of `rows`. Its logits are those of the last token of every row that samples,
        and of each of its guesses; then those that prompt log-probabilities need. The second value says of which rows,
        and how many.
        """
        block_size = self.cache.block_size
        token_ids, positions, slots = [], [], []
        for row in rows:
            start, count, table = row.start, row.num_tokens, row.block_ids
            token_ids += tokens_of(row)
            if count == 1:
                positions.append(start)
                slots.append(table[start // block_size] * block_size + start % block_size)
                continue
            span = range(start, start + count)
            positions += span
            slots += [table[p // block_size] * block_size + p % block_size for p in span]
        lengths = [row.num_tokens for row in rows]
        starts = np.fromiter(accumulate(lengths, initial=0), np.int64, len(rows) + 1)
        ends = starts[1:].tolist()
        wanted = logits_wanted(rows)
        scored = []
        for row, end in zip(rows, ends):
            if row.request.prompt_logprobs is not None:
                # The logits of a token say how probable the next one of the prompt was.
                first = _first_scored(row) - row.start
                count = min(row.num_tokens, row.request.num_prompt_tokens - 1 - row.start) - first
                if count > 0:
                    scored.append((row, count))
                    wanted += range(end - row.num_tokens + first, end - row.num_tokens + first + count)
        most_blocks = max(len(row.block_ids) for row in rows)
        tables = chain.from_iterable((*row.block_ids, *[0] * (most_blocks - len(row.block_ids))) for row in rows)
        block_table = np.fromiter(tables, np.int64, len(rows) * most_blocks).reshape(len(rows), most_blocks)
        seq_lens = np.asarray([row.start + row.num_tokens for row in rows])
        columns = upload(token_ids, positions, slots, starts, seq_lens, block_table, wanted, device=self.model.device)
        names = (
            "token_ids",
            "positions",
            "slot_mapping",
            "query_start_loc",
            "seq_lens",
            "block_table",
            "logits_indices",
        )
        batch = ForwardBatch(
            **dict(zip(names, columns)),
            max_query_len=max(lengths),
            max_seq_len=int(seq_lens.max()),
            num_decodes=next((at for at, length in enumerate(lengths) if length > 1), len(lengths)),  # those in front
            on_host=(starts, seq_lens, block_table),
        )
        return batch, scored

    def _feed_sampled(self, token_ids: Tensor, rows: list[ScheduledRequest]) -> None:
        """Put the tokens that the last launched step samples, and the host has not seen, where this step reads them."""
        # Among the first rows.
        late = [index for index, row in enumerate(rows) if row.start >= len(row.request.token_ids)]
        if not late:
            return
        places = {row.request.request_id: place for place, row in enumerate(self._sampled_rows)}
        sources = [places[rows[index].request.request_id] for index in late]
        if late == sources == list(range(len(late))):  # the same sequences in the same order, as in most steps
            token_ids[: len(late)] = self._sampled[: len(late)]
        else:
            target, source = upload(late, sources, device=token_ids.device)
            token_ids.index_copy_(0, target, self._sampled.index_select(0, source))

    def _sample(self, rows: list[ScheduledRequest], logits: Tensor) -> SamplerOutput | None:
        """Draw for the rows that sample; logits has one row for each of them, and one for each guess."""
        sampling = [row for row in rows if row.samples]
        if not sampling:
            self._sampled_rows = []
            return None
        if any(row.samples > 1 for row in sampling):  # a prompt about to fork: one logits row, n draws
            repeats = [repeat for row in sampling for repeat in (row.samples, *[1] * len(row.draft))]
            logits = logits.index_select(0, *upload(np.arange(len(repeats)).repeat(repeats), device=logits.device))
        metadata = self._sampling_metadata(sampling)
        if metadata.has_grammars:
            with self.trace.span("masks"):  # a GPU is still computing the logits
                drawing = [row for row in sampling for _ in range(row.samples)]
                metadata.masks = self.masks.fill([(row.request.grammar, row.draft) for row in drawing])
            for index, (num_tokens, error) in self.masks.stuck.items():
                drawing[index].request.maskless = drawing[index].position + num_tokens, error
        sampled = self.sampler.sample(logits, metadata)
        metadata.advance(sampled.token_ids)
        self._sampled = sampled.token_ids
        return sampled

    def _sampling_metadata(self, sampling: list[ScheduledRequest]) -> SamplingMetadata:
        """Built anew when other requests sample than in the last step; else what `advance` kept up to date."""
        last = self._sampled_rows
        same = len(last) == len(sampling) and all(
            now.request is before.request
            and now.num_tokens == now.samples == before.samples == 1  # one token, and so no guesses
            and now.start == before.start + before.num_tokens
            and not before.draft
            for now, before in zip(sampling, last)
        )
        self._sampled_rows = sampling
        if not same:
            rows = [
                SamplingRow(
                    row.request.params,
                    row.request.sample_seed(row.request.index + sample),
                    row.request.prompt_token_ids,
                    [*row.request.output_token_ids, *row.draft[:guess]] if guess else row.request.output_token_ids,
                    row.request.stop_token_ids,
                    row.position + guess,
                )
                for row in sampling
                for sample in range(row.samples)
                for guess in range(1 + len(row.draft))
            ]
            self._metadata = SamplingMetadata(rows, self.model.config.vocab_size, self.model.device)
            self._metadata.drafted = self._drafted(sampling)
        return self._metadata

    def _drafted(self, sampling: list[ScheduledRequest]) -> Drafted | None:
        """The guesses that were drawn by chance, with what they were drawn from."""
        rows, token_ids, probs, first = [], [], [], 0
        for row in sampling:
            if row.draft and row.request.spec_probs is not None:
                rows += range(first, first + len(row.draft))
                token_ids += row.draft
                probs.append(row.request.spec_probs[: len(row.draft)])
            first += row.samples + len(row.draft)
        return Drafted(*upload(rows, token_ids, device=self.model.device), torch.cat(probs)) if rows else None

    def _score_prompts(self, logits: Tensor, scored: list[tuple[ScheduledRequest, int]]) -> list[ScoredPrompt]:
        parts, start = [], 0
        for row, count in scored:
            request, first = row.request, _first_scored(row) + 1
            following = upload(request.prompt_token_ids[first : first + count], device=self.model.device)[0]
            counts = [request.params.prompt_logprobs] * count
            parts.append(
                ScoredPrompt(request, first, counts, score_tokens(logits[start : start + count], following, counts))
            )
            start += count
        return parts


class ScoredPrompt(NamedTuple):
    """The log-probabilities of a part of a prompt, on the device."""

    request: Request
    first: int  # token of the prompt
    counts: list[int]
    scores: LogprobTensors


class LaunchedStep:
    """A step on its way. All that the host wants of it is copied as soon as it is there, and waited for together."""

    def __init__(
        self, output: SchedulerOutput, sampled: SamplerOutput | None, prompts: list[ScoredPrompt], trace: Trace
    ):
        self.output, self.sampled, self.prompts, self.trace = output, sampled, prompts, trace
        wanted = (*(sampled.tensors if sampled else ()), *chain.from_iterable(part.scores for part in prompts))
        self.download = Download(*wanted)

    def wait(self) -> list[list[SampledToken]]:
        """The sampled tokens, for each row as many as it wanted samples; of a row with a draft the accepted draft
        tokens, and the token after them. Prompt log-probabilities go to their requests."""
        with self.trace.span("wait"):
            tensors = iter(self.download.wait())
        sampled = self.sampled and self.sampled.read(*islice(tensors, len(self.sampled.tensors)))
        for request, first, counts, scores in self.prompts:
            found = dictionaries(LogprobTensors(*islice(tensors, len(scores))), counts)
            # Computed again after a preemption: the same again.
            request.prompt_logprobs[first : first + len(found)] = found
        if sampled is None:
            return [[] for _ in self.output.rows]
        token_ids, logprobs = sampled
        tokens = iter(map(SampledToken, token_ids, logprobs or [None] * len(token_ids)))
        return [
            _accepted(tokens, row.draft) if row.draft else [next(tokens) for _ in range(row.samples)]
            for row in self.output.rows
        ]


def _first_scored(row: ScheduledRequest) -> int:
    """The first token of the row whose logits prompt log-probabilities want, if any does."""
    return max(row.start, row.request.logprob_start_len - 1)


def _accepted(tokens: Iterator[SampledToken], draft: tuple[int, ...]) -> list[SampledToken]:
    """The target's own tokens, up to the first that was guessed wrong:
    what it drew behind that one had a wrong text before it."""
    drawn = [next(tokens) for _ in range(len(draft) + 1)]
    right = takewhile(lambda pair: pair[0].token_id == pair[1], zip(drawn, draft))
    return drawn[: 1 + sum(1 for _ in right)]
