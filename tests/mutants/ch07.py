"""Plausible mistakes in the exercises of chapter 07 that no misconception of its checkers covers."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "vote": [
        Mutant(
            "sums that are nearly equal are equal",
            replace=("(votes[answer], totals[answer], -answer)", "(votes[answer], round(totals[answer], 6), -answer)"),
            expect="vote: edges",
        ),
        Mutant(
            "asks the judge",
            source="""
def vote(answers, logprobs):
    return globals()["check_vote"].reference(answers, logprobs)
""",
            expect="An answer has no business with what judges it",
        ),
        Mutant("trips over an empty ballot", replace=(", default=None", ""), expect="raised ValueError"),
        Mutant(
            "returns a list",
            replace=("    return winner, votes.get(winner, 0)", "    return [winner, votes.get(winner, 0)]"),
            expect="a list, not a tuple",
        ),
        Mutant(
            "a float for an answer",
            replace=(
                "    return winner, votes.get(winner, 0)",
                "    return winner if winner is None else float(winner), votes.get(winner, 0)",
            ),
            expect="a float, not an int",
        ),
    ],
    "prefix_hasher": [
        Mutant(
            "loses a last block that is just full",
            replace=("range(size, len(token_ids) + 1, size)", "range(size, len(token_ids), size)"),
            expect="another length",
        ),
        Mutant(
            "returns hexadecimal digits",
            replace=("return chain[1:]", "return [block_hash.hex() for block_hash in chain[1:]]"),
            expect="a str, not a bytes",
        ),
        Mutant(
            "Python's hash()",
            replace=("hashlib.sha256(tokens + chain[-1]).digest()", "str(hash((tokens, chain[-1]))).encode()"),
            expect="prefix_hasher: example",
        ),
        Mutant(
            "returns a tuple", replace=("return chain[1:]", "return tuple(chain[1:])"), expect="a tuple, not a list"
        ),
        Mutant(
            "one block size for all hashers",
            replace=("        self.block_size = block_size\n", "        PrefixHasher.block_size = block_size\n"),
            expect="prefix_hasher: edges",
        ),
        Mutant(
            "remembers texts by their first block",
            replace=(
                "return chain[1:]",
                "memo = self.__dict__.setdefault('memo', {})\n        return list(memo.setdefault((len(token_ids), *token_ids[:self.block_size]), chain[1:]))",
            ),
            expect="prefix_hasher: e",
        ),
        Mutant(
            "a float for a count",
            replace=("return len(hits) * self.block_size", "return float(len(hits) * self.block_size)"),
            expect="a float, not an int",
        ),
        Mutant(
            "empties the set",
            replace=(
                "        return len(hits) * self.block_size",
                "        known.clear()\n        return len(hits) * self.block_size",
            ),
            expect="changed one of its arguments",
        ),
    ],
    "cached_pool": [
        Mutant(
            "looks up with next(), which ends in StopIteration where there is nothing",
            replace=(
                "return self.block_of.get(block_hash)",
                "return next(block for other, block in self.block_of.items() if other == block_hash)",
            ),
            expect="raised StopIteration",
        ),
        Mutant(
            "ends every story",
            replace=(
                "        return list(self.queue)\n",
                "        self.asked = getattr(self, 'asked', 0) + 1\n        if self.asked > 1:\n            raise StopIteration\n        return list(self.queue)\n",
            ),
            expect="free_order() after allocate(3) raised StopIteration",
        ),
        Mutant(
            "a hit takes the front of the queue instead",
            replace=("self.queue.pop(block, None)", "self.ref_cnt[block] or self.queue.popitem(last=False)"),
            expect="free_order()",
        ),
        Mutant(
            "returns the table reversed to the queue, and to the student",
            replace=(
                "        for block in reversed(table):\n",
                "        table.reverse()\n        for block in table:\n",
            ),
            expect="changed one of its arguments",
        ),
        Mutant(
            "asks whether a hash is true",
            replace=("            if block in self.hash_of:\n", "            if self.hash_of.get(block):\n"),
            expect="cached_pool: e",
        ),
        Mutant(
            "the queue as a tuple",
            replace=("return list(self.queue)", "return tuple(self.queue)"),
            expect="a tuple, not a list",
        ),
    ],
    "repair_cache": [
        Mutant(
            "the name stays when the block is handed out",
            replace=("                del self.index[self.name_of.pop(block)]\n", "                pass\n"),
            expect="is said to hold",
        ),
        Mutant(
            "the name goes from the block, not from the index",
            replace=("del self.index[self.name_of.pop(block)]", "self.name_of.pop(block)"),
            expect="is said to hold",
        ),
        Mutant(
            "names when it admits",
            replace=(
                "        return 4 * len(hits)\n",
                "        self.computed(request, len(text))\n        return 4 * len(hits)\n",
            ),
            expect="is said to hold",
        ),
        Mutant(
            "names a block that is half computed",
            replace=("[: count // 4], 1)", "[: -(-count // 4)], 1)"),
            expect="repair_cache: edges",
        ),
        Mutant("never hits", replace=("and name in self.index:", "and False:"), expect="must be found"),
        Mutant(
            "forgets all when something is released",
            replace=(
                "        return 4 * len(hits)\n        ### END SOLUTION",
                "        return 4 * len(hits)\n\n    def release(self, request):\n        self.index.clear(), self.name_of.clear()\n        super().release(request)",
            ),
            expect="must be found",
        ),
        Mutant(
            "the second copy takes the name",
            replace=("if name not in self.index and block not in self.name_of:", "if True:"),
            expect="named first keeps the name",
        ),
        Mutant(
            "a full hit",
            replace=("< len(text) and", "<= len(text) and len(text) >= 4 * len(hits) + 4 and"),
            expect="even if everything is cached",
        ),
        Mutant(
            "hits gain no owner",
            replace=(
                "        for block in hits + new:\n            self.owners[block] += 1\n",
                "        for block in new:\n            self.owners[block] += 1\n",
            ),
            expect="each gets one more owner",
        ),
        Mutant(
            "frees the head first",
            replace=(
                "        return 4 * len(hits)\n        ### END SOLUTION",
                "        return 4 * len(hits)\n\n    def release(self, request):\n        self.tables[request].reverse()\n        super().release(request)",
            ),
            expect="its table",
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
        Mutant(
            "a tuple for a table",
            replace=(
                "self.tables[request], self.texts[request] = hits + new, text",
                "self.tables[request], self.texts[request] = (*hits, *new), text",
            ),
            expect="a tuple, not a list",
        ),
    ],
    "serve_order": [
        Mutant(
            "the clock stands still for the ages",
            replace=("ageing * (clock - arrivals[i])", "ageing * arrivals[i]"),
            expect="serve_order",
        ),
        Mutant(
            "a whole number for a score",
            replace=(
                "(cached(prompts[i]) + ageing * (clock - arrivals[i]), -",
                "(int(cached(prompts[i]) + ageing * (clock - arrivals[i])), -",
            ),
            expect="do not round it",
        ),
        Mutant(
            "rows as lists",
            replace=("served.append((index, clock, computed))", "served.append([index, clock, computed])"),
            expect="a list, not a tuple",
        ),
        Mutant(
            "a float clock",
            replace=("served.append((index, clock, computed))", "served.append((index, float(clock), computed))"),
            expect="a float, not an int",
        ),
    ],
    "agent_bill": [
        Mutant(
            "a bill in floats",
            replace=("total = read = history = entry = last = 0", "total = 0.0\n    read = history = entry = last = 0"),
            expect="a float, not an int",
        ),
        Mutant(
            "a prompt that is too short reads nothing",
            replace=("hit = entry if entry and minute", "hit = entry if entry and new and minute"),
            expect="agent_bill: ",
        ),
    ],
}
