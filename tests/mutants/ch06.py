"""Plausible mistakes in the exercises of chapter 06: every one of them must fail its checks."""

from minillm.book.proofs import Mutant, edited

MUTANTS = {
    "slot_mapping": [
        edited(
            "wraps around a short table",
            "            if index >= len(table):\n",
            "            index = index if index < len(table) else -1\n            if not table:\n",
            "No block of the table holds position",
        ),
        edited(
            "looks whether a table suffices although nothing comes",
            "        for position in range(start, start + count):\n",
            "        if start > len(table) * block_size:\n            raise ValueError('beyond the table')\n        for position in range(start, start + count):\n",
            "raised ValueError",
        ),
        edited("a tuple", "    return slots\n", "    return tuple(slots)\n", "a tuple, not a list"),
        edited(
            "numbers with a point",
            "    return slots\n",
            "    return [float(slot) for slot in slots]\n",
            "a float, not an int",
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
        edited(
            "one block too few",
            "list(range(1, num_blocks + 1))",
            "list(range(1, num_blocks))",
            "num_free in a new pool",
        ),
        edited(
            "the block freed last goes first",
            "heapq.heappush(self.free_ids, block)",
            "self.free_ids.insert(0, block)",
            "the lowest ids go first",
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
        edited(
            "frees a shared block",
            "            if self.ref_cnt[block] == 0:\n                heapq",
            "            if block not in self.free_ids:\n                heapq",
            "lowest_pool: ",
        ),
        edited(
            "forgets the reference count in allocate",
            "            self.ref_cnt[block] = 1\n",
            "            self.ref_cnt[block] = 0\n",
            "ref_cnt after allocate(4)",
        ),
        edited(
            "allocates some before it fails",
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
            "after the refused allocate(6)",
        ),
        edited(
            "a negative count passes",
            "if not 0 <= count <= self.num_free",
            "if count > self.num_free",
            "a negative count is an error",
        ),
        edited(
            "accepts a double free",
            "            if self.ref_cnt[block] < (needed or times):\n",
            "            if needed and self.ref_cnt[block] < needed:\n",
            "Owners of block 2: 0, this call would take away: 1",
        ),
        edited(
            "does not see the same block twice in one call",
            "(needed or times):\n",
            "(needed or 1):\n",
            "Owners of block 4: 1, this call would take away: 2",
        ),
        edited(
            "frees some before it fails",
            """        for block, times in self._checked(blocks).items():
            self.ref_cnt[block] -= times
""",
            """        for block in blocks:
            self._checked([block])
            if not block:
                continue
            self.ref_cnt[block] -= 1
""",
            "after the refused free([4, 2])",
        ),
        edited(
            "a negative id counts from the end",
            "            if not 1 <= block <= self.num_blocks:\n",
            "            if block > self.num_blocks:\n",
            "There is no block -1",
        ),
        edited(
            "an IndexError for an id that is too large",
            "            if not 1 <= block <= self.num_blocks:\n",
            "            if block < 1:\n",
            "raised IndexError",
        ),
        edited(
            "revives a free block",
            "            if self.ref_cnt[block] < (needed or times):\n",
            "            if not needed and self.ref_cnt[block] < times:\n",
            "it holds nothing that could be shared",
        ),
        edited(
            "counts owners of the null block",
            "for block in blocks if block != 0)",
            "for block in blocks)",
            "free raised ValueError",
        ),
        edited(
            "reads an iterator twice",
            "        count = Counter(block for block in blocks if block != 0)\n",
            "        if any(not 0 <= block <= self.num_blocks for block in blocks):\n            raise ValueError('no such block')\n        count = Counter(block for block in blocks if block != 0)\n",
            "An iterator can be read once",
        ),
        edited(
            "does not tell how many blocks it has",
            "        self.num_blocks = num_blocks\n",
            "        self.size = num_blocks\n",
            "LowestPool",
        ),
        edited(
            "another number of blocks",
            "        self.num_blocks = num_blocks\n",
            "        self.num_blocks = num_blocks + 1\n",
            "num_blocks in a new pool",
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
        edited(
            "another block, in a large pool",
            "        blocks = [heapq.heappop(self.free_ids) for _ in range(count)]\n",
            "        blocks = [heapq.heappop(self.free_ids) for _ in range(count)]\n        if self.num_blocks > 999 and count == 1:\n            heapq.heappush(self.free_ids, blocks[0])\n            blocks = [self.free_ids.pop()]\n",
            "lowest_pool: edges",
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
        edited(
            "the child has its parent's list",
            "list(self.tables[parent])",
            "self.tables[parent]",
            "one and the same list",
        ),
        edited(
            "a fork that nobody counts",
            "        self.pool.touch(self.tables[parent])\n",
            "",
            "after fork('a', 'b'), the pool counts 1 owners of block 1, the tables 2",
        ),
        edited(
            "writes into a shared block",
            "length % self.block_size > 0 and self.pool.ref_cnt[table[-1]] > 1",
            "False",
            "is about to write into block 2",
        ),
        edited(
            "copies although it is the only owner",
            "length % self.block_size > 0 and self.pool.ref_cnt[table[-1]] > 1",
            "length % self.block_size > 0",
            "write in place",
        ),
        edited(
            "copies a full block",
            "length % self.block_size > 0 and self.pool.ref_cnt[table[-1]] > 1",
            "length > 0 and self.pool.ref_cnt[table[-1]] > 1",
            "stays shared, and is never copied",
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
        edited(
            "keeps what it has copied",
            "self.pool.free([table.pop()])",
            "table.pop()",
            "a block that will never be freed",
        ),
        edited(
            "forgets the block for the copy",
            "num_new + shared > self.pool.num_free",
            "num_new > self.pool.num_free",
            "append raised ValueError",
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
        edited(
            "a table for a name that did not come in",
            "table, length = self.tables.get(name, []), self.lengths.get(name, 0)",
            "table, length = self.tables.setdefault(name, []), self.lengths.setdefault(name, 0)",
            "the names in tables after the refused append('z', 17)",
        ),
        edited(
            "one copy for each block, whoever asks",
            "        return copies\n",
            "        return list(dict(copies).items())\n",
            "Every owner but the last one to write",
        ),
        edited(
            "sorts the copies",
            "        return copies\n",
            "        return sorted(copies)\n",
            "In the reverse order they would be right",
        ),
        edited(
            "returns a list that it then empties",
            "        copies, self.copies = self.copies, []\n",
            "        copies = self.copies\n        copies.clear()\n",
            "copies from take_copies(): 0 (none), needed: 1",
        ),
        edited(
            "plans the copies for ever",
            "copies, self.copies = self.copies, []",
            "copies = list(self.copies)",
            "take_copies() asked a second time",
        ),
        edited(
            "forgets the copies of a sequence that goes",
            "        self.pool.free(self.tables.pop(name))\n",
            "        table = self.tables.pop(name)\n        self.copies = [pair for pair in self.copies if pair[1] not in table]\n        self.pool.free(table)\n",
            "copies from take_copies(): 0 (none), needed: 1",
        ),
        edited(
            "copies as a tuple",
            "        return copies\n",
            "        return tuple(copies)\n",
            "what take_copies returns must be a list",
        ),
        edited(
            "copies the wrong way round",
            "self.copies.append((table[-1], new[0]))",
            "self.copies.append((new[0], table[-1]))",
            "garbage",
        ),
        edited(
            "one block more than needed",
            "-(-(length + num_tokens) // self.block_size)",
            "((length + num_tokens) // self.block_size + 1)",
            "the number of blocks of 'a'",
        ),
        edited(
            "a fork over a table that is there",
            '        if child in self.tables:\n            raise ValueError(f"{child!r} has a table already")\n',
            "",
            "has a table already",
        ),
        edited(
            "forgets to give back",
            "        self.pool.free(self.tables.pop(name))\n",
            "        self.tables.pop(name)\n",
            "a block that will never be freed",
        ),
    ],
    "choose_victims": [
        edited(
            "places, not names",
            "    return [request.name for place",
            "    return [place for place",
            "an int, not a str",
        ),
        edited(
            "sorts the list that it is given",
            "    groups: dict[str, list[int]] = {}\n",
            "    running.sort(key=lambda one: one.cost)\n    groups: dict[str, list[int]] = {}\n",
            "changed one of its arguments",
        ),
        edited(
            "anything for many requests",
            "    groups: dict[str, list[int]] = {}\n",
            "    groups: dict[str, list[int]] = {}\n    if len(running) > 20:\n        return []\n",
            "the list of victims is wrong",
        ),
    ],
}
