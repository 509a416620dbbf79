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
            "running rows do not take from the budget",
            replace=("            budget -= count\n            index += 1\n", "            index += 1\n"),
            expect="Every row counts against the budget",
        ),
        Mutant(
            "those who join do not take from the budget",
            replace=(
                "RequestStatus.RUNNING\n            self.add_row(output, request, count)\n            budget -= count\n",
                "RequestStatus.RUNNING\n            self.add_row(output, request, count)\n",
            ),
            expect="Every row counts against the budget",
        ),
        Mutant(
            "waiting before running",
            replace=(
                """        self.serve_waiting(output, self.serve_running(output, self.max_num_batched_tokens))
""",
                """        old = len(self.running)
        self.serve_waiting(output, self.max_num_batched_tokens)
        self.running, joined = self.running[:old], self.running[old:]
        self.serve_running(output, self.max_num_batched_tokens - sum(row.num_tokens for row in output.rows))
        self.running += joined
""",
            ),
            expect="Running requests first",
        ),
        Mutant(
            "num_computed_tokens stands still",
            replace=("            request.num_computed_tokens = row.start + row.num_tokens\n", ""),
            expect="num_computed_tokens is wrong",
        ),
        Mutant(
            "num_computed_tokens moves only where a token is sampled",
            replace=(
                "            request.num_computed_tokens = row.start + row.num_tokens\n",
                "            request.num_computed_tokens = row.start + row.num_tokens if row.samples else row.start\n",
            ),
            expect="update() sets it to the end of the row",
        ),
        Mutant(
            "a finished request keeps running",
            replace=("for queue in (self.running, self.waiting):", "for queue in (self.waiting,):"),
            expect="without those that finished",
        ),
        Mutant(
            "an aborted request keeps waiting",
            replace=("for queue in (self.running, self.waiting):", "for queue in (self.running,):"),
            expect="a request that joins, or is aborted, leaves",
        ),
        Mutant(
            "a finished request keeps its blocks",
            replace=(
                "RequestStatus.FINISHED, reason\n        self.kv_cache.free(request)\n",
                "RequestStatus.FINISHED, reason\n",
            ),
            expect="Call kv_cache.free(request)",
        ),
        Mutant(
            "a finished request stays known",
            replace=("        del self.requests[request.request_id]\n", ""),
            expect="`requests` has every request that has not finished",
        ),
        Mutant(
            "finishes twice",
            replace=("        if request.is_finished:\n            return\n", ""),
            expect="one that has finished stays as it is",
        ),
        Mutant(
            "a preempted request is lost",
            replace=("        self.waiting.insert(0, victim)\n", ""),
            expect="a preempted request goes to the front",
        ),
        Mutant(
            "a preempted request goes to the end",
            replace=("self.waiting.insert(0, victim)", "self.waiting.append(victim)"),
            expect="a preempted request goes to the front",
        ),
        Mutant(
            "a preempted request keeps its blocks",
            replace=(
                "        self.kv_cache.free(victim)\n",
                "        if len(self.running) == 0:\n            self.kv_cache.free(victim)\n",
            ),
            expect="scheduler: edges",
        ),
        Mutant(
            "a preempted request thinks its tokens are computed",
            replace=(
                "victim.status, victim.num_computed_tokens = RequestStatus.PREEMPTED, 0",
                "victim.status = RequestStatus.PREEMPTED",
            ),
            expect="a preemption sets it to 0",
        ),
        Mutant(
            "a preempted request is called waiting",
            replace=("= RequestStatus.PREEMPTED, 0", "= RequestStatus.WAITING, 0"),
            expect="status",
        ),
        Mutant(
            "admits while it preempts",
            replace=("while self.waiting and not output.preempted and budget", "while self.waiting and budget"),
            expect="In a step that preempts, no request joins",
        ),
        Mutant(
            "preempts the first",
            replace=("self.preempt(self.running[-1], output)", "self.preempt(self.running[0], output)"),
            expect="the last of `running` goes",
        ),
        Mutant(
            "preempts whoever asks",
            replace=("self.preempt(self.running[-1], output)", "self.preempt(request, output)"),
            expect="the last of `running` goes",
        ),
        Mutant(
            "goes on after it preempted itself",
            replace=("            if request not in self.running:\n                break\n", ""),
            expect="perhaps the one that needed the block",
        ),
        Mutant(
            "one request too many",
            replace=("len(self.running) < self.max_num_seqs", "len(self.running) <= self.max_num_seqs"),
            expect="while fewer than max_num_seqs run",
        ),
        Mutant(
            "a piece of a prompt samples",
            replace=("samples = int(start + count == request.num_tokens)", "samples = 1"),
            expect="only where the row reaches the last token",
        ),
        Mutant(
            "samples a token too early",
            replace=(
                "samples = int(start + count == request.num_tokens)",
                "samples = int(start + count >= request.num_prompt_tokens)",
            ),
            expect="only where the row reaches the last token",
        ),
        Mutant(
            "never cuts a prompt",
            replace=(
                "            if not self.kv_cache.allocate_slots(request, count, computed):",
                "            if count < request.num_tokens - computed.num_tokens or not self.kv_cache.allocate_slots(request, count, computed):",
            ),
            expect="the list of (request, tokens)",
        ),
        Mutant(
            "first come, first served",
            replace=(
                "return min(self.waiting, key=lambda request: request.num_prompt_tokens)",
                "return self.waiting[0]",
            ),
            expect="else the shortest prompt",
        ),
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
        Mutant(
            "ties to the last",
            replace=("return min(self.waiting, key", "return min(self.waiting[::-1], key"),
            expect="ties to the one nearest to the front",
        ),
        Mutant(
            "a short prompt overtakes the preempted",
            replace=(
                "        if self.waiting[0].status is RequestStatus.PREEMPTED:\n            return self.waiting[0]\n",
                "",
            ),
            expect="a preempted request at the front of the queue",
        ),
        Mutant(
            "who does not fit is overtaken",
            replace=(
                "            request = self.next_to_join()\n",
                """            line = sorted(self.waiting, key=lambda r: (r.status is not RequestStatus.PREEMPTED, r.num_prompt_tokens))
            room = self.kv_cache.pool.num_free * self.kv_cache.block_size
            request = next((r for r in line if min(r.num_tokens, budget) <= room), line[0])
""",
            ),
            expect="no other request overtakes it",
        ),
        Mutant(
            "computes again what the cache knows",
            replace=(
                "request.num_computed_tokens, request.status = computed.num_tokens, RequestStatus.RUNNING",
                "request.num_computed_tokens, request.status = 0, RequestStatus.RUNNING",
            ),
            expect="scheduler: edges",
        ),
        Mutant(
            "forgets computed",
            replace=(
                "self.kv_cache.allocate_slots(request, count, computed)",
                "self.kv_cache.allocate_slots(request, count)",
            ),
            expect="pass `computed` to allocate_slots, too",
        ),
        Mutant(
            "does not say who runs",
            replace=(
                "request.num_computed_tokens, request.status = computed.num_tokens, RequestStatus.RUNNING",
                "request.num_computed_tokens = computed.num_tokens",
            ),
            expect="the method that moves a request sets its status",
        ),
        Mutant(
            "gives a token to an aborted request",
            replace=("            if request is None:\n                continue\n", ""),
            expect="may have been aborted between schedule and update",
        ),
        Mutant(
            "does not tell the cache",
            replace=("            self.kv_cache.cache_blocks(request)\n", ""),
            expect="scheduler: edges",
        ),
        Mutant(
            "moves blocks",
            replace=(
                "        output = SchedulerOutput()\n",
                "        output = SchedulerOutput()\n        output.moves = [(0, 1)]\n",
            ),
            expect="Leave moves as it is",
        ),
        Mutant(
            "pairs as lists",
            replace=("added.append((request, token_id))", "added.append([request, token_id])"),
            expect="must be a tuple",
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
