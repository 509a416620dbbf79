"""Plausible mistakes in the exercises of chapter 04 that no misconception of its checkers covers."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "pack_short_first": [
        Mutant(
            "raises only where a sequence has exactly 0 new tokens",
            replace=("min(lengths) < 1", "0 in lengths"),
            expect="a sequence without a new token, raises ValueError",
        ),
        Mutant("another error", replace=("raise ValueError", "raise IndexError"), expect="expected ValueError"),
        Mutant(
            "the order as a tuple", replace=('"order": order', '"order": tuple(order)'), expect="a tuple, not a list"
        ),
        Mutant(
            "a tensor for a number",
            replace=('"max_query_len": max(lengths)', '"max_query_len": torch.tensor(max(lengths))'),
            expect="not an int",
        ),
        Mutant(
            "a float for a number",
            replace=('"max_query_len": max(lengths)', '"max_query_len": float(max(lengths))'),
            expect="a float, not an int",
        ),
        Mutant(
            "positions in int32",
            replace=("torch.tensor(positions)", "torch.tensor(positions, dtype=torch.int32)"),
            expect="another dtype",
        ),
        Mutant(
            "a dictionary that equals everything",
            source="""
class Everything(dict):
    __eq__ = lambda self, other: True


def pack_short_first(sequences, num_computed):
    if not sequences or any(len(ids) <= done for ids, done in zip(sequences, num_computed)):
        raise ValueError
    return Everything()
""",
            expect="an Everything, not a dict",
        ),
        Mutant(
            "sorts the arguments",
            replace=("    token_ids, positions, ends", "    num_computed.sort()\n    token_ids, positions, ends"),
            expect="changed one of its arguments",
        ),
    ],
    "fit_regimes": [
        Mutant(
            "counts errors as equal that agree to nine digits",
            replace=(
                "if error <= best_error + 1e-12:",
                "if error < best_error or math.isclose(error, best_error, abs_tol=1e-12):",
            ),
            expect="Errors count as equal only if they differ by less than 1e-12",
        ),
        Mutant(
            "rounding decides a tie",
            replace=("error <= best_error + 1e-12", "error <= best_error"),
            expect="the largest k",
        ),
        Mutant(
            "slope from the last measurement alone",
            replace=("zip(batches[k:], seconds[k:])]", "zip(batches[k:][-1:], seconds[k:][-1:])]"),
            expect="fit_regimes",
        ),
        Mutant("adds floor and slope", replace=("max(floor, slope * b)", "(floor + slope * b)"), expect="fit_regimes"),
        Mutant("returns a list", replace=("return best", "return list(best)"), expect="a list, not a tuple"),
        Mutant(
            "returns NumPy's numbers",
            replace=("return best", "import numpy\n    return numpy.float64(best[0]), numpy.float64(best[1])"),
            expect="a float64, not a float",
        ),
    ],
    "plan_batches": [
        Mutant(
            "fills batches greedily",
            source="""
def plan_batches(lengths, max_prompts, bend):
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    return [order[i:i + max_prompts] for i in range(0, len(order), max_prompts)]
""",
            expect="the plan is wrong",
        ),
        Mutant(
            "no batch of more than 64",
            replace=("min(max_prompts, n - i) + 1", "min(max_prompts, n - i, 64) + 1"),
            expect="plan_batches: edges",
        ),
        Mutant(
            "returns tuples",
            replace=("batches.append(order[", "batches.append((*order,)["),
            expect="a tuple, not a list",
        ),
        Mutant(
            "returns NumPy's numbers",
            replace=(
                "    return batches",
                "    import numpy\n    return [[numpy.int64(i) for i in batch] for batch in batches]",
            ),
            expect="an int64, not an int",
        ),
        Mutant(
            "drops a prompt",
            replace=("    return batches", "    return batches[1:] or batches"),
            expect="exactly one batch",
        ),
    ],
    "ridge_batch": [
        Mutant(
            "keeps only the caches in memory",
            replace=("batch if weights + batch * cache", "batch if batch * cache"),
            expect="ridge_batch: edges",
        ),
        Mutant(
            "searches only among batches that memory bounds",
            replace=(
                "    return batch if weights + batch * cache <= gpu",
                "    most = (gpu['memory'] - weights) // max(1, cache)\n    return batch if batch <= most and weights <= gpu",
            ),
            expect="ridge_batch: edges",
        ),
        Mutant(
            "searches up to a million million",
            source="""
def ridge_batch(model, gpu, context):
    weights = model["params"] * model["weight_bytes"]
    cache = 2 * model["layers"] * model["kv_heads"] * model["head_dim"] * model["kv_bytes"] * context
    flops = 2 * model["params"] + 4 * model["layers"] * model["heads"] * model["head_dim"] * context
    low, high = 0, 10**12
    while high - low > 1:
        middle = (low + high) // 2
        computes = middle * flops * gpu["bandwidth"] >= (weights + middle * cache) * gpu["flops"]
        low, high = (low, middle) if computes else (middle, high)
    return high if high < 10**12 and weights + high * cache <= gpu["memory"] else None
""",
            expect="ridge_batch: edges",
        ),
        Mutant("divides by nothing", replace=("if gain <= 0:", "if gain < 0:"), expect="raised ZeroDivisionError"),
        Mutant("returns a float", replace=("return batch if", "return float(batch) if"), expect="a float, not an int"),
    ],
    "expert_bend": [
        Mutant(
            "refuses only a top_k of 0",
            replace=("if not 1 <= top_k <= num_experts:", "if not top_k or top_k > num_experts:"),
            expect="raise ValueError",
        ),
    ],
}
