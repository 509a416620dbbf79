"""InputBatch: the runner's own record of every request, one slot each, kept from step to step. Built in chapter 05.

    slot              0     1     2     3          a request keeps its slot until it has ended
    num_known        [9]   [4]   [-]   [6]         tokens that are known on the host
    last_token       [17]  [5]   [-]   [88]        the one that a decoding request processes next
    block_table      [4 7] [2]   [-]   [9 3]       grows by the blocks that a step adds; nothing is sent twice

A step names its requests and what is new. The tensors of the batch are then a few array operations over the slots,
whose cost hardly depends on how long the texts are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from minillm.engine.block_tables import BlockTables
from minillm.engine.step import NewRequest, ScheduledRequest
from minillm.engine.step_inputs import RequestState, StepInputs
from minillm.sampling.grammar.failed import Compile, started

NO_SLOT = -1  # of a request that has ended
NONE = np.zeros(0, np.int64)


class InputBatch:
    """One slot a request. The arrays grow with the number of requests and with the longest block table."""

    def __init__(self, block_size: int, device: torch.device | str, num_slots: int = 16, num_blocks: int = 16):
        self.block_size, self.device = block_size, torch.device(device)
        self.states: dict[str, RequestState] = {}
        self.free_slots: list[int] = []
        self.num_known = np.zeros(0, np.int64)
        self.last_token = np.zeros(0, np.int64)
        self.sampled_at = np.zeros(0, np.int64)  # where among the last step's draws the slot's own stands
        self.blocks = BlockTables(self.device, num_slots, num_blocks)
        self._numbers = np.arange(num_slots + 1)
        self.num_removed = 0  # requests
        self._ids: tuple[str, ...] = ()  # of the last step's rows, unless a request came or left since
        self._states: list[RequestState] = []  # theirs
        self._slots = NONE
        self._last: StepInputs  # the last step, where each row had one token
        self._num_further = 0  # steps that may follow it until a row begins another block; 0: it was not such a step
        self._any_scored = False
        self._grow(num_slots)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.states

    def __getitem__(self, request_id: str) -> RequestState:
        return self.states[request_id]

    def add(self, new: NewRequest, compile_grammar: Compile | None = None) -> RequestState:
        """Take a request in; one that is here already keeps its slot and its block table, and gets another text."""
        grammar = None
        if new.params.structured_outputs is not None:
            grammar = started(compile_grammar, new.params, new.token_ids[: new.num_prompt_tokens], new.output_ids)
        known = self.states.get(new.request_id)
        if known is None and not self.free_slots:
            self._grow(2 * len(self.num_known))
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
            state.output_token_ids.append(token_id)
        if self.num_removed != num_removed:
            kept = [place for place, state in enumerate(states) if state.slot != NO_SLOT]
            slots, token_ids = slots[kept], [token_ids[place] for place in kept]
        self.num_known[slots] += 1
        self.last_token[slots] = token_ids

    def inputs(self, rows: Sequence[ScheduledRequest]) -> StepInputs:
        """The numbers of a step, after its new blocks are in the tables.
        One that was asked for twice is the same again."""
        ids, starts, counts, block_ids, samples, drafts, first_blocks, _ = zip(*rows)
        if ids != self._ids:  # in most steps the requests are those of the last one
            self._ids, self._states = ids, list(map(self.states.__getitem__, ids))
            self._slots = np.fromiter((state.slot for state in self._states), np.int64, len(ids))
            self._any_scored = any(state.params.prompt_logprobs is not None for state in self._states)
            self._num_further = 0
        states, slots = self._states, self._slots
        if self._num_further and (counts, samples) == (self._last.counts, self._last.samples) and not any(block_ids):
            if not any(drafts) and (step := self._further(rows, starts)) is not None:
                return step
        self._num_further = 0
        if any(block_ids):
            for place, new in enumerate(block_ids):
                if new:
                    self.blocks.set(states[place].slot, first_blocks[place], new)
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
        slot_mapping = np.multiply(self.blocks.on_host[owners, block], self.block_size, dtype=np.int64)
        slot_mapping += offset
        step = StepInputs(
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
        if num_tokens == len(rows):
            self._last, self._num_further = step, self.block_size - 1 - int(offset.max())
        return step

    def _further(self, rows: Sequence[ScheduledRequest], starts: Sequence[int]) -> StepInputs | None:
        """The last step's inputs with each request one token further, as in most steps; None where one is not."""
        step, positions = self._last, np.asarray(starts, np.int64)
        if np.count_nonzero(positions - step.seq_lens):
            return None
        seq_lens, token_ids, late = positions + 1, self.last_token[step.slots], NONE
        if np.count_nonzero(unknown := seq_lens - self.num_known[step.slots]):
            if unknown.min() < 0:
                return None  # it processes a token before the last one
            late = np.flatnonzero(unknown)
            token_ids[late] = 0
        self._num_further -= 1
        step.rows, step.token_ids, step.late, step.seq_lens = rows, token_ids, late, seq_lens
        step.starts = step.positions = positions
        step.slot_mapping = step.slot_mapping + 1  # a new array: a device may still read the last one
        return step

    def numbers(self, count: int) -> np.ndarray:
        """0 to `count` - 1, not to be changed."""
        if count > len(self._numbers):
            self._numbers = np.arange(2 * count)
        return self._numbers[:count]

    def _grow(self, num_slots: int) -> None:
        before = len(self.num_known)
        for name in ("num_known", "last_token", "sampled_at"):
            array = np.zeros(num_slots, np.int64)
            array[:before] = getattr(self, name)
            setattr(self, name, array)
        self.free_slots += reversed(range(before, num_slots))
        if num_slots > len(self.blocks.on_host):
            self.blocks.grow(num_slots)
