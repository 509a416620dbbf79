"""Plausible mistakes in the exercises of chapter 14: every one of them must fail its checks."""

from minillm.book.proofs import Mutant, edited

MUTANTS = {
    "choose_buckets": [
        Mutant(
            "powers of two",
            source="""
def choose_buckets(counts, graph, eager):
    sizes = [2**i for i in range(12) if any(2**i / 2 < rows <= 2**i for rows in counts)]
    padded = sum(steps * (min(s for s in sizes if s >= rows) - rows) for rows, steps in counts.items())
    return sizes, padded + graph * len(sizes)
""",
            expect="padded rows",
        ),
        Mutant(
            "all or nothing",
            source="""
def choose_buckets(counts, graph, eager):
    every, none = (graph * len(counts), len(counts), sorted(counts)), (eager * sum(counts.values()), 0, [])
    cost, _, sizes = min(every, none)
    return sizes, cost
""",
            expect="which cost",
        ),
        Mutant(
            "greedy from the front",
            source="""
def choose_buckets(counts, graph, eager):
    def cost(sizes):
        total = graph * len(sizes)
        for rows, steps in counts.items():
            fit = [s for s in sizes if s >= rows]
            total += steps * (min(fit) - rows) if fit else steps * eager
        return total
    sizes = []
    while True:
        more = [sorted([*sizes, size]) for size in counts if size not in sizes]
        better = min(more, key=cost, default=sizes)
        if cost(better) >= cost(sizes):
            return sizes, cost(sizes)
        sizes = better
""",
            expect="choose_buckets: ",
        ),
        edited(
            "never runs without a graph",
            "for last, (cost, number, sizes) in best.items():\n        alone",
            "for last, (cost, number, sizes) in list(best.items())[-1:]:\n        alone",
            "steps without one",
        ),
        edited(
            "forgets the price of a graph",
            "ways.append((cost + padding + graph,",
            "ways.append((cost + padding,",
            "choose_buckets: example: cost",
        ),
        edited(
            "forgets those above",
            "ends.append((cost + eager * alone,",
            "ends.append((cost,",
            "only those larger than all have none",
        ),
        edited(
            "counts sizes, not steps",
            "sum(steps * (size - rows) for",
            "sum((size - rows) for",
            "choose_buckets: example: ",
        ),
        edited(
            "the cheaper of padding and eager",
            "padding = sum(steps * (size - rows) for",
            "padding = sum(steps * min(size - rows, eager) for",
            "A step takes the smallest graph that holds it",
        ),
        edited(
            "ties to the smaller list",
            "    cost, _, sizes = min(ends)\n",
            "    cost, sizes = min((cost, sizes) for cost, _, sizes in ends)\n",
            "Fewer graphs first",
        ),
        Mutant(
            "tries every set",
            source="""
def choose_buckets(counts, graph, eager):
    from itertools import combinations
    def cost(sizes):
        total = graph * len(sizes)
        for rows, steps in counts.items():
            fit = [s for s in sizes if s >= rows]
            total += steps * (min(fit) - rows) if fit else steps * eager
        return total
    every = (list(sizes) for n in range(len(counts) + 1) for sizes in combinations(sorted(counts), n))
    best = min(every, key=lambda sizes: (cost(sizes), len(sizes), sizes))
    return best, cost(best)
""",
            expect="it cannot be every set of them",
        ),
    ],
    "static_input": [
        edited(
            "one host buffer",
            "        self.hosts.reverse(), self.arrays.reverse()\n",
            "",
            "whose copy may not have ended",
        ),
        edited(
            "padding keeps what it had",
            "    for part in (table, lengths, positions, tokens):\n        part[:] = 0\n    slots[:] = -1\n",
            "",
            "Rows of padding",
        ),
        edited("slots of padding are 0", "slots[:] = -1", "slots[:] = 0", "Rows of padding: KV slot -1"),
        edited(
            "length 1 for padding",
            "    slots[:] = -1\n",
            "    slots[:] = -1\n    lengths[:] = 1\n",
            "Rows of padding: KV slot -1, length 0",
        ),
        edited(
            "tables are not cleared",
            "for part in (table, lengths, positions, tokens):",
            "for part in (lengths, positions, tokens):",
            "the one before in this host buffer",
        ),
        edited(
            "compares tables with the last step's",
            "    for part in (table, lengths, positions, tokens):\n        part[:] = 0\n    slots[:] = -1\n    for index, (token, position, blocks) in enumerate(rows):\n        table[index, : len(blocks)] = blocks\n",
            "    for part in (lengths, positions, tokens):\n        part[:] = 0\n    slots[:] = -1\n    shown = write_step.__dict__.setdefault('shown', {})\n    for index in range(len(table)):\n        blocks = rows[index].blocks if index < len(rows) else []\n        if shown.get(index, []) != blocks:\n            table[index] = 0\n            table[index, : len(blocks)] = blocks\n        shown[index] = list(blocks)\n    for index, (token, position, blocks) in enumerate(rows):\n",
            "then into the other one",
        ),
        edited(
            "the length without the token itself",
            "= position + 1, position, token",
            "= position, position, token",
            "The length counts the token itself",
        ),
        edited(
            "the slot of the last block",
            "blocks[position // block_size] * block_size",
            "blocks[-1] * block_size",
            "slot_mapping",
        ),
        edited(
            "a slot of 16",
            "blocks[position // block_size] * block_size",
            "blocks[position // block_size] * 16",
            "slot_mapping",
        ),
        edited(
            "tensors of lists",
            "        table[index, : len(blocks)] = blocks\n",
            "        torch.from_numpy(table)[index, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)\n",
            "fill makes a new tensor",
        ),
        edited(
            "another tensor",
            "        copy(self.on_device, self.hosts[0])",
            "        copy(self.on_device, self.hosts[0])\n        self.positions = self.positions.clone()",
            "makes a new tensor",
        ),
        edited(
            "a copy for each part",
            "        copy(self.on_device, self.hosts[0])",
            "        start = self.block_table.numel()\n        copy(self.on_device[:start], self.hosts[0][:start])\n        copy(self.on_device[start:], self.hosts[0][start:])",
            "copy got a destination other than all of on_device",
        ),
        edited(
            "tidies up behind the copy",
            "        copy(self.on_device, self.hosts[0])",
            "        copy(self.on_device, self.hosts[0])\n        self.arrays[0][4][:] = -1",
            "It was right when copy was called",
        ),
        edited(
            "parts that are no views",
            "self.slot_mapping = parts_of(self.on_device)",
            "self.slot_mapping = (part.clone() for part in parts_of(self.on_device))",
            "The parts are views of on_device",
        ),
        edited(
            "int64",
            "dtype=torch.int32)\n        self.hosts",
            "dtype=torch.int64)\n        self.hosts",
            "on_device must be an int32 tensor",
        ),
        edited(
            "too many rows",
            '        if len(rows) > self.size:\n            raise ValueError(f"{len(rows)} rows do not fit into buffers of {self.size}")\n',
            "        rows = rows[: self.size]\n",
            "do not fit into buffers of 4",
        ),
        edited(
            "refuses when it has begun",
            '        if len(rows) > self.size:\n            raise ValueError(f"{len(rows)} rows do not fit into buffers of {self.size}")\n        self.hosts.reverse(), self.arrays.reverse()\n',
            '        self.hosts.reverse(), self.arrays.reverse()\n        write_step(self.arrays[0], [], self.block_size)\n        if len(rows) > self.size:\n            raise ValueError(f"{len(rows)} rows do not fit into buffers of {self.size}")\n',
            "Refuse it before you write",
        ),
        edited(
            "a refused step takes a turn",
            '        if len(rows) > self.size:\n            raise ValueError(f"{len(rows)} rows do not fit into buffers of {self.size}")\n        self.hosts.reverse(), self.arrays.reverse()\n',
            '        self.hosts.reverse(), self.arrays.reverse()\n        if len(rows) > self.size:\n            raise ValueError(f"{len(rows)} rows do not fit into buffers of {self.size}")\n',
            "A step that is refused takes no turn",
        ),
        Mutant(
            "remembers the list, not what was in it",
            source="""
class StaticInput:
    def __init__(self, size, columns, block_size):
        self.size, self.columns, self.block_size = size, columns, block_size
        self.on_device = torch.zeros(size * (columns + 4), dtype=torch.int32)
        self.hosts = [torch.zeros_like(self.on_device) for _ in range(2)]
        self.shown = [[[]] * size, [[]] * size]
        start = size * columns
        self.block_table = self.on_device[:start].reshape(size, columns)
        self.seq_lens, self.positions, self.token_ids, self.slot_mapping = self.on_device[start:].reshape(4, size)

    def fill(self, rows, copy):
        if len(rows) > self.size:
            raise ValueError(f"{len(rows)} rows do not fit into buffers of {self.size}")
        self.hosts.reverse(), self.shown.reverse()
        host, start = self.hosts[0].numpy(), self.size * self.columns
        table, rest = host[:start].reshape(self.size, self.columns), host[start:].reshape(4, self.size)
        rest[:3], rest[3] = 0, -1
        for index, (token, position, blocks) in enumerate(rows):
            slot = blocks[position // self.block_size] * self.block_size + position % self.block_size
            rest[:, index] = position + 1, position, token, slot
        tables = [row.blocks for row in rows] + [[]] * (self.size - len(rows))
        for index, (before, blocks) in enumerate(zip(self.shown[0], tables)):
            if before != blocks:
                table[index] = 0
                table[index, : len(blocks)] = blocks
        self.shown[0] = tables
        copy(self.on_device, self.hosts[0])
""",
            expect="copy what is in it",
        ),
    ],
    "explain_trace": [
        edited("the outermost bar", "doing = max((bar", "doing = min((bar", "gaps for"),
        edited(
            "any open bar",
            "doing = max((bar for bar in host if bar.start <= left < bar.end), key=lambda bar: (bar.start, -bar.end), default=None)",
            "doing = next((bar for bar in host if bar.start <= left < bar.end), None)",
            "the bar that began last",
        ),
        edited(
            "of those that began together, the longest",
            "key=lambda bar: (bar.start, -bar.end)",
            "key=lambda bar: (bar.start, bar.end)",
            "explain_trace: ",
        ),
        edited("gaps before the first kernel", "elif first <= left < last:", "else:", "gaps for"),
        edited(
            "update is something else",
            ', "build batch": "schedule", "update": "schedule"}',
            ', "build batch": "schedule"}',
            "gaps for",
        ),
        edited(
            "steps from 0 to the last",
            "steps = sorted({bar.step for bar in bars})",
            "steps = sorted({bar.step for bar in host})",
            "explain_trace: ",
        ),
        edited(
            "only steps that follow each other",
            "sum(max(d[step], h.get(after, 0)) for step, after in zip(steps, [*steps[1:], None]))",
            "sum(max(d[step], h.get(step + 1, 0)) for step in steps)",
            "Host work of the steps 2, 5, 7, 9",
        ),
        edited(
            "only steps with something on the device",
            "    ahead = h[steps[0]] + sum(",
            "    steps = sorted({bar.step for bar in device})\n    ahead = h[steps[0]] + sum(",
            "Host work of the steps 2, 5, 7, 9",
        ),
        edited(
            "microsecond by microsecond",
            "cuts = sorted({bar.start for bar in bars} | {bar.end for bar in bars})",
            "cuts = [time for time in range(min(bar.start for bar in bars), max(bar.end for bar in bars) + 1)]",
            "Cut the time at the bars' starts and ends",
        ),
    ],
    "serve_ahead": [
        Mutant(
            "waits first",
            source="""
def serve_ahead(asks, runner, places):
    waiting, holding, said = list(asks), [], {ask.name: [] for ask in asks}
    while waiting or holding:
        while waiting and len(holding) < places:
            holding.append(waiting.pop(0))
        names = [ask.name for ask in holding]
        for ask, token in zip(list(holding), runner.wait(runner.launch(names))):
            said[ask.name].append(token)
            if token == ask.stop or len(said[ask.name]) == ask.max_tokens:
                runner.free(ask.name)
                holding.remove(ask)
    return said
""",
            expect="The next step is launched first",
        ),
        edited(
            "frees at once",
            "if ask.name in ended and ask.name not in names:",
            "if ask.name in ended:",
            "writes to its blocks",
        ),
        edited(
            "frees at the very end",
            "            if ask.name in ended and ask.name not in names:\n                runner.free(ask.name)\n                holding.remove(ask)\n        before = launched\n",
            "            if ask.name in ended and ask.name not in names:\n                holding.remove(ask)\n        before = launched\n    for ask in asks:\n        runner.free(ask.name)\n",
            "its blocks are free now",
        ),
        edited(
            "keeps late tokens", "                if name in ended:\n                    continue\n", "", "is dropped"
        ),
        edited(
            "does not count what is on its way",
            "len(said[ask.name]) + (ask.name in on_its_way) < ask.max_tokens",
            "len(said[ask.name]) < ask.max_tokens",
            "count what is in flight too",
        ),
        edited(
            "drops the stop token",
            "                said[name].append(token)\n                if token == asked[name].stop or len(said[name]) == asked[name].max_tokens:\n                    ended.add(name)\n",
            "                if token != asked[name].stop:\n                    said[name].append(token)\n                if token == asked[name].stop or len(said[name]) == asked[name].max_tokens:\n                    ended.add(name)\n",
            "The stop token itself belongs to the output",
        ),
        edited(
            "a place is free when its request has ended",
            "while waiting and len(holding) < places:",
            "while waiting and sum(ask.name not in ended for ask in holding) < places:",
            "there is no place for it yet",
        ),
        edited(
            "one stop token for all", "if token == asked[name].stop or", "if token == asks[0].stop or", "serve_ahead: "
        ),
        edited(
            "leaves the last step on its way",
            "while waiting or holding or before:",
            "while waiting or [ask for ask in holding if ask.name not in ended]:",
            "nothing is in flight",
        ),
        edited(
            "admits everybody",
            "while waiting and len(holding) < places:",
            "while waiting:",
            "there is no place for it yet",
        ),
        edited(
            "frees in the order of the step",
            "        for ask in list(holding):\n",
            "        for ask in sorted(holding, key=lambda ask: len(said[ask.name])):\n",
            "serve_ahead: ",
        ),
        edited(
            "in the order of the names",
            "launched = (runner.launch(names), names) if names else None",
            "names = sorted(names)\n        launched = (runner.launch(names), names) if names else None",
            "In the order in which they entered",
        ),
        edited(
            "launches nothing",
            "launched = (runner.launch(names), names) if names else None",
            "launched = (runner.launch(names), names)",
            "a step has at least one row",
        ),
    ],
}
