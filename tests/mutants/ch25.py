"""Plausible mistakes in the exercises of chapter 25, and submissions that break a rule: every one must fail its checks."""

from minillm.book.proofs import Mutant

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
        Mutant("a part of an image", replace=("return max(0, first - start), encode", "return max(0, first - start) + budget, encode"),
               expect="the number of tokens is wrong"),
        Mutant("the budget is spent too early", replace=("length > budget", "length >= budget"),
               expect="the number of tokens"),
        Mutant("goes on behind an image that does not fit",
               replace=("            return max(0, first - start), encode\n", "            continue\n"), expect="the number of tokens is wrong"),
        Mutant("a negative chunk", replace=("max(0, first - start), encode", "first - start, encode"),
               expect="no token can be processed"),
        Mutant("pays for the part in the chunk",
               replace=("        if length > budget:\n", "        length = min(first + length, start + count) - max(first, start)\n        if length > budget:\n"),
               expect="wrong"),
        Mutant("images behind the chunk", replace=("max(first, start) < min(first + length, start + count)", "first + length > start"),
               expect="wrong"),
        Mutant("looks at the cache only when the budget is spent", replace=("content in cached or ", ""), expect="cached"),
        Mutant("a list and no pair", replace=("    return count, encode\n", "    return [count, encode]\n"), expect="a list, not a tuple"),
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
        Mutant("preempts one that it serves", replace=("return Plan(tokens, tuple(preempt))", "return Plan(tokens, tuple(list(tokens)[:1]))"),
               expect="cannot be preempted"),
    ],
    "router": [
        Mutant("in turn", replace=("        return best\n", "        return arrival.number % len(loads)\n"), expect="has to be above 1"),
        Mutant("follows the cache, whatever the load",
               replace=("return new[index] + ahead + 0.02 * load.num_tokens, load.num_tokens", "return new[index], 0"),
               expect="has to be above 1"),
        Mutant("the least loaded", replace=("return new[index] + ahead + 0.02 * load.num_tokens, load.num_tokens", "return load.num_tokens, 0"),
               expect="has to be above 1"),
        Mutant("the largest cost", replace=("best = min(range", "best = max(range"), expect="has to be above 1"),
        Mutant("a load and no index", replace=("        return best\n", "        return loads[best]\n"), expect="return the index"),
        Mutant("counts from 1", replace=("        return best\n", "        return best + 1\n"), expect="return"),
        Mutant("twelve replicas always", replace=("range(len(loads))", "range(12)"), expect="IndexError"),
        Mutant("asks how long the answer is", replace=("arrival.prompt_tokens - load.cached_tokens", "arrival.max_tokens - load.cached_tokens"),
               expect="raised AttributeError"),
    ],
    "kernel": [
        Mutant("rounds down", replace=("+ 0.5)", "+ 0.0)"), expect="codes"),
        Mutant("forgets eps and divides by the block", replace=("/ size + eps", "/ BLOCK + eps"), expect="float64 gives"),
        Mutant("keeps the residual", replace=("        tl.store(residual_ptr + places, h, inside)\n", ""), expect="residual"),
        Mutant("no other at the load", replace=("h = tl.load(x_ptr + places, inside, other=0.0)", "h = tl.load(x_ptr + places, inside)"),
               expect="float64 gives"),
        Mutant("adds with torch", replace=("    (rows, size), programs = x.shape, min(16, len(x))\n", "    (rows, size), programs = x.shape, min(16, len(x))\n    residual.add_(x)\n"),
               expect="a torch operation"),
        Mutant("one row only", replace=("range(tl.program_id(0), rows, STRIDE)", "range(tl.program_id(0), 1, STRIDE)"), expect="no kernel loads x[1, 0]"),
        Mutant("all rows in one program", replace=("min(16, len(x))", "1"), expect="has to be above 1"),
        Mutant("past the last row", replace=("rows, STRIDE)", "rows + 1, STRIDE)"), expect="raised"),
    ],
}  # fmt: skip
