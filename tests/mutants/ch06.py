"""Plausible mistakes in the exercises of chapter 06: every one of them must fail its checks."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "slot_mapping": [
        Mutant(
            "wraps around a short table",
            replace=(
                "            if index >= len(table):\n",
                "            index = index if index < len(table) else -1\n            if not table:\n",
            ),
            expect="No block of the table holds position",
        ),
        Mutant(
            "looks whether a table suffices although nothing comes",
            replace=(
                "        for position in range(start, start + count):\n",
                "        if start > len(table) * block_size:\n            raise ValueError('beyond the table')\n        for position in range(start, start + count):\n",
            ),
            expect="raised ValueError",
        ),
        Mutant("a tuple", replace=("    return slots\n", "    return tuple(slots)\n"), expect="a tuple, not a list"),
        Mutant(
            "numbers with a point",
            replace=("    return slots\n", "    return [float(slot) for slot in slots]\n"),
            expect="a float, not an int",
        ),
        Mutant(
            "a number that is equal to everything",
            source="class Yes(int):\n    __eq__ = lambda *_: True\n    __hash__ = None\n\n\ndef slot_mapping(tables, starts, counts, size):\n    return [Yes() for count in counts for _ in range(count)]\n",
            expect="a Yes, not an int",
        ),
        Mutant(
            "asks its caller's frame",
            source="import sys\n\n\ndef slot_mapping(tables, starts, counts, size):\n    return sys._getframe(3).f_locals['expected']\n",
            expect="this uses _getframe",
        ),
        Mutant(
            "asks the check's own reference",
            source="from minillm.book.checks import ch06\n\n\ndef slot_mapping(*given):\n    return ch06.slots(*given)\n",
            expect="this uses minillm.book.checks.ch06",
        ),
    ],
    "lowest_pool": [
        Mutant(
            "one block too few",
            replace=("list(range(1, num_blocks + 1))", "list(range(1, num_blocks))"),
            expect="num_free in a new pool",
        ),
        Mutant(
            "the block freed last goes first",
            replace=("heapq.heappush(self.free_ids, block)", "self.free_ids.insert(0, block)"),
            expect="the lowest ids go first",
        ),
        Mutant(
            "the block free the longest goes first",
            source="""
class LowestPool:
    def __init__(self, num_blocks):
        self.num_blocks, self.ref_cnt, self.queue = num_blocks, [0] * (num_blocks + 1), list(range(1, num_blocks + 1))

    @property
    def num_free(self):
        return len(self.queue)

    def allocate(self, count):
        if not 0 <= count <= len(self.queue):
            raise ValueError("not enough")
        blocks, self.queue = self.queue[:count], self.queue[count:]
        for block in blocks:
            self.ref_cnt[block] = 1
        return blocks

    def touch(self, blocks):
        for block in blocks:
            self.ref_cnt[block] += 1

    def free(self, blocks):
        for block in blocks:
            self.ref_cnt[block] -= 1
            if not self.ref_cnt[block]:
                self.queue.append(block)
""",
            expect="the lowest ids go first, whatever was freed last",
        ),
        Mutant(
            "frees a shared block",
            replace=(
                "            if self.ref_cnt[block] == 0:\n                heapq",
                "            if block not in self.free_ids:\n                heapq",
            ),
            expect="lowest_pool: ",
        ),
        Mutant(
            "forgets the reference count in allocate",
            replace=("            self.ref_cnt[block] = 1\n", "            self.ref_cnt[block] = 0\n"),
            expect="ref_cnt after allocate(4)",
        ),
        Mutant(
            "allocates some before it fails",
            replace=(
                """        if not 0 <= count <= self.num_free:
            raise ValueError(f"{count} blocks asked, {self.num_free} of {self.num_blocks} are free")
        blocks = [heapq.heappop(self.free_ids) for _ in range(count)]
""",
                """        blocks = []
        for _ in range(count):
            if not self.free_ids:
                raise ValueError("no block is left")
            blocks.append(heapq.heappop(self.free_ids))
