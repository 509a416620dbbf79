"""Plausible mistakes in the exercises of chapter 13: every one of them must fail its checks."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "merge_prefix": [
        Mutant(
            "column i is sequence i",
            replace=(
                "mean[rows], log[rows] = prefix_mean.transpose(0, 1), prefix_log.T",
                "mean[:len(rows)], log[:len(rows)] = prefix_mean.transpose(0, 1), prefix_log.T",
            ),
            expect="Column i of the prefix belongs to sequence rows[i]",
        ),
        Mutant(
            "gathers rows of the prefix",
            replace=(
                "mean[rows], log[rows] = prefix_mean.transpose(0, 1), prefix_log.T",
                "mean[rows], log[rows] = prefix_mean.transpose(0, 1)[rows], prefix_log.T[rows]",
            ),
            expect="merge_prefix: ",
        ),
        Mutant(
            "into the arguments",
            replace=(
                "mean, log = torch.zeros_like(own_mean), torch.full_like(own_log, -torch.inf)",
                "mean, log = own_mean.clone(), own_log",
            ),
            expect="changed one of its arguments",
        ),
        Mutant(
            "those without a prefix count twice",
            replace=(
                "mean, log = torch.zeros_like(own_mean), torch.full_like(own_log, -torch.inf)",
                "mean, log = own_mean.clone(), own_log.clone()",
            ),
            expect="is not in `rows`",
        ),
        Mutant(
            "a log of 0 for no prefix",
            replace=("torch.full_like(own_log, -torch.inf)", "torch.zeros_like(own_log)"),
            expect="is not in `rows`",
        ),
        Mutant(
            "powers of two",
            replace=("total = torch.logaddexp(own_log, log)", "total = torch.logaddexp2(own_log, log)"),
            expect="The logarithms are natural here",
        ),
        Mutant(
            "the larger log",
            replace=("total = torch.logaddexp(own_log, log)", "total = torch.maximum(own_log, log)"),
            expect="The larger of two logs is not the log of the sum",
        ),
        Mutant(
            "by way of exp",
            replace=("total = torch.logaddexp(own_log, log)", "total = (own_log.exp() + log.exp()).log()"),
            expect="exp(log) overflows at 89",
        ),
        Mutant(
            "no where for the weights",
            replace=("weight = torch.where(empty, 0.0, torch.exp(log - total))", "weight = torch.exp(log - total)"),
            expect="-inf minus -inf is not a number",
        ),
        Mutant(
            "a product instead of where",
            replace=("torch.where(empty[:, :, None], 0.0, mean) * weight[:, :, None]", "mean * weight[:, :, None]"),
            expect="0 times NaN is NaN",
        ),
        Mutant(
            "the mean of the means",
            replace=(
                "return weighted(own_mean, own_log) + weighted(mean, log), total",
                "return torch.where((log == -torch.inf)[:, :, None], own_mean.nan_to_num(), (own_mean.nan_to_num() + mean.nan_to_num()) / 2), total",
            ),
            expect="merge_prefix: example: mean",
        ),
        Mutant(
            "the layout of the prefix",
            replace=("weighted(mean, log), total", "weighted(mean, log), total.T"),
            expect="the layout of the sequences' own states",
        ),
    ],
    "best_splits": [
        Mutant(
            "ties to more splits",
            replace=("min((time_of(splits), splits) for", "min((time_of(splits), -splits) for"),
            expect="best_splits: ",
        ),
        Mutant(
            "stops at the first rise",
            replace=(
                "    time, splits = min((time_of(splits), splits) for splits in range(1, max_splits + 1))\n",
                "    splits, time = 1, time_of(1)\n    while splits < max_splits and time_of(splits + 1) < time:\n        splits, time = splits + 1, time_of(splits + 1)\n",
            ),
            expect="best_splits: ",
        ),
        Mutant(
            "powers of two",
            replace=(
                "for splits in range(1, max_splits + 1))",
                "for splits in (1, 2, 4, 8, 16) if splits <= max_splits)",
            ),
            expect="best_splits: ",
        ),
        Mutant(
            "negative tiles",
            replace=("own = max(0, min(size, tiles - split * size))", "own = min(size, tiles - split * size)"),
            expect="best_splits: ",
        ),
        Mutant(
            "whole tiles only",
            replace=("tiles = -(-length // tile_n)", "tiles = length // tile_n"),
            expect="best_splits: ",
        ),
        Mutant(
            "all places are there at the start",
            replace=("free = [0] * places", "free = [0] * (places + 1)"),
            expect="best_splits: ",
        ),
        Mutant(
            "one short of the limit",
            replace=("range(1, max_splits + 1))", "range(1, max(max_splits, 2)))"),
            expect="best_splits: ",
        ),
        Mutant(
            "sequences outermost",
            replace=(
                "        for split in range(splits):\n            for length in seq_lens:\n",
                "        for length in seq_lens:\n            for split in range(splits):\n",
            ),
            expect="best_splits: ",
        ),
    ],
    "gather_window": [
        Mutant(
            "reads the null block",
            replace=(
                "            if block != 0:\n                tile = tl.load(pages + source, inside, 0.0)\n",
                "            tile = tl.load(pages + source, inside, 0.0)\n",
            ),
            expect="Block 0 is the null block",
        ),
        Mutant(
            "leaves the null block's rows out",
            replace=(
                "            tl.store(out + target, tile, inside)",
                "            if block != 0:\n                tl.store(out + target, tile, inside)",
            ),
            expect="that too is a store",
        ),
        Mutant(
            "every entry of the table",
            replace=(
                "    if ((column + 1) * BLOCK_SIZE > first) & (column * BLOCK_SIZE < length):",
                "    if column >= 0:",
            ),
            expect="belongs to another request by now",
        ),
        Mutant(
            "entries that left the window",
            replace=(
                "    if ((column + 1) * BLOCK_SIZE > first) & (column * BLOCK_SIZE < length):",
                "    if column * BLOCK_SIZE < length:",
            ),
            expect="What lies outside of the window",
        ),
        Mutant(
            "an entry for each slot",
            replace=(
                "        block = tl.load(block_table + seq * max_blocks + column).to(tl.int64)\n",
                "        block = tl.max(tl.load(block_table + seq * max_blocks + column + slots * 0).to(tl.int64), 0)\n",
            ),
            expect="as many loads",
        ),
        Mutant(
            "an entry for keys, one for values",
            replace=(
                "        for which in range(0, 2):\n",
                "        for which in range(0, 2):\n            block = tl.load(block_table + seq * max_blocks + column).to(tl.int64)\n",
            ),
            expect="One load for a block serves all its KV slots",
        ),
        Mutant(
            "a window of one more",
            replace=("first = tl.maximum(length - window, 0)", "first = tl.maximum(length - window - 1, 0)"),
            expect="gather_window: ",
        ),
        Mutant(
            "all slots of a block",
            replace=("& (positions >= first) & (positions < length)", "& (positions < length)"),
            expect="gather_window: example",
        ),
        Mutant(
            "runs behind the end",
            replace=(
                "kept = (slots < BLOCK_SIZE) & (positions >= first) & (positions < length)",
                "kept = (slots < BLOCK_SIZE) & (positions >= first)",
            ),
            expect="gather_window: example",
        ),
        Mutant(
            "slots of the next block",
            replace=("kept = (slots < BLOCK_SIZE) & (positions", "kept = (positions"),
            expect="gather_window: ",
        ),
        Mutant(
            "keys and values apart",
            replace=(
                "source = ((block * BLOCK_SIZE + slots) * 2 + which)[:, None] * ROW",
                "source = ((block * 2 + which) * BLOCK_SIZE + slots)[:, None] * ROW",
            ),
            expect="compare the address with the layout",
        ),
        Mutant(
            "tokens first",
            replace=(
                "target = (heads[None, :] * total + rows[:, None]) * DIM + (inner % DIM)[None, :]",
                "target = (which * total + rows[:, None]) * ROW + inner[None, :]",
            ),
            expect="the output [keys or values, KV head, row, dim]",
        ),
        Mutant(
            "rows from the offset",
            replace=("rows = tl.load(starts + seq) + positions - first", "rows = tl.load(starts + seq) + positions"),
            expect="gather_window: example",
        ),
        Mutant(
            "values are keys",
            replace=("(block * BLOCK_SIZE + slots) * 2 + which)", "(block * BLOCK_SIZE + slots) * 2 + which * 0)"),
            expect="is loaded 2 times",
        ),
        Mutant(
            "torch gathers",
            source="""
