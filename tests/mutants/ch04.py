"""Plausible mistakes in the exercises of chapter 04: every one of them must fail its checks."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "pack_short_first": [
        Mutant(
            "logits in the order of the batch",
            replace=("torch.tensor(last_row)", "torch.tensor(ends[1:]) - 1"),
            expect="logits_indices",
        ),
        Mutant(
            "positions from 0 for everyone",
            replace=("positions += range(num_computed[i], len(sequences[i]))", "positions += range(lengths[i])"),
            expect="positions",
        ),
        Mutant(
            "lengths before the step",
            replace=("[len(sequences[i]) for i in order]", "[num_computed[i] for i in order]"),
            expect="seq_lens",
        ),
        Mutant(
            "sorts by the length of the sequence",
            replace=("key=lambda i: lengths[i]", "key=lambda i: len(sequences[i])"),
            expect="order",
        ),
        Mutant(
            "equal ones backwards",
            replace=(
                "sorted(range(len(sequences)), key=lambda i: lengths[i])",
                "sorted(reversed(range(len(sequences))), key=lambda i: lengths[i])",
            ),
            expect="order",
        ),
        Mutant(
            "query_start_loc without its 0",
            replace=("positions, ends = [], [], [0]", "positions, ends = [], [], []"),
            expect="query_start_loc",
        ),
        Mutant(
            "lets an empty sequence in",
            replace=("if not lengths or min(lengths) < 1:", "if not lengths:"),
            expect="brings nothing",
        ),
        Mutant(
            "the longest query for the longest sequence",
            replace=("max(map(len, sequences))", "max(lengths)"),
            expect="max_seq_len",
        ),
    ],
    "fit_regimes": [
        Mutant(
            "arithmetic means",
            replace=("math.exp(sum(map(math.log, values)) / len(values))", "sum(values) / len(values)"),
            expect="the floor",
        ),
        Mutant(
            "always one on each side",
            replace=("range(len(batches) + 1)", "range(1, len(batches))"),
            expect="fit_regimes: edges",
        ),
        Mutant(
            "the smaller k at a tie",
            replace=("error <= best_error + 1e-12", "error < best_error - 1e-12"),
            expect="fit_regimes: edges",
        ),
        Mutant(
            "each side against its own line only",
            replace=(
                "error = sum(math.log(max(floor, slope * b) / t) ** 2 for b, t in zip(batches, seconds))",
                "error = sum(math.log((floor if i < k else slope * b) / t) ** 2 for i, (b, t) in enumerate(zip(batches, seconds)))",
            ),
            expect="fit_regimes",
        ),
        Mutant(
            "errors in seconds",
            replace=("math.log(max(floor, slope * b) / t) ** 2", "(max(floor, slope * b) - t) ** 2"),
            expect="fit_regimes",
        ),
        Mutant(
            "slope from the last measurement alone",
            replace=("zip(batches[k:], seconds[k:])]", "zip(batches[k:][-1:], seconds[k:][-1:])]"),
            expect="fit_regimes",
        ),
        Mutant("adds floor and slope", replace=("max(floor, slope * b)", "(floor + slope * b)"), expect="fit_regimes"),
    ],
    "plan_batches": [
        Mutant(
            "forgets the bend", replace=("max(bend, size * longest)", "size * longest"), expect="the cost of the plan"
        ),
        Mutant(
            "a batch costs its tokens, not its rectangle",
            replace=("size * longest)", "sum(lengths[j] for j in order[i:i + size]))"),
            expect="plan_batches: e",
        ),
        Mutant(
            "takes the shortest for the longest", replace=("order[i + size - 1]", "order[i]"), expect="plan_batches: e"
        ),
        Mutant(
            "does not sort",
            replace=("sorted(range(len(lengths)), key=lambda i: lengths[i])", "list(range(len(lengths)))"),
            expect="plan_batches: e",
        ),
        Mutant(
            "most batches at a tie",
            replace=("count + 1, [size", "count - 1, [size"),
            expect="among those of equal cost",
        ),
        Mutant(
            "the largest sizes first at a tie",
            replace=(
                "best[i] = min(candidates)",
                "best[i] = min(candidates, key=lambda c: (c[0], c[1], [-s for s in c[2]]))",
            ),
            expect="among those of equal cost",
        ),
        Mutant(
            "one prompt too many",
            replace=("min(max_prompts, n - i) + 1", "min(max_prompts + 1, n - i) + 1"),
            expect="more than",
        ),
        Mutant(
            "fills batches greedily",
            source="""
def plan_batches(lengths, max_prompts, bend):
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    return [order[i:i + max_prompts] for i in range(0, len(order), max_prompts)]
""",
            expect="the cost of the plan",
        ),
    ],
    "ridge_batch": [
        Mutant(
            "through a float",
            replace=('-(-weights * gpu["flops"] // gain)', 'math.ceil(weights * gpu["flops"] / gain)'),
            expect="ridge_batch: edges",
        ),
        Mutant(
            "rounds down",
            replace=('-(-weights * gpu["flops"] // gain)', 'weights * gpu["flops"] // gain'),
            expect="Llama-3.1-8B",
        ),
        Mutant(
            "only beyond the ridge",
            replace=('-(-weights * gpu["flops"] // gain)', 'weights * gpu["flops"] // gain + 1'),
            expect="the batch at context 0",
        ),
        Mutant(
            "forgets that there are keys and values",
            replace=("cache = 2 * model", "cache = model"),
            expect="ridge_batch",
        ),
        Mutant(
            "counts query heads in the cache", replace=('model["kv_heads"]', 'model["heads"]'), expect="ridge_batch"
        ),
        Mutant(
            "ignores the memory",
            replace=('batch if weights + batch * cache <= gpu["memory"] else None', "batch"),
            expect="ridge_batch: edges",
        ),
        Mutant(
            "keeps only the caches in memory",
            replace=("batch if weights + batch * cache", "batch if batch * cache"),
            expect="ridge_batch: edges",
        ),
        Mutant(
            "attention does no arithmetic",
            replace=(
                '2 * model["params"] + 4 * model["layers"] * model["heads"] * model["head_dim"] * context',
                '2 * model["params"]',
            ),
            expect="ridge_batch",
        ),
        Mutant("divides by nothing", replace=("if gain <= 0:", "if gain < 0:"), expect="raised ZeroDivisionError"),
    ],
}
