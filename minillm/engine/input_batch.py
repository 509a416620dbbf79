"""InputBatch: the runner's own record of every request, one slot each, kept from step to step. Built in chapter 05.

    slot              0     1     2     3          a request keeps its slot until it has ended
    num_known        [9]   [4]   [-]   [6]         tokens that are known on the host
    last_token       [17]  [5]   [-]   [88]        the one that a decoding request processes next
    block_table      [4 7] [2]   [-]   [9 3]       grows by the blocks that a step adds; nothing is sent twice

A step names its requests and what is new. The tensors of the batch are then a few array operations over the slots,
whose cost hardly depends on how long the texts are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minillm.engine.step import NewRequest, ScheduledRequest
from minillm.sampling.grammar.mask import Stuck
from minillm.sampling.grammar.protocol import CompiledGrammar, Grammar
from minillm.sampling.noise import derive_seed
from minillm.sampling.params import SamplingParams
from minillm.staging import upload

NO_SLOT = -1  # of a request that has ended
NONE = np.zeros(0, np.int64)
Compile = Callable[[SamplingParams], CompiledGrammar]  # of parameters with structured_outputs


class RequestState:
    """What the runner knows of one request. A drafter reads it too (`minillm.speculative.drafter.DraftedRequest`)."""

    __slots__ = (
        "cache_salt", "draft_probs", "grammar", "index", "logprob_start_len", "num_prompt_tokens", "params", "prompt",
        "prompt_token_ids", "request_id", "seed", "slot", "stop_token_ids", "stuck", "token_ids",
    )  # fmt: skip

    def __init__(self, new: NewRequest, slot: int, grammar: Grammar | None):
        self.request_id, self.params, self.seed, self.index = new.request_id, new.params, new.seed, new.index
        self.stop_token_ids, self.cache_salt, self.logprob_start_len = (
            new.stop_token_ids,
            new.cache_salt,
            new.logprob_start_len,
        )
        self.token_ids = new.token_ids  # prompt and output, as far as the host knows them
        self.num_prompt_tokens = new.num_prompt_tokens
        self.prompt_token_ids = new.token_ids[: new.num_prompt_tokens]
        self.prompt = np.asarray(self.prompt_token_ids, np.int64)
        self.slot = slot
        self.grammar = grammar
        self.stuck: Stuck | None = None  # where in the step under way its grammar could make no mask, and why
        # [num draft tokens, vocab_size]: what they were drawn from, if they were sampled
        self.draft_probs: Tensor | None = None

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def sample_seed(self, index: int | None = None) -> int:
        """As `minillm.engine.request.Request.sample_seed`."""
        index = self.index if index is None else index
        return derive_seed(self.seed, index) if index else self.seed

    def tokens(self, row: ScheduledRequest) -> np.ndarray | list[int]:
        """The tokens that a row of a step processes, draft tokens last."""
        end = row.start + row.num_tokens
        if end <= self.num_prompt_tokens:
            return self.prompt[row.start : end]
        return [*self.token_ids[row.start : end - len(row.draft)], *row.draft]


@dataclass
class StepInputs:
    """One step's numbers on the host, ready to be sent; decode rows stand first."""

    rows: Sequence[ScheduledRequest]
    states: list[RequestState]  # of each row
    slots: np.ndarray  # [num_rows]
    starts: np.ndarray  # [num_rows]
    counts: tuple[int, ...]  # tokens of each row
    samples: tuple[int, ...]  # of each row
    has_drafts: bool
    any_scored: bool  # whether a request wants log-probabilities of its prompt
    token_ids: np.ndarray  # [num_tokens]; 0 for one that only the device knows
    positions: np.ndarray  # [num_tokens]
    slot_mapping: np.ndarray  # [num_tokens]
    query_start_loc: np.ndarray  # [num_rows + 1]
    late: np.ndarray  # the rows whose token only the device knows
    seq_lens: np.ndarray  # [num_rows], with this step's tokens
    all_sample: bool  # whether every row wants one next token

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def all_decode(self) -> bool:
        """Whether every row has one token."""
        return len(self.token_ids) == len(self.rows)

    def logits_wanted(self) -> np.ndarray:
        """Of the step's tokens those whose logits are drawn from: the last one of each row that samples,
        and all its draft tokens. Behind an accepted draft token another token is drawn."""
        ends = self.query_start_loc[1:]
        if not self.has_drafts:
            return ends - 1 if self.all_sample else ends[np.asarray(self.samples) > 0] - 1
        wanted = [range(end - 1 - len(row.draft), end) for row, end in zip(self.rows, ends.tolist()) if row.samples]
        return np.fromiter((at for some in wanted for at in some), np.int64)


