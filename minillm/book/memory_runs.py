"""Serving made-up tokens to watch a memory, and random forks that check one. Built in chapter 06."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from minillm.engine.request import Request
from minillm.engine.scheduler import Scheduler
from minillm.engine.step import StepResult
from minillm.sampling_params import SamplingParams


class Look(NamedTuple):
    saw: Any  # what `look` returned
    running: int  # requests
    head: Request  # the first in the queue


class Served(NamedTuple):
    steps: int
    requests: list[Request]
    looks: list[Look]  # one for each step that leaves a request in the queue
    computed: int  # tokens


def serve(memory, look: Callable[[Any, list[Request]], Any], jobs: Sequence[tuple[int, int]]) -> Served:
    """All `jobs`, (prompt tokens, output tokens), queued at once at the engine's scheduler, over `memory`."""
    scheduler = Scheduler(memory, max_num_seqs=1000, max_num_batched_tokens=10**9)
    requests = [
        Request(f"r{i}", [5] * prompt, SamplingParams(max_tokens=output), max_tokens=output)
        for i, (prompt, output) in enumerate(jobs)
    ]
    for request in requests:
        scheduler.add(request)
    steps, looks, computed = 0, [], 0
    while scheduler.requests:
        output = scheduler.schedule()
        steps, computed = steps + 1, computed + output.num_tokens
        if head := scheduler.waiting.peek():
            looks.append(Look(look(memory, scheduler.running), len(scheduler.running), head))
        made_up = {row.request_id: [7] for row in output.rows if row.samples}
        scheduler.update(output, StepResult(made_up))
    return Served(steps, requests, looks, computed)


def on_device(batch, device: torch.device):
    """A `ForwardBatch` with all its tensors moved to `device`, in place."""
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor):
            setattr(batch, name, value.to(device))
    return batch


def random_forks(toy: SimpleNamespace, rng: Random, block_size: int, num_blocks: int = 400) -> bool:
    """Random texts fork, write and end; after each of 300 actions every text must read back as it was written.

    toy: `pool` (a class), `fork`, `write` and `slots_of`, as in chapter 06. A list stands for the memory.
    Returns whether the pool counts every block right at the end.
    """
    pool, memory, texts = toy.pool(num_blocks), [None] * (num_blocks + 1) * block_size, [([], [])]
    for _ in range(300):
        text, table = rng.choice(texts)
        action = rng.random()
        if action < 0.1 and len(texts) < 8:
            texts.append((list(text), toy.fork(pool, table)))
        elif action < 0.14 and len(texts) > 1:
            texts.remove((text, table))
            pool.free(table)
        else:
            slot, copy = toy.write(pool, table, len(text), block_size)
            if copy:
                old, new = (slice(block * block_size, (block + 1) * block_size) for block in copy)
                memory[new] = memory[old]
            text.append(rng.random())
            memory[slot] = text[-1]
        for written, blocks in texts:
            if written != [memory[slot] for slot in toy.slots_of(blocks, range(len(written)), block_size)]:
                raise AssertionError(f"a text of {len(written)} tokens no longer reads back from blocks {blocks}")
    owners = Counter(block for _, table in texts for block in table)
    return pool.ref_cnt == owners and len(pool.free_blocks) == num_blocks - len(owners)
