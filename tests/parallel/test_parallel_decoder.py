"""Every family's decoder, cut between ranks that are threads here: the logits of the whole one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from minillm.model.attention import NoCacheAttention
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import read_model
from minillm.parallel.communicator import Communicator
from minillm.parallel.layout import Layout
from minillm.parallel.loading import load_shard, split_decoder
from tests.helpers.model_zoo import CAPPED, CHECKPOINTS, FURTHER, LATENT, make_model

NAMES = [
    "llama-mqa-biases-tied", "qwen2-full", "qwen3-biases-window", "phi3-partial", "smollm3-biases-window-tied",
    "olmo2-biases", "granite-biases", "gemma3", "capped", "deepseek-v2-groups", "deepseek-v3-dense-halves",
]  # fmt: skip


class Threads(Communicator):
    """The sums between the ranks of one stage, which are threads."""

    def __init__(self, layout: Layout, table: list, barrier: threading.Barrier):
        super().__init__(Layout())
        self.layout, self.table, self.barrier = layout, table, barrier

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM):
        assert op == dist.ReduceOp.SUM
        self.table[self.layout.rank] = tensor
        self.barrier.wait(60)
        total = sum(self.table[1:], self.table[0])
        self.barrier.wait(60)
        return total


@pytest.mark.parametrize("name", NAMES)
def test_the_logits_of_two_ranks_are_those_of_one(name, tmp_path):
    """Read as parts, and cut from the whole."""
    settings = CAPPED if name == "capped" else (CHECKPOINTS | FURTHER | LATENT)[name]
    make_model(3, **settings).save_pretrained(tmp_path)
    whole, unprepared = read_model(tmp_path, "float32", "cpu").prepare(), read_model(tmp_path, "float32", "cpu")
    batch = ForwardBatch.single(list(range(5, 16)), all_logits=True)
    attention = NoCacheAttention(whole.config.layer_windows, whole.config.attention_softcap)
    expected, table, barrier = whole.forward(batch, attention), [None, None], threading.Barrier(2)

    def logits(rank: int, cut: bool) -> torch.Tensor:
        ranks = Threads(Layout(2, 1, rank), table, barrier)
        part = split_decoder(unprepared, ranks).prepare() if cut else load_shard(tmp_path, ranks, "float32", "cpu")
        return part.forward(batch, attention)

    for cut in (False, True):
        with ThreadPoolExecutor(2) as threads:
            parts = list(threads.map(logits, range(2), [cut] * 2))
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)
