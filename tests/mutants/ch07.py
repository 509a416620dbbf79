"""Plausible mistakes in the exercises of chapter 07: every one of them must fail its checks."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "vote": [
        Mutant(
            "lets the unreadable vote",
            source="""
def vote(answers, logprobs):
    totals = {}
    for answer, logprob in zip(answers, logprobs):
        totals[answer] = totals.get(answer, 0.0) + logprob
    winner = max(totals, key=lambda answer: (answers.count(answer), totals[answer], -(answer or 0)), default=None)
    return winner, answers.count(winner)
""",
            expect="None is no answer",
        ),
        Mutant(
            "takes 0 for unreadable",
            replace=("if answer is not None:", "if answer:"),
            expect="0 is an answer like any other",
        ),
        Mutant(
            "of equal counts the first wins",
            source="""
def vote(answers, logprobs):
    from collections import Counter
    tally = Counter(answer for answer in answers if answer is not None).most_common(1)
    return tally[0] if tally else (None, 0)
""",
            expect="Two votes each",
        ),
        Mutant(
            "the most probable answer, whatever its votes",
            replace=("(votes[answer], totals[answer], -answer)", "(totals[answer], votes[answer], -answer)"),
            expect="18 has two votes",
        ),
        Mutant(
            "the best single sample breaks the tie",
            replace=("totals.get(answer, 0.0) + logprob", "max(totals.get(answer, logprob), logprob)"),
            expect="single best sample",
        ),
        Mutant(
            "the improbable answer wins a tie",
            replace=("totals[answer], -answer", "-totals[answer], -answer"),
            expect="Two votes each",
        ),
        Mutant(
            "the larger answer at the end",
            replace=("totals[answer], -answer", "totals[answer], answer"),
            expect="the smaller answer wins",
        ),
        Mutant("trips over an empty ballot", replace=(", default=None", ""), expect="raised ValueError"),
    ],
    "prefix_hasher": [
        Mutant(
            "hashes the block without its parent",
            replace=("sha256(tokens + chain[-1])", "sha256(tokens)"),
            expect="without the hash before",
        ),
        Mutant(
            "every block has the root for its parent",
            replace=("sha256(tokens + chain[-1])", "sha256(tokens + self.root)"),
            expect="has the root for its parent",
        ),
        Mutant(
            "hashes the block that is not full",
            replace=("range(size, len(token_ids) + 1, size)", "range(size, len(token_ids) + size, size)"),
            expect="although it is not full",
        ),
        Mutant(
            "loses a last block that is just full",
            replace=("range(size, len(token_ids) + 1, size)", "range(size, len(token_ids), size)"),
            expect="another length",
        ),
        Mutant("forgets the salt", replace=("sha256(salt.encode())", "sha256(b'')"), expect="The salt is missing"),
        Mutant(
            "starts with the salt itself",
            replace=("hashlib.sha256(salt.encode()).digest()", "salt.encode()"),
            expect="not the SHA-256 of the salt",
        ),
        Mutant(
            "the parent comes first",
            replace=("tokens + chain[-1]", "chain[-1] + tokens"),
            expect="here the tokens come first",
        ),
        Mutant("8 bytes a token", replace=("to_bytes(4,", "to_bytes(8,"), expect="here they take 4"),
        Mutant("big-endian", replace=('"little"', '"big"'), expect="highest byte first"),
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
            "a full hit leaves nothing to compute",
            replace=("token_ids[:-1]", "token_ids"),
            expect="no token is left to compute",
        ),
        Mutant(
            "caps at the last token, not at its block",
            replace=(
                "self.hashes(token_ids[:-1])))\n        return len(hits) * self.block_size",
                "self.hashes(token_ids)))\n        return max(0, min(len(hits) * self.block_size, len(token_ids) - 1))",
            ),
            expect="Only whole blocks",
        ),
        Mutant("counts what is known behind a hole", replace=("takewhile(", "filter("), expect="behind a hole"),
    ],
    "cached_pool": [
        Mutant(
            "frees the head first",
            replace=("for block in reversed(table):", "for block in table:"),
            expect="join the queue last one first",
        ),
        Mutant(
            "evicts the most recently used",
            replace=("self.queue.popitem(last=False)", "self.queue.popitem(last=True)"),
            expect="front of the queue is handed out",
        ),
        Mutant(
            "the hash stays when the block is handed out",
            replace=("                del self.block_of[self.hash_of.pop(block)]\n", "                pass\n"),
            expect="must forget its hash at once",
        ),
        Mutant(
            "half of the hash stays",
            replace=("del self.block_of[self.hash_of.pop(block)]", "del self.block_of[self.hash_of[block]]"),
            expect="can be cached anew",
        ),
        Mutant(
            "the hash goes when the block becomes free",
            replace=(
                "                self.queue[block] = None\n",
                "                self.queue[block] = None\n                self.block_of.pop(self.hash_of.pop(block, None), None)\n",
            ),
            expect="forgotten only when the block is handed out",
        ),
        Mutant("no owner on a hit", replace=("            self.ref_cnt[block] += 1\n", ""), expect="raise ref_cnt"),
        Mutant(
            "a hit stays in the queue",
            replace=("            self.queue.pop(block, None)", "            pass"),
            expect="must leave the queue",
        ),
        Mutant(
            "a hit takes the front of the queue instead",
            replace=("self.queue.pop(block, None)", "self.ref_cnt[block] or self.queue.popitem(last=False)"),
            expect="free_order()",
        ),
        Mutant(
            "unfindable blocks to the end too",
            replace=("self.queue.move_to_end(block, last=False)", "pass"),
            expect="joins at the front",
        ),
        Mutant("hits over a hole", replace=("takewhile(", "filter("), expect="behind a hole"),
        Mutant(
            "the second copy takes the hash",
            replace=(
                "if block_hash not in self.block_of and block not in self.hash_of:",
                "if block not in self.hash_of:",
            ),
            expect="a second copy stays unknown",
        ),
        Mutant(
            "a second hash for one block",
            replace=(
                "if block_hash not in self.block_of and block not in self.hash_of:",
                "if block_hash not in self.block_of:",
            ),
            expect="whatever second hash",
        ),
        Mutant(
            "frees half a table before it refuses",
            replace=(
                (
                    '        if any(self.ref_cnt[block] == 0 for block in table):\n            raise ValueError(f"a block of {table} has no owner")\n'
                    "        for block in reversed(table):\n"
                ),
                '        for block in table[::-1]:\n            if not self.ref_cnt[block]:\n                raise ValueError("no owner")\n',
            ),
            expect="must change nothing",
        ),
        Mutant(
            "hands out what there is",
            replace=(
                '            raise ValueError(f"{count} blocks asked, {len(self.queue)} are free")\n',
                "            count = len(self.queue)\n",
            ),
            expect="fewer blocks are free",
        ),
        Mutant(
            "a shared block is free when its first owner leaves",
            replace=("            self.ref_cnt[block] -= 1\n", "            self.ref_cnt[block] = 0\n"),
            expect="One owner leaves",
        ),
        Mutant(
            "returns the table reversed to the queue, and to the student",
            replace=(
                "        for block in reversed(table):\n",
                "        table.reverse()\n        for block in table:\n",
            ),
            expect="changed one of its arguments",
        ),
    ],
    "repair_cache": [
        Mutant(
            "the name stays when the block is handed out",
            replace=("                del self.index[self.name_of.pop(block)]\n", "                pass\n"),
            expect="is passed off as",
        ),
        Mutant(
            "the name goes from the block, not from the index",
            replace=("del self.index[self.name_of.pop(block)]", "self.name_of.pop(block)"),
            expect="is passed off as",
        ),
        Mutant(
            "names when it admits",
            replace=(
                "        return 4 * len(hits)\n",
                "        self.computed(request, len(text))\n        return 4 * len(hits)\n",
            ),
            expect="is passed off as",
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
            expect="nothing is left to compute",
        ),
        Mutant(
            "hits gain no owner",
            replace=(
                "        for block in hits + new:\n            self.owners[block] += 1\n",
                "        for block in new:\n            self.owners[block] += 1\n",
            ),
            expect="each with one owner more",
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
            expect="is passed off as",
        ),
    ],
    "serve_order": [
        Mutant(
            "first come, first served",
            replace=("(cached(prompts[i]) + ageing * (clock - arrivals[i]), -arrivals[i], -i)", "(-arrivals[i], -i)"),
            expect="What is cached counts",
        ),
        Mutant(
            "never ages",
            replace=("cached(prompts[i]) + ageing * (clock - arrivals[i])", "cached(prompts[i])"),
            expect="Waiting counts",
        ),
        Mutant(
            "the clock stands still for the ages",
            replace=("ageing * (clock - arrivals[i])", "ageing * arrivals[i]"),
            expect="serve_order",
        ),
        Mutant(
            "ties to the later arrival",
            replace=("-arrivals[i], -i)", "arrivals[i], i)"),
            expect="Ties go to the earlier",
        ),
        Mutant("serves who is not there yet", replace=("if arrivals[i] <= clock]", "]"), expect="not there yet"),
        Mutant(
            "the tail outlives the head",
            replace=(
                "in reversed(range(block_size, len(prompts[index]) + 1, block_size))",
                "in range(block_size, len(prompts[index]) + 1, block_size)",
            ),
            expect="Heads outlive tails",
        ),
        Mutant(
            "evicts the most recently used",
            replace=("cache.popitem(last=False)", "cache.popitem()"),
            expect="evicts the most recent",
        ),
        Mutant(
            "a hit does not touch",
            replace=("            cache.move_to_end(tuple(prompts[index][:end]))\n", ""),
            expect="keeps its old place",
        ),
        Mutant(
            "a full hit costs nothing",
            replace=("range(block_size, len(prompt), block_size)", "range(block_size, len(prompt) + 1, block_size)"),
            expect="always computed",
        ),
        Mutant(
            "reuses half blocks",
            replace=(
                "range(block_size, len(prompts[index]) + 1, block_size)",
                "range(block_size, len(prompts[index]) + block_size, block_size)",
            ),
            expect="Only full blocks",
        ),
        Mutant(
            "evicts nothing",
            replace=("        while len(cache) > capacity:\n            cache.popitem(last=False)\n", ""),
            expect="goes on growing",
        ),
    ],
}
