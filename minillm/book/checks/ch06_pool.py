"""Drives a student's pool beside a reference, in the checks of chapter 06. Built in chapter 06."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from minillm.book.checks import Case


class Once:
    """Blocks that can be looped over a single time, as `reversed(table)`."""

    def __init__(self, blocks: list[int]) -> None:
        self.blocks, self.rest = blocks, iter(blocks)

    def __iter__(self) -> Once:
        return self

    def __next__(self) -> int:
        return next(self.rest)

    def __repr__(self) -> str:
        return f"iter({self.blocks})"


class PoolTrial:
    """A student's pool beside a list of reference counts; everything is compared after every call."""

    def __init__(self, case: Case, num_blocks: int) -> None:
        self.case, self.num_blocks, self.refs = case, num_blocks, [0] * (num_blocks + 1)
        self.pool = case.run(case.student, num_blocks)
        self._compare(f"in a new pool of {num_blocks}")

    @property
    def free_ids(self) -> list[int]:
        return [block for block in range(1, self.num_blocks + 1) if not self.refs[block]]

    def allocate(self, count: int) -> list[int]:
        free = self.free_ids
        if not 0 <= count <= len(free):
            why = "a negative count is an error" if count < 0 else f"{len(free)} blocks are free"
            self.case.raises(ValueError, self.pool.allocate, count, hint=f"All or nothing: {why}.")
            self._compare(f"after the refused allocate({count})", refused=True)
            return []
        got = self.case.run(self.pool.allocate, count)
        self.case.equal(got, free[:count], f"allocate({count})", hint=self._guess(got, free, count))
        for block in free[:count]:
            self.refs[block] = 1
        self._compare(f"after allocate({count})")
        return got

    def touch(self, blocks: Iterable[int], once: bool = False) -> None:
        blocks = list(blocks)
        bad = [b for b in blocks if b and not (0 < b <= self.num_blocks and self.refs[b])]
        why = f"Block {bad[0]} has no owner, so it holds nothing that could be shared." if bad else ""
        self._change("touch", blocks, 1, why, once)

    def free(self, blocks: Iterable[int], once: bool = False) -> None:
        blocks = list(blocks)
        count = Counter(b for b in blocks if b)
        bad = [b for b in count if not 0 < b <= self.num_blocks or count[b] > self.refs[b]]
        if bad and 0 < bad[0] <= self.num_blocks:
            why = f"Owners of block {bad[0]}: {self.refs[bad[0]]}, this call would take away: {count[bad[0]]}."
        else:
            why = f"There is no block {bad[0]}." if bad else ""
        self._change("free", blocks, -1, why, once)

    def _change(self, name: str, blocks: list[int], step: int, why_refused: str, once: bool) -> None:
        given, method = Once(blocks) if once else blocks, getattr(self.pool, name)
        if why_refused:
            self.case.raises(ValueError, method, given, hint=why_refused)
            self._compare(f"after the refused {name}({blocks})", refused=True)
            return
        self.case.run(method, given)
        for block in filter(None, blocks):
            self.refs[block] += step
        hint = "An iterator can be read once: if you need the blocks twice, make a list first." if once else None
        if len(set(blocks)) < len(blocks):
            hint = "A block that comes twice in one call counts twice."
        self._compare(f"after {name}({blocks})", hint=hint)

    def _compare(self, when: str, refused: bool = False, hint: str | None = None) -> None:
        hint = "A call that raises ValueError must leave the pool as it was." if refused else hint
        self.case.equal(self.pool.num_blocks, self.num_blocks, f"num_blocks {when}", hint=hint)
        self.case.equal(self.pool.ref_cnt, self.refs, f"ref_cnt {when}", hint=hint)
        self.case.equal(self.pool.num_free, len(self.free_ids), f"num_free {when}", hint=hint)

    def _guess(self, got: Any, free: list[int], count: int) -> str | None:
        if not isinstance(got, (list, tuple)):
            return None
        if 0 in got:
            return "Block 0 is the null block: the ids that are handed out go from 1 to num_blocks."
        owned = [block for block in got if 0 < block <= self.num_blocks and self.refs[block]]
        if owned:
            return f"Block {owned[0]} has {self.refs[owned[0]]} owner(s): a block is free when its last owner frees it."
        if sorted(got) == free[:count]:
            return "These are the right blocks, but not in ascending order."
        return (
            f"Free are {free[:12]}{' ...' if len(free) > 12 else ''}: the lowest ids go first, whatever was freed last."
        )
