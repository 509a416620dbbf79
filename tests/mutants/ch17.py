"""Plausible mistakes in the exercises of chapter 17: every one of them must fail its checks."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "token_grid": [
        Mutant(
            "256 gaps", replace=("(highs - lows) / 255", "(highs - lows) / 256"), expect="255 steps between 256 codes"
        ),
        Mutant(
            "one grid for all heads of a token",
            replace=(
                "lows, highs = x.amin(-1), x.amax(-1)",
                "lows, highs = x.amin((1, 2))[:, None].expand(x.shape[:2]), x.amax((1, 2))[:, None].expand(x.shape[:2])",
            ),
            expect="token_grid: ",
        ),
        Mutant(
            "one grid for each channel",
            replace=("lows, highs = x.amin(-1), x.amax(-1)", "lows, highs = x.amin(0), x.amax(0)"),
            expect="must have its shape",
        ),
        Mutant(
            "divides by zero",
            replace=("torch.where(highs == lows, torch.ones_like(steps), steps)", "steps"),
            expect="its step is 1",
        ),
        Mutant(
            "cuts off",
            replace=(".round().to(torch.uint8)", ".to(torch.uint8)"),
            expect="cuts off what is behind the point",
        ),
        Mutant(
            "half up",
            replace=(").round().to(torch.uint8)", " + 0.5).floor().to(torch.uint8)"),
            expect="Ties go to the even code",
        ),
        Mutant(
            "symmetric",
            replace=("lows, highs = x.amin(-1), x.amax(-1)", "highs = x.abs().amax(-1)\n    lows = -highs"),
            expect="the lows of",
        ),
        Mutant("signed codes", replace=("torch.uint8", "torch.int8"), expect="must be torch.uint8"),
        Mutant("in the dtype that came", replace=("    x = x.float()\n", ""), expect="must be torch.float32"),
        Mutant(
            "an epsilon",
            replace=("torch.where(highs == lows, torch.ones_like(steps), steps)", "steps + 1e-3"),
            expect="the steps of",
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
            expect="was given back before",
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
            expect="list of places in the table",
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
            expect="looks at place",
        ),
        Mutant("from the end", replace=("and not wanted(place)]", "and not wanted(place)][::-1]"), expect="Ascending"),
    ],
    "place": [
        Mutant(
            "the most popular first",
            source="""
def place(prefixes, device_blocks, host_blocks, disk_blocks, costs):
    plan, left = ["compute"] * len(prefixes), {"device": device_blocks, "host": host_blocks, "disk": disk_blocks}
    for i in sorted(range(len(prefixes)), key=lambda i: -prefixes[i][1]):
        for tier in left:
            if prefixes[i][0] <= left[tier]:
                left[tier] -= prefixes[i][0]
                plan[i] = tier
                break
    return plan
""",
            expect="a better plan exists",
        ),
        Mutant(
            "blocks do not count",
            replace=("time + num_blocks * uses * cost", "time + uses * cost"),
            expect="a better plan exists",
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
    ],
    "heavy_hitters": [
        Mutant(
            "the last step only",
            replace=("[score + weight for score, weight in zip(self.scores, weights)]", "list(weights)"),
            expect="Sums now",
        ),
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
        Mutant("the largest goes", replace=("victim = min(old", "victim = max(old"), expect="Sums now"),
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
            expect="throws out",
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
    ],
}
