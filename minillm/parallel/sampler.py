"""Sampling over a vocabulary that is split between ranks. Built in chapter 20.

A rank has the logits of its part of the vocabulary. What a draw needs of the others is mostly one candidate of each:

    greedy                   each rank's largest logit, and its token                          8 bytes a row and rank
    temperature              the noise of a token depends on its id alone (`minillm.sampling.noise`), so each rank adds
                             it to its own logits: again the largest sum, and its token        8 bytes
    min_p                    and the largest logit of all, before                              4 bytes
    top_k                    and the k largest of each rank, which say where the k-th of all is       4 k bytes
    everything else          the first rank gathers the logits, and draws as one process would        4 V / ranks bytes

All logits are gathered for top_p, for top_k beyond `MOST_CANDIDATES`, and wherever a request has one of these:
penalties, logit_bias, min_tokens, logprobs, prompt_logprobs, allowed_token_ids, bad_words, logits_processors,
structured_outputs, or drafts drawn from a distribution (a draft model, with temperature). One such row in a step is
enough.

The tokens are those of one process: the same sums are compared, and of equal ones the smallest id wins.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from minillm.parallel.communicator import Communicator
from minillm.sampling.filters import NEVER
from minillm.sampling.metadata import SamplingMetadata
from minillm.sampling.noise import gumbel_noise
from minillm.sampling.sampler import Sampler, SamplerOutput

MOST_CANDIDATES = 1024  # of each rank; more are hardly fewer than all


class SplitSampler(Sampler):
    """Draws the same tokens on each rank of the last stage; the ranks of other stages hear of them.

    `sampler` draws where all logits are gathered. `vocabulary` are the ids of this rank's part, `vocab_size` counts
    all.
    """

    def __init__(self, sampler: Sampler, communicator: Communicator, vocabulary: range, vocab_size: int):
        super().__init__(sampler.fused)
        self.sampler, self.communicator, self.layout = sampler, communicator, communicator.layout
        self.own, self.vocab_size = vocabulary, vocab_size
        self.is_gathered = False  # whether the next logits are those of the whole vocabulary, on the first rank
        self.arrival = Arrival()  # of the last draw

    @torch.inference_mode()
    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """One token a row; logits [num_rows, len(vocabulary)]. Outside of the last stage the tokens are there when
        `arrival` says so, and the logits are [num_rows, 0]."""
        if not self.layout.is_last:
            token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
            waits = logits.is_cuda or metadata.counts is not None  # the counts need the tokens at once
            self.arrival = Arrival(self.communicator.from_last_stage(token_ids, waits))
            return SamplerOutput(token_ids)
        if self.layout.tensor_parallel_size == 1:
            output = self.sampler.sample(logits, metadata)
        elif not self.is_gathered and not needs_all_logits(metadata):
            output = SamplerOutput(self.choose_split(logits, metadata))
        else:
            output = self._sample_on_first(logits, metadata)
        self.communicator.from_last_stage(output.token_ids)
        return output

    def gather(self, logits: Tensor) -> Tensor:
        """[num_rows, vocab_size] on the first rank of a stage; on the others the part that they have."""
        padded = torch.nn.functional.pad(logits, (0, self._each - logits.shape[1]))
        parts = self.communicator.gather(padded)
        return logits if parts is None else parts.transpose(0, 1).flatten(1)[:, : self.vocab_size].contiguous()

    def choose_split(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Token ids [num_rows], the same on each rank of the stage."""
        best, ids = _largest(logits)
        if not metadata.all_greedy:
            drawn, drawn_ids = _largest(self._with_noise(logits, metadata))
            best, ids = (
                (torch.where(metadata.is_greedy, best, drawn), torch.where(metadata.is_greedy, ids, drawn_ids))
                if metadata.any_greedy
                else (drawn, drawn_ids)
            )
        ids = (ids + self.own.start).to(torch.int32).view(torch.float32)  # its bits: a message has one dtype
        every = self.communicator.all_gather(torch.stack([best, ids], dim=1))  # [ranks, num_rows, 2]
        rank = every[:, :, 0].argmax(dim=0)  # of equal ones the first rank, whose ids are smaller
        return every[:, :, 1].contiguous().view(torch.int32).gather(0, rank[None])[0].long()

    def _with_noise(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """What `Sampler.choose` takes the argmax of, for this rank's part of the vocabulary."""
        logits = logits / metadata.temperature
        if metadata.min_p is not None:
            largest = self.communicator.all_reduce(logits.amax(dim=-1, keepdim=True), dist.ReduceOp.MAX)
            logits = logits.masked_fill(logits < largest + metadata.min_p.log()[:, None], NEVER)
        if metadata.top_k is not None:
            logits = logits.masked_fill(logits < self._kth_largest(logits, metadata), NEVER)
        noise = gumbel_noise(metadata.seeds, metadata.positions, self._ids_on(logits.device))
        return noise.add_(logits)

    def _kth_largest(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Of each row over the whole vocabulary, [num_rows, 1]; -inf for rows that keep all."""
        most = min(largest_k(metadata), self._each)
        own = logits.topk(min(most, logits.shape[1]), dim=-1).values
        own = torch.nn.functional.pad(own, (0, most - own.shape[1]), value=NEVER)  # the last rank may have fewer
        every = self.communicator.all_gather(own).transpose(0, 1).flatten(1)  # [num_rows, ranks * most]
        falling = every.sort(dim=-1, descending=True).values
        place = (metadata.top_k - 1).clamp(max=falling.shape[1] - 1)[:, None]
        keeps_all = (metadata.top_k >= self.vocab_size)[:, None]
        return falling.gather(-1, place).masked_fill(keeps_all, NEVER)

    @property
    def _each(self) -> int:
        """Tokens of a rank; the last ones may have fewer."""
        return -(-self.vocab_size // self.layout.tensor_parallel_size)

    def _ids_on(self, device: torch.device) -> Tensor:
        ids = getattr(self, "_ids", None)
        if ids is None or ids.device != device:
            ids = self._ids = torch.arange(self.own.start, self.own.stop, device=device)
        return ids

    def _sample_on_first(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        first = self.layout.tensor_rank == 0
        if not self.is_gathered:
            logits = self.gather(logits)
        if first:
            output = self.sampler.sample(logits, metadata)
        else:
            output = SamplerOutput(torch.empty(len(logits), dtype=torch.int64, device=logits.device))
        self.communicator.from_first(output.token_ids)
        return output


class Arrival:
    """Tokens of the last stage on their way here."""

    def __init__(self, work: dist.Work | None = None):
        self.work = work

    def wait(self) -> None:
        """Return when they are there; on a GPU, where the device has been told to wait, at once."""
        if self.work is not None:
            self.work.wait()
            self.work = None


def needs_all_logits(metadata: SamplingMetadata) -> bool:
    """Whether a row of the batch asks for something that is computed from its logits as a whole."""
    if metadata.rules is not None or metadata.named or metadata.logprob_rows or metadata.drafted is not None:
        return True
    if metadata.bias is not None or metadata.counts is not None or metadata.has_grammars:
        return True
    if metadata.all_greedy:
        return False
    return metadata.top_p is not None or (metadata.top_k is not None and largest_k(metadata) > MOST_CANDIDATES)


def largest_k(metadata: SamplingMetadata) -> int:
    """Of the rows that keep fewer tokens than there are."""
    return max((one.top_k for one in metadata.params if 0 < one.top_k < metadata.vocab_size), default=0)


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row the largest value, and the first place that has it: float32 and int64 [num_rows]."""
    places = logits.argmax(dim=-1)
    return logits.gather(-1, places[:, None])[:, 0].float(), places
