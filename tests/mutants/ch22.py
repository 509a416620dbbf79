"""Plausible mistakes in the exercises of chapter 22: every one of them must fail its checks."""

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
            "takes old flights",
            replace=("if flight != self.newest or not self.alive or self.finished:", "if self.finished:"),
            expect="the dead replica arrives late",
        ),
        Mutant(
            "takes tokens twice",
            replace=("tokens[len(self.output) - position :", "tokens[:"),
            expect="the tokens for the client",
        ),
        Mutant(
            "a stop token in the prompt ends the output",
            replace=("self.alive = [], False, 0, False", "self.alive = [], stop in prompt, 0, False"),
            expect="the prompt holds the stop token",
        ),
        Mutant("leaves gaps", replace=("if position > len(self.output):", "if False:"), expect="leaves a gap"),
        Mutant(
            "starts again",
            replace=("self.prompt + self.output, self.max_tokens", "self.prompt, self.max_tokens"),
            expect="tokens left to generate",
        ),
        Mutant(
            "generates max_tokens again",
            replace=("self.max_tokens - len(self.output)", "self.max_tokens"),
            expect="tokens left to generate",
        ),
        Mutant(
            "ignores the stop token",
            replace=("if self.stop in new else new", "if False else new"),
            expect="the stop token ends it",
        ),
        Mutant(
            "drops the stop token",
            replace=("new.index(self.stop) + 1", "new.index(self.stop)"),
            expect="the stop token ends it",
        ),
        Mutant(
            "more than max_tokens",
            replace=(": self.max_tokens - position]", ":]"),
            expect="more tokens than max_tokens",
        ),
        Mutant(
            "submits what has ended",
            replace=("self.alive and not self.finished", "self.alive"),
            expect="nothing is missing",
        ),
        Mutant(
            "counts a death twice",
            replace=("flight == self.newest and self.alive and not self.finished", "not self.finished"),
            expect="a second time",
        ),
        Mutant(
            "a lost flight still counts",
            replace=("self.alive = self.alive and not again", "pass"),
            expect="no message of a lost flight counts",
        ),
        Mutant(
            "no checks",
            replace=("if not prompt or max_tokens < 1:", "if False:"),
            expect="A prompt has at least one token",
        ),
        Mutant(
            "flight 0 counts",
            replace=("self.newest, self.alive = [], False, 0, False", "self.newest, self.alive = [], False, 0, True"),
            expect="no flight has been submitted yet",
        ),
        Mutant(
            "flights to come count",
            replace=("if flight != self.newest or", "if flight < self.newest or"),
            expect="was never submitted",
        ),
        Mutant(
            "lost is told twice",
            replace=("flight == self.newest and self.alive and not", "flight == self.newest and not"),
            expect="resumed_stream: edges",
        ),
        Mutant(
            "an old flight leaves a gap",
            replace=(
                '        if flight != self.newest or not self.alive or self.finished:\n            return []\n        if position > len(self.output):\n            raise ValueError(f"position {position} leaves a gap after {len(self.output)} tokens")\n',
                '        if position > len(self.output):\n            raise ValueError("gap")\n        if flight != self.newest or not self.alive or self.finished:\n            return []\n',
            ),
            expect="resumed_stream: edges",
        ),
        Mutant(
            "a gap of nothing",
            replace=("if position > len(self.output):", "if tokens and position > len(self.output):"),
            expect="is missing",
        ),
        Mutant(
            "keeps the prompt",
            replace=("self.stop = list(prompt), max_tokens, stop", "self.stop = prompt, max_tokens, stop"),
            expect="the caller's prompt was changed",
        ),
        Mutant(
            "returns the output itself",
            replace=(
                "        return new\n",
                "        self.output = new if len(self.output) == len(new) else self.output\n        return new\n",
            ),
            expect="the caller changed its lists",
        ),
        Mutant(
            "the flight before goes on",
            replace=(
                "self.newest, self.alive = self.newest + 1, True",
                "self.newest, self.alive = self.newest + (not self.alive), True",
            ),
            expect="resumed_stream: edges",
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
        Mutant(
            "knows the check's capacity",
            replace=("self.capacity, self.delay = capacity, delay", "self.capacity, self.delay = 20, 4"),
            expect="a replica serves 10 requests",
        ),
        Mutant("forgets what waits", replace=("(load + backlog / self.delay)", "load"), expect="autoscaler"),
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
            expect="requests wait after five hours",
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
