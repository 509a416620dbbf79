"""Plausible mistakes in the exercises of chapter 09 that no misconception of its checkers covers."""

from minillm.book.proofs import Mutant, edited

MUTANTS = {
    "ageing_key": [
        edited("takes anything", "if ageing < 0 or grace < 0:", "if ageing < 0:", "Here grace is negative"),
        edited(
            "divides by zero",
            "    if ageing == 0:\n        return key, math.inf if cost > cheapest else 0.0\n",
            "",
            "ZeroDivisionError",
        ),
        edited(
            "a key of the moment",
            "key = cost + ageing * (arrival + priority * grace)",
            "key = cost - ageing * (__import__('time').process_time() - (arrival + priority * grace))",
            "must not depend on the time",
        ),
        edited(
            "a rounded key", "    return key, (cost", "    return round(key, 1), (cost", "the values differ by 0.004"
        ),
        edited(
            "NumPy's number for a key",
            "    return key, (cost",
            "    return __import__('numpy').float64(key), (cost",
            "must be a float",
        ),
    ],
    "patient_queue": [
        edited(
            "strict shortest first",
            "if self.overtaken[request] >= self.patience]",
            "if False]",
            "no request is overtaken more often",
        ),
        edited("aborted ones are next", "in self.fresh if not request.is_finished]", "in self.fresh]", "There are:"),
        edited(
            "StopIteration where requests wait",
            "    def length(self, request):",
            "    def __iter__(self):\n        return next(iter([iter(())] * (not self.fresh + self.returned)))\n\n    def length(self, request):",
            "StopIteration",
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
        edited(
            "ties in order by the name",
            "    def length(self, request):",
            "    def order(self, running):\n        running.sort(key=lambda one: (one.arrival_time, one.request_id))\n\n    def length(self, request):",
            "requests that are equal in it keep their order",
        ),
        edited(
            "pop takes the first",
            "        return super().pop()",
            "        return (self.returned or self.fresh).pop(0)",
            "patient_queue: example",
        ),
        edited(
            "changes a request",
            "    def peek(self):",
            "    def add(self, request):\n        super().add(request)\n        request.priority = 1\n\n    def peek(self):",
            "must not change a request",
        ),
    ],
    "fair_queue": [
        edited(
            "notes the share of a stranger",
            "self.shares.get(request.user, 1.0)",
            "self.shares.setdefault(request.user, 1.0)",
            "Do not change `shares`",
        ),
        edited("shows aborted ones", "self.returned if not request.is_finished]", "self.returned]", "There are:"),
    ],
    "make_way": [
        edited("arrivals in whole seconds", "pair[1][2], pair[0]", "int(pair[1][2]), pair[0]", "make_way: "),
    ],
    "beat_it": [
        edited(
            "pretends that a request has just arrived",
            "    def peek(self):",
            "    def add(self, request):\n        super().add(request)\n        request.arrival_time = self.clock() + 1\n\n    def peek(self):",
            "must not change a request",
        ),
        edited(
            "pretends so behind what a queue may see",
            "    def peek(self):",
            "    def add(self, request):\n        super().add(request)\n        request._request.arrival_time = self.clock() + 1\n\n    def peek(self):",
            "may not read '_request'",
        ),
        edited(
            "pretends so by a copy",
            "    def peek(self):",
            "    def add(self, request):\n        super().add(__import__('copy').copy(request))\n\n    def peek(self):",
            "must not copy a request",
        ),
        edited(
            "reads the prompt",
            "    def peek(self):",
            "    def add(self, request):\n        super().add(request)\n        sum(request.prompt_token_ids)\n\n    def peek(self):",
            "may not read 'prompt_token_ids'",
        ),
    ],
}
