"""Plausible mistakes in the exercises of chapter 05 that no misconception of its checkers covers."""

from minillm.book.proofs import Mutant, edited

MUTANTS = {
    "stop_conditions": [
        edited(
            "one token too many",
            "number == params.max_tokens",
            "number > params.max_tokens",
            "the list of kept tokens is wrong",
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
        edited(
            "the kept tokens as a tuple",
            "    return kept, None, None",
            "    return (*kept,), None, None",
            "a tuple, not a list",
        ),
        edited(
            "NumPy's number for a token",
            'return kept, "stop", token',
            'return kept, "stop", __import__("numpy").int64(token)',
            "an int64, not an int",
        ),
        edited(
            "cuts its argument",
            'return kept, "length", None',
            'del new_token_ids[len(kept):]; return kept, "length", None',
            "changed one of its arguments",
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
        edited("pairs as lists", "return joined", "return [list(pair) for pair in joined]", "a list, not a tuple"),
        edited("floats", "joined.append((name, count))", "joined.append((name, float(count)))", "a float, not an int"),
    ],
    "scheduler": [
        edited(
            "the fewest tokens left to compute",
            "return min(self.waiting, key=lambda request: request.num_prompt_tokens)",
            "left = lambda one: one.num_tokens - self.kv_cache.get_computed_blocks(one).num_tokens\n        return min(self.waiting, key=left)",
            "scheduler: edges: the list of (request, tokens)",
        ),
        edited(
            "a row that holds its request",
            "output.rows.append(ScheduledRequest(request.request_id, start, count, blocks, samples))",
            "values = {'request_id': request.request_id, 'start': start, 'num_tokens': count, 'block_ids': blocks}\n        output.rows.append(__import__('types').SimpleNamespace(**values, samples=samples, request=request))",
            "must be a ScheduledRequest; got a SimpleNamespace",
        ),
        edited(
            "a request among the draft tokens of a row",
            "start, count, blocks, samples))",
            "start, count, blocks, samples, (request,)))",
            "A step is plain data",
        ),
        edited(
            "a step that holds the requests",
            "        output = SchedulerOutput()\n",
            "        output = SchedulerOutput()\n        output.requests = self.requests\n",
            "A step is plain data",
        ),
        edited(
            "rows as a tuple",
            "        return output",
            "        output.rows = (*output.rows,)\n        return output",
            "A list of ScheduledRequest",
        ),
        edited(
            "the engine's scheduler, looked up by its name",
            "        output = SchedulerOutput()\n",
            "        output = __import__('minillm.engine.scheduler', fromlist=['_']).Scheduler and SchedulerOutput()\n",
            "That is the part to write yourself",
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
        edited(
            "writes on the job",
            "            preempted[-1].num_computed_tokens = 0\n",
            "            preempted[-1].num_computed_tokens = 0\n            preempted[-1].was_preempted = True\n",
            "has no attribute 'was_preempted'",
        ),
        edited(
            "floats",
            "plan[job.name] = min(job.num_tokens, budget)",
            "plan[job.name] = float(min(job.num_tokens, budget))",
            "a float, not an int",
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
        edited(
            "multiplies in floats",
            "total_held + number * left",
            "int(total_held + float(number) * left)",
            "enough_memory: edges: the peak is wrong",
        ),
        edited("returns a float", "return peak", "return float(peak)", "a float, not an int"),
        edited(
            "sorts its argument",
            "    return peak",
            "    requests.sort()\n    return peak",
            "changed one of its arguments",
        ),
    ],
}
