"""Routing: which of many replicas takes the next request, as pure policies. Built in chapter 22.

    FleetView        what the router knows: the requests and tokens of each replica, and which blocks each one caches
    policy.pick      (RequestView, FleetView) -> the id of a replica

A policy reads no clock and sends no message. The same object therefore routes live traffic (`minillm.serving.router`)
and a simulated fleet of a thousand replicas. `pick` costs O(1) or O(log replicas), plus one look-up per block of the
prompt for `prefix_aware`.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

MOST_HOLDERS = 16  # of a prefix, that a prefix-aware policy compares


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a policy sees of a request. `block_hashes` names the full blocks of its prompt, in order: the hashes of
    `minillm.kv_cache.prefix` in a live fleet, the `hash_ids` of a trace in a simulated one."""

    request_id: str
    num_prompt_tokens: int
    block_hashes: Sequence[Hashable] = ()
    block_size: int = 16
    max_tokens: int = 0


@dataclass(slots=True, eq=False)
class ReplicaView:
    """What a policy sees of a replica: the load that the router has given it, and the blocks that it reported."""

    replica_id: str
    num_requests: int = 0  # unfinished requests
    num_tokens: int = 0  # of those requests: prompt tokens and the output tokens so far
    blocks: set[Hashable] = field(default_factory=set)  # hashes of the blocks in its prefix cache

    def num_cached_blocks(self, block_hashes: Sequence[Hashable]) -> int:
        """How many blocks at the head of a prompt it has."""
        for index, block_hash in enumerate(block_hashes):
            if block_hash not in self.blocks:
                return index
        return len(block_hashes)

    def num_new_tokens(self, request: RequestView) -> int:
        """How many tokens of the prompt it would have to compute; the last one always, since its logits are needed."""
        cached = self.num_cached_blocks(request.block_hashes) * request.block_size
        return max(1, request.num_prompt_tokens - cached)


class FleetView(Sequence[ReplicaView]):
    """The replicas that may take a request, in the order in which they joined, and two indices over them.

    `least_loaded()` is the replica with the fewest tokens. `holders(block_hash)` are the replicas that cache a block.
    """

    def __init__(self, replica_ids: Iterable[str] = ()):
        self._replicas: dict[str, ReplicaView] = {}
        self._order: list[ReplicaView] = []
        self._holders: dict[Hashable, dict[str, None]] = {}  # a dict and not a set: its order is that of the reports
        self._heap: list[tuple[int, int, int, str]] = []  # (tokens, requests, joined, id); most entries are out of date
        self._joined: dict[str, int] = {}
        self._count = 0
        for replica_id in replica_ids:
            self.add(replica_id)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index):
        return self._order[index]

    def __iter__(self) -> Iterator[ReplicaView]:
        return iter(self._order)

    def __contains__(self, replica_id: object) -> bool:
        return replica_id in self._replicas

    def get(self, replica_id: str) -> ReplicaView:
        """Raises KeyError for a replica that is not in the fleet."""
        return self._replicas[replica_id]

    def add(self, replica_id: str) -> ReplicaView:
        """A replica joins, without requests or blocks. Raises ValueError if it is in the fleet already."""
        if replica_id in self._replicas:
            raise ValueError(f"replica {replica_id!r} is in the fleet already; give the new one another id")
        replica = self._replicas[replica_id] = ReplicaView(replica_id)
        self._joined[replica_id] = self._count
        self._count += 1
        self._order.append(replica)
        self._push(replica)
        return replica

    def remove(self, replica_id: str) -> ReplicaView:
        """A replica leaves, and takes its blocks with it."""
        replica = self._replicas.pop(replica_id)
        self._order.remove(replica)
        del self._joined[replica_id]
        self.removed(replica_id, list(replica.blocks))
        return replica

    def started(self, replica_id: str, num_tokens: int) -> None:
        """A request of `num_tokens` was given to the replica."""
        self._change(replica_id, 1, num_tokens)

    def generated(self, replica_id: str, num_tokens: int = 1) -> None:
        """A request there has grown by `num_tokens`."""
        self._change(replica_id, 0, num_tokens)

    def finished(self, replica_id: str, num_tokens: int) -> None:
        """A request that counted `num_tokens` in all is no longer there."""
        self._change(replica_id, -1, -num_tokens)

    def stored(self, replica_id: str, block_hashes: Iterable[Hashable]) -> None:
        """The replica's prefix cache has these blocks now."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return  # a report that was under way when the replica left
        for block_hash in block_hashes:
            replica.blocks.add(block_hash)
            self._holders.setdefault(block_hash, {})[replica_id] = None

    def removed(self, replica_id: str, block_hashes: Iterable[Hashable]) -> None:
        """The replica's prefix cache no longer has these blocks."""
        replica = self._replicas.get(replica_id)
        for block_hash in block_hashes:
            if replica is not None:
                replica.blocks.discard(block_hash)
            if (holders := self._holders.get(block_hash)) is not None:
                holders.pop(replica_id, None)
                if not holders:
                    del self._holders[block_hash]

    def cleared(self, replica_id: str) -> None:
        """The replica's prefix cache was emptied."""
        if (replica := self._replicas.get(replica_id)) is not None:
            self.removed(replica_id, list(replica.blocks))

    def holders(self, block_hash: Hashable) -> Iterable[str]:
        """The ids of the replicas that cache this block."""
        return self._holders.get(block_hash, ())

    def longest_prefix(self, block_hashes: Sequence[Hashable]) -> tuple[int, list[str]]:
        """How many blocks at the head of a prompt some replica caches, and which replicas cache the last of them."""
        found: Iterable[str] = ()
        for index, block_hash in enumerate(block_hashes):
            holders = self._holders.get(block_hash)
            if holders is None:
                return index, list(found)
            found = holders
        return len(block_hashes), list(found)

    def least_loaded(self) -> ReplicaView:
        """The replica with the fewest tokens; ties to the fewest requests, then to the one that joined first."""
        if not self._order:
            raise LookupError("the fleet has no replica that takes requests")
        while True:
            tokens, requests, joined, replica_id = self._heap[0]
            replica = self._replicas.get(replica_id)
            if replica is not None and (tokens, requests, joined) == self._key(replica):
                return replica
            heapq.heappop(self._heap)

    def _key(self, replica: ReplicaView) -> tuple[int, int, int]:
        return replica.num_tokens, replica.num_requests, self._joined[replica.replica_id]

    def _push(self, replica: ReplicaView) -> None:
        if len(self._heap) > 64 + 4 * len(self._order):  # mostly entries that are out of date
            self._heap = [(*self._key(one), one.replica_id) for one in self._order]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (*self._key(replica), replica.replica_id))

    def _change(self, replica_id: str, num_requests: int, num_tokens: int) -> None:
        if (replica := self._replicas.get(replica_id)) is not None:
            replica.num_requests += num_requests
            replica.num_tokens += num_tokens
            self._push(replica)