def gather_window(pages, block_table, seq_lens, starts, total, window):
    parts = []
    for length, table in zip(seq_lens.tolist(), block_table.tolist()):
        for position in range(max(length - window, 0), length):
            parts.append(pages[table[position // pages.shape[1]], position % pages.shape[1]])
    return torch.stack(parts).permute(1, 2, 0, 3).contiguous()
""",
            expect="a torch operation read or wrote numbers",
        ),
    ],
    "slot_places": [
        Mutant(
            "the broken one",
            replace=(
                "tl.load(slot_mapping + tokens, tokens < num_tokens, -1).to(tl.int64)",
                "tl.load(slot_mapping + tokens, tokens < num_tokens, -1)",
            ),
            expect="an int32 ends at 2,147,483,647",
        ),
        Mutant(
            "converts the product",
            replace=(
                "    keys = slots[:, None] * ROW + inner[None, :]\n",
                "    keys = (slots.to(tl.int32)[:, None] * ROW + inner[None, :]).to(tl.int64)\n",
            ),
            expect="They differ by 1 times 2^32",
        ),
        Mutant(
            "places that are negative are padding",
            replace=(
                "    keys = slots[:, None] * ROW + inner[None, :]\n    real = (slots >= 0)[:, None]\n",
                "    keys = slots.to(tl.int32)[:, None] * ROW + inner[None, :]\n    real = keys >= 0\n",
            ),
            expect="What overflows can turn negative",
        ),
        Mutant(
            "only the slots",
            source="""
@triton.jit
def repaired_kernel(slot_mapping, places, num_tokens, num_blocks, BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr):
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inner = tl.arange(0, WIDTH)
    slots = tl.load(slot_mapping + tokens, tokens < num_tokens, -1).to(tl.int64)
    keys = slots[:, None] * ROW + inner[None, :]
    values = num_blocks * BLOCK_SIZE * ROW + keys
    values = tl.where(keys >= 0, values, -1)
    keys = tl.where(keys >= 0, keys, -1)
    inside = (tokens < num_tokens)[:, None] & (inner < ROW)[None, :]
    target = tokens[:, None] * ROW + inner[None, :]
    tl.store(places + target, keys, inside)
    tl.store(places + num_tokens * ROW + target, values, inside)


def slot_places(slot_mapping, num_blocks, block_size, num_kv_heads, head_dim):
    row, num_tokens = num_kv_heads * head_dim, len(slot_mapping)
    places = torch.empty(2, num_tokens, row, dtype=torch.int64)
    repaired_kernel[(triton.cdiv(num_tokens, 4),)](slot_mapping, places, num_tokens, num_blocks, BLOCK_SIZE=block_size, ROW=row, WIDTH=next_power_of_2(row), TOKENS=4)
    return places
""",
            expect="num_blocks * block_size * width = ",
        ),
        Mutant(
            "padding of the values by their place",
            replace=(
                "tl.where(real, first_value + keys, -1)",
                "tl.where(first_value + keys >= 0, first_value + keys, -1)",
            ),
            expect="KV slot -1 is padding",
        ),
        Mutant(
            "values beside the keys",
            replace=("first_value + keys, -1)", "ROW + keys, -1)"),
            expect="the place of number 0 of the values",
        ),
        Mutant(
            "torch converts",
            replace=(
                "    row, num_tokens = num_kv_heads * head_dim, len(slot_mapping)\n",
                "    row, num_tokens = num_kv_heads * head_dim, len(slot_mapping)\n    slot_mapping = slot_mapping.to(torch.int64)\n",
            ),
            expect="a torch operation read or wrote numbers",
        ),
        Mutant(
            "places in 32 bits",
            replace=("dtype=torch.int64, device", "dtype=torch.int32, device"),
            expect="must be an int64 tensor",
        ),
    ],
    "latent_decode": [
        Mutant(
            "keys of every head",
            source="""
def latent_decode(q_plain, q_turned, k_up, v_up, pages, block_table, seq_lens, scale):
    rope = q_turned.shape[-1]
    out = torch.zeros(len(seq_lens), *v_up.shape[:2])
    for seq, length in enumerate(seq_lens):
        if length:
            rows = pages[block_table[seq]].flatten(0, 1)[:length]
            turned, latents = rows[:, :rope], rows[:, rope:]
            keys = torch.einsum("hdr,nr->hnd", k_up, latents)
            scores = (torch.einsum("hd,hnd->hn", q_plain[seq], keys) + q_turned[seq] @ turned.T) * scale
            out[seq] = torch.einsum("hr,hvr->hv", scores.softmax(-1) @ latents, v_up)
    return out
""",
            expect="keys of every head would have",
        ),
        Mutant(
            "values of every head",
            replace=(
                'torch.einsum("hr,hvr->hv", scores.softmax(-1) @ latents, v_up)',
                'torch.einsum("hn,hnv->hv", scores.softmax(-1), torch.einsum("hvr,nr->hnv", v_up, latents))',
            ),
            expect="v_up behind the weighted sum of latents",
        ),
        Mutant("whole blocks", replace=("flatten(0, 1)[:length]", "flatten(0, 1)"), expect="NaN lies in block 0"),
    ],
}
