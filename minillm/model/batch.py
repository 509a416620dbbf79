"""One step of work: a flat, ragged list of tokens of many sequences. Built in chapter 02.

    sequence        A  A  A  B  C  C
    token_ids      [5, 9, 2, 7, 1, 4]        query_start_loc [0, 3, 4, 6]
    positions      [0, 1, 2, 8, 3, 4]        seq_lens        [3, 9, 5]

A is new and brings its whole prompt, B has 8 positions cached and brings one token, C
continues a prompt that was cut in chunks. There is no padding and no prefill or decode
phase: a sequence is the tokens it brings and how long it is after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from minillm.kernels.lora import TokenSlots


@dataclass
class ForwardBatch:
    """What one forward pass computes; travels as an argument, never as global state.

    A contiguous cache needs neither `block_table` nor `slot_mapping`; a paged one needs both.
    The two `max_` lengths are plain numbers, so that attention never waits for the device to know them.
    """

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    query_start_loc: Tensor  # [num_seqs + 1], sequence i owns tokens query_start_loc[i]:query_start_loc[i + 1]
    seq_lens: Tensor  # [num_seqs], positions of each sequence after this step
    block_table: Tensor | None  # [num_seqs, max_blocks]
    slot_mapping: Tensor | None  # [num_tokens], where each token's key and value are written
    max_query_len: int
    logits_indices: Tensor  # [num_logits], the tokens whose logits are wanted
    max_seq_len: int
    num_decodes: int | None = None  # sequences with one new token, which stand first; None: to be counted
    # Decode rows that are tokens of one sequence (chapter 18): [num_tokens], how many rows before each are of the same
    # one, 0 for its first and for padding. None: each row has a sequence of its own. `tokens_each`:
    # the most of one sequence.
    query_index: Tensor | None = None
    tokens_each: int = 1
    # query_start_loc, seq_lens and block_table as the host made them: a backend that plans there need not ask the
    # device.
    on_host: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    token_slots: TokenSlots | None = None  # each token's adapter (chapter 23). None: no token has one.

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @classmethod
    def single(
        cls,
        token_ids: Sequence[int] | Tensor,
        start: int = 0,
        all_logits: bool = False,
        device: torch.device | str = "cpu",
    ) -> ForwardBatch:
        """One sequence whose first `start` positions are cached already.

        Logits are wanted of its last token, or of every token when `all_logits`.
        Raises ValueError when there is no token.
        """
        token_ids = torch.as_tensor(token_ids, dtype=torch.int64, device=device)
        num_tokens = token_ids.shape[0]
        if num_tokens == 0:
            raise ValueError("a batch of 0 tokens has nothing to compute; pass at least one token id")
        end = start + num_tokens
        return cls(
            token_ids=token_ids,
            positions=torch.arange(start, end, device=device),
            query_start_loc=torch.tensor([0, num_tokens], device=device),
            seq_lens=torch.tensor([end], device=device),
            block_table=None,
            slot_mapping=None,
            max_query_len=num_tokens,
            logits_indices=torch.arange(0 if all_logits else num_tokens - 1, num_tokens, device=device),
            max_seq_len=end,
            num_decodes=int(num_tokens == 1),
        )


def adapted(module: nn.Module, x: Tensor, token_slots: TokenSlots | None) -> Tensor:
    """module(x), each token with the adapter in its batch slot. A module that stands in for one of ours, such as the
    product of chapter 11, need not know of adapters while there are none."""
    return module(x) if token_slots is None else module(x, token_slots)
