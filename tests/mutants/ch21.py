"""Plausible mistakes in the exercises of chapter 21: every one of them must fail its checks."""

from minillm.book.proofs import Mutant, edited

MUTANTS = {
    "route_tokens": [
        edited("in the dtype of the logits", "logits.float().sigmoid()", "logits.sigmoid()", "weights"),
        edited("takes any k", "if not 1 <= k <= logits.shape[1]:", "if k > 10**9:", "route_tokens: "),
        edited("an epsilon", "weights.sum(-1, keepdim=True)", "(weights.sum(-1, keepdim=True) + 1e-6)", "weights"),
        edited("ties within a tolerance", "(scores + bias).sort", "((scores + bias) * 1e5).round().sort", "experts"),
        edited(
            "no token, no columns",
            "    return weights / weights.sum(-1, keepdim=True), experts",
            "    if not len(logits):\n        return torch.zeros(0), experts\n    return weights / weights.sum(-1, keepdim=True), experts",
            "route_tokens: ",
        ),
        edited("sums in float64", "(scores + bias).sort", "(scores.double() + bias).sort", "route_tokens: edges"),
    ],
    "align_rows": [
        edited("no padding", "(counts + tile - 1) // tile", "counts // tile", "IndexError"),
        edited(
            "places without the beginning",
            "begins[owner] + torch.arange(len(flat)) - before[owner]",
            "torch.arange(len(flat))",
            "rows",
        ),
        edited(
            "tiles backwards", "torch.arange(num_experts).repeat", "torch.arange(num_experts).flip(0).repeat", "tiles"
        ),
    ],
    "grouped_tiles": [
        edited("padding is the last token", " * (rows >= 0)[:, None]", "", "the result"),
        Mutant(
            "a loop over the rows",
            source="""def grouped_tiles(x, weight, rows, tiles, k):
    tile = len(rows) // len(tiles)
    out = torch.zeros(len(rows), weight.shape[1])
    for place, number in enumerate(rows.tolist()):
        if number >= 0:
            out[place] = weight[tiles[place // tile]] @ x[number // k]
    return out
""",
            expect="operations of torch",
        ),
        Mutant(
            "weights not transposed",
            source="""def grouped_tiles(x, weight, rows, tiles, k):
    gathered = x[rows.clamp(min=0) // k] * (rows >= 0)[:, None]
    per_tile = gathered.view(len(tiles), len(rows) // len(tiles), -1)
    return torch.bmm(per_tile, weight[tiles].view(len(tiles), x.shape[1], -1)).flatten(0, 1)
""",
            expect="the result",
        ),
        Mutant(
            "a loop in numpy",
            source="\nimport numpy as np\n\n\ndef grouped_tiles(x, weight, rows, tiles, k):\n    tile, places, experts = len(rows) // len(tiles), rows.numpy(), tiles.numpy()\n    out = np.zeros((len(rows), weight.shape[1]), dtype=np.float32)\n    for i, number in enumerate(places):\n        if number >= 0:\n            out[i] = weight.numpy()[experts[i // tile]] @ x.numpy()[number // k]\n    return torch.from_numpy(out)\n",
            expect="grouped_tiles: ",
        ),
        Mutant(
            "a loop in Python",
            source="\ndef grouped_tiles(x, weight, rows, tiles, k):\n    tile, tokens, weights, experts = len(rows) // len(tiles), x.tolist(), weight.tolist(), tiles.tolist()\n    out = [\n        [sum(a * b for a, b in zip(row, tokens[number // k])) if number >= 0 else 0.0 for row in weights[experts[i // tile]]]\n        for i, number in enumerate(rows.tolist())\n    ]\n    return torch.tensor(out).view(len(rows), weight.shape[1])\n",
            expect="grouped_tiles: ",
        ),
    ],
    "place_replicas": [
        edited(
            "the first beginning, not improved",
            """range(30):
        placed = [set(rng.sample(range(count), each)) for _ in range(ranks)]
        improved = True""",
            """range(30):
        placed = [set(rng.sample(range(count), each)) for _ in range(ranks)]
        improved = False""",
            "is possible",
        ),
        edited(
            "copies that do not share",
            "sum(load[e] / copies[e] for e in held)",
            "sum(load[e] for e in held)",
            "is possible",
        ),
        edited(
            "an expert may be lost",
            '    if 0 in copies:\n        return [float("inf")] * copies.count(0)\n',
            "    copies = [c or 1 for c in copies]\n",
            "no rank holds expert",
        ),
        edited(
            "takes any size",
            "if ranks * each < count or each > count:",
            "if ranks < 1:",
            "expected it to raise ValueError",
        ),
        edited(
            "the mean, not the largest",
            "return sorted((sum(load[e] / copies[e] for e in held) for held in placed), reverse=True)",
            "return [sum(sum(load[e] / copies[e] for e in held) for held in placed)]",
            "is possible",
        ),
        Mutant(
            "greedy alone",
            source="""from minillm.parallel import placement


def place_replicas(load, ranks, each):
    count = len(load)
    if ranks * each < count or each > count:
        raise ValueError("no room")
    copies = [1] * count
    for _ in range(ranks * each - count):
        copies[max((e for e in range(count) if copies[e] < ranks), key=lambda e: load[e] / copies[e])] += 1
    placed, carried = [[] for _ in range(ranks)], [0.0] * ranks
    for e in sorted(range(count), key=lambda e: (-copies[e], -load[e] / copies[e])):
        for _ in range(copies[e]):
            free = [r for r in range(ranks) if len(placed[r]) < each and e not in placed[r]]
            free = free or [r for r in range(ranks) if e not in placed[r]]
            r = min(free, key=lambda r: carried[r])
            placed[r].append(e)
            carried[r] += load[e] / copies[e]
    return placed
""",
            expect="is possible",
        ),
        edited(
            "True for 1",
            "[sorted(held) for held in min",
            "[[bool(e) if e < 2 else e for e in sorted(held)] for held in min",
            "must be an int",
        ),
    ],
}
