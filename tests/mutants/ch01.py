"""Plausible mistakes in the exercises of chapter 01: every one of them must fail its checks."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "top_p_mask": [
        Mutant(
            "leaves out the token that crosses p",
            replace=("(before < p[:, None])", "(before + ranked <= p[:, None])"),
            expect="top_p_mask",
        ),
        Mutant("forgets the floor", replace=("    keep[:, :min_keep] = True\n", ""), expect="min_keep=3"),
        Mutant(
            "keeps what can never be drawn", replace=("mask & logits.isfinite()", "mask"), expect="-inf is never kept"
        ),
        Mutant(
            "takes the first row's p for all",
            replace=("(before < p[:, None])", "(before < p[0])"),
            expect="the mask [row, token]",
        ),
        Mutant(
            "does not carry the mask back",
            replace=("torch.zeros_like(keep).scatter(1, order, keep)", "keep"),
            expect="the mask",
        ),
        Mutant(
            "drops tokens at p = 1 by rounding", replace=(" | (p[:, None] >= 1)", ""), expect="p = 1 keeps every token"
        ),
        Mutant(
            "a sort that promises nothing about ties",
            replace=("descending=True, stable=True", "descending=True"),
            expect="sort with stable=True",
        ),
        Mutant(
            "one token too many where the sum is p",
            replace=("(before < p[:, None])", "(before <= p[:, None])"),
            expect="hold exactly 0.5",
        ),
        Mutant(
            "takes a probability of 0 for a logit of -inf",
            replace=("mask & logits.isfinite()", "mask & (logits.softmax(-1) > 0)"),
            expect="logits 0 and -200 for p = 1",
        ),
        Mutant(
            "the package's filter, two functions down",
            source="""
def filtered(logits, p):
    from minillm.sampling import filters
    return filters.top_p_filter(logits, p).isfinite()


def helper(logits, p):
    return filtered(logits, p)


def top_p_mask(logits, p, min_keep):
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    return (helper(logits, p) | torch.zeros_like(logits, dtype=torch.bool).scatter(1, order[:, :min_keep], True)) & logits.isfinite()
""",
            expect="filters.top_p_filter, here or in a function that it calls",
        ),
    ],
    "gumbel_top_k": [
        Mutant(
            "one logarithm instead of two",
            replace=("-torch.log(-torch.log(uniform))", "-torch.log(uniform)"),
            expect="gumbel_top_k",
        ),
        Mutant(
            "noise before the temperature",
            replace=(
                "torch.where(greedy, logits, scaled + noise)",
                "torch.where(greedy, logits, scaled + noise / torch.where(greedy, 1.0, temperature[:, None]))",
            ),
            expect="tokens [row, order of drawing]",
        ),
        Mutant(
            "noise on greedy rows too",
            replace=("torch.where(greedy, logits, scaled + noise)", "scaled + noise"),
            expect="temperature 0",
        ),
        Mutant(
            "ties to the larger id",
            replace=(
                "scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]",
                "(scores.shape[1] - 1 - scores.flip(1).sort(dim=-1, descending=True, stable=True).indices)[:, :k]",
            ),
            expect="smaller id",
        ),
        Mutant(
            "a sort that promises nothing about ties",
            replace=("descending=True, stable=True", "descending=True"),
            expect="sort with stable=True",
        ),
        Mutant(
            "topk",
            replace=("scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]", "scores.topk(k, -1).indices"),
            expect="sort with stable=True",
        ),
        *(
            Mutant(
                f"temperature {least} instead of 0, noise and all",
                replace=(
                    "    scores = torch.where(greedy, logits, scaled + noise)",
                    f"    scores = logits / temperature.clamp(min={least})[:, None] + noise",
                ),
                expect="a case of its own",
            )
            for least in (1e-2, 1e-6, 1e-12)
        ),
        Mutant(
            "keeps u away from 0 and 1",
            replace=("torch.log(uniform)", "torch.log(uniform.clamp(1e-4, 1 - 1e-4))"),
            expect="u as it stands",
        ),
        Mutant(
            "a little something in each logarithm",
            replace=("-torch.log(-torch.log(uniform))", "-torch.log(-torch.log(uniform + 1e-10) + 1e-10)"),
            expect="u as it stands",
        ),
        Mutant("int32", replace=(".indices[:, :k]", ".indices[:, :k].int()"), expect="must be an int64 tensor"),
    ],
    "young_penalty": [
        Mutant(
            "punishes as often as the token occurred",
            source="""
def young_penalty(logits, prompt_ids, output_ids, penalty, window):
    logits = logits.clone()
    for row, (prompt, output) in enumerate(zip(prompt_ids, output_ids)):
        for token in output[-window:]:
            if token not in prompt:
                z, r = logits[row, token], penalty[row]
                logits[row, token] = z / r if z > 0 else z * r
    return logits
""",
            expect="occurred twice",
        ),
        Mutant(
            "divides negative logits",
            replace=("torch.where(logits > 0, logits / r, logits * r)", "logits / r"),
            expect="are wrong at [0, 2]",
        ),
        Mutant(
            "punishes the prompt",
            replace=("sorted(set(output[-window:]) - set(prompt))", "sorted(set(output[-window:]))"),
            expect="stands in the prompt",
        ),
        Mutant("forgets the window", replace=("output[-window:]", "output"), expect="window=1"),
        Mutant("spares everything but the prompt", replace=("- set(prompt)", "& set(prompt)"), expect="the logits"),
        Mutant(
            "leaves the prompt out before it cuts",
            replace=("set(output[-window:]) - set(prompt)", "set([t for t in output if t not in prompt][-window:])"),
            expect="cut first, then leave the prompt out",
        ),
        Mutant(
            "makes a set before it cuts",
            replace=("set(output[-window:])", "set(list(dict.fromkeys(output))[-window:])"),
            expect="cut first, then make a set",
        ),
        Mutant(
            "float64",
            replace=(
                "torch.where(logits > 0, logits / r, logits * r), logits)",
                "torch.where(logits > 0, logits / r, logits * r), logits).double()",
            ),
            expect="must be a float32 tensor",
        ),
    ],
    "typical_mask": [
        Mutant("ranks by probability", replace=("(-logp - entropy).abs()", "-logp"), expect="the mask [row, token]"),
        Mutant("lets NaN into the entropy", replace=("torch.where(p > 0, p * logp, 0.0)", "(p * logp)"), expect="NaN"),
        Mutant("signed distance", replace=("(-logp - entropy).abs()", "(-logp - entropy)"), expect="the mask"),
        Mutant(
            "stops one token early",
            replace=("ranked.cumsum(-1) - ranked < mass[:, None]", "ranked.cumsum(-1) < mass[:, None]"),
            expect="the mask",
        ),
        Mutant(
            "a sort that promises nothing about ties",
            replace=("dim=-1, stable=True", "dim=-1"),
            expect="sort with stable=True",
        ),
        Mutant(
            "one token too many where the sum is the mass",
            replace=("ranked < mass[:, None]", "ranked <= mass[:, None]"),
            expect="hold exactly 0.5",
        ),
        Mutant(
            "takes a probability of 0 for a logit of -inf",
            replace=("order, keep) & logits.isfinite()", "order, keep) & (p > 0)"),
            expect="logits 0 and -200 for mass = 1",
        ),
    ],
}
