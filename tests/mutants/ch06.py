"""Plausible mistakes in the exercises of chapter 06: every one of them must fail its checks."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "slot_mapping": [
        Mutant(
            "one block too far",
            replace=(
                "            block = table[index]\n",
                "            block = table[min((position + 1) // block_size, len(table) - 1)]\n",
            ),
            expect="One block too far",
        ),
        Mutant(
            "counts positions from the chunk's start",
            replace=("divmod(position, block_size)", "divmod(position - start, block_size)"),
            expect="stands at position starts[i], not at 0",
        ),
        Mutant(
            "writes into the null block", replace=(" if block else -1", ""), expect="would fall into the null block"
        ),
        Mutant(
            "forgets that blocks have a size",
            replace=("block * block_size + offset if", "block + offset if"),
            expect="begins at slot b * block_size",
        ),
        Mutant(
            "takes the position for the slot",
            replace=("block * block_size + offset if", "position if"),
            expect="That is the position",
        ),
        Mutant(
            "counts blocks from 1",
            replace=("block * block_size + offset if", "(block - 1) * block_size + offset if"),
            expect="block 0 has slots too",
        ),
        Mutant(
            "the first table for all",
            replace=(
                "            block = table[index]\n",
                "            block = block_tables[0][index % len(block_tables[0])]\n",
            ),
            expect="a table of its own",
        ),
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
    ],
    "lowest_pool": [
        Mutant(
            "hands out the null block",
            replace=("list(range(1, num_blocks + 1))", "list(range(num_blocks))"),
            expect="Block 0 is the null block",
        ),
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
            "touches once, whatever the list says",
            replace=("            self.ref_cnt[block] += times\n", "            self.ref_cnt[block] += 1\n"),
            expect="comes twice in one call counts twice",
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
            expect="a block that nobody will ever free",
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
            expect="a block that nobody will ever free",
        ),
    ],
    "choose_victims": [
        Mutant(
            "ignores that blocks are shared",
            replace=(" - kept - {0})", " - {0})"),
            expect="One that another request holds stays",
        ),
        Mutant("counts the null block", replace=(" - kept - {0})", " - kept)"), expect="0 is no block"),
        Mutant(
            "counts a block for each of its owners",
            replace=(
                "len({block for place in victims for block in running[place].blocks} - kept - {0})",
                "sum(block not in kept and block != 0 for place in victims for block in running[place].blocks)",
            ),
            expect="one with several owners counts once",
        ),
        Mutant(
            "exactly k, not at least",
            replace=("total = min(k, before + freed)", "total = before + freed"),
            expect="the list of victims for k=",
        ),
        Mutant(
            "ties to more victims",
            replace=("key[1] + size", "key[1] - size"),
            expect="the smaller number of victims counts",
        ),
        Mutant(
            "ties to the earlier arrivals",
            source="""
def choose_victims(running, k):
    def freed(victims):
        kept = {block for one in running if one not in victims for block in one.blocks}
        return len({block for one in victims for block in one.blocks} - kept - {0})
    enough = [victims for size in range(len(running) + 1) for victims in combinations(running, size) if freed(victims) >= k]
    best = min(enough, key=lambda victims: (sum(one.cost for one in victims), len(victims)), default=None)
    return None if best is None else [one.name for one in best]
""",
            expect="the later arrivals go",
        ),
        Mutant(
            "tries every subset",
            source="""
def choose_victims(running, k):
    def freed(victims):
        kept = {block for place, one in enumerate(running) if place not in victims for block in one.blocks}
        return len({block for place in victims for block in running[place].blocks} - kept - {0})
    def rank(victims):
        return sum(running[place].cost for place in victims), len(victims), [-place for place in reversed(victims)]
    best = None
    for size in range(len(running) + 1):
        for victims in combinations(range(len(running)), size):
            if freed(victims) >= k and (best is None or rank(victims) < rank(best)):
                best = victims
    return None if best is None else [running[place].name for place in best]
""",
            expect="Trying every subset takes forever",
        ),
        Mutant(
            "greedy by cost for each block",
            source="""
def choose_victims(running, k):
    left, names = list(running), []
    def freed():
        kept = {block for one in left for block in one.blocks}
        return len({block for one in running for block in one.blocks} - kept - {0})
    while freed() < k:
        if not left:
            return None
        cheapest = min(left, key=lambda one: one.cost / (len(set(one.blocks) - {0}) or 0.1))
        left.remove(cheapest)
        names.append(cheapest.name)
    return [one.name for one in running if one.name in names]
""",
            expect="] cost ",
        ),
        Mutant(
            "from the back, as the scheduler does",
            source="""
def choose_victims(running, k):
    for start in range(len(running), -1, -1):
        kept = {block for one in running[:start] for block in one.blocks}
        if len({block for one in running for block in one.blocks} - kept - {0}) >= k:
            return [one.name for one in running[start:]]
""",
            expect="] cost ",
        ),
        Mutant(
            "nothing, where nothing suffices",
            replace=("        return None\n", "        return []\n"),
            expect="the list of victims for k=",
        ),
    ],
}