class FailedGrammar:
    """In the place of a grammar that could not be started: its request ends with the error, and no other."""

    is_terminated = False

    def __init__(self, error: Exception):
        self.error = error

    def fill_mask(self, words: np.ndarray) -> None:
        raise self.error

    def copy(self) -> FailedGrammar:
        return self


def _started(new: NewRequest, compile_grammar: Compile) -> Grammar | FailedGrammar:
    """The grammar of a request, behind what it has generated."""
    try:
        grammar = compile_grammar(new.params).start()
        for token_id in new.token_ids[new.num_prompt_tokens :]:
            grammar.accept(token_id)
        return grammar
    except Exception as error:
        return FailedGrammar(error)


class InputBatch:
    """One slot a request. The arrays grow with the number of requests and with the longest block table."""

    def __init__(self, block_size: int, device: torch.device | str, num_slots: int = 16, num_blocks: int = 16):
        self.block_size, self.device = block_size, torch.device(device)
        self.states: dict[str, RequestState] = {}
        self.free_slots: list[int] = []
        self.num_known = np.zeros(0, np.int64)
        self.last_token = np.zeros(0, np.int64)
        self.sampled_at = np.zeros(0, np.int64)  # where among the last step's draws the slot's own stands
        self.block_table = np.zeros((0, num_blocks), np.int32)
        self.on_device: Tensor | None = None  # the block table there; on a CPU it is the same memory
        self._numbers = np.arange(num_slots + 1)
        self.num_removed = 0  # requests
        self._ids: tuple[str, ...] = ()  # of the last step's rows, unless a request came or left since
        self._states: list[RequestState] = []  # theirs
        self._slots = NONE
        self._any_scored = False
        self._changes: list[tuple[int, int, list[int]]] = []  # (slot, first entry, blocks) not sent yet
        self._grow(num_slots, num_blocks)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.states

    def __getitem__(self, request_id: str) -> RequestState:
        return self.states[request_id]

    def add(self, new: NewRequest, compile_grammar: Compile | None = None) -> RequestState:
        """Take a request in; one that is here already keeps its slot and its block table, and gets another text."""
        grammar = None if new.params.structured_outputs is None else _started(new, compile_grammar)
        known = self.states.get(new.request_id)
        if known is None and not self.free_slots:
            self._grow(2 * len(self.num_known), self.block_table.shape[1])
        slot = self.free_slots.pop() if known is None else known.slot
        state = self.states[new.request_id] = RequestState(new, slot, grammar)
        self.num_known[slot], self.last_token[slot] = len(new.token_ids), new.token_ids[-1]
        self._ids = ()
        return state

    def remove(self, request_id: str) -> None:
        """Forget a request; nothing happens for one that is not here."""
        if (state := self.states.pop(request_id, None)) is not None:
            self.free_slots.append(state.slot)
            state.slot = NO_SLOT
            self._ids = ()
            self.num_removed += 1

    def extend(
        self, states: Sequence[RequestState], slots: np.ndarray, token_ids: Sequence[int], num_removed: int
    ) -> None:
        """One more token for each. `slots` [len(states)] were theirs when `num_removed` requests had been removed:
        one that was removed since is left out."""
        for state, token_id in zip(states, token_ids):
            state.token_ids.append(token_id)
        if self.num_removed != num_removed:
            kept = [place for place, state in enumerate(states) if state.slot != NO_SLOT]
            slots, token_ids = slots[kept], [token_ids[place] for place in kept]
        self.num_known[slots] += 1
        self.last_token[slots] = token_ids

    def set_blocks(self, slot: int, first: int, block_ids: Sequence[int]) -> None:
        """Entries of a block table from `first` on."""
        end = first + len(block_ids)
        if end > self.block_table.shape[1]:
            self._grow(len(self.num_known), max(end, 2 * self.block_table.shape[1]))
        self.block_table[slot, first:end] = block_ids
        if self.device.type != "cpu":
            self._changes.append((slot, first, list(block_ids)))

    def inputs(self, rows: Sequence[ScheduledRequest]) -> StepInputs:
        """The numbers of a step, after its new blocks are in the tables.
        One that was asked for twice is the same again."""
        ids, starts, counts, block_ids, samples, drafts, first_blocks, _ = zip(*rows)
        if ids != self._ids:  # in most steps the requests are those of the last one
            self._ids, self._states = ids, list(map(self.states.__getitem__, ids))
            self._slots = np.fromiter((state.slot for state in self._states), np.int64, len(ids))
            self._any_scored = any(state.params.prompt_logprobs is not None for state in self._states)
        states, slots = self._states, self._slots
        if any(block_ids):
            for place, new in enumerate(block_ids):
                if new:
                    self.set_blocks(states[place].slot, first_blocks[place], new)
        starts = np.asarray(starts, np.int64)
        unread = self.num_known[slots] - starts  # 1: the row begins with the last token that is known; 0: behind it
        is_usual = not np.count_nonzero(unread - 1)
        late, num_tokens = NONE, sum(counts)
        if num_tokens == len(rows):
            positions, owners, query_start_loc = starts, slots, self.numbers(len(rows) + 1)
            token_ids = self.last_token[slots]
            several = () if is_usual else np.flatnonzero(unread > 1).tolist()
        else:
            lengths = np.asarray(counts)
            query_start_loc = np.concatenate([[0], lengths.cumsum()])
            owners = slots.repeat(lengths)
            positions = np.arange(num_tokens) + (starts - query_start_loc[:-1]).repeat(lengths)
            token_ids = self.last_token[owners]
            several = np.flatnonzero((lengths > 1) | (unread > 1)).tolist()
        for place in several:
            token_ids[query_start_loc[place] : query_start_loc[place + 1]] = states[place].tokens(rows[place])
        if not is_usual:
            late = np.flatnonzero(unread < 1)
            token_ids[query_start_loc[late]] = 0
        block, offset = np.divmod(positions, self.block_size)
        slot_mapping = np.multiply(self.block_table[owners, block], self.block_size, dtype=np.int64)
        slot_mapping += offset
        return StepInputs(
            rows,
            states,
            slots,
            starts,
            counts,
            samples,
            any(drafts),
            self._any_scored,
            token_ids,
            positions,
            slot_mapping,
            query_start_loc,
            late,
            starts + (1 if num_tokens == len(rows) else counts),
            samples.count(1) == len(rows),
        )

    def numbers(self, count: int) -> np.ndarray:
        """0 to `count` - 1, not to be changed."""
        if count > len(self._numbers):
            self._numbers = np.arange(2 * count)
        return self._numbers[:count]

    def tables(self, slots: np.ndarray, num_blocks: int) -> tuple[np.ndarray, Tensor]:
        """The first entries of the block tables of `slots`, on the host and on the device:
        int32 [len(slots), num_blocks]."""
        on_host = self.block_table[slots, :num_blocks]
        if self.device.type == "cpu":
            return on_host, torch.from_numpy(on_host)
        self.send_changes()
        return on_host, self.on_device[:, :num_blocks].index_select(0, upload(slots, device=self.device)[0])

    def send_changes(self) -> None:
        """Write new entries to the table on the device: their places and their blocks are one copy."""
        if not self._changes:
            return
        width = self.block_table.shape[1]
        places = [
            np.arange(slot * width + first, slot * width + first + len(ids)) for slot, first, ids in self._changes
        ]
        blocks = [np.asarray(ids, np.int32) for _, _, ids in self._changes]
        # The last one wins where an entry changed twice: index_copy_ leaves the order open.
        target, last = np.unique(np.concatenate(places)[::-1], return_index=True)
        place, block = upload(target, np.concatenate(blocks)[::-1][last], device=self.device)
        self.on_device.view(-1).index_copy_(0, place, block)
        self._changes.clear()

    def _grow(self, num_slots: int, num_blocks: int) -> None:
        before = len(self.num_known)
        for name in ("num_known", "last_token", "sampled_at"):
            array = np.zeros(num_slots, np.int64)
            array[:before] = getattr(self, name)
            setattr(self, name, array)
        table = np.zeros((num_slots, num_blocks), np.int32)
        table[:before, : self.block_table.shape[1]] = self.block_table
        self.block_table = table
        self.free_slots += reversed(range(before, num_slots))
        if self.device.type != "cpu":
            [self.on_device] = upload(table, device=self.device)
            self._changes.clear()  # they are in it
