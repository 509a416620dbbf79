"""Plausible mistakes in the exercises of chapter 13: every one of them must fail its checks."""

from minillm.book.proofs import Mutant, edited

MUTANTS = {
    "merge_prefix": [
        edited(
            "column i is sequence i",
            "mean[rows], log[rows] = prefix_mean.transpose(0, 1), prefix_log.T",
            "mean[:len(rows)], log[:len(rows)] = prefix_mean.transpose(0, 1), prefix_log.T",
            "Column i of the prefix belongs to sequence rows[i]",
        ),
        edited(
            "gathers rows of the prefix",
            "mean[rows], log[rows] = prefix_mean.transpose(0, 1), prefix_log.T",
            "mean[rows], log[rows] = prefix_mean.transpose(0, 1)[rows], prefix_log.T[rows]",
            "merge_prefix: ",
        ),
        edited(
            "into the arguments",
            "mean, log = torch.zeros_like(own_mean), torch.full_like(own_log, -torch.inf)",
            "mean, log = own_mean.clone(), own_log",
            "changed one of its arguments",
        ),
        edited(
            "those without a prefix count twice",
            "mean, log = torch.zeros_like(own_mean), torch.full_like(own_log, -torch.inf)",
            "mean, log = own_mean.clone(), own_log.clone()",
            "is not in `rows`",
        ),
        edited(
            "a log of 0 for no prefix",
            "torch.full_like(own_log, -torch.inf)",
            "torch.zeros_like(own_log)",
            "is not in `rows`",
        ),
        edited(
            "powers of two",
            "total = torch.logaddexp(own_log, log)",
            "total = torch.logaddexp2(own_log, log)",
            "The logarithms are natural here",
        ),
        edited(
            "the larger log",
            "total = torch.logaddexp(own_log, log)",
            "total = torch.maximum(own_log, log)",
            "The larger of two logs is not the log of the sum",
        ),
        edited(
            "by way of exp",
            "total = torch.logaddexp(own_log, log)",
            "total = (own_log.exp() + log.exp()).log()",
            "exp(log) overflows at 89",
        ),
        edited(
            "no where for the weights",
            "weight = torch.where(empty, 0.0, torch.exp(log - total))",
            "weight = torch.exp(log - total)",
            "-inf minus -inf is not a number",
        ),
        edited(
            "a product instead of where",
            "torch.where(empty[:, :, None], 0.0, mean) * weight[:, :, None]",
            "mean * weight[:, :, None]",
            "0 times NaN is NaN",
        ),
        edited(
            "the mean of the means",
            "return weighted(own_mean, own_log) + weighted(mean, log), total",
            "return torch.where((log == -torch.inf)[:, :, None], own_mean.nan_to_num(), (own_mean.nan_to_num() + mean.nan_to_num()) / 2), total",
            "merge_prefix: example: mean",
        ),
        edited(
            "the layout of the prefix",
            "weighted(mean, log), total",
            "weighted(mean, log), total.T",
            "the layout of the sequences' own states",
        ),
    ],
    "best_splits": [
        edited(
            "ties to more splits",
            "min((time_of(splits), splits) for",
            "min((time_of(splits), -splits) for",
            "best_splits: ",
        ),
        edited(
            "stops at the first rise",
            "    time, splits = min((time_of(splits), splits) for splits in range(1, max_splits + 1))\n",
            "    splits, time = 1, time_of(1)\n    while splits < max_splits and time_of(splits + 1) < time:\n        splits, time = splits + 1, time_of(splits + 1)\n",
            "best_splits: ",
        ),
        edited(
            "powers of two",
            "for splits in range(1, max_splits + 1))",
            "for splits in (1, 2, 4, 8, 16) if splits <= max_splits)",
            "best_splits: ",
        ),
        edited(
            "negative tiles",
            "own = max(0, min(size, tiles - split * size))",
            "own = min(size, tiles - split * size)",
            "best_splits: ",
        ),
        edited("whole tiles only", "tiles = -(-length // tile_n)", "tiles = length // tile_n", "best_splits: "),
        edited(
            "all places are there at the start", "free = [0] * places", "free = [0] * (places + 1)", "best_splits: "
        ),
        edited("one short of the limit", "range(1, max_splits + 1))", "range(1, max(max_splits, 2)))", "best_splits: "),
        edited(
            "sequences outermost",
            "        for split in range(splits):\n            for length in seq_lens:\n",
            "        for length in seq_lens:\n            for split in range(splits):\n",
            "best_splits: ",
        ),
    ],
    "gather_window": [
        edited(
            "reads the null block",
            "            if block != 0:\n                tile = tl.load(pages + source, inside, 0.0)\n",
            "            tile = tl.load(pages + source, inside, 0.0)\n",
            "Block 0 is the null block",
        ),
        edited(
            "leaves the null block's rows out",
            "            tl.store(out + target, tile, inside)",
            "            if block != 0:\n                tl.store(out + target, tile, inside)",
            "that too is a store",
        ),
        edited(
            "every entry of the table",
            "    if ((column + 1) * BLOCK_SIZE > first) & (column * BLOCK_SIZE < length):",
            "    if column >= 0:",
            "belongs to another request by now",
        ),
        edited(
            "entries that left the window",
            "    if ((column + 1) * BLOCK_SIZE > first) & (column * BLOCK_SIZE < length):",
            "    if column * BLOCK_SIZE < length:",
            "What lies outside of the window",
        ),
        edited(
            "an entry for each slot",
            "        block = tl.load(block_table + seq * max_blocks + column).to(tl.int64)\n",
            "        block = tl.max(tl.load(block_table + seq * max_blocks + column + slots * 0).to(tl.int64), 0)\n",
            "as many loads",
        ),
        edited(
            "an entry for keys, one for values",
            "        for which in range(0, 2):\n",
            "        for which in range(0, 2):\n            block = tl.load(block_table + seq * max_blocks + column).to(tl.int64)\n",
            "One load for a block serves all its KV slots",
        ),
        edited(
            "a window of one more",
            "first = tl.maximum(length - window, 0)",
            "first = tl.maximum(length - window - 1, 0)",
            "gather_window: ",
        ),
        edited(
            "all slots of a block",
            "& (positions >= first) & (positions < length)",
            "& (positions < length)",
            "gather_window: example",
        ),
        edited(
            "runs behind the end",
            "kept = (slots < BLOCK_SIZE) & (positions >= first) & (positions < length)",
            "kept = (slots < BLOCK_SIZE) & (positions >= first)",
            "gather_window: example",
        ),
        edited(
            "slots of the next block",
            "kept = (slots < BLOCK_SIZE) & (positions",
            "kept = (positions",
            "gather_window: ",
        ),
        edited(
            "keys and values apart",
            "source = ((block * BLOCK_SIZE + slots) * 2 + which)[:, None] * ROW",
            "source = ((block * 2 + which) * BLOCK_SIZE + slots)[:, None] * ROW",
            "compare the address with the layout",
        ),
        edited(
            "tokens first",
            "target = (heads[None, :] * total + rows[:, None]) * DIM + (inner % DIM)[None, :]",
            "target = (which * total + rows[:, None]) * ROW + inner[None, :]",
            "the output [keys or values, KV head, row, dim]",
        ),
        edited(
            "rows from the offset",
            "rows = tl.load(starts + seq) + positions - first",
            "rows = tl.load(starts + seq) + positions",
            "gather_window: example",
        ),
        edited(
            "values are keys",
            "(block * BLOCK_SIZE + slots) * 2 + which)",
            "(block * BLOCK_SIZE + slots) * 2 + which * 0)",
            "is loaded 2 times",
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
        edited(
            "the broken one",
            "tl.load(slot_mapping + tokens, tokens < num_tokens, -1).to(tl.int64)",
            "tl.load(slot_mapping + tokens, tokens < num_tokens, -1)",
            "an int32 ends at 2,147,483,647",
        ),
        edited(
            "converts the product",
            "    keys = slots[:, None] * ROW + inner[None, :]\n",
            "    keys = (slots.to(tl.int32)[:, None] * ROW + inner[None, :]).to(tl.int64)\n",
            "They differ by 1 times 2^32",
        ),
        edited(
            "places that are negative are padding",
            "    keys = slots[:, None] * ROW + inner[None, :]\n    real = (slots >= 0)[:, None]\n",
            "    keys = slots.to(tl.int32)[:, None] * ROW + inner[None, :]\n    real = keys >= 0\n",
            "What overflows can turn negative",
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
        edited(
            "padding of the values by their place",
            "tl.where(real, first_value + keys, -1)",
            "tl.where(first_value + keys >= 0, first_value + keys, -1)",
            "KV slot -1 is padding",
        ),
        edited(
            "values beside the keys",
            "first_value + keys, -1)",
            "ROW + keys, -1)",
            "the place of number 0 of the values",
        ),
        edited(
            "torch converts",
            "    row, num_tokens = num_kv_heads * head_dim, len(slot_mapping)\n",
            "    row, num_tokens = num_kv_heads * head_dim, len(slot_mapping)\n    slot_mapping = slot_mapping.to(torch.int64)\n",
            "a torch operation read or wrote numbers",
        ),
        edited(
            "places in 32 bits", "dtype=torch.int64, device", "dtype=torch.int32, device", "must be an int64 tensor"
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
        edited(
            "values of every head",
            'torch.einsum("hr,hvr->hv", scores.softmax(-1) @ latents, v_up)',
            'torch.einsum("hn,hnv->hv", scores.softmax(-1), torch.einsum("hvr,nr->hnv", v_up, latents))',
            "v_up behind the weighted sum of latents",
        ),
        edited("whole blocks", "flatten(0, 1)[:length]", "flatten(0, 1)", "NaN lies in block 0"),
    ],
}
