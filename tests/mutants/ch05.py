"""Plausible mistakes in the exercises of chapter 05 that no misconception of its checkers covers."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "stop_conditions": [
        Mutant(
            "one token too many",
            replace=("number == params.max_tokens", "number > params.max_tokens"),
            expect="the list of kept tokens is wrong",
        ),
        Mutant(
            "looks at the last token only",
            source="""
def take_tokens(params, eos_id, num_outputs, new_token_ids):
    number, token = num_outputs + len(new_token_ids), (new_token_ids or [None])[-1]
    if number >= params.min_tokens and token is not None and token == eos_id and not params.ignore_eos:
        return list(new_token_ids), "stop", None
    if number >= params.min_tokens and token in params.stop_token_ids:
        return list(new_token_ids), "stop", token
    if number >= params.max_tokens:
        return list(new_token_ids), "length", None
    return list(new_token_ids), None, None
""",
            expect="the list of kept tokens is wrong",
        ),
        Mutant(
            "the kept tokens as a tuple",
            replace=("    return kept, None, None", "    return (*kept,), None, None"),
            expect="a tuple, not a list",
        ),
        Mutant(
            "NumPy's number for a token",
            replace=('return kept, "stop", token', 'return kept, "stop", __import__("numpy").int64(token)'),
            expect="an int64, not an int",
        ),
        Mutant(
            "cuts its argument",
            replace=('return kept, "length", None', 'del new_token_ids[len(kept):]; return kept, "length", None'),
            expect="changed one of its arguments",
        ),
    ],
    "admission": [
        Mutant(
            "empties the queue",
            source="""
def admit(waiting, budget, free_slots, min_chunk):
    joined = []
    while waiting and len(joined) < free_slots:
        name, num_tokens = waiting.pop(0)
        count = num_tokens if num_tokens <= budget else min(budget, num_tokens - min_chunk)
        if count == num_tokens or count >= min_chunk:
            joined.append((name, count))
            budget -= count
    return joined
""",
            expect="changed one of its arguments",
        ),
        Mutant(
            "pairs as lists",
            replace=("return joined", "return [list(pair) for pair in joined]"),
            expect="a list, not a tuple",
        ),
        Mutant(
            "floats",
            replace=("joined.append((name, count))", "joined.append((name, float(count)))"),
            expect="a float, not an int",
        ),
    ],
    "scheduler": [
        Mutant(
            "the fewest tokens left to compute",
            replace=(
                "return min(self.waiting, key=lambda request: request.num_prompt_tokens)",
                "left = lambda one: one.num_tokens - self.kv_cache.get_computed_blocks(one).num_tokens\n        return min(self.waiting, key=left)",
            ),
            expect="scheduler: edges: the list of (request, tokens)",
        ),
        Mutant(
            "a row that holds its request",
            replace=(
                "output.rows.append(ScheduledRequest(request.request_id, start, count, blocks, samples))",
                "values = {'request_id': request.request_id, 'start': start, 'num_tokens': count, 'block_ids': blocks}\n        output.rows.append(__import__('types').SimpleNamespace(**values, samples=samples, request=request))",
            ),
            expect="must be a ScheduledRequest; got a SimpleNamespace",
        ),
        Mutant(
            "a request among the draft tokens of a row",
            replace=("start, count, blocks, samples))", "start, count, blocks, samples, (request,)))"),
            expect="A step is plain data",
        ),
        Mutant(
            "a step that holds the requests",
            replace=(
                "        output = SchedulerOutput()\n",
                "        output = SchedulerOutput()\n        output.requests = self.requests\n",
            ),
            expect="A step is plain data",
        ),
        Mutant(
            "rows as a tuple",
            replace=(
                "        return output",
                "        output.rows = (*output.rows,)\n        return output",
            ),
            expect="A list of ScheduledRequest",
        ),
        Mutant(
            "the engine's scheduler, looked up by its name",
            replace=(
                "        output = SchedulerOutput()\n",
                "        output = __import__('minillm.engine.scheduler', fromlist=['_']).Scheduler and SchedulerOutput()\n",
            ),
            expect="That is the part to write yourself",
        ),
    ],
    "repair_scheduler": [
        Mutant(
            "the broken one",
            source="""
class RepairedScheduler(BrokenScheduler):
    pass
""",
            expect="the plan of the step is wrong",
        ),
        Mutant(
            "writes on the job",
            replace=(
                "            preempted[-1].num_computed_tokens = 0\n",
                "            preempted[-1].num_computed_tokens = 0\n            preempted[-1].was_preempted = True\n",
            ),
            expect="has no attribute 'was_preempted'",
        ),
        Mutant(
            "floats",
            replace=(
                "plan[job.name] = min(job.num_tokens, budget)",
                "plan[job.name] = float(min(job.num_tokens, budget))",
            ),
            expect="a float, not an int",
        ),
    ],
    "enough_memory": [
        Mutant(
            "walks through the steps with NumPy",
            source="""
def peak_memory(requests):
    import numpy
    change, count = (numpy.zeros(max((left for _, left in requests), default=0) + 2, dtype=int) for _ in range(2))
    for held, left in requests:
        change[1], change[left + 1] = change[1] + held, change[left + 1] - held
        count[1], count[left + 1] = count[1] + 1, count[left + 1] - 1
    return int((change.cumsum() + count.cumsum() * numpy.arange(len(change))).max())
""",
            expect="raised",
        ),
        Mutant(
            "adds up all requests for each",
            source="""
def peak_memory(requests):
    return max((sum(held + last for held, left in requests if left >= last) for _, last in requests), default=0)
""",
            expect="in one pass over them",
        ),
        Mutant(
            "multiplies in floats",
            replace=("total_held + number * left", "int(total_held + float(number) * left)"),
            expect="enough_memory: edges: the peak is wrong",
        ),
        Mutant("returns a float", replace=("return peak", "return float(peak)"), expect="a float, not an int"),
        Mutant(
            "sorts its argument",
            replace=("    return peak", "    requests.sort()\n    return peak"),
            expect="changed one of its arguments",
        ),
    ],
}
