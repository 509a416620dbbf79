"""Plausible mistakes in the exercises of chapter 12: every one of them must fail its checks."""

from minillm.book.proofs import Mutant

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
        Mutant(
            "empty minus empty",
            replace=(
                "factor = torch.where(empty, 0.0, torch.exp(best - largest))",
                "factor = torch.exp(best - largest)",
            ),
            expect="-inf minus -inf is not a number",
        ),
        Mutant(
            "leaves acc as it was",
            replace=(
                "acc = torch.where(empty[:, :, None], 0.0, acc) * factor[:, :, None]",
                "acc = torch.where(empty[:, :, None], 0.0, acc)",
            ),
            expect="acc for 2 parts",
        ),
        Mutant(
            "leaves total as it was",
            replace=("total = torch.where(empty, 0.0, total) * factor", "total = torch.where(empty, 0.0, total)"),
            expect="total for 2 parts",
        ),
        Mutant(
            "rescales the wrong way",
            replace=("torch.exp(best - largest)", "torch.exp(largest - best)"),
            expect="merge_states: example: total",
        ),
        Mutant(
            "powers of two",
            replace=("torch.exp(best - largest)", "torch.exp2(best - largest)"),
            expect="merge_states: example: total",
        ),
        Mutant(
            "no maximum",
            replace=("torch.exp(best - largest))", "torch.exp(best))\n    largest = torch.zeros_like(largest)"),
            expect="The largest score of all parts",
        ),
        Mutant(
            "by way of exp(best)",
            replace=(
                "    acc = torch",
                "    total = torch.where(empty, 0.0, total / factor) * torch.exp(best - 0 * largest) / torch.exp(largest)\n    acc = torch",
            ),
            expect="merge_states: edges: total",
        ),
        Mutant(
            "the empty state's best is 0",
            replace=(
                "    return largest,",
                "    largest = torch.where(largest == -torch.inf, 0.0, largest)\n    return largest,",
            ),
            expect="-inf where no part has seen any",
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
        Mutant(
            "forgets the past",
            replace=("past, key_tiles = num_keys - num_queries,", "past, key_tiles = 0,"),
            expect="plan_tiles: example: query tile 0",
        ),
        Mutant(
            "keys that do not exist are no matter",
            replace=(
                "low, high = tile * tile_n, (tile + 1) * tile_n",
                "low, high = tile * tile_n, min((tile + 1) * tile_n, num_keys)",
            ),
            expect="which does not exist",
        ),
        Mutant(
            "queries that do not exist have a say",
            replace=("past + min(begin + tile_m, num_queries) - 1", "past + begin + tile_m - 1"),
            expect="Each of these queries sees all of these keys",
        ),
        Mutant(
            "a window of one more",
            replace=("max(low, prefix) > last - window)", "max(low, prefix) >= last - window)"),
            expect="expected 'masked'",
        ),
        Mutant(
            "skips one too few at the window",
            replace=("high - 1 <= first - window)", "high - 1 < first - window)"),
            expect="None of these queries sees any of these keys",
        ),
        Mutant(
            "skips one too many at the window",
            replace=("high - 1 <= first - window)", "high - 1 <= first - window + 1)"),
            expect="is 'skipped', expected 'masked'",
        ),
        Mutant(
            "a tile that ends at the first query is masked",
            replace=("(high - 1 <= first and", "(high - 1 < first and"),
            expect="Each of these queries sees all of these keys",
        ),
        Mutant(
            "the last query decides",
            replace=("(high - 1 <= first and", "(high - 1 <= last and"),
            expect="is 'whole', expected 'masked'",
        ),
        Mutant(
            "the window's edge by the first query",
            replace=("max(low, prefix) > last - window)", "max(low, prefix) > first - window)"),
            expect="is 'whole', expected 'masked'",
        ),
        Mutant(
            "prefix and window apart",
            replace=("max(low, prefix) > last - window)", "low > last - window)"),
            expect="is 'masked', expected 'whole'",
        ),
        Mutant(
            "the prefix is causal",
            replace=("if high <= prefix or (high", "if (high <= prefix and high - 1 <= first) or (high"),
            expect="is 'masked', expected 'whole'",
        ),
        Mutant(
            "the prefix is whole wherever it reaches",
            replace=("if high <= prefix or (high", "if low < prefix or (high"),
            expect="is 'whole', expected 'masked'",
        ),
        Mutant(
            "the prefix leaves with the window",
            replace=(
                "if low >= prefix and (low > last or high - 1 <= first - window):",
                "if low > last or high - 1 <= first - window:",
            ),
            expect="expected",
        ),
        Mutant(
            "runs are lists",
            replace=("(kind(tile), tile, end) for tile, end", "[kind(tile), tile, end] for tile, end"),
            expect="Each run is a tuple",
        ),
        Mutant(
            "neighbours of a kind stay apart",
            replace=(" if before is None or kind(before) != kind(tile)]", "]"),
            expect="They are one run",
        ),
        Mutant(
            "skipped tiles are left out",
            replace=(
                "zip(starts, [*starts[1:], key_tiles])]",
                "zip(starts, [*starts[1:], key_tiles]) if kind(tile) != 'skipped']",
            ),
            expect="each run begins where the one before ended",
        ),
        Mutant(
            "asks every tile",
            replace=(
                "cuts = [0, *sorted(cuts)]",
                "cuts = range(key_tiles)\n        kinds = {tile: kind(tile) for tile in cuts}",
            ),
            expect="compute where the runs begin and end",
        ),
        Mutant(
            "forgets one bound",
            replace=("edges = (prefix, first - window + 1, last - window + 1,", "edges = (prefix, first - window + 1,"),
            expect="is 'masked', expected 'whole'",
        ),
    ],
    "document_kernel": [
        Mutant(
            "the broken one",
            replace=('best = tl.full((TILE_M,), float("-inf"), tl.float32)', "best = tl.zeros((TILE_M,), tl.float32)"),
            expect="compared with them that is no score",
        ),
        Mutant(
            "only the start",
            replace=('reference = tl.where(larger == float("-inf"), 0.0, larger)', "reference = larger"),
            expect="Which tile is the first that its document is in",
        ),
        Mutant(
            "keeps the 0",
            replace=("return larger, total, acc", "return reference, total, acc"),
            expect="compared with them that is no score",
        ),
        Mutant(
            "rescale is left as it was",
            replace=("tl.exp(best - reference)", "tl.exp(best - larger)"),
            expect="Which tile is the first that its document is in",
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
        Mutant(
            "float16's lowest number for what is masked",
            replace=(
                'scores = tl.where(of_rows[:, None] == of_columns[None, :], scores, float("-inf"))',
                "scores = tl.where(of_rows[:, None] == of_columns[None, :], scores, -65504.0)",
            ),
            expect="compared with them that is no score",
        ),
        Mutant(
            "starts at -50,000",
            replace=(
                'best = tl.full((TILE_M,), float("-inf"), tl.float32)',
                "best = tl.full((TILE_M,), -50000.0, tl.float32)",
            ),
            expect="compared with them that is no score",
        ),
        Mutant(
            "forgets to rescale acc",
            replace=("acc * rescale[:, None]", "acc"),
            expect="document_kernel: example: the output",
        ),
        Mutant(
            "starts far below",
            replace=(
                'best = tl.full((TILE_M,), float("-inf"), tl.float32)',
                "best = tl.full((TILE_M,), -100.0, tl.float32)",
            ),
            expect="compared with them that is no score",
        ),
        Mutant(
            "another document's keys",
            replace=("of_rows[:, None] == of_columns[None, :]", "of_rows[:, None] >= of_columns[None, :]"),
            expect="tokens see documents before their own",
        ),
        Mutant(
            "loads its own tile only",
            replace=(
                "for begin in range(0, n, TILE_N):",
                "for begin in range(0, tl.program_id(0) * TILE_M + TILE_M, TILE_N):",
            ),
            expect="document_kernel: example: program (0, 0, 0)",
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
        Mutant(
            "no sinks",
            replace=("sinks = tl.minimum(sink, start)", "sinks = 0"),
            expect="never loads k[0, 0] (missing: rows 0–3;",
        ),
        Mutant(
            "sinks and window overlap",
            replace=("sinks = tl.minimum(sink, start)", "sinks = sink"),
            expect="it also counts twice in the softmax",
        ),
        Mutant(
            "a window of one more",
            replace=(
                "start = tl.maximum(past + begin - window + 1, 0)",
                "start = tl.maximum(past + begin - window, 0)",
            ),
            expect="None of its queries sees that key",
        ),
        Mutant(
            "rounded down to a tile",
            replace=(
                "start = tl.maximum(past + begin - window + 1, 0)",
                "start = tl.maximum(past + begin - window + 1, 0) // TILE_N * TILE_N",
            ),
            expect="None of its queries sees that key",
        ),
        Mutant(
            "the sinks' tile is loaded whole",
            replace=("past + rows, tile, sinks, sink,", "past + rows, tile, num_keys, sink,"),
            expect="None of its queries sees that key",
        ),
        Mutant(
            "the last tile is loaded whole",
            replace=("past + rows, tile, last + 1, sink,", "past + rows, tile, num_keys, sink,"),
            expect="None of its queries sees that key",
        ),
        Mutant("no end of keys", replace=("there = columns < end", "there = columns >= 0"), expect="sink_window: "),
        Mutant(
            "loads everything before the last query",
            replace=("for tile in range(start, last + 1, TILE_N)", "for tile in range(0, last + 1, TILE_N)"),
            expect="sink_window: example: program",
        ),
        Mutant(
            "each query has the first one's window",
            replace=("(columns[None, :] > positions[:, None] - window)", "(columns[None, :] >= 0)"),
            expect="each query has a window of its own",
        ),
        Mutant(
            "forgets the past",
            replace=("past = num_keys - num_queries", "past = 0"),
            expect="sink_window: edges: program",
        ),
        Mutant(
            "empty minus empty",
            replace=('reference = tl.where(larger == float("-inf"), 0.0, larger)', "reference = larger"),
            expect="its best is still -inf there",
        ),
        Mutant(
            "keeps the 0",
            replace=("return larger, total, acc", "return reference, total, acc"),
            expect="compared with them that is no score",
        ),
        Mutant(
            "forgets to rescale acc",
            replace=("acc * rescale[:, None]", "acc"),
            expect="What does the next tile do to best, total and acc",
        ),
        Mutant(
            "forgets to rescale total",
            replace=("total = total * rescale", "total = total"),
            expect="What does the next tile do to best, total and acc",
        ),
        Mutant(
            "a state in the inputs' dtype",
            replace=(
                "    return larger, total, acc",
                "    acc = acc.to(values.dtype).to(tl.float32)\n    return larger, total, acc",
            ),
            expect="acc is a sum of values, and leaves float16",
        ),
        Mutant(
            "one program a query",
            replace=("sink_kernel[(triton.cdiv(num_queries, TILE_M),)]", "sink_kernel[(num_queries,)]"),
            expect="sink_kernel has 70 programs",
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
        Mutant(
            "mask first",
            replace=(
                """    scores = cap * (1 - 2 / (tl.exp(2 * scores / cap) + 1))
    scores = tl.where(seen, scores, float("-inf"))
""",
                """    scores = tl.where(seen, scores, float("-inf"))
    scores = cap * (1 - 2 / (tl.exp(2 * scores / cap) + 1))
""",
            ),
            expect="The mask does not survive",
        ),
        Mutant(
            "cuts them off",
            replace=("cap * (1 - 2 / (tl.exp(2 * scores / cap) + 1))", "tl.minimum(tl.maximum(scores, -cap), cap)"),
            expect="capped: ",
        ),
        Mutant(
            "tanh of half",
            replace=("tl.exp(2 * scores / cap)", "tl.exp(scores / cap)"),
            expect="capped: example: the output",
        ),
        Mutant(
            "infinite over infinite",
            replace=(
                "cap * (1 - 2 / (tl.exp(2 * scores / cap) + 1))",
                "cap * (tl.exp(2 * scores / cap) - 1) / (tl.exp(2 * scores / cap) + 1)",
            ),
            expect="becomes inf / inf",
        ),
        Mutant(
            "no maximum, the cap will do",
            replace=("larger = tl.maximum(best, tl.max(scores, 1))", "larger = tl.zeros_like(best)"),
            expect="Subtract the largest score too",
        ),
        Mutant(
            "the cap as maximum",
            replace=("larger = tl.maximum(best, tl.max(scores, 1))", "larger = tl.zeros_like(best) + cap"),
            expect="and exp(-500) is 0",
        ),
        Mutant(
            "a program for each query head",
            replace=(
                "grid = triton.cdiv(num_queries, TILE_M // group), num_kv_heads",
                "grid = triton.cdiv(num_queries, TILE_M), num_heads",
            ),
            expect="both have the tokens at positions 0 to 15",
        ),
        Mutant(
            "one program a token",
            replace=(
                "grid = triton.cdiv(num_queries, TILE_M // group), num_kv_heads",
                "grid = num_queries, num_kv_heads",
            ),
            expect="capped_kernel has 40 programs",
        ),
        Mutant(
            "a state in the inputs' dtype",
            replace=("return larger, total, acc", "return larger, total, acc.to(values.dtype).to(tl.float32)"),
            expect="acc is a sum of values, and leaves float16",
        ),
        Mutant(
            "heads lie interleaved",
            replace=(
                "heads = kv_head * GROUP + tl.arange(0, TILE_M) % GROUP",
                "heads = kv_head + tl.arange(0, TILE_M) % GROUP * num_kv_heads",
            ),
            expect="a lane without a query of its own",
        ),
        Mutant(
            "heads before tokens",
            replace=(
                """    tokens = first + tl.arange(0, TILE_M) // GROUP
    heads = kv_head * GROUP + tl.arange(0, TILE_M) % GROUP""",
                """    tokens = first + tl.arange(0, TILE_M) % (TILE_M // GROUP)
    heads = kv_head * GROUP + tl.arange(0, TILE_M) // (TILE_M // GROUP) % 2""",
            ),
            expect="capped: ",
        ),
        Mutant(
            "the first KV head for all",
            replace=("kv_place = (columns * num_kv_heads + kv_head)", "kv_place = (columns * num_kv_heads)"),
            expect="A program reads its own KV head",
        ),
        Mutant(
            "loads all keys",
            replace=("end = past + tl.minimum(first + TILE_M // GROUP, num_queries)", "end = num_keys"),
            expect="never ahead",
        ),
        Mutant(
            "forgets the past", replace=("past = num_keys - num_queries", "past = 0"), expect="never loads k[16, 0, 0]"
        ),
        Mutant(
            "rows take the place of tokens in the mask",
            replace=("past + tokens[:, None]", "(past + first + tl.arange(0, TILE_M))[:, None]"),
            expect="The rows of one token share its position",
        ),
    ],
}
