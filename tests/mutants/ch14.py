"""Plausible mistakes in the exercises of chapter 14: every one of them must fail its checks."""

from minillm.book.proofs import Mutant

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
        Mutant(
            "never runs without a graph",
            replace=(
                "for last, (cost, number, sizes) in best.items():\n        alone",
                "for last, (cost, number, sizes) in list(best.items())[-1:]:\n        alone",
            ),
            expect="steps without one",
        ),
        Mutant(
            "forgets the price of a graph",
            replace=("ways.append((cost + padding + graph,", "ways.append((cost + padding,"),
            expect="choose_buckets: example: cost",
        ),
        Mutant(
            "forgets those above",
            replace=("ends.append((cost + eager * alone,", "ends.append((cost,"),
            expect="only those larger than all have none",
        ),
        Mutant(
            "counts sizes, not steps",
            replace=("sum(steps * (size - rows) for", "sum((size - rows) for"),
            expect="choose_buckets: example: ",
        ),
        Mutant(
            "the cheaper of padding and eager",
            replace=("padding = sum(steps * (size - rows) for", "padding = sum(steps * min(size - rows, eager) for"),
            expect="A step takes the smallest graph that holds it",
        ),
        Mutant(
            "ties to the smaller list",
            replace=(
                "    cost, _, sizes = min(ends)\n",
                "    cost, sizes = min((cost, sizes) for cost, _, sizes in ends)\n",
            ),
            expect="Fewer graphs first",
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
        Mutant(
            "one host buffer",
            replace=("        self.hosts.reverse(), self.arrays.reverse()\n", ""),
            expect="whose copy may not have ended",
        ),
        Mutant(
            "padding keeps what it had",
            replace=(
                "    for part in (table, lengths, positions, tokens):\n        part[:] = 0\n    slots[:] = -1\n",
                "",
            ),
            expect="Rows of padding",
        ),
        Mutant(
            "slots of padding are 0", replace=("slots[:] = -1", "slots[:] = 0"), expect="Rows of padding: KV slot -1"
        ),
        Mutant(
            "length 1 for padding",
            replace=("    slots[:] = -1\n", "    slots[:] = -1\n    lengths[:] = 1\n"),
            expect="Rows of padding: KV slot -1, length 0",
        ),
        Mutant(
            "tables are not cleared",
            replace=("for part in (table, lengths, positions, tokens):", "for part in (lengths, positions, tokens):"),
            expect="the one before in this host buffer",
        ),
        Mutant(
            "compares tables with the last step's",
            replace=(
                "    for part in (table, lengths, positions, tokens):\n        part[:] = 0\n    slots[:] = -1\n    for index, (token, position, blocks) in enumerate(rows):\n        table[index, : len(blocks)] = blocks\n",
                "    for part in (lengths, positions, tokens):\n        part[:] = 0\n    slots[:] = -1\n    shown = write_step.__dict__.setdefault('shown', {})\n    for index in range(len(table)):\n        blocks = rows[index].blocks if index < len(rows) else []\n        if shown.get(index, []) != blocks:\n            table[index] = 0\n            table[index, : len(blocks)] = blocks\n        shown[index] = list(blocks)\n    for index, (token, position, blocks) in enumerate(rows):\n",
            ),
            expect="then into the other one",
        ),
        Mutant(
            "the length without the token itself",
            replace=("= position + 1, position, token", "= position, position, token"),
            expect="The length counts the token itself",
        ),
        Mutant(
            "the slot of the last block",
            replace=("blocks[position // block_size] * block_size", "blocks[-1] * block_size"),
            expect="slot_mapping",
        ),
        Mutant(
            "a slot of 16",
            replace=("blocks[position // block_size] * block_size", "blocks[position // block_size] * 16"),
            expect="slot_mapping",
        ),
        Mutant(
            "tensors of lists",
            replace=(
                "        table[index, : len(blocks)] = blocks\n",
                "        torch.from_numpy(table)[index, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)\n",
            ),
            expect="fill makes a new tensor",
        ),
        Mutant(
            "another tensor",
            replace=(
                "        copy(self.on_device, self.hosts[0])",
                "        copy(self.on_device, self.hosts[0])\n        self.positions = self.positions.clone()",
            ),
            expect="makes a new tensor",
        ),
        Mutant(
            "a copy for each part",
            replace=(
                "        copy(self.on_device, self.hosts[0])",
                "        start = self.block_table.numel()\n        copy(self.on_device[:start], self.hosts[0][:start])\n        copy(self.on_device[start:], self.hosts[0][start:])",
            ),
            expect="copy got a destination other than all of on_device",
        ),
        Mutant(
            "tidies up behind the copy",
            replace=(
                "        copy(self.on_device, self.hosts[0])",
                "        copy(self.on_device, self.hosts[0])\n        self.arrays[0][4][:] = -1",
            ),
            expect="It was right when copy was called",
        ),
        Mutant(
            "parts that are no views",
            replace=(
                "self.slot_mapping = parts_of(self.on_device)",
                "self.slot_mapping = (part.clone() for part in parts_of(self.on_device))",
            ),
            expect="The parts are views of on_device",
        ),
        Mutant(
            "int64",
            replace=("dtype=torch.int32)\n        self.hosts", "dtype=torch.int64)\n        self.hosts"),
            expect="on_device must be an int32 tensor",
        ),
        Mutant(
            "too many rows",
            replace=(
                '        if len(rows) > self.size:\n            raise ValueError(f"{len(rows)} rows do not fit into buffers of {self.size}")\n',
                "        rows = rows[: self.size]\n",
            ),
            expect="do not fit into buffers of 4",
        ),
        Mutant(
            "refuses when it has begun",
            replace=(
                '        if len(rows) > self.size:\n            raise ValueError(f"{len(rows)} rows do not fit into buffers of {self.size}")\n        self.hosts.reverse(), self.arrays.reverse()\n',
                '        self.hosts.reverse(), self.arrays.reverse()\n        write_step(self.arrays[0], [], self.block_size)\n        if len(rows) > self.size:\n            raise ValueError(f"{len(rows)} rows do not fit into buffers of {self.size}")\n',
            ),
            expect="Refuse it before you write",
        ),
        Mutant(
            "a refused step takes a turn",
            replace=(
                '        if len(rows) > self.size:\n            raise ValueError(f"{len(rows)} rows do not fit into buffers of {self.size}")\n        self.hosts.reverse(), self.arrays.reverse()\n',
                '        self.hosts.reverse(), self.arrays.reverse()\n        if len(rows) > self.size:\n            raise ValueError(f"{len(rows)} rows do not fit into buffers of {self.size}")\n',
            ),
            expect="A step that is refused takes no turn",
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
        Mutant("the outermost bar", replace=("doing = max((bar", "doing = min((bar"), expect="gaps for"),
        Mutant(
            "any open bar",
            replace=(
                "doing = max((bar for bar in host if bar.start <= left < bar.end), key=lambda bar: (bar.start, -bar.end), default=None)",
                "doing = next((bar for bar in host if bar.start <= left < bar.end), None)",
            ),
            expect="the bar that began last",
        ),
        Mutant(
            "of those that began together, the longest",
            replace=("key=lambda bar: (bar.start, -bar.end)", "key=lambda bar: (bar.start, bar.end)"),
            expect="explain_trace: ",
        ),
        Mutant("gaps before the first kernel", replace=("elif first <= left < last:", "else:"), expect="gaps for"),
        Mutant(
            "update is something else",
            replace=(', "build batch": "schedule", "update": "schedule"}', ', "build batch": "schedule"}'),
            expect="gaps for",
        ),
        Mutant(
            "steps from 0 to the last",
            replace=("steps = sorted({bar.step for bar in bars})", "steps = sorted({bar.step for bar in host})"),
            expect="explain_trace: ",
        ),
        Mutant(
            "only steps that follow each other",
            replace=(
                "sum(max(d[step], h.get(after, 0)) for step, after in zip(steps, [*steps[1:], None]))",
                "sum(max(d[step], h.get(step + 1, 0)) for step in steps)",
            ),
            expect="Host work of the steps 2, 5, 7, 9",
        ),
        Mutant(
            "only steps with something on the device",
            replace=(
                "    ahead = h[steps[0]] + sum(",
                "    steps = sorted({bar.step for bar in device})\n    ahead = h[steps[0]] + sum(",
            ),
            expect="Host work of the steps 2, 5, 7, 9",
        ),
        Mutant(
            "microsecond by microsecond",
            replace=(
                "cuts = sorted({bar.start for bar in bars} | {bar.end for bar in bars})",
                "cuts = [time for time in range(min(bar.start for bar in bars), max(bar.end for bar in bars) + 1)]",
            ),
            expect="Cut the time at the bars' starts and ends",
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
        Mutant(
            "frees at once",
            replace=("if ask.name in ended and ask.name not in names:", "if ask.name in ended:"),
            expect="writes to its blocks",
        ),
        Mutant(
            "frees at the very end",
            replace=(
                "            if ask.name in ended and ask.name not in names:\n                runner.free(ask.name)\n                holding.remove(ask)\n        before = launched\n",
                "            if ask.name in ended and ask.name not in names:\n                holding.remove(ask)\n        before = launched\n    for ask in asks:\n        runner.free(ask.name)\n",
            ),
            expect="its blocks are free now",
        ),
        Mutant(
            "keeps late tokens",
            replace=("                if name in ended:\n                    continue\n", ""),
            expect="is dropped",
        ),
        Mutant(
            "does not count what is on its way",
            replace=(
                "len(said[ask.name]) + (ask.name in on_its_way) < ask.max_tokens",
                "len(said[ask.name]) < ask.max_tokens",
            ),
            expect="count what is in flight too",
        ),
        Mutant(
            "drops the stop token",
            replace=(
                "                said[name].append(token)\n                if token == asked[name].stop or len(said[name]) == asked[name].max_tokens:\n                    ended.add(name)\n",
                "                if token != asked[name].stop:\n                    said[name].append(token)\n                if token == asked[name].stop or len(said[name]) == asked[name].max_tokens:\n                    ended.add(name)\n",
            ),
            expect="The stop token itself belongs to the output",
        ),
        Mutant(
            "a place is free when its request has ended",
            replace=(
                "while waiting and len(holding) < places:",
                "while waiting and sum(ask.name not in ended for ask in holding) < places:",
            ),
            expect="there is no place for it yet",
        ),
        Mutant(
            "one stop token for all",
            replace=("if token == asked[name].stop or", "if token == asks[0].stop or"),
            expect="serve_ahead: ",
        ),
        Mutant(
            "leaves the last step on its way",
            replace=(
                "while waiting or holding or before:",
                "while waiting or [ask for ask in holding if ask.name not in ended]:",
            ),
            expect="nothing is in flight",
        ),
        Mutant(
            "admits everybody",
            replace=("while waiting and len(holding) < places:", "while waiting:"),
            expect="there is no place for it yet",
        ),
        Mutant(
            "frees in the order of the step",
            replace=(
                "        for ask in list(holding):\n",
                "        for ask in sorted(holding, key=lambda ask: len(said[ask.name])):\n",
            ),
            expect="serve_ahead: ",
        ),
        Mutant(
            "in the order of the names",
            replace=(
                "launched = (runner.launch(names), names) if names else None",
                "names = sorted(names)\n        launched = (runner.launch(names), names) if names else None",
            ),
            expect="In the order in which they entered",
        ),
        Mutant(
            "launches nothing",
            replace=(
                "launched = (runner.launch(names), names) if names else None",
                "launched = (runner.launch(names), names)",
            ),
            expect="a step has at least one row",
        ),
    ],
}
