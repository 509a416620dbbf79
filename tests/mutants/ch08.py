"""Plausible mistakes in the exercises of chapter 08 that no misconception of its checkers covers."""

from minillm.book.proofs import Mutant, edited

MUTANTS = {
    "goodput_window": [
        edited("nearly meets a target", "numbers[name] <= most for", "numbers[name] <= most + 1e-6 for", "misses ttft"),
        edited("trips over a single token", " or [0.0]", "", "raised"),
        edited(
            "divides by the time in use",
            "good / (end - start)",
            "good / ((max((t[-1] for _, t in inside if t), default=end) - start) or 1)",
            "the goodput (requests/s)",
        ),
        edited(
            "the mean gap with the time to first token",
            '"tpot": sum(gaps) / len(gaps)',
            '"tpot": (times[-1] - arrival) / len(times)',
            "goodput_window: e",
        ),
        edited(
            "the mean gap over all tokens",
            '"tpot": sum(gaps) / len(gaps)',
            '"tpot": sum(gaps) / len(times)',
            "misses tpot (0.5)",
        ),
        edited(
            "rounds",
            "return good / (end - start),",
            "return round(good / (end - start), 4),",
            "the goodput (requests/s) is wrong",
        ),
        edited(
            "returns NumPy's numbers",
            "return good / (end - start),",
            "return __import__('numpy').float64(good / (end - start)),",
            "a float64, not a float",
        ),
        edited(
            "looks at the names only where a request ended",
            'if unknown := targets.keys() - {"ttft", "tpot", "itl", "e2e"}:',
            "if requests and (unknown := targets.keys() - {'ttft', 'tpot', 'itl', 'e2e'}):",
            "even if the window has no requests",
        ),
    ],
    "itl_percentile": [
        edited(
            "rounds up in floating point",
            "gaps[-(-q * len(gaps) // 100) - 1]",
            "gaps[__import__('math').ceil(q / 100 * len(gaps)) - 1]",
            "rank 8 of 100 for P7",
        ),
        edited(
            "rounds down",
            "gaps[-(-q * len(gaps) // 100) - 1]",
            "gaps[min(len(gaps) - 1, q * len(gaps) // 100)]",
            "returned rank 2 of 100 for P1",
        ),
        edited(
            "a zero ends the request's gap",
            "                continue\n",
            "                last.pop(name, None)\n                continue\n",
            "P100 of the gaps",
        ),
        edited(
            "removes the zeros from the trace",
            "    gaps.sort()\n",
            "    for _, delivered in trace:\n        for name in [n for n in delivered if not delivered[n]]:\n            del delivered[name]\n    gaps.sort()\n",
            "changed one of its arguments",
        ),
        edited(
            "returns NumPy's numbers",
            "return gaps[-(-q * len(gaps) // 100) - 1]",
            "return __import__('numpy').float64(gaps[-(-q * len(gaps) // 100) - 1])",
            "a float64, not a float",
        ),
    ],
    "plan_step": [
        edited(
            "a negative number of places",
            "waiting[:max(0, max_num_seqs - len(running))]",
            "waiting[:max_num_seqs - len(running)]",
            "requests are in the batch",
        ),
        edited(
            "the budget does not shrink",
            "            plan.append((name, count))\n            left -= count\n",
            "            plan.append((name, count))\n",
            "are left",
        ),
        edited(
            "decodes past the budget",
            "        if count := fitting(todo):",
            "        if count := 1 if todo == 1 else fitting(todo):",
            "gets 1 tokens, but 0 are left",
        ),
        edited(
            "the cap for the cut only",
            "return todo if todo <= room else",
            "return todo if todo <= left else",
            "No request gets more than the cap",
        ),
        edited(
            "a grain of the cap", "room // grain * grain", "min(left // grain, cap // grain + 1) * grain", "the cap is"
        ),
        edited(
            "a cap of whole grains",
            "room = min(left, cap)",
            "room = min(left, cap // grain * grain)",
            "the plan is wrong",
        ),
        edited("cuts anywhere", "room // grain * grain", "room", "a multiple of 8"),
        edited(
            "waiting requests with one token first",
            "in waiting[:max(",
            "in sorted(waiting, key=lambda one: one[1] != 1)[:max(",
            "a waiting request overtakes",
        ),
        edited(
            "in the order of the batch",
            "    return plan",
            "    names = [name for name, _ in running + waiting]\n    return sorted(plan, key=lambda pair: names.index(pair[0]))",
            "plan_step: e",
        ),
        edited("pairs as lists", "    return plan", "    return [list(pair) for pair in plan]", "a list, not a tuple"),
        edited(
            "sorts its argument",
            "    decoding = [",
            "    running.sort(key=lambda one: one[1])\n    decoding = [",
            "changed one of its arguments",
        ),
    ],
    "repair_budget": [
        edited(
            "stays at 0 and lets pictures through",
            "min(tokens, left) if may_cut or tokens <= left else 0",
            "min(tokens, max(0, left)) if may_cut else tokens",
            "P was given 7 tokens, 6 were left",
        ),
        edited(
            "raises only where there are rows", "if budget < 0:", "if budget < 0 and rows:", "also if there are no rows"
        ),
        edited(
            "asserts",
            '        raise ValueError(f"budget={budget} is below 0")',
            "        assert budget >= 0",
            "raised AssertionError",
        ),
        edited(
            "True for 1",
            "plan.append((name, count))",
            "plan.append((name, count if count > 1 else True))",
            "a bool, not an int",
        ),
        Mutant(
            "the broken one",
            source="""
def plan_rows(rows, budget):
    plan = []
    for name, tokens, may_cut in rows:
        if not budget:
            break
        count = min(tokens, budget) if may_cut else tokens
        plan.append((name, count))
        budget -= count
    return plan
""",
            expect="P was given 7 tokens, 6 were left",
        ),
    ],
    "even_chunks": [
        Mutant(
            "equal lengths",
            source="""
def even_chunks(prompt, streams, target, c0, c1, c2):
    for steps in range(1, prompt + 1):
        chunks = [prompt // steps + (i < prompt % steps) for i in range(steps)]
        starts = [sum(chunks[:i]) for i in range(steps)]
        if all(c0 + c1 * (n + streams) + c2 * (n * s + n * (n + 1) // 2) <= target for n, s in zip(chunks, starts)):
            return chunks
    raise ValueError("target")
""",
            expect="even_chunks",
        ),
        edited("costs in floats", "n * (n + 1) // 2", "n * (n + 1) / 2", "even_chunks: edges"),
        edited(
            "refuses a target of 0",
            "if (first := greedy(target)) is None:",
            "if target <= 0 or (first := greedy(target)) is None:",
            "even_chunks: edges: even_chunks raised ValueError",
        ),
        edited(
            "a lowest limit that is nearly right",
            "bisect_left(range(target), True, key=suffices)",
            "bisect_left(range(0, target, max(1, target // 1000)), True, key=suffices) * max(1, target // 1000)",
            "even_chunks",
        ),
        edited("returns a tuple", "        return chunks\n", "        return (*chunks,)\n", "a tuple, not a list"),
    ],
}
