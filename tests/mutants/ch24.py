"""Plausible mistakes in the exercises of chapter 24: every one of them must fail its checks."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "waits": [
        Mutant(
            "counts from sending",
            replace=("sent + seconds - moment)", "seconds)"),
            expect="the latency of the request that is due at",
        ),
        Mutant(
            "leaves failures out",
            replace=("        if moment >= warmup:\n", "        if moment >= warmup and seconds <= timeout:\n"),
            expect="one for each request that is due",
        ),
        Mutant(
            "a failure takes the timeout",
            replace=("math.inf if seconds > timeout else sent + seconds", "sent + min(seconds, timeout)"),
            expect="is cut off",
        ),
        Mutant(
            "the connection is busy to the end",
            replace=("sent + min(seconds, timeout))", "sent + seconds)"),
            expect="its connection is free then",
        ),
        Mutant(
            "exactly the timeout fails",
            replace=("seconds > timeout", "seconds >= timeout"),
            expect="exactly the timeout is complete",
        ),
        Mutant(
            "does not send the warm-up",
            replace=(
                "        sent = max(moment, heapq.heappop(free))\n",
                "        if moment < warmup:\n            continue\n        sent = max(moment, heapq.heappop(free))\n",
            ),
            expect="sent, and not reported",
        ),
        Mutant(
            "cuts the warm-up by sending",
            replace=("        if moment >= warmup:\n", "        if sent >= warmup:\n"),
            expect="one for each request that is due",
        ),
        Mutant(
            "the end of the warm-up is cut too",
            replace=("        if moment >= warmup:\n", "        if moment > warmup:\n"),
            expect="one for each request that is due",
        ),
        Mutant(
            "connections in turn",
            replace=(
                "        sent = max(moment, heapq.heappop(free))\n        heapq.heappush(free,",
                "        sent = max(moment, free.pop(0))\n        free.append(",
            ),
            expect="free first is used",
        ),
        Mutant(
            "takes no connection at all",
            replace=(
                "    if connections < 1 or len(due) != len(work):",
                "    connections = max(1, connections)\n    if len(due) != len(work):",
            ),
            expect="Without a connection nothing is sent",
        ),
    ],
    "percentile_bounds": [
        Mutant(
            "only the upper ends",
            replace=(
                "return of_rank((start, count) for start, _, count in buckets), of_rank",
                "return max(s for s, e, n in buckets if n and e >= of_rank((e, n) for _, e, n in buckets)), of_rank",
            ),
            expect="the lower bound",
        ),
        Mutant(
            "rank in floating point",
            replace=("rank = -(-q * total // 100)", "rank = math.ceil(q / 100 * total)"),
            expect="is rank",
        ),
        Mutant(
            "rank rounded down", replace=("rank = -(-q * total // 100)", "rank = q * total // 100"), expect="bound of P"
        ),
        Mutant(
            "mean of the servers' bounds",
            source="""
