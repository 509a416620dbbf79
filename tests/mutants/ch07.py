"""Plausible mistakes in the exercises of chapter 07 that no misconception of its checkers covers."""

from minillm.book.proofs import Mutant, edited

MUTANTS = {
    "vote": [
        edited(
            "sums that are nearly equal are equal",
            "(votes[answer], totals[answer], -answer)",
            "(votes[answer], round(totals[answer], 6), -answer)",
            "vote: edges",
        ),
        Mutant(
            "asks the judge",
            source="""
def vote(answers, logprobs):
    return globals()["check_vote"].reference(answers, logprobs)
""",
            expect="An answer has no business with what judges it",
        ),
        edited("trips over an empty ballot", ", default=None", "", "raised ValueError"),
        edited(
            "returns a list",
            "    return winner, votes.get(winner, 0)",
            "    return [winner, votes.get(winner, 0)]",
            "a list, not a tuple",
        ),
        edited(
            "a float for an answer",
            "    return winner, votes.get(winner, 0)",
            "    return winner if winner is None else float(winner), votes.get(winner, 0)",
            "a float, not an int",
        ),
    ],
    "prefix_hasher": [
        edited(
            "loses a last block that is just full",
            "range(size, len(token_ids) + 1, size)",
            "range(size, len(token_ids), size)",
            "another length",
        ),
        edited(
            "returns hexadecimal digits",
            "return chain[1:]",
            "return [block_hash.hex() for block_hash in chain[1:]]",
            "a str, not a bytes",
        ),
        edited(
            "Python's hash()",
            "hashlib.sha256(tokens + chain[-1]).digest()",
            "str(hash((tokens, chain[-1]))).encode()",
            "prefix_hasher: example",
        ),
        edited("returns a tuple", "return chain[1:]", "return tuple(chain[1:])", "a tuple, not a list"),
        edited(
            "one block size for all hashers",
            "        self.block_size = block_size\n",
            "        PrefixHasher.block_size = block_size\n",
            "prefix_hasher: edges",
        ),
        edited(
            "remembers texts by their first block",
            "return chain[1:]",
            "memo = self.__dict__.setdefault('memo', {})\n        return list(memo.setdefault((len(token_ids), *token_ids[:self.block_size]), chain[1:]))",
            "prefix_hasher: e",
        ),
        edited(
            "a float for a count",
            "return len(hits) * self.block_size",
            "return float(len(hits) * self.block_size)",
            "a float, not an int",
        ),
        edited(
            "empties the set",
            "        return len(hits) * self.block_size",
            "        known.clear()\n        return len(hits) * self.block_size",
            "changed one of its arguments",
        ),
    ],
    "cached_pool": [
        edited(
            "looks up with next(), which ends in StopIteration where there is nothing",
            "return self.block_of.get(block_hash)",
            "return next(block for other, block in self.block_of.items() if other == block_hash)",
            "raised StopIteration",
        ),
        edited(
            "ends every story",
            "        return list(self.queue)\n",
            "        self.asked = getattr(self, 'asked', 0) + 1\n        if self.asked > 1:\n            raise StopIteration\n        return list(self.queue)\n",
            "free_order() after allocate(3) raised StopIteration",
        ),
        edited(
            "a hit takes the front of the queue instead",
            "self.queue.pop(block, None)",
            "self.ref_cnt[block] or self.queue.popitem(last=False)",
            "free_order()",
        ),
        edited(
            "returns the table reversed to the queue, and to the student",
            "        for block in reversed(table):\n",
            "        table.reverse()\n        for block in table:\n",
            "changed one of its arguments",
        ),
        edited(
            "asks whether a hash is true",
            "            if block in self.hash_of:\n",
            "            if self.hash_of.get(block):\n",
            "cached_pool: e",
        ),
        edited("the queue as a tuple", "return list(self.queue)", "return tuple(self.queue)", "a tuple, not a list"),
    ],
    "repair_cache": [
        edited(
            "the name stays when the block is handed out",
            "                del self.index[self.name_of.pop(block)]\n",
            "                pass\n",
            "is said to hold",
        ),
        edited(
            "the name goes from the block, not from the index",
            "del self.index[self.name_of.pop(block)]",
            "self.name_of.pop(block)",
            "is said to hold",
        ),
        edited(
            "names when it admits",
            "        return 4 * len(hits)\n",
            "        self.computed(request, len(text))\n        return 4 * len(hits)\n",
            "is said to hold",
        ),
        edited(
            "names a block that is half computed", "[: count // 4], 1)", "[: -(-count // 4)], 1)", "repair_cache: edges"
        ),
        edited("never hits", "and name in self.index:", "and False:", "must be found"),
        edited(
            "forgets all when something is released",
            "        return 4 * len(hits)\n        ### END SOLUTION",
            "        return 4 * len(hits)\n\n    def release(self, request):\n        self.index.clear(), self.name_of.clear()\n        super().release(request)",
            "must be found",
        ),
        edited(
            "the second copy takes the name",
            "if name not in self.index and block not in self.name_of:",
            "if True:",
            "named first keeps the name",
        ),
        edited(
            "a full hit",
            "< len(text) and",
            "<= len(text) and len(text) >= 4 * len(hits) + 4 and",
            "even if everything is cached",
        ),
        edited(
            "hits gain no owner",
            "        for block in hits + new:\n            self.owners[block] += 1\n",
            "        for block in new:\n            self.owners[block] += 1\n",
            "each gets one more owner",
        ),
        edited(
            "frees the head first",
            "        return 4 * len(hits)\n        ### END SOLUTION",
            "        return 4 * len(hits)\n\n    def release(self, request):\n        self.tables[request].reverse()\n        super().release(request)",
            "its table",
        ),
        Mutant(
            "repairs the eviction only",
            source="""
class PrefixCache(BrokenCache):
    def admit(self, request, text):
        cached = super().admit(request, text)
        new = self.tables[request][cached // 4:]
        self.index = {n: b for n, b in self.index.items() if b not in new or text.startswith(n)}
        return cached
""",
            expect="is said to hold",
        ),
        edited(
            "a tuple for a table",
            "self.tables[request], self.texts[request] = hits + new, text",
            "self.tables[request], self.texts[request] = (*hits, *new), text",
            "a tuple, not a list",
        ),
    ],
    "serve_order": [
        edited(
            "the clock stands still for the ages",
            "ageing * (clock - arrivals[i])",
            "ageing * arrivals[i]",
            "serve_order",
        ),
        edited(
            "a whole number for a score",
            "(cached(prompts[i]) + ageing * (clock - arrivals[i]), -",
            "(int(cached(prompts[i]) + ageing * (clock - arrivals[i])), -",
            "do not round it",
        ),
        edited(
            "rows as lists",
            "served.append((index, clock, computed))",
            "served.append([index, clock, computed])",
            "a list, not a tuple",
        ),
        edited(
            "a float clock",
            "served.append((index, clock, computed))",
            "served.append((index, float(clock), computed))",
            "a float, not an int",
        ),
    ],
    "agent_bill": [
        edited(
            "a bill in floats",
            "total = read = history = entry = last = 0",
            "total = 0.0\n    read = history = entry = last = 0",
            "a float, not an int",
        ),
        edited(
            "a prompt that is too short reads nothing",
            "hit = entry if entry and minute",
            "hit = entry if entry and new and minute",
            "agent_bill: ",
        ),
    ],
}