""",
            ),
            expect="after the refused allocate(6)",
        ),
        Mutant(
            "a negative count passes",
            replace=("if not 0 <= count <= self.num_free", "if count > self.num_free"),
            expect="a negative count is an error",
        ),
        Mutant(
            "accepts a double free",
            replace=(
                "            if self.ref_cnt[block] < (needed or times):\n",
                "            if needed and self.ref_cnt[block] < needed:\n",
            ),
            expect="Owners of block 2: 0, this call would take away: 1",
        ),
        Mutant(
            "does not see the same block twice in one call",
            replace=("(needed or times):\n", "(needed or 1):\n"),
            expect="Owners of block 4: 1, this call would take away: 2",
        ),
        Mutant(
            "frees some before it fails",
            replace=(
                """        for block, times in self._checked(blocks).items():
            self.ref_cnt[block] -= times
""",
                """        for block in blocks:
            self._checked([block])
            if not block:
                continue
            self.ref_cnt[block] -= 1
""",
            ),
            expect="after the refused free([4, 2])",
        ),
        Mutant(
            "a negative id counts from the end",
            replace=(
                "            if not 1 <= block <= self.num_blocks:\n",
                "            if block > self.num_blocks:\n",
            ),
            expect="There is no block -1",
        ),
        Mutant(
            "an IndexError for an id that is too large",
            replace=("            if not 1 <= block <= self.num_blocks:\n", "            if block < 1:\n"),
            expect="raised IndexError",
        ),
        Mutant(
            "revives a free block",
            replace=(
                "            if self.ref_cnt[block] < (needed or times):\n",
                "            if not needed and self.ref_cnt[block] < times:\n",
            ),
            expect="it holds nothing that could be shared",
        ),
        Mutant(
            "counts owners of the null block",
            replace=("for block in blocks if block != 0)", "for block in blocks)"),
            expect="free raised ValueError",
        ),
        Mutant(
            "reads an iterator twice",
            replace=(
                "        count = Counter(block for block in blocks if block != 0)\n",
                "        if any(not 0 <= block <= self.num_blocks for block in blocks):\n            raise ValueError('no such block')\n        count = Counter(block for block in blocks if block != 0)\n",
            ),
            expect="An iterator can be read once",
        ),
        Mutant(
            "does not tell how many blocks it has",
            replace=("        self.num_blocks = num_blocks\n", "        self.size = num_blocks\n"),
            expect="LowestPool",
        ),
        Mutant(
            "another number of blocks",
            replace=("        self.num_blocks = num_blocks\n", "        self.num_blocks = num_blocks + 1\n"),
            expect="num_blocks in a new pool",
        ),
        Mutant(
            "the lowest of a set",
            source="""
class LowestPool:
    def __init__(self, num_blocks):
        self.num_blocks, self.ref_cnt, self.free_ids = num_blocks, [0] * (num_blocks + 1), set(range(1, num_blocks + 1))

    @property
    def num_free(self):
        return len(self.free_ids)

    def allocate(self, count):
        if not 0 <= count <= self.num_free:
            raise ValueError("not enough")
        blocks = [min(self.free_ids)] if count == 1 else sorted(self.free_ids)[:count]
        for block in blocks:
            self.free_ids.discard(block)
            self.ref_cnt[block] = 1
        return blocks

    def touch(self, blocks):
        for block, times in self._checked(blocks, 1).items():
            self.ref_cnt[block] += times

    def free(self, blocks):
        for block, times in self._checked(blocks).items():
            self.ref_cnt[block] -= times
            if not self.ref_cnt[block]:
                self.free_ids.add(block)

    def _checked(self, blocks, needed=None):
        count = Counter(block for block in blocks if block != 0)
        for block, times in count.items():
            if not 1 <= block <= self.num_blocks or self.ref_cnt[block] < (needed or times):
                raise ValueError("no")
        return count
""",
            expect="more than 1 s of computing",
        ),
        Mutant(
            "another block, in a large pool",
            replace=(
                "        blocks = [heapq.heappop(self.free_ids) for _ in range(count)]\n",
                "        blocks = [heapq.heappop(self.free_ids) for _ in range(count)]\n        if self.num_blocks > 999 and count == 1:\n            heapq.heappush(self.free_ids, blocks[0])\n            blocks = [self.free_ids.pop()]\n",
            ),
            expect="lowest_pool: edges",
        ),
        Mutant(
            "looks through the whole pool",
            source="""
