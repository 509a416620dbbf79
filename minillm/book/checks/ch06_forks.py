"""Drives a student's forked tables beside what each sequence has written, in the checks of chapter 06.
Built in chapter 06.

Copies and writes are carried out in a dictionary of slots, and then every table is read.
"""

from __future__ import annotations

from collections import Counter

from minillm.book.checks import Case
from minillm.kv_cache.block_pool import BlockPool


class ForkTrial:
    """A student's tables, over the package's pool, beside what each sequence has written: `texts`."""

    def __init__(self, case: Case, num_blocks: int, block_size: int) -> None:
        self.case, self.block_size, self.pool = case, block_size, BlockPool(num_blocks)
        self.tables = case.run(case.student, self.pool, block_size, may_change=True)
        self.texts: dict[str, list[str]] = {}
        self.writes: dict[str, int] = {}  # name -> the first position that this step writes
        self.planned: list[str] = []  # who needs a copy in this step
        self.memory: dict[tuple[int, int], str] = {}

    def fork(self, parent: str, child: str) -> None:
        if child in self.texts:
            self.case.raises(ValueError, self.tables.fork, parent, child, hint=f"{child!r} has a table already.")
            self._compare(f"after the refused fork({parent!r}, {child!r})")
            return
        self.case.run(self.tables.fork, parent, child)
        self.texts[child] = list(self.texts[parent])
        self.case.true(
            self.tables.tables[parent] is not self.tables.tables[child],
            f"{parent!r} and {child!r} have one and the same list for their tables",
            hint="Two names for one list: what one of them appends, the other one gets too. Make a copy of the list.",
        )
        self._compare(
            f"after fork({parent!r}, {child!r})",
            hint="A fork moves nothing and takes no block; each block has one owner more.",
        )

    def free(self, name: str) -> None:
        self.case.run(self.tables.free, name)
        self.texts.pop(name)
        self.writes.pop(name, None)
        self._compare(f"after free({name!r})")

    def append(self, name: str, count: int) -> None:
        text, size = self.texts.get(name, []), self.block_size
        before = list(self.tables.tables.get(name, []))
        shares = bool(len(text) % size) and self.pool.ref_cnt[before[-1]] > 1
        fits = -(-(len(text) + count) // size) - len(before) + shares <= self.pool.num_free
        free = self.pool.num_free
        got = self.case.run(self.tables.append, name, count)
        told = (
            f"{-(-(len(text) + count) // size) - len(before)} new blocks and {int(shares)} for a copy are needed, "
            f"{free} were free."
        )
        self.case.equal(got, fits, f"append({name!r}, {count}) at length {len(text)}", hint=told)
        if fits:
            self.texts[name] = text + [f"{name}{len(text) + i}" for i in range(count)]
            self.writes.setdefault(name, len(text))
            self.planned += [name] * shares
        when = f"after {'' if fits else 'the refused '}append({name!r}, {count})"
        self._compare(when, hint=None if fits else "It did not fit: nothing may change, not even a block for the copy.")
        if fits:
            self._check_ownership(name, len(text), before, shares, when)

    def step(self) -> None:
        """Make the copies, write the tokens of this step, and read every sequence through its table."""
        size, wanted = self.block_size, self.planned
        copies = self.case.run(self.tables.take_copies)
        self.case.is_a(copies, list, "what take_copies returns")
        copies = [tuple(pair) for pair in copies]
        shown = ", ".join(f"{a} to {b}" for a, b in copies) or "none"
        told = (
            "Every owner but the last one to write needs a copy of its own; "
            "all of them are in the list, in the order they were planned."
        )
        if len(copies) > len(wanted):
            told = "A copy too many: was it planned for the last owner, or by an append that then returned False?"
        self.case.true(
            len(copies) == len(wanted),
            f"copies from take_copies(): {len(copies)} ({shown}), needed: {len(wanted)}"
            + (f", for {', '.join(map(repr, wanted))}" if wanted else ""),
            hint=told,
        )
        memory = self._executed(copies)
        wrong = self._misread(memory)
        hint = None
        if wrong and not self._misread(self._executed(copies[::-1])):
            hint = "In the reverse order they would be right: a copy overwrites what a later one should have read."
        if wrong:
            name, got = wrong
            self.case.equal(
                got,
                self.texts[name],
                f"what {name!r} reads through its table {self.tables.tables[name]} after the copies {shown},",
                hint=hint
                or (
                    "'a3' is what sequence a wrote at position 3. Each copy is made when its turn comes, "
                    "then the tokens are written."
                ),
            )
        self.case.equal(
            self.case.run(self.tables.take_copies),
            [],
            "take_copies() asked a second time",
            hint="Each copy is made once.",
        )
        self.memory, self.writes, self.planned = memory, {}, []
        self.case.true(
            all(len(t) == -(-len(self.texts[n]) // size) for n, t in self.tables.tables.items()),
            "a table changed in take_copies",
        )

    def _check_ownership(self, name: str, start: int, before: list[int], shares: bool, when: str) -> None:
        table, first = self.tables.tables[name], start // self.block_size
        self.case.equal(
            table[:first],
            before[:first],
            f"the full blocks of {name!r} {when}",
            hint="A full block is never written to again: it stays shared, and is never copied.",
        )
        for index in range(first, len(table)):
            others = [n for n, t in self.tables.tables.items() if n != name and table[index] in t]
            self.case.true(
                not others,
                (
                    f"{when}, {name!r} is about to write into block {table[index]}, "
                    f"which stands in the table of {others[:1]} too"
                ),
                hint="Copy on write: take a block, plan the copy, put it into this table, free the shared one.",
            )
        if not shares:
            self.case.equal(
                table[: len(before)],
                before,
                f"the blocks {name!r} had {when}",
                hint="Its last block has no other owner: write in place.",
            )

    def _compare(self, when: str, hint: str | None = None) -> None:
        names = sorted(self.texts)
        self.case.equal(sorted(self.tables.tables), names, f"the names in tables {when}", hint=hint)
        self.case.equal(
            [self.tables.lengths.get(n) for n in names],
            [len(self.texts[n]) for n in names],
            f"the lengths of {names} {when}",
            hint=hint,
        )
        for name in names:
            self.case.equal(
                len(self.tables.tables[name]),
                -(-len(self.texts[name]) // self.block_size),
                f"the number of blocks of {name!r} {when}",
                hint=hint,
            )
        owned = Counter(block for table in self.tables.tables.values() for block in table)
        for block in range(1, self.pool.num_blocks + 1):
            told = (
                hint
                or "Too many in the pool: a block that will never be freed. Too few: another request will be given it."
            )
            self.case.true(
                self.pool.ref_cnt[block] == owned[block],
                (
                    f"{when}, the pool counts {self.pool.ref_cnt[block]} owners of block {block}, "
                    f"the tables {owned[block]}"
                ),
                hint=told,
            )

    def _executed(self, copies: list[tuple[int, int]]) -> dict[tuple[int, int], str]:
        memory, size = dict(self.memory), self.block_size
        for source, target in copies:
            for offset in range(size):
                memory[target, offset] = memory.get((source, offset), "garbage")
        for name, start in self.writes.items():
            for position in range(start, len(self.texts[name])):
                memory[self.tables.tables[name][position // size], position % size] = self.texts[name][position]
        return memory

    def _misread(self, memory: dict[tuple[int, int], str]) -> tuple[str, list[str]] | None:
        for name, text in self.texts.items():
            got = [
                memory.get((self.tables.tables[name][p // self.block_size], p % self.block_size), "garbage")
                for p in range(len(text))
            ]
            if got != text:
                return name, got
        return None
