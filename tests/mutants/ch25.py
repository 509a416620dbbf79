"""Plausible mistakes in the exercises of chapter 25, and submissions that break a rule: every one must fail its checks."""

from minillm.book.proofs import Mutant, edited

_FCFS = """
from minillm.book.projects.scheduler import Plan


class MyScheduler:
    def plan(self, view):
        budget, free, tokens, running = view.budget, view.free_blocks, {}, list(view.running)
        preempt, index = [], 0
        while index < len(running) and budget:
            one = running[index]
            count = min(one.missing, budget)
            while one.blocks_for(count) > free:
                victim = running.pop()
                preempt.append(victim.request_id)
                free += victim.num_blocks
                if victim is one:
                    return Plan(tokens, tuple(preempt))
            tokens[one.request_id], budget, free, index = count, budget - count, free - one.blocks_for(count), index + 1
        for one in view.waiting if not preempt else ():
            count = min(one.missing, budget)
            if not count or len(running) == view.max_num_seqs or one.blocks_for(count) > free:
                break
            running.append(one)
            tokens[one.request_id], budget, free = count, budget - count, free - one.blocks_for(count)
        return Plan(tokens, tuple(preempt))
"""

MUTANTS = {
    "encoder_plan": [
        edited("a part of an image", "return max(0, first - start), encode", "return max(0, first - start) + budget, encode", "the number of tokens is wrong"),
        edited("the budget is spent too early", "length > budget", "length >= budget", "the number of tokens"),
        edited("goes on behind an image that does not fit", "            return max(0, first - start), encode\n", "            continue\n", "the number of tokens is wrong"),
        edited("a negative chunk", "max(0, first - start), encode", "first - start, encode", "no token can be processed"),
        edited("pays for the part in the chunk", "        if length > budget:\n", "        length = min(first + length, start + count) - max(first, start)\n        if length > budget:\n", "wrong"),
        edited("images behind the chunk", "max(first, start) < min(first + length, start + count)", "first + length > start", "wrong"),
        edited("looks at the cache only when the budget is spent", "content in cached or ", "", "cached"),
        edited("a list and no pair", "    return count, encode\n", "    return [count, encode]\n", "a list, not a tuple"),
    ],
    "scheduler": [
        Mutant("vLLM's rule in other words", source=_FCFS, expect="has to be above 1"),
        Mutant("counts no blocks", source=_FCFS.replace("one.blocks_for(count) > free", "False"), expect="no room for"),
        Mutant("forgets the budget", source=_FCFS.replace("min(one.missing, budget)", "one.missing"), expect="the budget is 1024"),
        Mutant("too many at once", source=_FCFS.replace("len(running) == view.max_num_seqs", "False"),
               expect="would be number 49 of those that run"),
        Mutant("waits for better times", source=_FCFS.replace("for one in view.waiting if", "for one in view.waiting[1:] if"),
               expect="the plan has no token"),
        Mutant("a float for a count", source=_FCFS.replace("min(one.missing, budget)", "min(one.missing, budget) / 1"),
               expect="a whole number from 1 on"),
        Mutant("rewinds the clock", source=_FCFS.replace("        budget, free", "        view.now = 0.0\n        budget, free"),
               expect="plan raised FrozenInstanceError"),
        Mutant("a dictionary and no plan", source=_FCFS.replace("return Plan(tokens, tuple(preempt))", "return tokens"),
               expect="return Plan"),
        edited("preempts one that it serves", "return Plan(tokens, tuple(preempt))", "return Plan(tokens, tuple(list(tokens)[:1]))", "cannot be preempted"),
    ],
    "router": [
        edited("in turn", "        return best\n", "        return arrival.number % len(loads)\n", "has to be above 1"),
        edited("follows the cache, whatever the load", "return new[index] + ahead + 0.02 * load.num_tokens, load.num_tokens", "return new[index], 0", "has to be above 1"),
        edited("the least loaded", "return new[index] + ahead + 0.02 * load.num_tokens, load.num_tokens", "return load.num_tokens, 0", "has to be above 1"),
        edited("the largest cost", "best = min(range", "best = max(range", "has to be above 1"),
        edited("a load and no index", "        return best\n", "        return loads[best]\n", "return the index"),
        edited("counts from 1", "        return best\n", "        return best + 1\n", "return"),
        edited("twelve replicas always", "range(len(loads))", "range(12)", "IndexError"),
        edited("asks how long the answer is", "arrival.prompt_tokens - load.cached_tokens", "arrival.max_tokens - load.cached_tokens", "raised AttributeError"),
    ],
    "kernel": [
        edited("rounds down", "+ 0.5)", "+ 0.0)", "codes"),
        edited("forgets eps and divides by the block", "/ size + eps", "/ BLOCK + eps", "float64 gives"),
        edited("keeps the residual", "        tl.store(residual_ptr + places, h, inside)\n", "", "residual"),
        edited("no other at the load", "h = tl.load(x_ptr + places, inside, other=0.0)", "h = tl.load(x_ptr + places, inside)", "float64 gives"),
        edited("adds with torch", "    (rows, size), programs = x.shape, min(16, len(x))\n", "    (rows, size), programs = x.shape, min(16, len(x))\n    residual.add_(x)\n", "a torch operation"),
        edited("one row only", "range(tl.program_id(0), rows, STRIDE)", "range(tl.program_id(0), 1, STRIDE)", "no kernel loads x[1, 0]"),
        edited("all rows in one program", "min(16, len(x))", "1", "has to be above 1"),
        edited("past the last row", "rows, STRIDE)", "rows + 1, STRIDE)", "raised"),
    ],
}  # fmt: skip
