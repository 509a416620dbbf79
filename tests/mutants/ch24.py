"""Mistakes in the exercises of chapter 24 that the checkers must find beside those that they know by name."""

from minillm.book.proofs import edited

MUTANTS = {
    "waits": [
        edited("a tuple", "    return latencies\n", "    return tuple(latencies)\n", "a tuple, not a list"),
        edited("only the first connection", "[0.0] * connections", "[0.0]", "waits: example"),
    ],
    "percentile_bounds": [
        edited(
            "a list for a pair",
            "    return of_rank((start, count) for start, _, count in buckets), of_rank((end, count) for _, end, count in buckets)",
            "    return [of_rank((start, count) for start, _, count in buckets), of_rank((end, count) for _, end, count in buckets)]",
            "a list, not a tuple",
        ),
        edited(
            "takes counts out of the histograms",
            "    rank = -(-q * total // 100)\n",
            "    rank = -(-q * total // 100)\n    for _, counts in histograms:\n        counts.clear()\n",
            "changed one of its arguments",
        ),
    ],
    "cheapest_fleet": [
        edited(
            "the largest on offer is lost",
            "largest = max((usable[name] for name, count in fleet.items() if count), default=0)",
            "largest = max(usable.values())",
            "cheapest_fleet",
        ),
    ],
    "stays_cheaper": [
        edited(
            "a list for a pair",
            "    return month, rented - own\n",
            "    return [month, rented - own]\n",
            "a list, not a tuple",
        ),
        edited(
            "a float for the saving",
            "    return month, rented - own\n",
            "    return month, float(rented - own)\n",
            "a float, not an int",
        ),
    ],
    "find_saturation": [
        edited("bisects", "below = splits[answers]", "below = answers // 2", "is enough whatever the answer is"),
        edited(
            "the costs the other way round",
            "max(fail_cost + costs[below], pass_cost + costs[answers - below])",
            "max(pass_cost + costs[below], fail_cost + costs[answers - below])",
            "is enough whatever the answer is",
        ),
        edited("the least of both sides", "(max(fail_cost", "(min(fail_cost", "is enough whatever the answer is"),
        edited("one by one", "below = splits[answers]", "below = 1", "is enough whatever the answer is"),
        edited("probes past the end", "if probe(low + below):", "if probe(low + below + 1):", "the saturation rate"),
    ],
}
