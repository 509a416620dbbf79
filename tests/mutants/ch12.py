"""Plausible mistakes in the exercises of chapter 12: every one of them must fail its checks."""

from minillm.book.proofs import Mutant, edited

MUTANTS = {
    "merge_states": [
        Mutant(
            "a product instead of where",
            source="""
def merge_states(best, total, acc):
    largest = best.amax(0)
    factor = torch.exp(best - largest).nan_to_num()
    return largest, (total * factor).sum(0), (acc * factor[:, :, None]).sum(0)
""",
            expect="0 times NaN, or infinity, is NaN",
        ),
        Mutant(
            "looks for NaN",
            source="""
def merge_states(best, total, acc):
    largest = best.amax(0)
    factor = torch.where(best == -torch.inf, 0.0, torch.exp(best - largest))
    total, acc = torch.where(total.isnan(), 0.0, total), torch.where(acc.isnan(), 0.0, acc)
    return largest, (total * factor).sum(0), (acc * factor[:, :, None]).sum(0)
""",
            expect="0 times NaN, or infinity, is NaN",
        ),
        edited(
            "empty minus empty",
            "factor = torch.where(empty, 0.0, torch.exp(best - largest))",
            "factor = torch.exp(best - largest)",
            "-inf minus -inf is not a number",
        ),
        edited(
            "leaves acc as it was",
            "acc = torch.where(empty[:, :, None], 0.0, acc) * factor[:, :, None]",
            "acc = torch.where(empty[:, :, None], 0.0, acc)",
            "acc for 2 parts",
        ),
        edited(
            "leaves total as it was",
            "total = torch.where(empty, 0.0, total) * factor",
            "total = torch.where(empty, 0.0, total)",
            "total for 2 parts",
        ),
        edited(
            "rescales the wrong way",
            "torch.exp(best - largest)",
            "torch.exp(largest - best)",
            "merge_states: example: total",
        ),
        edited(
            "powers of two", "torch.exp(best - largest)", "torch.exp2(best - largest)", "merge_states: example: total"
        ),
        edited(
            "no maximum",
            "torch.exp(best - largest))",
            "torch.exp(best))\n    largest = torch.zeros_like(largest)",
            "The largest score of all parts",
        ),
        edited(
            "by way of exp(best)",
            "    acc = torch",
            "    total = torch.where(empty, 0.0, total / factor) * torch.exp(best - 0 * largest) / torch.exp(largest)\n    acc = torch",
            "merge_states: edges: total",
        ),
        edited(
            "the empty state's best is 0",
            "    return largest,",
            "    largest = torch.where(largest == -torch.inf, 0.0, largest)\n    return largest,",
            "-inf where no part has seen any",
        ),
        Mutant(
            "two parts only",
            source="""
def merge_states(best, total, acc):
    state = best[0], total[0], acc[0]
    for part in range(1, min(len(best), 2)):
        largest = torch.maximum(state[0], best[part])
        old = torch.where(state[0] == -torch.inf, 0.0, torch.exp(state[0] - largest))
        new = torch.where(best[part] == -torch.inf, 0.0, torch.exp(best[part] - largest))
        state = (largest, state[1].nan_to_num() * old + total[part].nan_to_num() * new,
                 state[2].nan_to_num() * old[:, None] + acc[part].nan_to_num() * new[:, None])
    return state
""",
            expect="for 3 parts",
        ),
        Mutant(
            "adds the means up by their totals",
            source="""
def merge_states(best, total, acc):
    total, acc = total.nan_to_num(), acc.nan_to_num()
    return best.amax(0), total.sum(0), acc.sum(0)
""",
            expect="merge_states: example: total",
        ),
    ],
    "plan_tiles": [
        edited(
            "forgets the past",
            "past, key_tiles = num_keys - num_queries,",
            "past, key_tiles = 0,",
            "plan_tiles: example: query tile 0",
        ),
        edited(
            "keys that do not exist are no matter",
            "low, high = tile * tile_n, (tile + 1) * tile_n",
            "low, high = tile * tile_n, min((tile + 1) * tile_n, num_keys)",
            "which does not exist",
        ),
        edited(
            "queries that do not exist have a say",
            "past + min(begin + tile_m, num_queries) - 1",
            "past + begin + tile_m - 1",
            "Each of these queries sees all of these keys",
        ),
        edited(
            "a window of one more",
            "max(low, prefix) > last - window)",
            "max(low, prefix) >= last - window)",
            "expected 'masked'",
        ),
        edited(
            "skips one too few at the window",
            "high - 1 <= first - window)",
            "high - 1 < first - window)",
            "None of these queries sees any of these keys",
        ),
        edited(
            "skips one too many at the window",
            "high - 1 <= first - window)",
            "high - 1 <= first - window + 1)",
            "is 'skipped', expected 'masked'",
        ),
        edited(
            "a tile that ends at the first query is masked",
            "(high - 1 <= first and",
            "(high - 1 < first and",
            "Each of these queries sees all of these keys",
        ),
        edited(
            "the last query decides", "(high - 1 <= first and", "(high - 1 <= last and", "is 'whole', expected 'masked'"
        ),
        edited(
            "the window's edge by the first query",
            "max(low, prefix) > last - window)",
            "max(low, prefix) > first - window)",
            "is 'whole', expected 'masked'",
        ),
        edited(
            "prefix and window apart",
            "max(low, prefix) > last - window)",
            "low > last - window)",
            "is 'masked', expected 'whole'",
        ),
        edited(
            "the prefix is causal",
            "if high <= prefix or (high",
            "if (high <= prefix and high - 1 <= first) or (high",
            "is 'masked', expected 'whole'",
        ),
        edited(
            "the prefix is whole wherever it reaches",
            "if high <= prefix or (high",
            "if low < prefix or (high",
            "is 'whole', expected 'masked'",
        ),
        edited(
            "the prefix leaves with the window",
            "if low >= prefix and (low > last or high - 1 <= first - window):",
            "if low > last or high - 1 <= first - window:",
            "expected",
        ),
        edited(
            "runs are lists",
            "(kind(tile), tile, end) for tile, end",
            "[kind(tile), tile, end] for tile, end",
            "Each run is a tuple",
        ),
        edited(
            "neighbours of a kind stay apart",
            " if before is None or kind(before) != kind(tile)]",
            "]",
            "They are one run",
        ),
        edited(
            "skipped tiles are left out",
            "zip(starts, [*starts[1:], key_tiles])]",
            "zip(starts, [*starts[1:], key_tiles]) if kind(tile) != 'skipped']",
            "each run begins where the one before ended",
        ),
        edited(
            "asks every tile",
            "cuts = [0, *sorted(cuts)]",
            "cuts = range(key_tiles)\n        kinds = {tile: kind(tile) for tile in cuts}",
            "compute where the runs begin and end",
        ),
        edited(
            "forgets one bound",
            "edges = (prefix, first - window + 1, last - window + 1,",
            "edges = (prefix, first - window + 1,",
            "is 'masked', expected 'whole'",
        ),
    ],
    "document_kernel": [
        edited(
            "the broken one",
            'best = tl.full((TILE_M,), float("-inf"), tl.float32)',
            "best = tl.zeros((TILE_M,), tl.float32)",
            "compared with them that is no score",
        ),
        edited(
            "only the start",
            'reference = tl.where(larger == float("-inf"), 0.0, larger)',
            "reference = larger",
            "Which tile is the first that its document is in",
        ),
        edited(
            "keeps the 0",
            "return larger, total, acc",
            "return reference, total, acc",
            "compared with them that is no score",
        ),
        edited(
            "rescale is left as it was",
            "tl.exp(best - reference)",
            "tl.exp(best - larger)",
            "Which tile is the first that its document is in",
        ),
        Mutant(
            "-10,000 for what is masked",
            source="""
@triton.jit
def repaired_kernel(q, k, v, documents, out, n, scale, HEAD_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    dims = tl.arange(0, HEAD_DIM)
    queries = tl.load(q + rows[:, None] * HEAD_DIM + dims[None, :], (rows < n)[:, None], 0.0)
    of_rows = tl.load(documents + rows, rows < n, -1)
    best = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    acc = tl.zeros((TILE_M, HEAD_DIM), tl.float32)
    for begin in range(0, n, TILE_N):
        columns = begin + tl.arange(0, TILE_N)
        keys = tl.load(k + columns[:, None] * HEAD_DIM + dims[None, :], (columns < n)[:, None], 0.0)
        values = tl.load(v + columns[:, None] * HEAD_DIM + dims[None, :], (columns < n)[:, None], 0.0)
        of_columns = tl.load(documents + columns, columns < n, -2)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(of_rows[:, None] == of_columns[None, :], scores, -10000.0)
        larger = tl.maximum(best, tl.max(scores, 1))
        rescale = tl.exp(best - larger)
        weights = tl.exp(scores - larger[:, None])
        total = total * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * rescale[:, None], input_precision="ieee")
        best = larger
    tl.store(out + rows[:, None] * HEAD_DIM + dims[None, :], acc / total[:, None], (rows < n)[:, None])


def repaired_attention(q, k, v, documents):
    (n, head_dim), out = q.shape, torch.empty_like(q)
    repaired_kernel[(triton.cdiv(n, TILE_M),)](q, k, v, documents, out, n, head_dim**-0.5, HEAD_DIM=head_dim, TILE_M=TILE_M, TILE_N=TILE_N)
    return out
""",
            expect="compared with them that is no score",
        ),
        edited(
            "float16's lowest number for what is masked",
            'scores = tl.where(of_rows[:, None] == of_columns[None, :], scores, float("-inf"))',
            "scores = tl.where(of_rows[:, None] == of_columns[None, :], scores, -65504.0)",
            "compared with them that is no score",
        ),
        edited(
            "starts at -50,000",
            'best = tl.full((TILE_M,), float("-inf"), tl.float32)',
            "best = tl.full((TILE_M,), -50000.0, tl.float32)",
            "compared with them that is no score",
        ),
        edited("forgets to rescale acc", "acc * rescale[:, None]", "acc", "document_kernel: example: the output"),
        edited(
            "starts far below",
            'best = tl.full((TILE_M,), float("-inf"), tl.float32)',
            "best = tl.full((TILE_M,), -100.0, tl.float32)",
            "compared with them that is no score",
        ),
        edited(
            "another document's keys",
            "of_rows[:, None] == of_columns[None, :]",
            "of_rows[:, None] >= of_columns[None, :]",
            "tokens see documents before their own",
        ),
        edited(
            "loads its own tile only",
            "for begin in range(0, n, TILE_N):",
            "for begin in range(0, tl.program_id(0) * TILE_M + TILE_M, TILE_N):",
            "document_kernel: example: program (0, 0, 0)",
        ),
        Mutant(
            "torch",
            source="""
def repaired_attention(q, k, v, documents):
    scores = q.float() @ k.float().T * q.shape[1] ** -0.5
    return (scores.masked_fill(documents[:, None] != documents[None, :], -torch.inf).softmax(-1) @ v.float()).to(q.dtype)
""",
            expect="a torch operation read or wrote numbers",
        ),
    ],
    "sink_window": [
        edited("no sinks", "sinks = tl.minimum(sink, start)", "sinks = 0", "never loads k[0, 0] (missing: rows 0–3;"),
        edited(
            "sinks and window overlap",
            "sinks = tl.minimum(sink, start)",
            "sinks = sink",
            "it also counts twice in the softmax",
        ),
        edited(
            "a window of one more",
            "start = tl.maximum(past + begin - window + 1, 0)",
            "start = tl.maximum(past + begin - window, 0)",
            "None of its queries sees that key",
        ),
        edited(
            "rounded down to a tile",
            "start = tl.maximum(past + begin - window + 1, 0)",
            "start = tl.maximum(past + begin - window + 1, 0) // TILE_N * TILE_N",
            "None of its queries sees that key",
        ),
        edited(
            "the sinks' tile is loaded whole",
            "past + rows, tile, sinks, sink,",
            "past + rows, tile, num_keys, sink,",
            "None of its queries sees that key",
        ),
        edited(
            "the last tile is loaded whole",
            "past + rows, tile, last + 1, sink,",
            "past + rows, tile, num_keys, sink,",
            "None of its queries sees that key",
        ),
        edited("no end of keys", "there = columns < end", "there = columns >= 0", "sink_window: "),
        edited(
            "loads everything before the last query",
            "for tile in range(start, last + 1, TILE_N)",
            "for tile in range(0, last + 1, TILE_N)",
            "sink_window: example: program",
        ),
        edited(
            "each query has the first one's window",
            "(columns[None, :] > positions[:, None] - window)",
            "(columns[None, :] >= 0)",
            "each query has a window of its own",
        ),
        edited("forgets the past", "past = num_keys - num_queries", "past = 0", "sink_window: edges: program"),
        edited(
            "empty minus empty",
            'reference = tl.where(larger == float("-inf"), 0.0, larger)',
            "reference = larger",
            "its best is still -inf there",
        ),
        edited(
            "keeps the 0",
            "return larger, total, acc",
            "return reference, total, acc",
            "compared with them that is no score",
        ),
        edited(
            "forgets to rescale acc",
            "acc * rescale[:, None]",
            "acc",
            "What does the next tile do to best, total and acc",
        ),
        edited(
            "forgets to rescale total",
            "total = total * rescale",
            "total = total",
            "What does the next tile do to best, total and acc",
        ),
        edited(
            "a state in the inputs' dtype",
            "    return larger, total, acc",
            "    acc = acc.to(values.dtype).to(tl.float32)\n    return larger, total, acc",
            "acc is a sum of values, and leaves float16",
        ),
        edited(
            "one program a query",
            "sink_kernel[(triton.cdiv(num_queries, TILE_M),)]",
            "sink_kernel[(num_queries,)]",
            "sink_kernel has 70 programs",
        ),
        Mutant(
            "a helper of the package",
            source="""
from minillm.kernels.flash_attention import take_in


@triton.jit
def sink_kernel(q, k, v, out, n, HEAD_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    rows = tl.arange(0, TILE_M)
    best, total, acc = take_in(rows, rows, rows, rows, rows, True, "ieee")


def sink_window(q, k, v, sink, window):
    out = torch.empty_like(q)
    sink_kernel[(1,)](q, k, v, out, len(q), HEAD_DIM=16, TILE_M=TILE_M, TILE_N=TILE_N)
    return out
""",
            expect="this uses the package's minillm.kernels.flash_attention.take_in, in a kernel",
        ),
    ],
    "capped": [
        edited(
            "mask first",
            """    scores = cap * (1 - 2 / (tl.exp(2 * scores / cap) + 1))
    scores = tl.where(seen, scores, float("-inf"))
""",
            """    scores = tl.where(seen, scores, float("-inf"))
    scores = cap * (1 - 2 / (tl.exp(2 * scores / cap) + 1))
""",
            "The mask does not survive",
        ),
        edited(
            "cuts them off",
            "cap * (1 - 2 / (tl.exp(2 * scores / cap) + 1))",
            "tl.minimum(tl.maximum(scores, -cap), cap)",
            "capped: ",
        ),
        edited("tanh of half", "tl.exp(2 * scores / cap)", "tl.exp(scores / cap)", "capped: example: the output"),
        edited(
            "infinite over infinite",
            "cap * (1 - 2 / (tl.exp(2 * scores / cap) + 1))",
            "cap * (tl.exp(2 * scores / cap) - 1) / (tl.exp(2 * scores / cap) + 1)",
            "becomes inf / inf",
        ),
        edited(
            "no maximum, the cap will do",
            "larger = tl.maximum(best, tl.max(scores, 1))",
            "larger = tl.zeros_like(best)",
            "Subtract the largest score too",
        ),
        edited(
            "the cap as maximum",
            "larger = tl.maximum(best, tl.max(scores, 1))",
            "larger = tl.zeros_like(best) + cap",
            "and exp(-500) is 0",
        ),
        edited(
            "a program for each query head",
            "grid = triton.cdiv(num_queries, TILE_M // group), num_kv_heads",
            "grid = triton.cdiv(num_queries, TILE_M), num_heads",
            "both have the tokens at positions 0 to 15",
        ),
        edited(
            "one program a token",
            "grid = triton.cdiv(num_queries, TILE_M // group), num_kv_heads",
            "grid = num_queries, num_kv_heads",
            "capped_kernel has 40 programs",
        ),
        edited(
            "a state in the inputs' dtype",
            "return larger, total, acc",
            "return larger, total, acc.to(values.dtype).to(tl.float32)",
            "acc is a sum of values, and leaves float16",
        ),
        edited(
            "heads lie interleaved",
            "heads = kv_head * GROUP + tl.arange(0, TILE_M) % GROUP",
            "heads = kv_head + tl.arange(0, TILE_M) % GROUP * num_kv_heads",
            "a lane without a query of its own",
        ),
        edited(
            "heads before tokens",
            """    tokens = first + tl.arange(0, TILE_M) // GROUP
    heads = kv_head * GROUP + tl.arange(0, TILE_M) % GROUP""",
            """    tokens = first + tl.arange(0, TILE_M) % (TILE_M // GROUP)
    heads = kv_head * GROUP + tl.arange(0, TILE_M) // (TILE_M // GROUP) % 2""",
            "capped: ",
        ),
        edited(
            "the first KV head for all",
            "kv_place = (columns * num_kv_heads + kv_head)",
            "kv_place = (columns * num_kv_heads)",
            "A program reads its own KV head",
        ),
        edited(
            "loads all keys",
            "end = past + tl.minimum(first + TILE_M // GROUP, num_queries)",
            "end = num_keys",
            "never ahead",
        ),
        edited("forgets the past", "past = num_keys - num_queries", "past = 0", "never loads k[16, 0, 0]"),
        edited(
            "rows take the place of tokens in the mask",
            "past + tokens[:, None]",
            "(past + first + tl.arange(0, TILE_M))[:, None]",
            "The rows of one token share its position",
        ),
    ],
}
