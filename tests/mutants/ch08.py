"""Plausible mistakes in the exercises of chapter 08: every one of them must fail its checks."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "goodput_window": [
        Mutant(
            "counts by arrival",
            replace=("start <= (times[-1] if times else arrival) < end", "start <= arrival < end"),
            expect="its last token came at 2.0",
        ),
        Mutant(
            "counts by the first token",
            replace=("(times[-1] if times else arrival)", "(times[0] if times else arrival)"),
            expect="goodput_window: edges",
        ),
        Mutant(
            "both ends of the window belong to it",
            replace=(" < end]", " <= end]"),
            expect="the window ends just before",
        ),
        Mutant(
            "equal breaks the promise",
            replace=("numbers[name] <= most", "numbers[name] < most"),
            expect="exactly what was promised",
        ),
        Mutant(
            "one promise kept is enough",
            replace=("return all(", "return not targets or any("),
            expect="the second came late",
        ),
        Mutant(
            "the mean gap for the longest",
            replace=('"itl": max(gaps)', '"itl": sum(gaps) / len(gaps)'),
            expect="breaks itl",
        ),
        Mutant(
            "forgets failed requests",
            replace=("if start <= (times[-1] if times else arrival) < end]", "if times and start <= times[-1] < end]"),
            expect="a failed request counts",
        ),
        Mutant(
            "a failed request keeps an empty promise",
            replace=("            return False", "            return not targets"),
            expect="keeps nothing",
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
            "takes any name for a promise",
            replace=('if unknown := targets.keys() - {"ttft", "tpot", "itl", "e2e"}:', "if False:"),
            expect="misspelt promise",
        ),
    ],
    "itl_percentile": [
        Mutant(
            "interpolates",
            replace=(
                "return gaps[-(-q * len(gaps) // 100) - 1] if gaps else None",
                "import numpy\n    return float(numpy.percentile(gaps, q)) if gaps else None",
            ),
            expect="itl_percentile: example",
        ),
        Mutant(
            "rounds up in floating point",
            replace=("gaps[-(-q * len(gaps) // 100) - 1]", "gaps[__import__('math').ceil(q / 100 * len(gaps)) - 1]"),
            expect="rank 8 of 100 for P7",
        ),
        Mutant(
            "rounds down",
            replace=("gaps[-(-q * len(gaps) // 100) - 1]", "gaps[min(len(gaps) - 1, q * len(gaps) // 100)]"),
            expect="returned rank 4 of 4 for P75",
        ),
        Mutant(
            "spreads a delivery evenly",
            replace=(
                "                gaps.append(time - last[name])\n            gaps += [0.0] * (count - 1)",
                "                gaps += [(time - last[name]) / count] * count\n            else:\n                gaps += [0.0] * (count - 1)",
            ),
            expect="itl_percentile: example",
        ),
        Mutant(
            "one gap a delivery",
            replace=("            gaps += [0.0] * (count - 1)\n", ""),
            expect="gives B two tokens at once",
        ),
        Mutant(
            "no zeros in the first delivery",
            replace=(
                "                gaps.append(time - last[name])\n            gaps += [0.0] * (count - 1)",
                "                gaps += [time - last[name]] + [0.0] * (count - 1)",
            ),
            expect="three tokens in the first delivery",
        ),
        Mutant(
            "takes a zero for a delivery",
            replace=("            if not count:\n                continue\n", ""),
            expect="is no delivery",
        ),
        Mutant(
            "gaps between steps",
            replace=(
                "            last[name] = time\n",
                "            last[name] = time\n        last = {name: time for name in last}\n",
            ),
            expect="a step without A lies between",
        ),
        Mutant("forgets to sort", replace=("    gaps.sort()\n", ""), expect="itl_percentile: example"),
        Mutant("zero for no gap", replace=("if gaps else None", "if gaps else 0.0"), expect="expected None"),
    ],
    "plan_step": [
        Mutant(
            "in the order they came",
            replace=("    for name, todo in decoding + prompts:", "    for name, todo in running:"),
            expect="plan_step: example",
        ),
        Mutant(
            "prompts in order",
            replace=(
                "    prompts = sorted((one for one in running if one[1] > 1), key=lambda one: one[1])",
                "    prompts = [one for one in running if one[1] > 1]",
            ),
            expect="the plan is wrong",
        ),
        Mutant("cuts anywhere", replace=("room // grain * grain", "room"), expect="a multiple of 8"),
        Mutant(
            "whole ones at a multiple too",
            replace=(
                "return todo if todo <= room else room // grain * grain",
                "return min(todo, room) // grain * grain",
            ),
            expect="plan_step",
        ),
        Mutant(
            "somebody overtakes in the queue",
            replace=("            break\n", "            continue\n"),
            expect="overtakes",
        ),
        Mutant(
            "a prompt that gets nothing ends it",
            source="""