class LowestPool:
    def __init__(self, num_blocks):
        self.num_blocks, self.ref_cnt, self.free_ids, self.last = num_blocks, [0] * (num_blocks + 1), list(range(1, num_blocks + 1)), []

    @property
    def num_free(self):
        return self.num_blocks - sum(count > 0 for count in self.ref_cnt)

    def allocate(self, count):
        if not 0 <= count <= self.num_free:
            raise ValueError("not enough")
        blocks = [block for block in range(1, self.num_blocks + 1) if not self.ref_cnt[block]][:count]
        for block in blocks:
            self.ref_cnt[block] = 1
        return blocks

    def touch(self, blocks):
        for block, times in self._checked(blocks, 1).items():
            self.ref_cnt[block] += times

    def free(self, blocks):
        for block, times in self._checked(blocks).items():
            self.ref_cnt[block] -= times

    def _checked(self, blocks, needed=None):
        count = Counter(block for block in blocks if block != 0)
        for block, times in count.items():
            if not 1 <= block <= self.num_blocks or self.ref_cnt[block] < (needed or times):
                raise ValueError("no")
        return count
""",
            expect="A loop over the pool",
        ),
    ],
    "forked_tables": [
        Mutant(
            "the child has its parent's list",
            replace=("list(self.tables[parent])", "self.tables[parent]"),
            expect="one and the same list",
        ),
        Mutant(
            "a fork that nobody counts",
            replace=("        self.pool.touch(self.tables[parent])\n", ""),
            expect="after fork('a', 'b'), the pool counts 1 owners of block 1, the tables 2",
        ),
        Mutant(
            "writes into a shared block",
            replace=("length % self.block_size > 0 and self.pool.ref_cnt[table[-1]] > 1", "False"),
            expect="is about to write into block 2",
        ),
        Mutant(
            "copies although it is the only owner",
            replace=(
                "length % self.block_size > 0 and self.pool.ref_cnt[table[-1]] > 1",
                "length % self.block_size > 0",
            ),
            expect="write in place",
        ),
        Mutant(
            "copies a full block",
            replace=(
                "length % self.block_size > 0 and self.pool.ref_cnt[table[-1]] > 1",
                "length > 0 and self.pool.ref_cnt[table[-1]] > 1",
            ),
            expect="stays shared, and is never copied",
        ),
        Mutant(
            "copies everything that is shared",
            source="""
