"""Plausible mistakes in the exercises of chapter 20: every one of them must fail its checks."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "row_parallel": [
        Mutant(
            "every rank adds the bias",
            replace=("if bias is not None and rank == 0:", "if bias is not None:"),
            expect="The bias was added 2 times",
        ),
        Mutant(
            "the bias in equal parts",
            replace=(
                "    if bias is not None and rank == 0:\n        partial = partial + bias\n",
                "    if bias is not None:\n        partial = partial + bias / world_size\n",
            ),
            expect="The bias was added",
        ),
        Mutant("no bias", replace=("partial = partial + bias", "pass"), expect="The bias was added 0 times"),
        Mutant(
            "a second all-reduce for the bias",
            replace=(
                "    if bias is not None and rank == 0:\n        partial = partial + bias\n    return all_reduce(partial)",
                "    if bias is None:\n        return all_reduce(partial)\n    return all_reduce(partial) + all_reduce(bias * (rank == 0))",
            ),
            expect="the number of all_reduce calls of rank 0",
        ),
        Mutant(
            "writes into the bias",
            replace=("partial = partial + bias", "partial = partial + bias.add_(1).sub_(1).mul_(2) / 2"),
            expect="changed one of its arguments",
        ),
        Mutant(
            "a sum in float32",
            replace=("    partial = x @ weight.T\n", "    partial = (x.float() @ weight.float().T).to(x.dtype)\n"),
            expect="what rank 0 returns",
        ),
        Mutant(
            "a rank without columns stays away",
            replace=("    return all_reduce(partial)", "    return all_reduce(partial) if x.shape[1] else partial"),
            expect="Every rank has to make the calls that the others wait for",
        ),
        Mutant(
            "only rank 0 returns the sum",
            replace=(
                "    return all_reduce(partial)",
                "    total = all_reduce(partial)\n    return total if rank == 0 else partial",
            ),
            expect="what rank 1 returns",
        ),
        Mutant(
            "the last rank adds it once more",
            replace=(
                "    return all_reduce(partial)",
                "    total = all_reduce(partial)\n    return total if bias is None or 0 <= rank < 2 else total + bias",
            ),
            expect="what rank 2 returns",
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
            expect="the result of rank 0",
        ),
        Mutant(
            "a mirrored ring to the right",
            source="""
