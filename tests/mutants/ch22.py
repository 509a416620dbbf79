"""Plausible mistakes in the exercises of chapter 22 that no misconception of its checkers covers."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "pick": [
        Mutant("ties to the last", replace=("-head, index))", "-head, -index))"), expect="pick"),
        Mutant("ties to the first alone", replace=("-head, index))", "index))"), expect="pick"),
    ],
    "migration_plan": [
        Mutant(
            "floats", replace=("    return best\n", "    return list(map(float, best))\n"), expect="migration_plan: "
        ),
    ],
    "resumed_stream": [
        Mutant(
            "no checks",
            replace=("if not prompt or max_tokens < 1:", "if False:"),
            expect="Here the prompt is empty",
        ),
        Mutant(
            "keeps the prompt",
            replace=("self.stop = list(prompt), max_tokens, stop", "self.stop = prompt, max_tokens, stop"),
            expect="keep copies",
        ),
        Mutant(
            "returns the output itself",
            replace=(
                "        return new\n",
                "        self.output = new if len(self.output) == len(new) else self.output\n        return new\n",
            ),
            expect="output after receive",
        ),
    ],
    "autoscaler": [
        Mutant(
            "looks at now alone",
            replace=("self.curve[now : now + self.delay + 1]", "self.curve[now : now + 1]"),
            expect="the day cost",
        ),
        Mutant(
            "follows the load",
            source="""
class Autoscaler:
    def __init__(self, yesterday, capacity, delay):
        self.capacity = capacity

    def desired(self, arrivals, backlog, ready, starting):
        return -(-(arrivals[-1] if arrivals else 0) // self.capacity)
""",
            expect="the day cost",
        ),
        Mutant(
            "always the peak",
            replace=("ahead = self.curve[now : now + self.delay + 1]", "ahead = self.curve"),
            expect="the day cost",
        ),
        Mutant(
            "yesterday's height",
            replace=("load = max(ahead) * recent / before", "load = max(ahead)"),
            expect="the day cost",
        ),
        Mutant("forgets what waits", replace=("(load + backlog / self.delay)", "load"), expect="autoscaler"),
        Mutant(
            "knows the check's capacity",
            replace=("self.capacity, self.delay = capacity, delay", "self.capacity, self.delay = 20, 4"),
            expect="a replica serves 10 requests",
        ),
        Mutant(
            "a ratio over zero",
            replace=(
                "        elif before:\n            load = max(ahead) * recent / before\n        else:\n            load = max(recent / len(arrivals[-6:]), max(ahead))",
                "        else:\n            load = max(ahead) * recent / before",
            ),
            expect="autoscaler",
        ),
        Mutant(
            "nothing for nothing",
            replace=("load = max(recent / len(arrivals[-6:]), max(ahead))", "load = max(ahead)"),
            expect="requests wait after interval 60",
        ),
        Mutant("rounds down", replace=("math.ceil((load", "math.floor((load"), expect="autoscaler"),
        Mutant(
            "a float",
            replace=(
                "return math.ceil((load + backlog / self.delay) / self.capacity)",
                "return (load + backlog / self.delay) / self.capacity",
            ),
            expect="not an int",
        ),
    ],
}