def plan_step(running, waiting, budget, max_num_seqs, cap, grain):
    plan, left = [], budget
    rows = sorted(running, key=lambda one: one[1]) + waiting[:max(0, max_num_seqs - len(running))]
    for name, todo in rows:
        room = min(left, cap)
        count = todo if todo <= room else room // grain * grain
        if not count:
            break
        plan.append((name, count))
        left -= count
    return plan
""",
            expect="the plan is wrong",
        ),
        Mutant(
            "places only for those with tokens",
            replace=("max_num_seqs - len(running)", "max_num_seqs - len(plan)"),
            expect="Every running request has a place",
        ),
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
            expect="tokens where 0 are left",
        ),
        Mutant(
            "the cap for the cut only",
            replace=("return todo if todo <= room else", "return todo if todo <= left else"),
            expect="C gets 17 tokens, the cap is 16",
        ),
        Mutant("no cap", replace=("room = min(left, cap)", "room = left"), expect="the cap is 20"),
        Mutant(
            "a grain of the cap",
            replace=("room // grain * grain", "min(left // grain, cap // grain + 1) * grain"),
            expect="the cap is",
        ),
        Mutant(
            "lists who gets nothing",
            replace=(
                "        if count := fitting(todo):\n            plan.append((name, count))\n            left -= count",
                "        count = fitting(todo)\n        plan.append((name, count))\n        left -= count",
            ),
            expect="Who gets nothing",
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
            "cuts the picture",
            replace=("min(tokens, left) if may_cut or tokens <= left else 0", "min(tokens, left)"),
            expect="P was cut to 6 of 7",
        ),
        Mutant(
            "stops at the first that does not fit",
            replace=("        if count:\n", "        if not count:\n            break\n        if count:\n"),
            expect="has its chance",
        ),
        Mutant(
            "an even picture does not fit",
            replace=("tokens <= left else 0", "tokens < left else 0"),
            expect="repair_budget: edges",
        ),
        Mutant(
            "hides a negative budget",
            replace=(
                '    if budget < 0:\n        raise ValueError(f"budget={budget} is below 0")\n',
                "    budget = max(0, budget)\n",
            ),
            expect="somebody else's mistake",
        ),
        Mutant(
            "lists rows with 0 tokens",
            replace=(
                "        if count:\n            plan.append((name, count))\n            left -= count",
                "        plan.append((name, count))\n        left -= count",
            ),
            expect="was given 0 tokens",
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
            "full at the front",
            replace=("return greedy(bisect_left(range(target), True, key=suffices))", "return first"),
            expect="the most expensive step of [8, 4]",
        ),
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
        Mutant("forgets the streams", replace=("c1 * (n + streams)", "c1 * n"), expect="over the target"),
        Mutant(
            "forgets what came before",
            replace=("c2 * (n * done + n * (n + 1) // 2)", "c2 * (n * (n + 1) // 2)"),
            expect="over the target",
        ),
        Mutant("a chunk reads itself whole", replace=("n * (n + 1) // 2", "n * n"), expect="even_chunks"),
        Mutant(
            "returns None for what cannot be",
            replace=(
                '        raise ValueError(f"target={target}: somewhere in the prompt a single token costs more")',
                "        return None",
            ),
            expect="expected it to raise ValueError",
        ),
        Mutant(
            "strictly under the target", replace=("bisect_right(range(1,", "bisect_left(range(1,"), expect="even_chunks"
        ),
    ],
}