def percentile_bounds(histograms, q):
    if not 1 <= q <= 100:
        raise ValueError(q)
    found = []
    for ends, counts in histograms:
        rank, seen = -(-q * sum(counts) // 100), 0
        for low, high, count in zip([0.0, *ends], [*ends, math.inf], counts):
            seen += count
            if count and seen >= rank:
                found.append((low, high))
                break
    if not found:
        return None
    return tuple(sum(side) / len(found) for side in zip(*found))
""",
            expect="counts are added up",
        ),
        Mutant(
            "the last bucket has no values",
            replace=("zip([0.0, *ends], [*ends, math.inf], counts)", "zip([0.0, *ends], ends, counts)"),
            expect="percentile_bounds",
        ),
        Mutant(
            "the last bucket ends where it begins",
            replace=("[*ends, math.inf]", "[*ends, ends[-1] if ends else math.inf]"),
            expect="upper bound",
        ),
        Mutant(
            "counts are cumulative",
            replace=("            seen += count\n", "            seen = count\n"),
            expect="percentile_bounds",
        ),
        Mutant("forgets to sort", replace=("in sorted(pairs)", "in pairs"), expect="percentile_bounds"),
        Mutant(
            "zeros for no value",
            replace=("        return None\n", "        return 0.0, math.inf\n"),
            expect="expected None",
        ),
        Mutant(
            "any percentage",
            replace=("    if not 1 <= q <= 100:\n", "    if not 0 <= q <= 100:\n"),
            expect="A percentile from 1 to 100",
        ),
    ],
    "cheapest_fleet": [
        Mutant(
            "the largest rate that held",
            replace=(
                "list(itertools.takewhile(lambda probe: probe[1], sorted(probes)))",
                "[probe for probe in sorted(probes) if probe[1]]",
            ),
            expect="it counts for nothing",
        ),
        Mutant(
            "probes in the order given",
            replace=("lambda probe: probe[1], sorted(probes)", "lambda probe: probe[1], probes"),
            expect="cheapest_fleet",
        ),
        Mutant("no spare", replace=(" - largest < peak", " < peak"), expect="after the loss of its largest machine"),
        Mutant(
            "the smallest is lost",
            replace=("largest = max((", "largest = min(("),
            expect="after the loss of its largest machine",
        ),
        Mutant(
            "the largest on offer is lost",
            replace=(
                "largest = max((usable[name] for name, count in fleet.items() if count), default=0)",
                "largest = max(usable.values())",
            ),
            expect="cheapest_fleet",
        ),
        Mutant(
            "one kind only",
            replace=(
                "        largest = max((",
                "        if sum(count > 0 for count in counts) > 1:\n            continue\n        largest = max((",
            ),
            expect="holds the peak for",
        ),
        Mutant(
            "too few counts",
            replace=("range(-(-peak // size) + 2)", "range(-(-peak // size) + 1)"),
            expect="cheapest_fleet",
        ),
        Mutant(
            "ties to more machines",
            replace=("key = price, sum(counts),", "key = price, -sum(counts),"),
            expect="costs the same with",
        ),
        Mutant(
            "ties to the last",
            replace=("[-count for count in counts]", "list(counts)"),
            expect="the fleet, of those with the same price and size",
        ),
        Mutant(
            "lists what is not there",
            replace=("for name, count in best[1].items() if count}", "for name, count in best[1].items()}"),
            expect="lists a machine 0 times",
        ),
        Mutant(
            "an empty fleet",
            replace=(
                '        raise ValueError(f"no fleet of {list(machines)} holds {peak} requests/s after a loss")',
                "        return {}",
            ),
            expect="No fleet holds the peak",
        ),
    ],
    "stays_cheaper": [
        Mutant(
            "the first crossing",
            replace=(
                "            month = None\n        elif month is None:",
                "            pass\n        elif month is None:",
            ),
            expect="the first crossing does not last",
        ),
        Mutant(
            "machines are sold",
            replace=("bought = max(0, -(-tokens // per_month) - owned)", "bought = -(-tokens // per_month) - owned"),
            expect="is not sold",
        ),
        Mutant("rounds down", replace=("-(-tokens // per_month)", "tokens // per_month"), expect="two are bought"),
        Mutant(
            "idle machines are free",
            replace=("owned * running\n", "-(-tokens // per_month) * running\n"),
            expect="still costs its running",
        ),
        Mutant(
            "running from the next month on",
            replace=("bought * price + owned * running", "bought * price + (owned - bought) * running"),
            expect="the saving at the end",
        ),
        Mutant(
            "equal is above", replace=("if own > rented:", "if own >= rented:"), expect="equal sums count as not above"
        ),
        Mutant("months from 0 on", replace=("enumerate(demand, start=1)", "enumerate(demand)"), expect="the month is"),
        Mutant(
            "compares the months alone",
            replace=(
                "        own += bought * price + owned * running\n        rented += tokens * api\n",
                "        own = bought * price + owned * running\n        rented = tokens * api\n",
            ),
            expect="the saving at the end",
        ),
        Mutant(
            "the saving with the other sign", replace=("rented - own", "own - rented"), expect="the saving at the end"
        ),
    ],
    "find_saturation": [
        Mutant(
            "bisects",
            replace=("below = splits[answers]", "below = answers // 2"),
            expect="is enough whatever the answer is",
        ),
        Mutant(
            "the costs the other way round",
            replace=(
                "max(fail_cost + costs[below], pass_cost + costs[answers - below])",
                "max(pass_cost + costs[below], fail_cost + costs[answers - below])",
            ),
            expect="is enough whatever the answer is",
        ),
        Mutant(
            "the least of both sides",
            replace=("(max(fail_cost", "(min(fail_cost"),
            expect="is enough whatever the answer is",
        ),
        Mutant(
            "one by one",
            replace=("below = splits[answers]", "below = 1"),
            expect="is enough whatever the answer is",
        ),
        Mutant(
            "forgets that no rate may hold",
            replace=("low, answers = 0, num_rates + 1\n", "low, answers = min(1, num_rates), max(1, num_rates)\n"),
            expect="the saturation rate",
        ),
        Mutant(
            "answers the first that fails",
            replace=("    return low\n", "    return low + 1\n"),
            expect="the saturation rate",
        ),
        Mutant(
            "probes past the end",
            replace=("if probe(low + below):", "if probe(low + below + 1):"),
            expect="the saturation rate",
        ),
        Mutant(
            "works the same case out again and again",
            source="""
def find_saturation(probe, num_rates, pass_cost, fail_cost):
    def cost(answers):
        if answers == 1:
            return 0, 0
        return min((max(fail_cost + cost(below)[0], pass_cost + cost(answers - below)[0]), below)
                   for below in range(1, answers))
    low, answers = 0, num_rates + 1
    while answers > 1:
        below = cost(answers)[1]
        low, answers = (low + below, answers - below) if probe(low + below) else (low, below)
    return low
""",
            expect="more than 3 s",
        ),
    ],
}
