"""The harness of chapters 05 and 06: a stand-in for the cache manager, made-up serving, random forks."""

from __future__ import annotations

from collections import Counter
from random import Random
from types import SimpleNamespace

import pytest
import torch

from minillm.book.memory_runs import on_device, random_forks, serve
from minillm.book.memory_stand_in import StandInMemory
from minillm.model.batch import ForwardBatch


class Rooms(StandInMemory):
    """Room for a number of requests, whatever their length."""

    def __init__(self, num_requests):
        super().__init__(num_requests)
        self.num_requests = num_requests

    def allocate_slots(self, request, num_new_tokens, computed=None):
        if request.request_id not in self.tables and len(self.tables) == self.num_requests:
            return False
        self.tables[request.request_id] = [0]
        return True

    def free(self, request):
        self.tables.pop(request.request_id, None)


class Pool:
    def __init__(self, num_blocks):
        self.free_blocks, self.ref_cnt = list(range(1, num_blocks + 1)), Counter()

    def allocate(self, count):
        blocks = [self.free_blocks.pop() for _ in range(count)]
        self.ref_cnt.update(blocks)
        return blocks

    def free(self, blocks):
        self.ref_cnt.subtract(blocks)
        self.free_blocks += [block for block in blocks if not self.ref_cnt[block]]


def fork(pool, table):
    pool.ref_cnt.update(table)
    return list(table)


def slots_of(table, positions, block_size):
    return [table[p // block_size] * block_size + p % block_size for p in positions]


def write(pool, table, position, block_size, *, copies=True):
    index, copy = position // block_size, None
    if index == len(table):
        table += pool.allocate(1)
    if copies and pool.ref_cnt[table[index]] > 1:
        copy = table[index], pool.allocate(1)[0]
        pool.free([copy[0]])
        table[index] = copy[1]
    return slots_of(table, [position], block_size)[0], copy


def test_made_up_serving_counts_steps_tokens_and_what_it_saw():
    run = serve(Rooms(2), lambda memory, running: len(memory.tables), [(3, 2), (4, 1), (5, 2)])
    assert run.computed == (3 + 1) + 4 + (5 + 1)
    assert run.steps == 3  # r2 takes the place of r1, which ends after the first step
    assert [(look.saw, look.running, look.head.request_id) for look in run.looks] == [(2, 2, "r2")]
    assert all(request.is_finished for request in run.requests)


def test_random_forks_accept_copy_on_write_and_notice_a_missing_copy():
    toy = SimpleNamespace(pool=Pool, fork=fork, write=write, slots_of=slots_of)
    assert random_forks(toy, Random(0), block_size=4)
    toy.write = lambda *args: write(*args, copies=False)
    with pytest.raises(AssertionError, match="no longer reads back"):
        random_forks(toy, Random(0), block_size=4)


def test_a_batch_moves_with_all_its_tensors():
    batch = on_device(ForwardBatch.single([1, 2, 3]), torch.device("meta"))
    assert batch.token_ids.device.type == batch.query_start_loc.device.type == "meta"
    assert batch.max_seq_len == 3
