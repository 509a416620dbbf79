"""Mistakes in the exercises of chapter 24 that the checkers must find beside those that they know by name."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "waits": [
        Mutant(
            "a tuple", replace=("    return latencies\n", "    return tuple(latencies)\n"), expect="a tuple, not a list"
        ),
        Mutant("only the first connection", replace=("[0.0] * connections", "[0.0]"), expect="waits: example"),
    ],
    "percentile_bounds": [
        Mutant(
            "a list for a pair",
            replace=(
                "    return of_rank((start, count) for start, _, count in buckets), of_rank((end, count) for _, end, count in buckets)",
                "    return [of_rank((start, count) for start, _, count in buckets), of_rank((end, count) for _, end, count in buckets)]",
            ),
            expect="a list, not a tuple",
        ),
        Mutant(
            "takes counts out of the histograms",
            replace=(
                "    rank = -(-q * total // 100)\n",
                "    rank = -(-q * total // 100)\n    for _, counts in histograms:\n        counts.clear()\n",
            ),
            expect="changed one of its arguments",
        ),
    ],
    "cheapest_fleet": [
        Mutant(
            "the largest on offer is lost",
            replace=(
                "largest = max((usable[name] for name, count in fleet.items() if count), default=0)",
                "largest = max(usable.values())",
            ),
            expect="cheapest_fleet",
        ),
    ],
    "stays_cheaper": [
        Mutant(
            "a list for a pair",
            replace=("    return month, rented - own\n", "    return [month, rented - own]\n"),
            expect="a list, not a tuple",
        ),
        Mutant(
            "a float for the saving",
            replace=("    return month, rented - own\n", "    return month, float(rented - own)\n"),
            expect="a float, not an int",
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
            "probes past the end",
            replace=("if probe(low + below):", "if probe(low + below + 1):"),
            expect="the saturation rate",
        ),
    ],
}
