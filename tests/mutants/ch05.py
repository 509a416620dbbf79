"""Plausible mistakes in the exercises of chapter 05: every one of them must fail its checks."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "stop_conditions": [
        Mutant(
            "one token too many",
            replace=("number == params.max_tokens", "number > params.max_tokens"),
            expect="the fifth token is the last",
        ),
        Mutant(
            "counts from zero",
            replace=("enumerate(new_token_ids, num_outputs + 1)", "enumerate(new_token_ids, num_outputs)"),
            expect="the fifth token is the last",
        ),
        Mutant(
            "min_tokens one too late",
            replace=("number >= params.min_tokens", "number > params.min_tokens"),
            expect="min_tokens=3: the second output cannot end it, the third can",
        ),
        Mutant(
            "min_tokens holds for stop tokens only",
            replace=("if may_stop and token == eos_id", "if token == eos_id"),
            expect="min_tokens=3: the first two cannot end it",
        ),
        Mutant(
            "ignores the stop tokens along with the end",
            replace=(
                "if may_stop and token in params.stop_token_ids:",
                "if may_stop and not params.ignore_eos and token in params.stop_token_ids:",
            ),
            expect="ignore_eos, but 2 is a stop token as well",
        ),
        Mutant(
            "the length counts first",
            source="""
def take_tokens(params, eos_id, num_outputs, new_token_ids):
    kept = []
    for number, token in enumerate(new_token_ids, num_outputs + 1):
        kept.append(token)
        if number == params.max_tokens:
            return kept, "length", None
        if number >= params.min_tokens and token == eos_id and not params.ignore_eos:
            return kept, "stop", None
        if number >= params.min_tokens and token in params.stop_token_ids:
            return kept, "stop", token
    return kept, None, None
""",
            expect="the rule that comes first counts",
        ),
        Mutant(
            "a stop token before the model's end",
            source="""
def take_tokens(params, eos_id, num_outputs, new_token_ids):
    kept = []
    for number, token in enumerate(new_token_ids, num_outputs + 1):
        kept.append(token)
        if number >= params.min_tokens and token in params.stop_token_ids:
            return kept, "stop", token
        if number >= params.min_tokens and token == eos_id and not params.ignore_eos:
            return kept, "stop", None
        if number == params.max_tokens:
            return kept, "length", None
    return kept, None, None
