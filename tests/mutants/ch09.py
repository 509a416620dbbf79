"""Plausible mistakes in the exercises of chapter 09 that no misconception of its checkers covers."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "ageing_key": [
        Mutant(
            "takes anything",
            replace=("if ageing < 0 or grace < 0:", "if ageing < 0:"),
            expect="Here grace is negative",
        ),
        Mutant(
            "divides by zero",
            replace=("    if ageing == 0:\n        return key, math.inf if cost > cheapest else 0.0\n", ""),
            expect="ZeroDivisionError",
        ),
        Mutant(
            "a key of the moment",
            replace=(
                "key = cost + ageing * (arrival + priority * grace)",
                "key = cost - ageing * (__import__('time').process_time() - (arrival + priority * grace))",
            ),
            expect="must not depend on the time",
        ),
        Mutant(
            "a rounded key",
            replace=("    return key, (cost", "    return round(key, 1), (cost"),
            expect="the values differ by 0.004",
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
            expect="no request is overtaken more often",
        ),
        Mutant(
            "aborted ones are next",
            replace=("in self.fresh if not request.is_finished]", "in self.fresh]"),
            expect="There are:",
        ),
        Mutant(
            "StopIteration where requests wait",
            replace=(
                "    def length(self, request):",
                "    def __iter__(self):\n        return next(iter([iter(())] * (not self.fresh + self.returned)))\n\n    def length(self, request):",
            ),
            expect="StopIteration",
        ),
        Mutant(
            "counts of the class",
            source="""
class PatientQueue(TwoLists):
    overtaken = {}

    def __init__(self, patience):
        super().__init__()
        self.patience = patience

    def add(self, request):
        super().add(request)
        self.overtaken[request.request_id] = 0

    def peek(self):
        returned = [request for request in self.returned if not request.is_finished]
        fresh = [request for request in self.fresh if not request.is_finished]
        full = [request for request in fresh if self.overtaken[request.request_id] >= self.patience]
        if returned:
            self.chosen = min(returned, key=lambda request: request.arrival_time)
        else:
            self.chosen = min(full[:1] or fresh, key=lambda one: one.num_prompt_tokens + one.max_tokens, default=None)
        return self.chosen

    def pop(self):
        if self.chosen in self.fresh:
            for request in self.fresh[: self.fresh.index(self.chosen)]:
                self.overtaken[request.request_id] += 1
        return super().pop()
""",
            expect="Two queues share nothing",
        ),
        Mutant(
            "ties in order by the name",
            replace=(
                "    def length(self, request):",
                "    def order(self, running):\n        running.sort(key=lambda one: (one.arrival_time, one.request_id))\n\n    def length(self, request):",
            ),
            expect="requests that are equal in it keep their order",
        ),
        Mutant(
            "pop takes the first",
            replace=("        return super().pop()", "        return (self.returned or self.fresh).pop(0)"),
            expect="patient_queue: example",
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
            "notes the share of a stranger",
            replace=("self.shares.get(request.user, 1.0)", "self.shares.setdefault(request.user, 1.0)"),
            expect="Do not change `shares`",
        ),
        Mutant(
            "shows aborted ones",
            replace=("self.returned if not request.is_finished]", "self.returned]"),
            expect="There are:",
        ),
    ],
    "make_way": [
        Mutant(
            "arrivals in whole seconds",
            replace=("pair[1][2], pair[0]", "int(pair[1][2]), pair[0]"),
            expect="make_way: ",
        ),
    ],
    "beat_it": [
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
