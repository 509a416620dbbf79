"""Plausible mistakes in the exercises of chapter 17: every one of them must fail its checks."""

from minillm.book.proofs import Mutant, edited

MUTANTS = {
    "token_grid": [
        edited(
            "one grid for each channel",
            "lows, highs = x.amin(-1), x.amax(-1)",
            "lows, highs = x.amin(0), x.amax(0)",
            "token_grid: ",
        ),
        edited("signed codes", "torch.uint8", "torch.int8", "token_grid: "),
        edited("in the dtype that came", "    x = x.float()\n", "", "token_grid: "),
        edited(
            "float64 is enough",
            "    x = x.float()\n",
            "    x = x if x.dtype == torch.float64 else x.float()\n",
            "whatever the dtype of x",
        ),
        edited("an epsilon", "torch.where(steps == 0, torch.ones_like(steps), steps)", "steps + 1e-3", "the steps of"),
        edited(
            "small differences are none", "torch.where(steps == 0,", "torch.where(steps < 1e-9,", "very small numbers"
        ),
        edited(
            "where the numbers are equal",
            "torch.where(steps == 0,",
            "torch.where(highs == lows,",
            "too small for float32",
        ),
        edited(
            "tiny differences are none", "torch.where(steps == 0,", "torch.where(steps < 1e-14,", "very small numbers"
        ),
    ],
    "span_policy": [
        edited(
            "the window is one longer", "key > query - self.window or", "key >= query - self.window or", "span_policy: "
        ),
        edited("the end is pinned too", "start <= key < end", "start <= key <= end", "span_policy: "),
        edited(
            "frees what is still to be written",
            "p >= num_computed or self.sees",
            "p < num_computed and self.sees",
            "still to be written",
        ),
        edited("frees twice", "if block != 0 and not wanted(place)", "if not wanted(place)", "was freed before"),
        edited(
            "looks at a page's first position",
            "positions = range(place * self.block_size, (place + 1) * self.block_size)",
            "positions = [place * self.block_size]",
            "span_policy: ",
        ),
        edited(
            "blocks in place of places",
            "return [place for place, block",
            "return [block for place, block",
            "list of indices into the table",
        ),
        edited(
            "positions of the text",
            "{p: place for place, p in enumerate(seen)}",
            "{p: p for p in seen}",
            "positions in the text",
        ),
        edited("leaves the query out", "range(query + 1) if", "range(query) if", "sees its own key"),
        edited(
            "sees pinned keys of the future",
            "seen = [p for p in range(query + 1)",
            "seen = [p for p in range(max([query + 1, *(end for _, end in self.pinned)]))",
            "span_policy: ",
        ),
        edited(
            "the first span only",
            "for start, end in self.pinned)",
            "for start, end in self.pinned[:1])",
            "span_policy: ",
        ),
        edited(
            "judges from the last computed token",
            "self.sees(num_computed, p)",
            "self.sees(num_computed - 1, p)",
            "sees a position of table",
        ),
        edited("from the end", "and not wanted(place)]", "and not wanted(place)][::-1]", "ascending"),
        edited(
            "one policy for all objects",
            "        self.block_size, self.window, self.pinned = block_size, window, list(pinned)\n",
            "        SpanPolicy.block_size, SpanPolicy.window, SpanPolicy.pinned = block_size, window, list(pinned)\n",
            "Two objects share nothing",
        ),
        edited("keeps the caller's list", "list(pinned)", "pinned", "copy it"),
        edited(
            "the last 200 positions",
            "for p in range(query + 1) if",
            "for p in range(max(0, query - 200), query + 1) if",
            "span_policy: ",
        ),
    ],
    "place": [
        edited(
            "a table for twelve blocks",
            "states = {(device_blocks, host_blocks, disk_blocks): (0, ())}",
            "states = {(min(device_blocks, 12), min(host_blocks, 12), min(disk_blocks, 12)): (0, ())}",
            "the total time of the plan is wrong",
        ),
        edited(
            "a list of its own kind",
            "return list(min(",
            "return type('Plan', (list,), {})(min(",
            "the plan must be a list",
        ),
        edited("blocks do not count", "time + num_blocks * uses * cost", "time + uses * cost", "place: edges"),
        edited(
            "uses do not count", "time + num_blocks * uses * cost", "time + num_blocks * cost", "a better plan exists"
        ),
        edited("a prefix takes one block", "room[index] -= num_blocks", "room[index] -= 1", "which has room for"),
        edited(
            "always takes a tier with room",
            "                option = (time",
            "                if index == 3 and any(num_blocks <= r for r in left):\n                    continue\n                option = (time",
            "a better plan exists",
        ),
        edited(
            "keeps the first way to a state",
            "if room not in following or option[0] < following[room][0]:",
            "if room not in following:",
            "a better plan exists",
        ),
        edited(
            "the first state",
            "min(states.values(), key=lambda state: state[0])[1]",
            "next(iter(states.values()))[1]",
            "a better plan exists",
        ),
        edited(
            "the time too",
            "return list(min(states.values(), key=lambda state: state[0])[1])",
            "return min(states.values(), key=lambda state: state[0])",
            "must be a list of",
        ),
        edited(
            "an enumeration of strings",
            "return list(min(states.values(), key=lambda state: state[0])[1])",
            "import enum\n    tier = enum.Enum('Tier', {name: name for name in ('device', 'host', 'disk', 'compute')}, type=str)\n    return [tier(name) for name in min(states.values(), key=lambda state: state[0])[1]]",
            "must be a list of",
        ),
        edited(
            "fills in the costs",
            "    tiers = ((",
            '    costs["device"] = 0\n    tiers = ((',
            "changed one of its arguments",
        ),
        Mutant(
            "all plans",
            source='\nimport itertools\n\n\ndef place(prefixes, device_blocks, host_blocks, disk_blocks, costs):\n    rooms, best = {"device": device_blocks, "host": host_blocks, "disk": disk_blocks}, None\n    for plan in itertools.product(("device", "host", "disk", "compute"), repeat=len(prefixes)):\n        if all(sum(n for (n, _), where in zip(prefixes, plan) if where == tier) <= room for tier, room in rooms.items()):\n            time = sum(n * uses * costs.get(tier, 0) for (n, uses), tier in zip(prefixes, plan))\n            if best is None or time < best[0]:\n                best = time, plan\n    return list(best[1])\n',
            expect="try no state twice",
        ),
    ],
    "heavy_hitters": [
        edited("nobody is safe", "range(len(self.kept) - self.recent)", "range(len(self.kept))", "is among the last"),
        edited(
            "one too many is safe",
            "range(len(self.kept) - self.recent)",
            "range(max(1, len(self.kept) - self.recent - 1))",
            "Sums now",
        ),
        edited(
            "ties to the youngest", "key=lambda i: self.scores[i])", "key=lambda i: (self.scores[i], -i))", "Sums now"
        ),
        edited(
            "one more is kept",
            "if len(self.kept) <= self.budget:",
            "if len(self.kept) <= self.budget + 1:",
            "heavy_hitters: ",
        ),
        edited(
            "places in place of positions",
            "return self.kept.pop(victim)",
            "self.kept.pop(victim)\n        return victim",
            "heavy_hitters: example: step",
        ),
        edited(
            "counts what is kept", "self.kept.append(self.count)", "self.kept.append(len(self.kept))", "heavy_hitters: "
        ),
        edited(
            "the score stays", "        del self.scores[victim]\n", "        del self.scores[-1]\n", "heavy_hitters: "
        ),
        edited(
            "any number of weights",
            '        if len(weights) != len(self.kept) + 1:\n            raise ValueError(f"{len(weights)} weights for {len(self.kept) + 1} kept positions")\n',
            "",
            "heavy_hitters: ",
        ),
        edited(
            "checks too late",
            '        if len(weights) != len(self.kept) + 1:\n            raise ValueError(f"{len(weights)} weights for {len(self.kept) + 1} kept positions")\n        self.kept.append(self.count)\n',
            '        self.kept.append(self.count)\n        if len(weights) != len(self.kept):\n            raise ValueError("weights")\n',
            "change nothing",
        ),
        edited(
            "adds the weights before it refuses them",
            "        if len(weights) != len(self.kept) + 1:\n",
            "        if len(weights) != len(self.kept) + 1:\n            for i, weight in enumerate(weights[: len(self.kept)]):\n                self.scores[i] += weight\n",
            "Sums now",
        ),
        Mutant(
            "does nothing, and raises StopIteration at the second look",
            source="""
class HeavyHitters:
    def __init__(self, budget, recent):
        self.looks = iter([[]])

    @property
    def kept(self):
        return next(self.looks)

    def step(self, weights):
        return None
""",
            expect="StopIteration",
        ),
        edited(
            "scores in float32",
            "[score + weight for score, weight in zip(self.scores, weights)]",
            "(torch.tensor(self.scores) + torch.tensor(weights)).tolist()",
            "heavy_hitters: edges",
        ),
    ],
    "pack_keys": [
        edited(
            "looks for zeros, not for a scale of 0",
            "torch.where(scales == 0,",
            "torch.where((grouped == 0).all(-1),",
            "so the scale of that group is 1",
        ),
        edited(
            "groups of an even size only",
            "    grouped = x.float().unflatten(-1, (-1, group))\n",
            "    grouped = x.float().unflatten(-1, (-1, group // 2 * 2 or 2))\n",
            "pack_keys: edges",
        ),
        edited(
            "bfloat16 is enough",
            "x.float().unflatten",
            "(x if x.dtype == torch.bfloat16 else x.float()).unflatten",
            "pack_keys: edges",
        ),
        edited(
            "neighbours in a byte",
            ".to(torch.uint8).chunk(2, -1)",
            ".to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)",
            "not two neighbours",
        ),
        edited("in the dtype that came", "x.float().unflatten", "x.unflatten", "pack_keys: "),
        edited(
            "an epsilon",
            "scales = torch.where(scales == 0, torch.ones_like(scales), scales)",
            "scales = scales + 1e-6",
            "pack_keys: ",
        ),
        edited(
            "signed bytes",
            "first | second << 4, scales",
            "(first | second << 4).view(torch.int8), scales",
            "pack_keys: ",
        ),
    ],
    "merge_with_sink": [
        Mutant(
            "the package's merge",
            source="""
def merge_with_sink(parts, sink):
    from minillm.kernels.paged_decode import torch_merge_splits

    lses = torch.stack([*(lse for _, lse in parts), sink], -1)
    outs = [torch.where(lse[:, None] == -torch.inf, 0.0, out) for out, lse in parts]
    outs = torch.stack([*outs, torch.zeros_like(outs[0])], 1)
    out = torch_merge_splits(outs[None], lses[None] * 1.4426950408889634, torch.empty(1, *outs[:, 0].shape))
    return out[0], lses.logsumexp(-1)
""",
            expect="torch_merge_splits",
        ),
        edited(
            "the sink in each part",
            "torch.cat([lses, sink[None]])",
            "torch.cat([torch.logaddexp(lses, sink[None]), sink[None]])",
            "merge_with_sink: ",
        ),
        edited(
            "multiplies NaN by zero",
            "    outs = torch.where(lses[..., None] == -torch.inf, torch.zeros_like(outs), outs)\n",
            "",
            "NaN",
        ),
        edited("forgets the sink", "torch.cat([lses, sink[None]])", "lses", "merge_with_sink: "),
        edited("overflows", ".logsumexp(0)", ".exp().sum(0).log()", "overflows"),
    ],
    "gated_chunks": [
        edited(
            "divides products",
            "(logs[:, None] - logs[None]).clamp(max=0).exp()",
            "logs.exp()[:, None] / logs.exp()[None]",
            "NaN",
        ),
        edited("reads before it writes", "between).tril()", "between).tril(-1)", "own key and value"),
        edited(
            "the state is not decayed for its readers",
            "(q[here] * logs.exp()) @ state",
            "q[here] @ state",
            "has decayed",
        ),
        edited("keys decay to the start", "left = (logs[-1] - logs).exp()", "left = logs.exp()", "gated_chunks: "),
        edited(
            "states before the chunks",
            "        state = logs[-1]",
            "        states.append(state)\n        state = logs[-1]",
            "gated_chunks: ",
        ),
    ],
}
