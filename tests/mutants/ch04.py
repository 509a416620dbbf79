"""Plausible mistakes in the exercises of chapter 04 that no misconception of its checkers covers."""

from minillm.book.proofs import Mutant, edited

MUTANTS = {
    "pack_short_first": [
        edited(
            "raises only where a sequence has exactly 0 new tokens",
            "min(lengths) < 1",
            "0 in lengths",
            "a sequence without a new token, raises ValueError",
        ),
        edited("another error", "raise ValueError", "raise IndexError", "expected ValueError"),
        edited("the order as a tuple", '"order": order', '"order": tuple(order)', "a tuple, not a list"),
        edited(
            "a tensor for a number",
            '"max_query_len": max(lengths)',
            '"max_query_len": torch.tensor(max(lengths))',
            "not an int",
        ),
        edited(
            "a float for a number",
            '"max_query_len": max(lengths)',
            '"max_query_len": float(max(lengths))',
            "a float, not an int",
        ),
        edited(
            "positions in int32",
            "torch.tensor(positions)",
            "torch.tensor(positions, dtype=torch.int32)",
            "another dtype",
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
        edited(
            "sorts the arguments",
            "    token_ids, positions, ends",
            "    num_computed.sort()\n    token_ids, positions, ends",
            "changed one of its arguments",
        ),
    ],
    "fit_regimes": [
        edited(
            "counts errors as equal that agree to nine digits",
            "if error <= best_error + 1e-12:",
            "if error < best_error or math.isclose(error, best_error, abs_tol=1e-12):",
            "Errors count as equal only if they differ by less than 1e-12",
        ),
        edited("rounding decides a tie", "error <= best_error + 1e-12", "error <= best_error", "the largest k"),
        edited(
            "slope from the last measurement alone",
            "zip(batches[k:], seconds[k:])]",
            "zip(batches[k:][-1:], seconds[k:][-1:])]",
            "fit_regimes",
        ),
        edited("adds floor and slope", "max(floor, slope * b)", "(floor + slope * b)", "fit_regimes"),
        edited("returns a list", "return best", "return list(best)", "a list, not a tuple"),
        edited(
            "returns NumPy's numbers",
            "return best",
            "import numpy\n    return numpy.float64(best[0]), numpy.float64(best[1])",
            "a float64, not a float",
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
        edited(
            "no batch of more than 64",
            "min(max_prompts, n - i) + 1",
            "min(max_prompts, n - i, 64) + 1",
            "plan_batches: edges",
        ),
        edited("returns tuples", "batches.append(order[", "batches.append((*order,)[", "a tuple, not a list"),
        edited(
            "returns NumPy's numbers",
            "    return batches",
            "    import numpy\n    return [[numpy.int64(i) for i in batch] for batch in batches]",
            "an int64, not an int",
        ),
        edited("drops a prompt", "    return batches", "    return batches[1:] or batches", "exactly one batch"),
    ],
    "ridge_batch": [
        edited(
            "keeps only the caches in memory",
            "batch if weights + batch * cache",
            "batch if batch * cache",
            "ridge_batch: edges",
        ),
        edited(
            "searches only among batches that memory bounds",
            "    return batch if weights + batch * cache <= gpu",
            "    most = (gpu['memory'] - weights) // max(1, cache)\n    return batch if batch <= most and weights <= gpu",
            "ridge_batch: edges",
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
        edited("divides by nothing", "if gain <= 0:", "if gain < 0:", "raised ZeroDivisionError"),
        edited("returns a float", "return batch if", "return float(batch) if", "a float, not an int"),
    ],
    "expert_bend": [
        edited(
            "refuses only a top_k of 0",
            "if not 1 <= top_k <= num_experts:",
            "if not top_k or top_k > num_experts:",
            "raise ValueError",
        ),
    ],
}
