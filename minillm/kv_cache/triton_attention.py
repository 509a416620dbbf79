"""TritonAttention: rotation, the write to the pages and attention over them in our own GPU kernels.
Built in chapter 13.

    qkv -> rotate_and_store -> paged_decode  for the sequences that bring one token, which stand first
                            -> paged_prefill for the others

    once a step and window: seq_lens -> plan_decode -> what each program of paged_decode reads

Everything that the host must know (how many rows decode, the longest query, the longest sequence) it knows from the
batch without asking the GPU, so a step has no synchronisation and can be captured as a CUDA graph.
How a sequence is split follows from the lengths, which are on the GPU: a kernel plans it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minillm.device import triton_has_tensor_cores
from minillm.kernels.decode_plan import DecodePlan, plan_decode
from minillm.kernels.kv_codes import INT4, pair_of
from minillm.kernels.language import serves
from minillm.kernels.paged_decode import paged_decode
from minillm.kernels.paged_prefill import PrefillPlan, paged_prefill
from minillm.kernels.rotary import rotate_and_store
from minillm.kv_cache.paged import PagedKVCache
from minillm.kv_cache.retention import SinkTurn, turn_queries
from minillm.kv_cache.torch_attention import TorchAttention

if TYPE_CHECKING:
    from minillm.model.batch import ForwardBatch

MOST_ROWS = 32  # of queries, tokens times heads of a group: more would need registers that the keys take
PAGE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn, INT4)


class TritonAttention:
    """The AttentionBackend over a `PagedKVCache`, on a GPU, or interpreted on a CPU.

    `torch_prefill` leaves prompts to `TorchAttention`: on a GPU whose tensor cores Triton cannot use (a T4) torch's
    kernels win there, while decoding, which is memory-bound, stays ours. None decides by the device. `sink_turn`
    is retention's (chapter 17): its sinks are seen beside the windows of all layers. Raises ValueError where no kernel
    can run.
    """

    fused_store = graph_safe = True

    def __init__(
        self,
        cache: PagedKVCache,
        layer_windows: Sequence[int | None],
        num_heads: int,
        torch_prefill: bool | None = None,
        sink_turn: SinkTurn | None = None,
    ):
        keys = cache.keys[0]
        check_runs_on(keys)
        head_dim = keys.shape[2] * pair_of(keys)
        if not 16 <= head_dim <= 256:
            raise ValueError(f"attention_backend='triton' takes head_dim 16 to 256, not {head_dim}; use 'torch'")
        if keys.dtype not in PAGE_DTYPES:
            known = ", ".join(map(str, PAGE_DTYPES))
            raise ValueError(f"attention_backend='triton' cannot read pages of {keys.dtype}; it reads {known}")
        if sink_turn and None in layer_windows:
            raise ValueError(
                f"sinks={sink_turn.policy.sinks} need a window in every layer, not layer_windows={layer_windows}"
            )
        self.cache = cache
        self.layer_windows = list(layer_windows)
        most_rows = 16 if keys.is_cuda and not triton_has_tensor_cores(keys.device) else MOST_ROWS  # more spill on a T4
        # Of a sequence that share a reading of its keys.
        self.most_tokens = max(1, most_rows // (num_heads // keys.shape[1]))
        self.sink_turn = sink_turn
        self.sink_logits: Sequence[Tensor] | None = None  # see `minillm.kv_cache.sink_logits`
        if torch_prefill is None:
            torch_prefill = keys.is_cuda and not triton_has_tensor_cores(keys.device)
        self.torch = TorchAttention(cache, layer_windows, num_heads, sink_turn) if torch_prefill else None
        self._plans: dict[int | None, tuple[ForwardBatch, DecodePlan]] = {}  # of the last batch, for each window
        self.prefill_plan = PrefillPlan()
        self.num_sms = count_sms(keys)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        """See `minillm.model.attention.AttentionBackend`; no slot may be -1."""
        self.cache.write(layer, k, v, batch.slot_mapping)
        return self.attend_stored(q if q.stride(2) == 1 else q.contiguous(), layer, batch)

    def rotate_and_store(
        self,
        qkv: Tensor,
        rotary: tuple[Tensor, Tensor],
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        layer: int,
        slot_mapping: Tensor,
    ) -> Tensor:
        """From the projection on: norm of the heads where there are weights, rotation and the write to the pages are
        one kernel. Returns the queries, for `attend_stored`.

        qkv [num_tokens, heads of q, k and v, head_dim], overwritten; cos and sin in `rotary`. A slot of -1 is a row
        that only fills up the batch.
        """
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        num_kv_heads = keys.shape[1]
        q, k, v = qkv.split_with_sizes([qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
        rotate_and_store(q, k, v, *rotary, keys, values, slot_mapping, q_weight, k_weight, eps, **self._scales(layer))
        return q

    def attend_stored(self, q: Tensor, layer: int, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        """Attention of queries whose keys and values are in their slots; written to `out` where it is given."""
        keys, values, window = self.cache.keys[layer], self.cache.values[layer], self.layer_windows[layer]
        fewer = self._scales(layer) | self._sinks(q, layer, batch)  # what chapter 17 adds
        num_decodes = count_decodes(batch)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        if num_decodes:
            decodes = slice(num_decodes)
            paged_decode(
                q[decodes], keys, values, batch.seq_lens[decodes], batch.block_table[decodes], window=window,
                out=out[decodes], plan=self._plan(layer, batch), **fewer,
            )  # fmt: skip
        if num_decodes < batch.num_tokens:
            if self.torch is not None:
                self.torch.prefill(q, layer, batch, out)
            else:
                several = slice(num_decodes, None)
                index = batch.query_start_loc[several], batch.seq_lens[several]
                plan = self.prefill_plan.get(layer == 0, batch, q, keys, *index, batch.max_query_len, window)
                paged_prefill(
                    q, keys, values, *index, batch.block_table[several], batch.max_query_len, window, out=out,
                    plan=plan, **fewer,
                )  # fmt: skip
        return out

    def _plan(self, layer: int, batch: ForwardBatch) -> DecodePlan:
        """Made by the first layer of each window, in every forward pass,
        since a recorded batch changes its contents."""
        window = self.layer_windows[layer]
        planned, plan = self._plans.get(window, (None, None))
        if planned is not batch or layer == self.layer_windows.index(window):
            seq_lens, index = batch.seq_lens[: batch.num_decodes], batch.query_index
            plan = plan_decode(
                seq_lens, self.cache.keys[layer].shape[1], batch.max_seq_len, self.num_sms, window,
                None if index is None else index[: batch.num_decodes], min(batch.tokens_each, self.most_tokens),
            )  # fmt: skip
            self._plans[window] = batch, plan
        return plan

    def _scales(self, layer: int) -> dict[str, Tensor]:
        """Those of a cache of codes."""
        cache = self.cache
        return (
            {"key_scales": cache.key_scales[layer], "value_scales": cache.value_scales[layer]}
            if cache.quantized
            else {}
        )

    def _sinks(self, q: Tensor, layer: int, batch: ForwardBatch) -> dict[str, int | Tensor]:
        """Learned logits; of kept tokens how many they are, and the queries as they meet them."""
        learned = {} if self.sink_logits is None else {"sink_logits": self.sink_logits[layer]}
        if self.sink_turn is None:
            return learned
        policy, turned = self.sink_turn.policy, q
        if batch.max_seq_len > policy.num_kept:  # before that, all stand in the cache where they stand in the text
            turned = turn_queries(q, self.sink_turn.of(batch, layer))
        return learned | {"sinks": policy.sinks, "q_sink": turned.contiguous()}


def check_runs_on(pages: Tensor) -> None:
    """Raise ValueError where no kernel can be launched on the cache's device."""
    if not serves(pages):
        raise ValueError(
            f"attention_backend='triton' cannot run on {pages.device}: it needs a GPU, or TRITON_INTERPRET=1 in the "
            f"environment before the start; use attention_backend='torch'"
        )


def count_sms(pages: Tensor) -> int:
    """The SMs of the GPU that holds the cache, among which a decode step is split; a few where it is interpreted."""
    return torch.cuda.get_device_properties(pages.device).multi_processor_count if pages.is_cuda else 4


def count_decodes(batch: ForwardBatch) -> int:
    """How many sequences bring one token; they stand first. Asks the device only where the batch does not say."""
    if batch.num_decodes is None:
        several = (batch.query_start_loc.diff() > 1).nonzero()
        batch.num_decodes = int(several[0]) if len(several) else batch.num_seqs
    return batch.num_decodes