""",
            expect="rule 1 comes before rule 2",
        ),
        Mutant(
            "drops the token that ends it",
            replace=('return kept, "stop", token', 'return kept[:-1], "stop", token'),
            expect="7 is a stop token, 11 came after it",
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
            expect="11 came after it",
        ),
    ],
    "admission": [
        Mutant(
            "the budget does not go down",
            replace=("            budget -= count\n", ""),
            expect="What one gets, the next ones do not have",
        ),
        Mutant(
            "forgets the rest",
            replace=("count = min(budget, num_tokens - min_chunk)", "count = budget"),
            expect="is cut into 6 and 1 tokens",
        ),
        Mutant(
            "the piece must be larger than min_chunk",
            replace=("if count < min_chunk:", "if count <= min_chunk:"),
            expect="the largest part that the rule allows",
        ),
        Mutant(
            "the head blocks the queue",
            replace=("                continue\n", "                break\n"),
            expect="the next one has its chance",
        ),
        Mutant(
            "a whole prompt needs min_chunk too",
            replace=("        if count:\n", "        if count >= min_chunk:\n"),
            expect="the list of (name, tokens)",
        ),
        Mutant(
            "one slot too many",
            replace=("len(joined) == free_slots", "len(joined) > free_slots"),
            expect="Every one that is admitted takes a slot",
        ),
        Mutant(
            "exactly the budget is not whole",
            replace=("if num_tokens > budget:", "if num_tokens >= budget:"),
            expect="the list of (name, tokens)",
        ),
        Mutant(
            "never cuts",
            replace=(
                "            count = min(budget, num_tokens - min_chunk)\n            if count < min_chunk:\n                continue\n",
                "            continue\n",
            ),
            expect="all of it, else the largest part",
        ),
        Mutant(
            "shortest first",
            replace=(
                "for name, num_tokens in waiting:",
                "for name, num_tokens in sorted(waiting, key=lambda pair: pair[1]):",
            ),
            expect="Every request in its turn",
        ),
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
    ],
    "scheduler": [
        Mutant(
            "running rows do not take from the budget",
            replace=("            budget -= count\n            index += 1\n", "            index += 1\n"),
            expect="Every row takes its tokens from the budget",
        ),
        Mutant(
            "those who join do not take from the budget",
            replace=(
                "RequestStatus.RUNNING\n            self.add_row(output, request, count)\n            budget -= count\n",
                "RequestStatus.RUNNING\n            self.add_row(output, request, count)\n",
            ),
            expect="Every row takes its tokens from the budget",
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
                "            request.num_computed_tokens = row.start + row.num_tokens if tokens else row.start\n",
            ),
            expect="update() moves it on to the end of the row",
        ),
        Mutant(
            "a finished request keeps running",
            replace=("for queue in (self.running, self.waiting):", "for queue in (self.waiting,):"),
            expect="without those that finished",
        ),
        Mutant(
            "an aborted request keeps waiting",
            replace=("for queue in (self.running, self.waiting):", "for queue in (self.running,):"),
            expect="who is admitted, or aborted, leaves",
        ),
        Mutant(
            "a finished request keeps its blocks",
            replace=(
                "RequestStatus.FINISHED, reason\n        self.kv_cache.free(request)\n",
                "RequestStatus.FINISHED, reason\n",
            ),
            expect="Blocks go back",
        ),
        Mutant(
            "a finished request stays known",
            replace=("        del self.requests[request.request_id]\n", ""),
            expect="`requests` has everybody who has not finished",
        ),
        Mutant(
            "finishes twice",
            replace=("        if request.is_finished:\n            return\n", ""),
            expect="one that has finished already stays as it is",
        ),
        Mutant(
            "a preempted request is lost",
            replace=("        self.waiting.insert(0, victim)\n", ""),
            expect="who is preempted goes to the front",
        ),
        Mutant(
            "a preempted request goes to the end",
            replace=("self.waiting.insert(0, victim)", "self.waiting.append(victim)"),
            expect="who is preempted goes to the front",
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
            expect="While anybody is preempted, nobody is admitted",
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
            expect="perhaps the one that asked",
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
            "ties to the last",
            replace=("return min(self.waiting, key", "return min(self.waiting[::-1], key"),
            expect="ties to who came first",
        ),
        Mutant(
            "a short prompt overtakes the preempted",
            replace=(
                "        if self.waiting[0].status is RequestStatus.PREEMPTED:\n            return self.waiting[0]\n",
                "",
            ),
            expect="a preempted one at the head of the queue",
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
            expect="nobody overtakes",
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
            expect="call of allocate_slots gets `computed` too",
        ),
        Mutant(
            "does not say who runs",
            replace=(
                "request.num_computed_tokens, request.status = computed.num_tokens, RequestStatus.RUNNING",
                "request.num_computed_tokens = computed.num_tokens",
            ),
            expect="Who is admitted becomes RUNNING",
        ),
        Mutant(
            "gives a token to an aborted request",
            replace=("            if request.is_finished:\n                continue\n", ""),
            expect="may have been aborted between schedule and update",
        ),
        Mutant(
            "does not tell the cache",
            replace=("            self.kv_cache.cache_blocks(request)\n", ""),
            expect="scheduler: edges",
        ),
    ],
    "repair_scheduler": [
        Mutant(
            "still whole or not at all",
            replace=("(is_new and job.num_tokens > budget)", "job.num_tokens > budget"),
            expect="one that was preempted may be cut",
        ),
        Mutant(
            "lets the preempted over the budget",
            replace=("plan[job.name] = min(job.num_tokens, budget)", "plan[job.name] = job.num_tokens"),
            expect="The budget holds in every step",
        ),
        Mutant(
            "cuts new prompts too",
            replace=("(is_new and job.num_tokens > budget)", "False"),
            expect="new jobs whole or not at all",
        ),
        Mutant(
            "one token for each that runs",
            replace=("plan[job.name] = min(job.num_tokens - job.num_computed_tokens, budget)", "plan[job.name] = 1"),
            expect="Running jobs first, each what it lacks",
        ),
        Mutant(
            "a token after every piece",
            replace=(
                "            if job.num_computed_tokens == job.num_tokens:\n",
                "            if job.name in plan:\n",
            ),
            expect="only there",
        ),
        Mutant(
            "keeps what was computed",
            replace=("            preempted[-1].num_computed_tokens = 0\n", ""),
            expect="repair_scheduler: e",
        ),
        Mutant(
            "lets others overtake",
            replace=(
                "                break\n",
                "                self.waiting.append(self.waiting.pop(0))\n                if all(held + j.num_tokens > self.memory or j.num_tokens > budget for j in self.waiting):\n                    break\n                continue\n",
            ),
            expect="repair_scheduler",
        ),
        Mutant(
            "gives up the job that does not fit",
            replace=("                break\n", "                self.waiting.pop(0)\n                continue\n"),
            expect="nobody is lost, and",
        ),
        Mutant(
            "joins with nothing",
            replace=("len(self.running) < self.max_num_seqs and budget:", "len(self.running) < self.max_num_seqs:"),
            expect="Nobody joins without a token",
        ),
        Mutant(
            "the broken one",
            source="""
class RepairedScheduler(BrokenScheduler):
    pass
""",
            expect="the plan is wrong",
        ),
    ],
    "enough_memory": [
        Mutant(
            "adds up the largest sizes",
            source="""
def peak_memory(requests):
    return sum(held + left for held, left in requests)
""",
            expect="afterwards the second one alone",
        ),
        Mutant(
            "the first step only",
            source="""
def peak_memory(requests):
    return sum(held + 1 for held, left in requests)
""",
            expect="the peak of (10, 2) and (4, 5)",
        ),
        Mutant(
            "gives back a step too early",
            replace=(
                "peak = max(peak, total_held + number * left)",
                "peak = max(peak, total_held + number * (left - 1))",
            ),
            expect="enough_memory: example",
        ),
        Mutant(
            "shortest first",
            replace=("key=lambda request: -request[1]", "key=lambda request: request[1]"),
            expect="the peak of",
        ),
        Mutant(
            "the end only",
            replace=("peak = max(peak, total_held + number * left)", "peak = total_held + number * left"),
            expect="Memory grows until somebody finishes",
        ),
        Mutant(
            "walks",
            source="""
def peak_memory(requests):
    longest = max((left for _, left in requests), default=0)
    return max((sum(held + t for held, left in requests if left >= t) for t in range(1, longest + 1)), default=0)
""",
            expect="you go through the requests again for every step",
        ),
    ],
}