class RouterPolicy(Protocol):
    """Chooses a replica. `replicas` is never empty; it leaves out replicas that drain, start or are dead."""

    def pick(self, request: RequestView, replicas: FleetView) -> str:
        """The `replica_id` of the replica that takes `request`."""


class RoundRobin:
    """Each replica in turn."""

    def __init__(self):
        self.next = 0

    def pick(self, request: RequestView, replicas: FleetView) -> str:
        replica = replicas[self.next % len(replicas)]
        self.next = (self.next + 1) % len(replicas)
        return replica.replica_id


class Random:
    """Any replica, with equal chances."""

    def __init__(self, seed: int = 0):
        self.rng = random.Random(seed)

    def pick(self, request: RequestView, replicas: FleetView) -> str:
        return replicas[self.rng.randrange(len(replicas))].replica_id


class LeastTokens:
    """The replica whose requests have the fewest tokens: join the shortest queue, with work measured in tokens."""

    def pick(self, request: RequestView, replicas: FleetView) -> str:
        return replicas.least_loaded().replica_id


class PowerOfTwo:
    """The less loaded of two replicas drawn at random (Mitzenmacher 2001): nearly as balanced as `LeastTokens`,
    although it reads two loads and not all of them."""

    def __init__(self, seed: int = 0):
        self.rng = random.Random(seed)

    def pick(self, request: RequestView, replicas: FleetView) -> str:
        if len(replicas) == 1:
            return replicas[0].replica_id
        one, other = self.rng.sample(range(len(replicas)), 2)
        return min(replicas[one], replicas[other], key=lambda replica: replica.num_tokens).replica_id


class PrefixAware:
    """The replica that finishes the prompt with the least work ahead of it:

        cost = tokens of the prompt that it has to compute + load_weight * tokens of its other requests

    The candidates are the replicas that cache the longest prefix of the prompt, and the least loaded one (as in
    Preble, Srivatsa et al. 2024: exploit the cache, or explore). `load_weight` trades hits for balance: 0 always
    follows the cache; a large weight is `LeastTokens`. Equal costs go to the replica with the fewest tokens.
    """

    def __init__(self, load_weight: float = 0.25):
        if not load_weight >= 0:
            raise ValueError(f"load_weight={load_weight} is not allowed; it is a number from 0 on")
        self.load_weight = load_weight

    def pick(self, request: RequestView, replicas: FleetView) -> str:
        _, holders = replicas.longest_prefix(request.block_hashes)
        # A block that all prompts share has a thousand holders; the least loaded replica stands for the rest of them.
        candidates = [replicas.least_loaded(), *map(replicas.get, holders[:MOST_HOLDERS])]
        return min(candidates, key=lambda replica: self.cost(request, replica)).replica_id

    def cost(self, request: RequestView, replica: ReplicaView) -> tuple[float, int]:
        return replica.num_new_tokens(request) + self.load_weight * replica.num_tokens, replica.num_tokens


POLICIES: dict[str, Callable[[], RouterPolicy]] = {
    "round_robin": RoundRobin,
    "random": Random,
    "least_tokens": LeastTokens,
    "power_of_two": PowerOfTwo,
    "prefix_aware": PrefixAware,
}


def make_router_policy(policy: str | RouterPolicy) -> RouterPolicy:
    """A policy by name, or an object of your own with `pick`. Raises ValueError naming the policies there are."""
    if callable(getattr(policy, "pick", None)):
        return policy
    if policy not in POLICIES:
        raise ValueError(
            f"router_policy={policy!r} is not known; choose from {', '.join(sorted(POLICIES))}, "
            f"or pass an object with pick(request, replicas) -> replica id"
        )
    return POLICIES[policy]()
