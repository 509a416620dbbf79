"""Plausible mistakes in the exercises of chapter 17: every one of them must fail its checks."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "token_grid": [
        Mutant(
            "one grid for each channel",
            replace=("lows, highs = x.amin(-1), x.amax(-1)", "lows, highs = x.amin(0), x.amax(0)"),
            expect="token_grid: ",
        ),
        Mutant("signed codes", replace=("torch.uint8", "torch.int8"), expect="token_grid: "),
        Mutant("in the dtype that came", replace=("    x = x.float()\n", ""), expect="token_grid: "),
        Mutant(
            "float64 is enough",
            replace=("    x = x.float()\n", "    x = x if x.dtype == torch.float64 else x.float()\n"),
            expect="whatever the dtype of x",
        ),
        Mutant(
            "an epsilon",
            replace=("torch.where(steps == 0, torch.ones_like(steps), steps)", "steps + 1e-3"),
            expect="the steps of",
        ),
        Mutant(
            "small differences are none",
            replace=("torch.where(steps == 0,", "torch.where(steps < 1e-9,"),
            expect="very small numbers",
        ),
        Mutant(
            "where the numbers are equal",
            replace=("torch.where(steps == 0,", "torch.where(highs == lows,"),
            expect="too small for float32",
        ),
        Mutant(
            "tiny differences are none",
            replace=("torch.where(steps == 0,", "torch.where(steps < 1e-14,"),
            expect="very small numbers",
        ),
    ],
    "span_policy": [
        Mutant(
            "the window is one longer",
            replace=("key > query - self.window or", "key >= query - self.window or"),
            expect="span_policy: ",
        ),
        Mutant("the end is pinned too", replace=("start <= key < end", "start <= key <= end"), expect="span_policy: "),
        Mutant(
            "frees what is still to be written",
            replace=("p >= num_computed or self.sees", "p < num_computed and self.sees"),
            expect="still to be written",
        ),
        Mutant(
            "frees twice",
            replace=("if block != 0 and not wanted(place)", "if not wanted(place)"),
            expect="was freed before",
        ),
        Mutant(
            "looks at a page's first position",
            replace=(
                "positions = range(place * self.block_size, (place + 1) * self.block_size)",
                "positions = [place * self.block_size]",
            ),
            expect="span_policy: ",
        ),
        Mutant(
            "blocks in place of places",
            replace=("return [place for place, block", "return [block for place, block"),
            expect="list of indices into the table",
        ),
        Mutant(
            "positions of the text",
            replace=("{p: place for place, p in enumerate(seen)}", "{p: p for p in seen}"),
            expect="positions in the text",
        ),
        Mutant("leaves the query out", replace=("range(query + 1) if", "range(query) if"), expect="sees its own key"),
        Mutant(
            "sees pinned keys of the future",
            replace=(
                "seen = [p for p in range(query + 1)",
                "seen = [p for p in range(max([query + 1, *(end for _, end in self.pinned)]))",
            ),
            expect="span_policy: ",
        ),
        Mutant(
            "the first span only",
            replace=("for start, end in self.pinned)", "for start, end in self.pinned[:1])"),
            expect="span_policy: ",
        ),
        Mutant(
            "judges from the last computed token",
            replace=("self.sees(num_computed, p)", "self.sees(num_computed - 1, p)"),
            expect="sees a position of table",
        ),
        Mutant("from the end", replace=("and not wanted(place)]", "and not wanted(place)][::-1]"), expect="ascending"),
        Mutant(
            "one policy for all objects",
            replace=(
                "        self.block_size, self.window, self.pinned = block_size, window, list(pinned)\n",
                "        SpanPolicy.block_size, SpanPolicy.window, SpanPolicy.pinned = block_size, window, list(pinned)\n",
            ),
            expect="Two objects share nothing",
        ),
        Mutant("keeps the caller's list", replace=("list(pinned)", "pinned"), expect="copy it"),
        Mutant(
            "the last 200 positions",
            replace=("for p in range(query + 1) if", "for p in range(max(0, query - 200), query + 1) if"),
            expect="span_policy: ",
        ),
    ],
    "place": [
        Mutant(
            "a table for twelve blocks",
            replace=(
                "states = {(device_blocks, host_blocks, disk_blocks): (0, ())}",
                "states = {(min(device_blocks, 12), min(host_blocks, 12), min(disk_blocks, 12)): (0, ())}",
            ),
            expect="the total time of the plan is wrong",
        ),
        Mutant(
            "a list of its own kind",
            replace=("return list(min(", "return type('Plan', (list,), {})(min("),
            expect="the plan must be a list",
        ),
        Mutant(
            "blocks do not count",
            replace=("time + num_blocks * uses * cost", "time + uses * cost"),
            expect="place: edges",
        ),
        Mutant(
            "uses do not count",
            replace=("time + num_blocks * uses * cost", "time + num_blocks * cost"),
            expect="a better plan exists",
        ),
        Mutant(
            "a prefix takes one block",
            replace=("room[index] -= num_blocks", "room[index] -= 1"),
            expect="which has room for",
        ),
        Mutant(
            "always takes a tier with room",
            replace=(
                "                option = (time",
                "                if index == 3 and any(num_blocks <= r for r in left):\n                    continue\n                option = (time",
            ),
            expect="a better plan exists",
        ),
        Mutant(
            "keeps the first way to a state",
            replace=("if room not in following or option[0] < following[room][0]:", "if room not in following:"),
            expect="a better plan exists",
        ),
        Mutant(
            "the first state",
            replace=("min(states.values(), key=lambda state: state[0])[1]", "next(iter(states.values()))[1]"),
            expect="a better plan exists",
        ),
        Mutant(
            "the time too",
            replace=(
                "return list(min(states.values(), key=lambda state: state[0])[1])",
                "return min(states.values(), key=lambda state: state[0])",
            ),
            expect="must be a list of",
        ),
        Mutant(
            "an enumeration of strings",
            replace=(
                "return list(min(states.values(), key=lambda state: state[0])[1])",
                "import enum\n    tier = enum.Enum('Tier', {name: name for name in ('device', 'host', 'disk', 'compute')}, type=str)\n    return [tier(name) for name in min(states.values(), key=lambda state: state[0])[1]]",
            ),
            expect="must be a list of",
        ),
        Mutant(
            "fills in the costs",
            replace=("    tiers = ((", '    costs["device"] = 0\n    tiers = (('),
            expect="changed one of its arguments",
        ),
        Mutant(
            "all plans",
            source='\nimport itertools\n\n\ndef place(prefixes, device_blocks, host_blocks, disk_blocks, costs):\n    rooms, best = {"device": device_blocks, "host": host_blocks, "disk": disk_blocks}, None\n    for plan in itertools.product(("device", "host", "disk", "compute"), repeat=len(prefixes)):\n        if all(sum(n for (n, _), where in zip(prefixes, plan) if where == tier) <= room for tier, room in rooms.items()):\n            time = sum(n * uses * costs.get(tier, 0) for (n, uses), tier in zip(prefixes, plan))\n            if best is None or time < best[0]:\n                best = time, plan\n    return list(best[1])\n',
            expect="try no state twice",
        ),
    ],
    "heavy_hitters": [
        Mutant(
            "nobody is safe",
            replace=("range(len(self.kept) - self.recent)", "range(len(self.kept))"),
            expect="is among the last",
        ),
        Mutant(
            "one too many is safe",
            replace=("range(len(self.kept) - self.recent)", "range(max(1, len(self.kept) - self.recent - 1))"),
            expect="Sums now",
        ),
        Mutant(
            "ties to the youngest",
            replace=("key=lambda i: self.scores[i])", "key=lambda i: (self.scores[i], -i))"),
            expect="Sums now",
        ),
        Mutant(
            "one more is kept",
            replace=("if len(self.kept) <= self.budget:", "if len(self.kept) <= self.budget + 1:"),
            expect="heavy_hitters: ",
        ),
        Mutant(
            "places in place of positions",
            replace=("return self.kept.pop(victim)", "self.kept.pop(victim)\n        return victim"),
            expect="heavy_hitters: example: step",
        ),
        Mutant(
            "counts what is kept",
            replace=("self.kept.append(self.count)", "self.kept.append(len(self.kept))"),
            expect="heavy_hitters: ",
        ),
        Mutant(
            "the score stays",
            replace=("        del self.scores[victim]\n", "        del self.scores[-1]\n"),
            expect="heavy_hitters: ",
        ),
        Mutant(
            "any number of weights",
            replace=(
                '        if len(weights) != len(self.kept) + 1:\n            raise ValueError(f"{len(weights)} weights for {len(self.kept) + 1} kept positions")\n',
                "",
            ),
            expect="heavy_hitters: ",
        ),
        Mutant(
            "checks too late",
            replace=(
                '        if len(weights) != len(self.kept) + 1:\n            raise ValueError(f"{len(weights)} weights for {len(self.kept) + 1} kept positions")\n        self.kept.append(self.count)\n',
                '        self.kept.append(self.count)\n        if len(weights) != len(self.kept):\n            raise ValueError("weights")\n',
            ),
            expect="change nothing",
        ),
        Mutant(
            "adds the weights before it refuses them",
            replace=(
                "        if len(weights) != len(self.kept) + 1:\n",
                "        if len(weights) != len(self.kept) + 1:\n            for i, weight in enumerate(weights[: len(self.kept)]):\n                self.scores[i] += weight\n",
            ),
            expect="Sums now",
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
        Mutant(
            "scores in float32",
            replace=(
                "[score + weight for score, weight in zip(self.scores, weights)]",
                "(torch.tensor(self.scores) + torch.tensor(weights)).tolist()",
            ),
            expect="heavy_hitters: edges",
        ),
    ],
    "pack_keys": [
        Mutant(
            "looks for zeros, not for a scale of 0",
            replace=("torch.where(scales == 0,", "torch.where((grouped == 0).all(-1),"),
            expect="so the scale of that group is 1",
        ),
        Mutant(
            "groups of an even size only",
            replace=(
                "    grouped = x.float().unflatten(-1, (-1, group))\n",
                "    grouped = x.float().unflatten(-1, (-1, group // 2 * 2 or 2))\n",
            ),
            expect="pack_keys: edges",
        ),
        Mutant(
            "bfloat16 is enough",
            replace=("x.float().unflatten", "(x if x.dtype == torch.bfloat16 else x.float()).unflatten"),
            expect="pack_keys: edges",
        ),
        Mutant(
            "neighbours in a byte",
            replace=(".to(torch.uint8).chunk(2, -1)", ".to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)"),
            expect="not two neighbours",
        ),
        Mutant("in the dtype that came", replace=("x.float().unflatten", "x.unflatten"), expect="pack_keys: "),
        Mutant(
            "an epsilon",
            replace=("scales = torch.where(scales == 0, torch.ones_like(scales), scales)", "scales = scales + 1e-6"),
            expect="pack_keys: ",
        ),
        Mutant(
            "signed bytes",
            replace=("first | second << 4, scales", "(first | second << 4).view(torch.int8), scales"),
            expect="pack_keys: ",
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
        Mutant(
            "the sink in each part",
            replace=("torch.cat([lses, sink[None]])", "torch.cat([torch.logaddexp(lses, sink[None]), sink[None]])"),
            expect="merge_with_sink: ",
        ),
        Mutant(
            "multiplies NaN by zero",
            replace=("    outs = torch.where(lses[..., None] == -torch.inf, torch.zeros_like(outs), outs)\n", ""),
            expect="NaN",
        ),
        Mutant("forgets the sink", replace=("torch.cat([lses, sink[None]])", "lses"), expect="merge_with_sink: "),
        Mutant("overflows", replace=(".logsumexp(0)", ".exp().sum(0).log()"), expect="overflows"),
    ],
    "gated_chunks": [
        Mutant(
            "divides products",
            replace=("(logs[:, None] - logs[None]).clamp(max=0).exp()", "logs.exp()[:, None] / logs.exp()[None]"),
            expect="NaN",
        ),
        Mutant("reads before it writes", replace=("between).tril()", "between).tril(-1)"), expect="own key and value"),
        Mutant(
            "the state is not decayed for its readers",
            replace=("(q[here] * logs.exp()) @ state", "q[here] @ state"),
            expect="has decayed",
        ),
        Mutant(
            "keys decay to the start",
            replace=("left = (logs[-1] - logs).exp()", "left = logs.exp()"),
            expect="gated_chunks: ",
        ),
        Mutant(
            "states before the chunks",
            replace=("        state = logs[-1]", "        states.append(state)\n        state = logs[-1]"),
            expect="gated_chunks: ",
        ),
    ],
}
