"""Plausible mistakes in the exercises of chapter 20 that no misconception of its checkers covers."""

from minillm.book.proofs import Mutant, edited

MUTANTS = {
    "row_parallel": [
        edited(
            "writes into the bias",
            "partial = partial + bias",
            "partial = partial + bias.add_(1).sub_(1).mul_(2) / 2",
            "changed one of its arguments",
        ),
        edited(
            "a sum in float32",
            "    partial = x @ weight.T\n",
            "    partial = (x.float() @ weight.float().T).to(x.dtype)\n",
            "what the ranks return",
        ),
        edited(
            "a rank without columns stays away",
            "    return all_reduce(partial)",
            "    return all_reduce(partial) if x.shape[1] else partial",
            "Every rank has to make the calls that the others wait for",
        ),
        edited(
            "the last rank adds it once more",
            "    return all_reduce(partial)",
            "    total = all_reduce(partial)\n    return total if bias is None or 0 <= rank < 2 else total + bias",
            "On rank 2 the bias was added 2 times",
        ),
    ],
    "split_qkv": [
        edited(
            "KV heads cut like query heads",
            "first_kv, last_kv = first // group, (last - 1) // group + 1",
            "first_kv, last_kv = num_kv_heads * rank // world_size, max(num_kv_heads * (rank + 1) // world_size, num_kv_heads * rank // world_size + 1)",
            "split_qkv: ",
        ),
        edited(
            "misses the last group", "(last - 1) // group + 1", "max(last // group, first // group + 1)", "split_qkv: "
        ),
        edited(
            "kv_of_query by place",
            "head // group - first_kv for head in",
            "(head - first) // group for head in",
            "split_qkv: ",
        ),
        edited(
            "a shard in float32",
            "return torch.cat(parts), [",
            "return torch.cat(parts).float(), [",
            "shard is wrong: another dtype",
        ),
        edited("a rank below 0", "not 0 <= rank < world_size", "rank >= world_size", "split_qkv: "),
    ],
    "left_ring": [
        edited(
            "to the right",
            "left, right = (rank - 1) % n, (rank + 1) % n",
            "right, left = (rank - 1) % n, (rank + 1) % n",
            "Send to the left neighbour",
        ),
        Mutant(
            "everything to the left, then everything again",
            source="""
def left_ring(rank, world_size, values, send, recv):
    total, left, right = values.clone(), (rank - 1) % world_size, (rank + 1) % world_size
    if world_size == 1:
        return total
    if rank != world_size - 1:
        total += recv(right)
    if rank:
        send(total, left)
        total = recv(right)
    else:
        send(total, left)
    if rank > 1:
        send(total, left)
    return total
""",
            expect="left_ring: ",
        ),
        edited(
            "receives before it sends",
            "        send(chunks[(rank + 1 + step) % n], left)\n        chunks[(rank + 2 + step) % n] += recv(right)\n",
            "        chunks[(rank + 2 + step) % n] += recv(right)\n        send(chunks[(rank + 1 + step) % n], left)\n",
            "Send before you receive",
        ),
        edited(
            "adds into the argument",
            ".clone() for c in range(n)]",
            " for c in range(n)]",
            "changed one of its arguments",
        ),
        edited(
            "alone, its own values",
            "    n, size = world_size, len(values)\n",
            "    n, size = world_size, len(values)\n    if n == 1:\n        return values\n",
            "no view of the own values",
        ),
        edited("in float32", "].clone() for c in range(n)]", "].clone().float() for c in range(n)]", "another dtype"),
        edited("in float64", "].clone() for c in range(n)]", "].double() for c in range(n)]", "another dtype"),
    ],
    "repair_worker": [
        edited(
            "leaves when its own work is done",
            "while comm.any(bool(waiting or running)):",
            "while waiting or running:",
            "the ranks hang after",
        ),
        edited(
            "no rows, no call",
            "        tokens = comm.mlp([token for token, _ in running.values()])\n",
            "        tokens = comm.mlp([token for token, _ in running.values()]) if running else []\n",
            "A rank without rows calls mlp([])",
        ),
        edited(
            "asks only when it has a place",
            "while comm.any(bool(waiting or running)):",
            "while (len(running) < most and comm.any(bool(waiting or running))) or running:",
            "the ranks hang after",
        ),
        Mutant(
            "a bad request takes a step",
            source="""
def repaired_worker(comm, requests, most):
    answers, waiting, running = {name: [] for name, _, _ in requests}, deque(requests), {}
    while comm.any(bool(waiting or running)):
        while waiting and len(running) < most:
            name, token, count = waiting.popleft()
            running[name] = token, count
        bad = [name for name, (token, _) in running.items() if not 0 <= token < VOCABULARY]
        good = {name: one for name, one in running.items() if name not in bad}
        tokens = comm.mlp([token for token, _ in good.values()])
        for name in bad:
            answers[name] = None
            del running[name]
        for (name, (_, left)), token in zip(good.items(), tokens):
            answers[name].append(token)
            running[name] = token, left - 1
            if left == 1:
                del running[name]
    return answers
""",
            expect="costs no step",
        ),
        edited(
            "empties the list of requests",
            "    return answers\n",
            "    requests.clear()\n    return answers\n",
            "changed one of its arguments",
        ),
    ],
    "fewest_bubbles": [
        edited(
            "in the order of the list",
            "place = max(can, key=way)",
            "place = can[0]",
            "the number of time slots of the plan",
        ),
        edited(
            "the shortest way first", "max(can, key=way)", "min(can, key=way)", "the number of time slots of the plan"
        ),
        edited(
            "the most passes first",
            "max(can, key=way)",
            "max(can, key=lambda one: sum(left[one]))",
            "the number of time slots of the plan",
        ),
        edited(
            "the most tokens first, whatever the chunks",
            "max(can, key=way)",
            "max(can, key=lambda one: left[one][1])",
            "the number of time slots of the plan",
        ),
        edited(
            "a slot too late",
            "slot + (1 if left[place][0] else num_stages)",
            "slot + (1 if left[place][0] else num_stages + 1)",
            "the number of time slots of the plan",
        ),
        edited(
            "chunks wait too",
            "slot + (1 if left[place][0] else num_stages)",
            "slot + num_stages",
            "the number of time slots of the plan",
        ),
        Mutant(
            "a request at a time",
            source="""
def fewest_bubbles(requests, num_stages):
    plan = []
    for place, (chunks, tokens) in enumerate(requests):
        plan += [place] * chunks
        for _ in range(tokens):
            plan += [None] * (num_stages - 1) + [place]
    return plan
""",
            expect="the number of time slots of the plan",
        ),
        edited(
            "a token in the next slot",
            "slot + (1 if left[place][0] else num_stages)",
            "slot + 1",
            "leaves the last stage",
        ),
        edited(
            "empties the pipeline",
            "    return plan\n",
            "    return plan + [None] * (num_stages - 1)\n",
            "the plan ends with an empty time slot",
        ),
        edited(
            "True for 1",
            "    return plan\n",
            "    return [bool(place) if place in (0, 1) else place for place in plan]\n",
            "fewest_bubbles: ",
        ),
    ],
}
