"""Traces of chats, replayed through the engine's cache manager without a model. Built in chapter 07."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

from minillm import SamplingParams
from minillm.engine.request import Request
from minillm.kv_cache.manager import KVCacheManager


class Turn(NamedTuple):
    """One request: a prompt, and the answer that the model gave to it."""

    prompt: list[int]
    answer: list[int]


def chats(shared: int, num_chats: int = 40, num_turns: int = 6, seed: int = 0) -> list[Turn]:
    """Turns in the order of their arrival; all begin with the same `shared` tokens, every other token is unique.

    Chats start between times 0 and 20, pauses last 1 on average, questions and answers have 10 to 60 tokens.
    """
    rng, fresh = random.Random(seed), count(1)

    def new(low: int, high: int) -> list[int]:
        return [next(fresh) for _ in range(rng.randint(low, high))]

    system = [next(fresh) for _ in range(shared)]
    histories = [list(system) for _ in range(num_chats)]
    times = []
    for chat in range(num_chats):
        start = rng.uniform(0, 20)
        pauses = [rng.expovariate(1) for _ in range(num_turns)]
        times += [(start + sum(pauses[:i]), chat) for i in range(num_turns)]
    trace = []
    for _, chat in sorted(times):
        turn = Turn(histories[chat] + new(10, 60), new(10, 60))
        histories[chat] = turn.prompt + turn.answer
        trace.append(turn)
    return trace


def replay(
    trace: Sequence[Turn],
    num_blocks: int,
    block_size: int = 16,
    manager: Callable[[int, int], KVCacheManager] = KVCacheManager,
) -> list[int]:
    """Prompt tokens that the engine's manager finds for each turn of a trace, one request after the other."""
    cache, found = manager(num_blocks, block_size), []
    for number, turn in enumerate(trace):
        request = Request(str(number), turn.prompt, SamplingParams(), max_tokens=len(turn.answer))
        known = cache.get_computed_blocks(request)
        found.append(known.num_tokens)
        request.token_ids += turn.answer
        start, end = len(turn.prompt), request.num_tokens - 1  # the last token of an answer is sampled, not computed
        for upto in sorted({start, *range((start // block_size + 1) * block_size, end, block_size), end}):
            done = known.num_tokens if upto == start else request.num_computed_tokens
            if not cache.allocate_slots(request, upto - done, known if upto == start else None):
                raise ValueError(f"{num_blocks} blocks of {block_size} cannot hold turn {number} of the trace")
            request.num_computed_tokens = upto
            cache.cache_blocks(request)
        cache.free(request)
    return found


def prefill_tokens(llm, run: Callable[[], object]) -> int:
    """Prompt tokens that `llm` computed while `run` was served, from the engine's trace."""
    llm.trace.clear()
    llm.trace.enabled = True
    run()
    steps = [(e.args["start"], int(e.value), e.args["prompt"]) for e in llm.trace.events if e.name == "tokens"]
    llm.trace.enabled = False
    return sum(max(0, min(start + n, prompt) - start) for start, n, prompt in steps)
