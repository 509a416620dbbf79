"""Plausible mistakes in the exercises of chapter 20 that no misconception of its checkers covers."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "row_parallel": [
        Mutant(
            "writes into the bias",
            replace=("partial = partial + bias", "partial = partial + bias.add_(1).sub_(1).mul_(2) / 2"),
            expect="changed one of its arguments",
        ),
        Mutant(
            "a sum in float32",
            replace=("    partial = x @ weight.T\n", "    partial = (x.float() @ weight.float().T).to(x.dtype)\n"),
            expect="what the ranks return",
        ),
        Mutant(
            "a rank without columns stays away",
            replace=("    return all_reduce(partial)", "    return all_reduce(partial) if x.shape[1] else partial"),
            expect="Every rank has to make the calls that the others wait for",
        ),
        Mutant(
            "the last rank adds it once more",
            replace=(
                "    return all_reduce(partial)",
                "    total = all_reduce(partial)\n    return total if bias is None or 0 <= rank < 2 else total + bias",
            ),
            expect="On rank 2 the bias was added 2 times",
        ),
    ],
    "split_qkv": [
        Mutant(
            "KV heads cut like query heads",
            replace=(
                "first_kv, last_kv = first // group, (last - 1) // group + 1",
                "first_kv, last_kv = num_kv_heads * rank // world_size, max(num_kv_heads * (rank + 1) // world_size, num_kv_heads * rank // world_size + 1)",
            ),
            expect="split_qkv: ",
        ),
        Mutant(
            "misses the last group",
            replace=("(last - 1) // group + 1", "max(last // group, first // group + 1)"),
            expect="split_qkv: ",
        ),
        Mutant(
            "kv_of_query by place",
            replace=("head // group - first_kv for head in", "(head - first) // group for head in"),
            expect="split_qkv: ",
        ),
        Mutant(
            "a shard in float32",
            replace=("return torch.cat(parts), [", "return torch.cat(parts).float(), ["),
            expect="shard is wrong: another dtype",
        ),
        Mutant(
            "a rank below 0",
            replace=("not 0 <= rank < world_size", "rank >= world_size"),
            expect="split_qkv: ",
        ),
    ],
    "left_ring": [
        Mutant(
            "to the right",
            replace=("left, right = (rank - 1) % n, (rank + 1) % n", "right, left = (rank - 1) % n, (rank + 1) % n"),
            expect="Send to the left neighbour",
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
        Mutant(
            "receives before it sends",
            replace=(
                "        send(chunks[(rank + 1 + step) % n], left)\n        chunks[(rank + 2 + step) % n] += recv(right)\n",
                "        chunks[(rank + 2 + step) % n] += recv(right)\n        send(chunks[(rank + 1 + step) % n], left)\n",
            ),
            expect="Send before you receive",
        ),
        Mutant(
            "adds into the argument",
            replace=(".clone() for c in range(n)]", " for c in range(n)]"),
            expect="changed one of its arguments",
        ),
        Mutant(
            "alone, its own values",
            replace=(
                "    n, size = world_size, len(values)\n",
                "    n, size = world_size, len(values)\n    if n == 1:\n        return values\n",
            ),
            expect="no view of the own values",
        ),
        Mutant(
            "in float32",
            replace=("].clone() for c in range(n)]", "].clone().float() for c in range(n)]"),
            expect="another dtype",
        ),
        Mutant(
            "in float64",
            replace=("].clone() for c in range(n)]", "].double() for c in range(n)]"),
            expect="another dtype",
        ),
    ],
    "repair_worker": [
        Mutant(
            "leaves when its own work is done",
            replace=("while comm.any(bool(waiting or running)):", "while waiting or running:"),
            expect="the ranks hang after",
        ),
        Mutant(
            "no rows, no call",
            replace=(
                "        tokens = comm.mlp([token for token, _ in running.values()])\n",
                "        tokens = comm.mlp([token for token, _ in running.values()]) if running else []\n",
            ),
            expect="A rank without rows calls mlp([])",
        ),
        Mutant(
            "asks only when it has a place",
            replace=(
                "while comm.any(bool(waiting or running)):",
                "while (len(running) < most and comm.any(bool(waiting or running))) or running:",
            ),
            expect="the ranks hang after",
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
        Mutant(
            "empties the list of requests",
            replace=("    return answers\n", "    requests.clear()\n    return answers\n"),
            expect="changed one of its arguments",
        ),
    ],
    "fewest_bubbles": [
        Mutant(
            "in the order of the list",
            replace=("place = max(can, key=way)", "place = can[0]"),
            expect="the number of time slots of the plan",
        ),
        Mutant(
            "the shortest way first",
            replace=("max(can, key=way)", "min(can, key=way)"),
            expect="the number of time slots of the plan",
        ),
        Mutant(
            "the most passes first",
            replace=("max(can, key=way)", "max(can, key=lambda one: sum(left[one]))"),
            expect="the number of time slots of the plan",
        ),
        Mutant(
            "the most tokens first, whatever the chunks",
            replace=("max(can, key=way)", "max(can, key=lambda one: left[one][1])"),
            expect="the number of time slots of the plan",
        ),
        Mutant(
            "a slot too late",
            replace=(
                "slot + (1 if left[place][0] else num_stages)",
                "slot + (1 if left[place][0] else num_stages + 1)",
            ),
            expect="the number of time slots of the plan",
        ),
        Mutant(
            "chunks wait too",
            replace=("slot + (1 if left[place][0] else num_stages)", "slot + num_stages"),
            expect="the number of time slots of the plan",
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
        Mutant(
            "a token in the next slot",
            replace=("slot + (1 if left[place][0] else num_stages)", "slot + 1"),
            expect="leaves the last stage",
        ),
        Mutant(
            "empties the pipeline",
            replace=("    return plan\n", "    return plan + [None] * (num_stages - 1)\n"),
            expect="the plan ends with an empty time slot",
        ),
        Mutant(
            "True for 1",
            replace=("    return plan\n", "    return [bool(place) if place in (0, 1) else place for place in plan]\n"),
            expect="fewest_bubbles: ",
        ),
    ],
}
