"""What the cache manager keeps of a request, and what it tells others. Built in chapter 06."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass
class BlockMoves:
    """Copies to make before the forward pass, in this order; each pair is (from, to)."""

    to_disk: list[tuple[int, bytes]] = field(default_factory=list)  # host place -> file of that hash
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # device block -> host place
    # The block of that hash, read already -> host place.
    from_disk: list[tuple[bytes, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # device block -> device block, on write
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # host place -> device block

    def __bool__(self) -> bool:
        return bool(self.to_disk or self.swap_out or self.from_disk or self.copies or self.swap_in)


@dataclass(frozen=True)
class ComputedBlocks:
    """The part of a request that need not be computed: `num_tokens` tokens, in blocks that are not owned yet."""

    block_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    from_host: dict[int, int] = field(default_factory=dict)  # index in block_ids -> host place it is copied from
    found: dict[str, int] = field(default_factory=dict)  # of a prefix: how many of the tokens each tier had


@dataclass(slots=True)
class RequestBlocks:
    """What the manager keeps of one request."""

    table: list[int] | None = None  # the blocks it owns, in the order of its tokens; None while it owns none
    hashes: list[bytes] = field(default_factory=list)  # prefix hashes of its full blocks, as far as they were needed
    num_cached: int = 0  # how many leading blocks of the table the pool can find by hash
    num_writable: int = 0  # so many tokens find a KV slot in the table, in blocks that no other request reads
    num_sent: int = 0  # how many leading entries of the table earlier steps have told the runner
    # While it is swapped out: host places, hashes to look for, or neither.
    swapped: list[int | bytes | None] | None = None


class Tables(Mapping[str, list[int]]):
    """The block tables of all requests that own blocks, by request id."""

    def __init__(self, records: dict[str, RequestBlocks]):
        self.records = records

    def __getitem__(self, request_id: str) -> list[int]:
        if (table := self.records[request_id].table) is None:
            raise KeyError(request_id)
        return table

    def __iter__(self) -> Iterator[str]:
        return (request_id for request_id, record in self.records.items() if record.table is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)