def left_ring(rank, world_size, values, send, recv):
    n, size = world_size, len(values)
    chunks = [values[size * c // n : size * (c + 1) // n].clone() for c in range(n)]
    for step in range(n - 1):
        send(chunks[(rank - 1 - step) % n], (rank + 1) % n)
        chunks[(rank - 2 - step) % n] += recv((rank - 1) % n)
    for step in range(n - 1):
        send(chunks[(rank - step) % n], (rank + 1) % n)
        chunks[(rank - 1 - step) % n] = recv((rank - 1) % n)
    return torch.cat(chunks)
""",
            expect="Send to the left neighbour",
        ),
        Mutant(
            "replaces in the first half",
            replace=("chunks[(rank + 2 + step) % n] += recv(right)", "chunks[(rank + 2 + step) % n] = recv(right)"),
            expect="the result of rank 0",
        ),
        Mutant(
            "adds in the second half",
            replace=("chunks[(rank + 1 + step) % n] = recv(right)", "chunks[(rank + 1 + step) % n] += recv(right)"),
            expect="the result of rank 0",
        ),
        Mutant(
            "a step short",
            source="""
def left_ring(rank, world_size, values, send, recv):
    n, size = world_size, len(values)
    chunks = [values[size * c // n : size * (c + 1) // n].clone() for c in range(n)]
    for step in range(n - 1):
        send(chunks[(rank + 1 + step) % n], (rank - 1) % n)
        chunks[(rank + 2 + step) % n] += recv((rank + 1) % n)
    for step in range(n - 2):
        send(chunks[(rank + step) % n], (rank - 1) % n)
        chunks[(rank + 1 + step) % n] = recv((rank + 1) % n)
    return torch.cat(chunks)
""",
            expect="the result of rank 0",
        ),
        Mutant(
            "all values around the ring",
            source="""
def left_ring(rank, world_size, values, send, recv):
    total, passing = values.clone(), values
    for _ in range(world_size - 1):
        send(passing, (rank - 1) % world_size)
        passing = recv((rank + 1) % world_size)
        total += passing
    return total
""",
            expect="the lengths that rank 0 sends",
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
            expect="no rank can go on",
        ),
        Mutant(
            "equal chunks",
            replace=(
                "values[size * c // n : size * (c + 1) // n].clone() for c in range(n)]",
                "values[c * (size // n) : (c + 1) * (size // n) if c < n - 1 else size].clone() for c in range(n)]",
            ),
            expect="the lengths that rank 0 sends",
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
            expect="or a view of them",
        ),
        Mutant(
            "in float32",
            replace=("].clone() for c in range(n)]", "].clone().float() for c in range(n)]"),
            expect="must be a float64 tensor",
        ),
        Mutant(
            "in float64",
            replace=("].clone() for c in range(n)]", "].double() for c in range(n)]"),
            expect="must be a float32 tensor",
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
            "ends with a bad request",
            replace=("deque(request for request in requests if answers[request[0]] is not None)", "deque(requests)"),
            expect="raised ValueError",
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
            expect="the number of calls of mlp on each rank",
        ),
        Mutant(
            "a bad request costs the rank a step without a row",
            source="""
def repaired_worker(comm, requests, most):
    answers = {name: [] if 0 <= token < VOCABULARY else None for name, token, _ in requests}
    waiting, running = deque(requests), {}
    while comm.any(bool(waiting or running)):
        while waiting and len(running) < most:
            name, token, count = waiting.popleft()
            running[name] = token, count
        running = {name: one for name, one in running.items() if answers[name] is not None}
        tokens = comm.mlp([token for token, _ in running.values()])
        for (name, (_, left)), token in zip(list(running.items()), tokens):
            answers[name].append(token)
            running[name] = token, left - 1
            if left == 1:
                del running[name]
    return answers
""",
            expect="the number of calls of mlp on each rank",
        ),
        Mutant(
            "the next request starts when all have ended",
            replace=(
                "        while waiting and len(running) < most:\n",
                "        idle = not running\n        while idle and waiting and len(running) < most:\n",
            ),
            expect="the number of calls of mlp on each rank",
        ),
        Mutant(
            "one step more",
            replace=(
                "    return answers\n",
                "    comm.mlp([])\n    return answers\n",
            ),
            expect="A request that cannot run costs no step",
        ),
        Mutant(
            "all at once",
            replace=("while waiting and len(running) < most:", "while waiting:"),
            expect="the number of calls of mlp on each rank",
        ),
        Mutant(
            "a step for each request",
            replace=(
                "        while waiting and len(running) < most:\n",
                "        if waiting and len(running) < most:\n",
            ),
            expect="the number of calls of mlp on each rank",
        ),
        Mutant(
            "an empty list for a bad request",
            replace=(
                "    return answers\n",
                "    return {name: tokens or [] for name, tokens in answers.items()}\n",
            ),
            expect="None if its first token is outside the vocabulary",
        ),
        Mutant(
            "token 0 is bad",
            replace=("0 <= token < VOCABULARY", "0 < token < VOCABULARY"),
            expect="repair_worker: edges",
        ),
        Mutant(
            "the last token is bad",
            replace=("0 <= token < VOCABULARY", "0 <= token < VOCABULARY - 1"),
            expect="repair_worker: edges",
        ),
        Mutant(
            "empties the list of requests",
            replace=("    return answers\n", "    requests.clear()\n    return answers\n"),
            expect="Copy the list before you take requests out of it",
        ),
    ],
    "fewest_bubbles": [
        Mutant(
            "in the order of the list", replace=("place = max(can, key=way)", "place = can[0]"), expect="are enough"
        ),
        Mutant("the shortest way first", replace=("max(can, key=way)", "min(can, key=way)"), expect="are enough"),
        Mutant(
            "the most passes first",
            replace=("max(can, key=way)", "max(can, key=lambda one: sum(left[one]))"),
            expect="are enough",
        ),
        Mutant(
            "the most tokens first, whatever the chunks",
            replace=("max(can, key=way)", "max(can, key=lambda one: left[one][1])"),
            expect="are enough",
        ),
        Mutant(
            "a token in the next slot",
            replace=("slot + (1 if left[place][0] else num_stages)", "slot + 1"),
            expect="leaves the last stage",
        ),
        Mutant(
            "a slot too late",
            replace=(
                "slot + (1 if left[place][0] else num_stages)",
                "slot + (1 if left[place][0] else num_stages + 1)",
            ),
            expect="are enough",
        ),
        Mutant(
            "chunks wait too",
            replace=("slot + (1 if left[place][0] else num_stages)", "slot + num_stages"),
            expect="are enough",
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
            expect="are enough",
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
