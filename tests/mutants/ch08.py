"""Plausible mistakes in the exercises of chapter 08 that no misconception of its checkers covers."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "goodput_window": [
        Mutant(
            "nearly meets a target",
            replace=("numbers[name] <= most for", "numbers[name] <= most + 1e-6 for"),
            expect="misses ttft",
        ),
        Mutant("trips over a single token", replace=(" or [0.0]", ""), expect="raised"),
        Mutant(
            "divides by the time in use",
            replace=(
                "good / (end - start)",
                "good / ((max((t[-1] for _, t in inside if t), default=end) - start) or 1)",
            ),
            expect="the goodput (requests/s)",
        ),
        Mutant(
            "the mean gap with the time to first token",
            replace=('"tpot": sum(gaps) / len(gaps)', '"tpot": (times[-1] - arrival) / len(times)'),
            expect="goodput_window: e",
        ),
        Mutant(
            "the mean gap over all tokens",
            replace=('"tpot": sum(gaps) / len(gaps)', '"tpot": sum(gaps) / len(times)'),
            expect="misses tpot (0.5)",
        ),
        Mutant(
            "rounds",
            replace=("return good / (end - start),", "return round(good / (end - start), 4),"),
            expect="the goodput (requests/s) is wrong",
        ),
        Mutant(
            "returns NumPy's numbers",
            replace=("return good / (end - start),", "return __import__('numpy').float64(good / (end - start)),"),
            expect="a float64, not a float",
        ),
        Mutant(
            "looks at the names only where a request ended",
            replace=(
                'if unknown := targets.keys() - {"ttft", "tpot", "itl", "e2e"}:',
                "if requests and (unknown := targets.keys() - {'ttft', 'tpot', 'itl', 'e2e'}):",
            ),
            expect="even if the window has no requests",
        ),
    ],
    "itl_percentile": [
        Mutant(
            "rounds up in floating point",
            replace=("gaps[-(-q * len(gaps) // 100) - 1]", "gaps[__import__('math').ceil(q / 100 * len(gaps)) - 1]"),
            expect="rank 8 of 100 for P7",
        ),
        Mutant(
            "rounds down",
            replace=("gaps[-(-q * len(gaps) // 100) - 1]", "gaps[min(len(gaps) - 1, q * len(gaps) // 100)]"),
            expect="returned rank 2 of 100 for P1",
        ),
        Mutant(
            "a zero ends the request's gap",
            replace=("                continue\n", "                last.pop(name, None)\n                continue\n"),
            expect="P100 of the gaps",
        ),
        Mutant(
            "removes the zeros from the trace",
            replace=(
                "    gaps.sort()\n",
                "    for _, delivered in trace:\n        for name in [n for n in delivered if not delivered[n]]:\n            del delivered[name]\n    gaps.sort()\n",
            ),
            expect="changed one of its arguments",
        ),
        Mutant(
            "returns NumPy's numbers",
            replace=(
                "return gaps[-(-q * len(gaps) // 100) - 1]",
                "return __import__('numpy').float64(gaps[-(-q * len(gaps) // 100) - 1])",
            ),
            expect="a float64, not a float",
        ),
    ],
    "plan_step": [
        Mutant(
            "a negative number of places",
            replace=("waiting[:max(0, max_num_seqs - len(running))]", "waiting[:max_num_seqs - len(running)]"),
            expect="requests are in the batch",
        ),
        Mutant(
            "the budget does not shrink",
            replace=(
                "            plan.append((name, count))\n            left -= count\n",
                "            plan.append((name, count))\n",
            ),
            expect="are left",
        ),
        Mutant(
            "decodes past the budget",
            replace=("        if count := fitting(todo):", "        if count := 1 if todo == 1 else fitting(todo):"),
            expect="gets 1 tokens, but 0 are left",
        ),
        Mutant(
            "the cap for the cut only",
            replace=("return todo if todo <= room else", "return todo if todo <= left else"),
            expect="No request gets more than the cap",
        ),
        Mutant(
            "a grain of the cap",
            replace=("room // grain * grain", "min(left // grain, cap // grain + 1) * grain"),
            expect="the cap is",
        ),
        Mutant(
            "a cap of whole grains",
            replace=("room = min(left, cap)", "room = min(left, cap // grain * grain)"),
            expect="the plan is wrong",
        ),
        Mutant("cuts anywhere", replace=("room // grain * grain", "room"), expect="a multiple of 8"),
        Mutant(
            "waiting requests with one token first",
            replace=("in waiting[:max(", "in sorted(waiting, key=lambda one: one[1] != 1)[:max("),
            expect="a waiting request overtakes",
        ),
        Mutant(
            "in the order of the batch",
            replace=(
                "    return plan",
                "    names = [name for name, _ in running + waiting]\n    return sorted(plan, key=lambda pair: names.index(pair[0]))",
            ),
            expect="plan_step: e",
        ),
        Mutant(
            "pairs as lists",
            replace=("    return plan", "    return [list(pair) for pair in plan]"),
            expect="a list, not a tuple",
        ),
        Mutant(
            "sorts its argument",
            replace=("    decoding = [", "    running.sort(key=lambda one: one[1])\n    decoding = ["),
            expect="changed one of its arguments",
        ),
    ],
    "repair_budget": [
        Mutant(
            "stays at 0 and lets pictures through",
            replace=(
                "min(tokens, left) if may_cut or tokens <= left else 0",
                "min(tokens, max(0, left)) if may_cut else tokens",
            ),
            expect="P was given 7 tokens, 6 were left",
        ),
        Mutant(
            "raises only where there are rows",
            replace=("if budget < 0:", "if budget < 0 and rows:"),
            expect="also if there are no rows",
        ),
        Mutant(
            "asserts",
            replace=('        raise ValueError(f"budget={budget} is below 0")', "        assert budget >= 0"),
            expect="raised AssertionError",
        ),
        Mutant(
            "True for 1",
            replace=("plan.append((name, count))", "plan.append((name, count if count > 1 else True))"),
            expect="a bool, not an int",
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
        Mutant(
            "costs in floats",
            replace=("n * (n + 1) // 2", "n * (n + 1) / 2"),
            expect="even_chunks: edges",
        ),
        Mutant(
            "refuses a target of 0",
            replace=("if (first := greedy(target)) is None:", "if target <= 0 or (first := greedy(target)) is None:"),
            expect="even_chunks: edges: even_chunks raised ValueError",
        ),
        Mutant(
            "a lowest limit that is nearly right",
            replace=(
                "bisect_left(range(target), True, key=suffices)",
                "bisect_left(range(0, target, max(1, target // 1000)), True, key=suffices) * max(1, target // 1000)",
            ),
            expect="even_chunks",
        ),
        Mutant(
            "returns a tuple",
            replace=("        return chunks\n", "        return (*chunks,)\n"),
            expect="a tuple, not a list",
        ),
    ],
}