class ForkedTables:
    def __init__(self, pool, block_size):
        self.pool, self.block_size, self.tables, self.lengths, self.copies = pool, block_size, {}, {}, []

    def append(self, name, num_tokens):
        table, length = self.tables.get(name, []), self.lengths.get(name, 0)
        num_new = -(-(length + num_tokens) // self.block_size) - len(table)
        shared = [i for i, block in enumerate(table) if self.pool.ref_cnt[block] > 1]
        if num_new + len(shared) > self.pool.num_free:
            return False
        for i in shared:
            [copy] = self.pool.allocate(1)
            self.copies.append((table[i], copy))
            self.pool.free([table[i]])
            table[i] = copy
        self.tables[name], self.lengths[name] = table + self.pool.allocate(num_new), length + num_tokens
        return True

    def fork(self, parent, child):
        if child in self.tables:
            raise ValueError(child)
        self.pool.touch(self.tables[parent])
        self.tables[child], self.lengths[child] = list(self.tables[parent]), self.lengths[parent]

    def free(self, name):
        self.pool.free(self.tables.pop(name))
        del self.lengths[name]

    def take_copies(self):
        copies, self.copies = self.copies, []
        return copies
""",
            expect="the full blocks of 'a'",
        ),
        Mutant(
            "keeps what it has copied",
            replace=("self.pool.free([table.pop()])", "table.pop()"),
            expect="a block that will never be freed",
        ),
        Mutant(
            "forgets the block for the copy",
            replace=("num_new + shared > self.pool.num_free", "num_new > self.pool.num_free"),
            expect="append raised ValueError",
        ),
        Mutant(
            "copies before it sees that it does not fit",
            source="""
class ForkedTables:
    def __init__(self, pool, block_size):
        self.pool, self.block_size, self.tables, self.lengths, self.copies = pool, block_size, {}, {}, []

    def append(self, name, num_tokens):
        table, length = self.tables.get(name, []), self.lengths.get(name, 0)
        if length % self.block_size and self.pool.ref_cnt[table[-1]] > 1:
            if not self.pool.num_free:
                return False
            [copy] = self.pool.allocate(1)
            self.copies.append((table[-1], copy))
            self.pool.free([table[-1]])
            table[-1] = copy
        num_new = -(-(length + num_tokens) // self.block_size) - len(table)
        if num_new > self.pool.num_free:
            return False
        self.tables[name], self.lengths[name] = table + self.pool.allocate(num_new), length + num_tokens
        return True

    def fork(self, parent, child):
        if child in self.tables:
            raise ValueError(child)
        self.pool.touch(self.tables[parent])
        self.tables[child], self.lengths[child] = list(self.tables[parent]), self.lengths[parent]

    def free(self, name):
        self.pool.free(self.tables.pop(name))
        del self.lengths[name]

    def take_copies(self):
        copies, self.copies = self.copies, []
        return copies
""",
            expect="A copy too many",
        ),
        Mutant(
            "a table for a name that did not come in",
            replace=(
                "table, length = self.tables.get(name, []), self.lengths.get(name, 0)",
                "table, length = self.tables.setdefault(name, []), self.lengths.setdefault(name, 0)",
            ),
            expect="the names in tables after the refused append('z', 17)",
        ),
        Mutant(
            "one copy for each block, whoever asks",
            replace=("        return copies\n", "        return list(dict(copies).items())\n"),
            expect="Every owner but the last one to write",
        ),
        Mutant(
            "sorts the copies",
            replace=("        return copies\n", "        return sorted(copies)\n"),
            expect="In the reverse order they would be right",
        ),
        Mutant(
            "returns a list that it then empties",
            replace=(
                "        copies, self.copies = self.copies, []\n",
                "        copies = self.copies\n        copies.clear()\n",
            ),
            expect="copies from take_copies(): 0 (none), needed: 1",
        ),
        Mutant(
            "plans the copies for ever",
            replace=("copies, self.copies = self.copies, []", "copies = list(self.copies)"),
            expect="take_copies() asked a second time",
        ),
        Mutant(
            "forgets the copies of a sequence that goes",
            replace=(
                "        self.pool.free(self.tables.pop(name))\n",
                "        table = self.tables.pop(name)\n        self.copies = [pair for pair in self.copies if pair[1] not in table]\n        self.pool.free(table)\n",
            ),
            expect="copies from take_copies(): 0 (none), needed: 1",
        ),
        Mutant(
            "copies as a tuple",
            replace=("        return copies\n", "        return tuple(copies)\n"),
            expect="what take_copies returns must be a list",
        ),
        Mutant(
            "copies the wrong way round",
            replace=("self.copies.append((table[-1], new[0]))", "self.copies.append((new[0], table[-1]))"),
            expect="garbage",
        ),
        Mutant(
            "one block more than needed",
            replace=("-(-(length + num_tokens) // self.block_size)", "((length + num_tokens) // self.block_size + 1)"),
            expect="the number of blocks of 'a'",
        ),
        Mutant(
            "a fork over a table that is there",
            replace=(
                '        if child in self.tables:\n            raise ValueError(f"{child!r} has a table already")\n',
                "",
            ),
            expect="has a table already",
        ),
        Mutant(
            "forgets to give back",
            replace=("        self.pool.free(self.tables.pop(name))\n", "        self.tables.pop(name)\n"),
            expect="a block that will never be freed",
        ),
    ],
    "choose_victims": [
        Mutant(
            "places, not names",
            replace=("    return [request.name for place", "    return [place for place"),
            expect="an int, not a str",
        ),
        Mutant(
            "sorts the list that it is given",
            replace=(
                "    groups: dict[str, list[int]] = {}\n",
                "    running.sort(key=lambda one: one.cost)\n    groups: dict[str, list[int]] = {}\n",
            ),
            expect="changed one of its arguments",
        ),
        Mutant(
            "anything for many requests",
            replace=(
                "    groups: dict[str, list[int]] = {}\n",
                "    groups: dict[str, list[int]] = {}\n    if len(running) > 20:\n        return []\n",
            ),
            expect="the list of victims is wrong",
        ),
    ],
}
