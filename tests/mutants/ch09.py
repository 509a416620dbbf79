"""Plausible mistakes in the exercises of chapter 09: every one of them must fail its checks."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "ageing_key": [
        Mutant(
            "arrival counts against the early",
            replace=("cost + ageing * (arrival + priority * grace)", "cost - ageing * (arrival + priority * grace)"),
            expect="the value of the first is smaller by",
        ),
        Mutant(
            "forgets the 4",
            replace=("prompt_tokens + 4 * max_tokens", "prompt_tokens + max_tokens"),
            expect="ageing_key: example",
        ),
        Mutant(
            "priority is not worth time",
            replace=("ageing * (arrival + priority * grace)", "ageing * arrival + priority * grace"),
            expect="the same value at any time",
        ),
        Mutant(
            "priority only in the key",
            replace=(" / ageing + priority * grace", " / ageing"),
            expect="Two levels of priority",
        ),
        Mutant(
            "a moment instead of a time",
            replace=(
                "(cost - cheapest) / ageing + priority * grace",
                "(cost - cheapest) / ageing + priority * grace + arrival",
            ),
            expect="safe, of a cheapest request of priority 0",
        ),
        Mutant(
            "divides by zero",
            replace=("    if ageing == 0:\n        return key, math.inf if cost > cheapest else 0.0\n", ""),
            expect="ZeroDivisionError",
        ),
        Mutant(
            "never safe without ageing",
            replace=("math.inf if cost > cheapest else 0.0", "math.inf"),
            expect="safe, of a cheapest request is wrong",
        ),
        Mutant(
            "takes anything",
            replace=("if ageing < 0 or grace < 0:", "if ageing < 0:"),
            expect="expected it to raise ValueError",
        ),
        Mutant(
            "dearer than the cheapest is ignored",
            replace=("(cost - cheapest) / ageing", "cost / ageing"),
            expect="a request of cost 20",
        ),
        Mutant(
            "NumPy's number for a key",
            replace=("    return key, (cost", "    return __import__('numpy').float64(key), (cost"),
            expect="must be a float",
        ),
    ],
    "patient_queue": [
        Mutant(
            "strict shortest first",
            replace=("if self.overtaken[request] >= self.patience]", "if False]"),
            expect="overtaken 2 times",
        ),
        Mutant(
            "one time too many",
            replace=("self.overtaken[request] >= self.patience", "self.overtaken[request] > self.patience"),
            expect="overtaken 2 times",
        ),
        Mutant(
            "counts a peek",
            replace=(
                "        return self.chosen\n\n    def pop",
                "        self.overtaken.update(fresh)\n        return self.chosen\n\n    def pop",
            ),
            expect="patient_queue: example",
        ),
        Mutant(
            "everybody who stays is overtaken",
            replace=("self.fresh[: self.fresh.index(self.chosen)]", "self.fresh"),
            expect="peek returned",
        ),
        Mutant(
            "the most overtaken instead of the first",
            replace=("out_of_patience[:1] or fresh", "out_of_patience[-1:] or fresh"),
            expect="peek returned",
        ),
        Mutant(
            "by the prompt alone",
            replace=("return request.num_prompt_tokens + request.max_tokens", "return request.num_prompt_tokens"),
            expect="prompt and max_tokens together",
        ),
        Mutant(
            "put back by length",
            replace=("min(returned, key=lambda request: request.arrival_time)", "min(returned, key=self.length)"),
            expect="peek returned",
        ),
        Mutant(
            "put back at the end of the queue",
            replace=(
                "    def peek(self):",
                "    def put_back(self, request):\n        self.fresh.append(request)\n\n    def peek(self):",
            ),
            expect="goes first, by arrival",
        ),
        Mutant(
            "shows aborted ones",
            replace=(
                "    def peek(self):",
                "    def __iter__(self):\n        return iter(self.returned + self.fresh)\n\n    def peek(self):",
            ),
            expect="aborted while it waited",
        ),
        Mutant(
            "aborted ones are next",
            replace=("in self.fresh if not request.is_finished]", "in self.fresh]"),
            expect="peek returned",
        ),
        Mutant(
            "order by length",
            replace=(
                "    def peek(self):",
                "    def order(self, running):\n        running.sort(key=self.length)\n\n    def peek(self):",
            ),
            expect="the order of running requests",
        ),
        Mutant(
            "order returns a new list",
            replace=(
                "    def peek(self):",
                "    def order(self, running):\n        return sorted(running, key=lambda request: request.arrival_time)\n\n    def peek(self):",
            ),
            expect="in place",
        ),
        Mutant(
            "pop takes the first",
            replace=("        return super().pop()", "        return (self.returned or self.fresh).pop(0)"),
            expect="patient_queue: example",
        ),
        Mutant(
            "by arrival instead of by add",
            replace=(
                "in self.fresh if not request.is_finished]",
                "in sorted(self.fresh, key=lambda request: request.arrival_time) if not request.is_finished]",
            ),
            expect="go by the order of add",
        ),
        Mutant(
            "changes a request",
            replace=(
                "    def peek(self):",
                "    def add(self, request):\n        super().add(request)\n        request.priority = 1\n\n    def peek(self):",
            ),
            expect="must not change a request",
        ),
    ],
    "fair_queue": [
        Mutant(
            "all tokens alike",
            replace=("prompt + self.output_weight * (num_tokens - prompt)", "num_tokens"),
            expect="one output token of weight 2",
        ),
        Mutant(
            "multiplies by the share",
            replace=("weight / self.shares.get(request.user, 1.0)", "weight * self.shares.get(request.user, 1.0)"),
            expect="over a share of 2",
        ),
        Mutant(
            "no share for strangers",
            replace=("self.shares.get(request.user, 1.0)", "self.shares[request.user]"),
            expect="KeyError",
        ),
        Mutant(
            "labels by where the step starts",
            replace=(
                "first = max(request.num_computed_tokens, request.max_computed_tokens)",
                "first = request.num_computed_tokens",
            ),
            expect="9 and 10 are new",
        ),
        Mutant(
            "counts the prompt whole at the first step",
            replace=(
                "min(num_tokens, max(0, request.num_prompt_tokens - first))",
                "num_tokens if first < request.num_prompt_tokens else 0",
            ),
            expect="one output token of weight 2",
        ),
        Mutant(
            "never lifts",
            replace=(
                "self.counters[request.user] = max(self.counters.get(request.user, 0.0), floor)",
                "self.counters[request.user] = self.counters.get(request.user, 0.0)",
            ),
            expect="cem is new",
        ),
        Mutant(
            "lifts to the largest",
            replace=("floor = min((self.counters", "floor = max((self.counters"),
            expect="cem is new",
        ),
        Mutant(
            "pulls a counter down",
            replace=(
                "self.counters[request.user] = max(self.counters.get(request.user, 0.0), floor)",
                "self.counters[request.user] = floor",
            ),
            expect="a counter never falls",
        ),
        Mutant(
            "starts at 0 on an empty server",
            replace=("default = self.counters.get(self.left_last, 0.0)", "default = 0.0"),
            expect="bob left last",
        ),
        Mutant(
            "the floor of everybody ever seen",
            replace=("for other in self.present)", "for other in self.counters)"),
            expect="eve, at 0, is not",
        ),
        Mutant(
            "present only while waiting",
            replace=(
                "    def peek(self):",
                "    def pop(self):\n        self.leave(self.chosen)\n        return super().pop()\n\n    def peek(self):",
            ),
            expect="fair_queue",
        ),
        Mutant(
            "join does nothing",
            replace=("        self.present.append(request.user)\n", "        pass\n"),
            expect="fair_queue",
        ),
        Mutant(
            "put back at the end",
            replace=("self.fresh[::-1] + self.returned", "self.returned[::-1] + self.fresh[::-1]"),
            expect="put back last",
        ),
        Mutant(
            "ties by name",
            replace=("(*self.urgency(one), one.user)", "(self.counters[one.user], one.user)"),
            expect="peek returned",
        ),
        Mutant(
            "running by arrival",
            replace=("running.sort(key=self.urgency)", "running.sort(key=lambda request: request.arrival_time)"),
            expect="the order of running requests",
        ),
        Mutant(
            "shows aborted ones",
            replace=("self.returned if not request.is_finished]", "self.returned]"),
            expect="An aborted request is never returned",
        ),
        Mutant(
            "from the largest token computed alone",
            replace=(
                "first = max(request.num_computed_tokens, request.max_computed_tokens)",
                "first = request.max_computed_tokens",
            ),
            expect="the larger of the two",
        ),
        Mutant(
            "a whole weight",
            replace=("self.output_weight * (num_tokens - prompt)", "int(self.output_weight) * (num_tokens - prompt)"),
            expect="fair_queue: random",
        ),
    ],
    "beat_it": [
        Mutant(
            "first come, first served",
            replace=("self.clock() - oldest.arrival_time > self.danger", "True"),
            expect="sjf has",
        ),
        Mutant(
            "nobody is ever in danger",
            replace=("self.clock() - oldest.arrival_time > self.danger", "False"),
            expect="for the first token, allowed are",
        ),
        Mutant("helps too late", replace=("bound * 2 / 3", "bound * 2"), expect="for the first token, allowed are"),
        Mutant(
            "shows aborted ones",
            replace=(
                "    def peek(self):",
                "    def __iter__(self):\n        return iter(self.returned + self.fresh)\n\n    def peek(self):",
            ),
            expect="beat_it: edges",
        ),
        Mutant(
            "drops the longest",
            replace=(
                "    def peek(self):",
                "    def put_back(self, request):\n        self.returned.append(request)\n\n    def add(self, request):\n        if request.max_tokens < 100:\n            super().add(request)\n\n    def peek(self):",
            ),
            expect="a request is never served",
        ),
        Mutant(
            "loses those who were preempted",
            replace=("    def peek(self):", "    def put_back(self, request):\n        pass\n\n    def peek(self):"),
            expect="beat_it: edges",
        ),
        Mutant(
            "pretends that a request has just arrived",
            replace=(
                "    def peek(self):",
                "    def add(self, request):\n        super().add(request)\n        request.arrival_time = self.clock() + 1\n\n    def peek(self):",
            ),
            expect="must not change a request",
        ),
        Mutant(
            "reads the prompt",
            replace=(
                "    def peek(self):",
                "    def add(self, request):\n        super().add(request)\n        sum(request.prompt_token_ids)\n\n    def peek(self):",
            ),
            expect="may not read 'prompt_token_ids'",
        ),
    ],
}
