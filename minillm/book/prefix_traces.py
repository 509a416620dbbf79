"""Traces of chats, replayed through the engine's cache manager without a model. Built in chapter 07."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations, count, takewhile
from typing import NamedTuple

from minillm import SamplingParams
from minillm.engine.request import Request
from minillm.kv_cache.manager import KVCacheManager
from minillm.kv_cache.prefix import extend_chain


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


def offline_optimum(trace: Sequence[Turn], num_blocks: int, block_size: int = 16) -> list[int]:
    """Prompt tokens found in each request by a cache that knows the whole trace (Belady, 1966).

    A block that a request computes without a lookup is not needed by it. Of two blocks that are needed again at the
    same time, the one deeper in its chain is evicted.
    """
    chains = [_chain(turn.prompt + turn.answer[:-1], block_size) for turn in trace]
    lookups = [chain[: (len(turn.prompt) - 1) // block_size] for chain, turn in zip(chains, trace)]
    never, upcoming, due = len(trace), {}, []  # due: for each request, when its blocks are needed again
    for i in reversed(range(len(trace))):
        due.insert(0, [(upcoming.get(name, never), place) for place, name in enumerate(chains[i])])
        upcoming |= {name: i if place < len(lookups[i]) else never for place, name in enumerate(chains[i])}
    cached, found = {}, []  # cached: block -> (the request that needs it next, its place in the chain)
    for turn, chain, lookup, needed in zip(trace, chains, lookups, due):
        found.append(block_size * sum(1 for _ in takewhile(cached.__contains__, lookup)))
        cached |= dict(zip(chain, needed))
        surplus = len(cached) - num_blocks + _num_blocks(turn, block_size) - len(chain)  # the last block has no hash
        for name in sorted(cached.keys() - set(chain), key=cached.get, reverse=True)[: max(0, surplus)]:
            del cached[name]
    return found


def best_of_all(trace: Sequence[Turn], num_blocks: int, block_size: int) -> int:
    """The most prompt tokens that any cache can find, by trying every choice of what to keep."""
    states = {frozenset(): 0}  # what is cached -> most tokens found so far
    for turn in trace:
        own = frozenset(_chain(turn.prompt + turn.answer[:-1], block_size))
        lookup = _chain(turn.prompt, block_size)[: (len(turn.prompt) - 1) // block_size]
        room, after = num_blocks - _num_blocks(turn, block_size), {}
        for cached, found in states.items():
            found += block_size * sum(1 for _ in takewhile(cached.__contains__, lookup))
            for kept in (kept for n in range(room + 1) for kept in combinations(sorted(cached - own), n)):
                after[own | set(kept)] = max(found, after.get(own | set(kept), 0))
        states = after
    return max(states.values())


def _chain(token_ids: list[int], block_size: int) -> list[bytes]:
    """The hashes of all full blocks."""
    chain: list[bytes] = []
    extend_chain(chain, b"", token_ids, block_size, len(token_ids) // block_size)
    return chain


def _num_blocks(turn: Turn, block_size: int) -> int:
    """Blocks in the table of a request at its end; the last token of an answer is never computed."""
    return -(-(len(turn.prompt + turn.answer) - 1) // block_size)


def prefill_tokens(llm, run: Callable[[], object]) -> int:
    """Prompt tokens that `llm` computed while `run` was served, from the engine's trace."""
    llm.trace.clear()
    llm.trace.enabled = True
    run()
    steps = [(e.args["start"], int(e.value), e.args["prompt"]) for e in llm.trace.events if e.name == "tokens"]
    llm.trace.enabled = False
    return sum(max(0, min(start + n, prompt) - start) for start, n, prompt in steps)
