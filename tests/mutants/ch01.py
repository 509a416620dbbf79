"""Plausible mistakes in the exercises of chapter 01: every one of them must fail its checks."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "top_p_mask": [
        Mutant(
            "leaves out the token that crosses p",
            replace=("(before < p[:, None])", "(before + ranked <= p[:, None])"),
            expect="top_p_mask",
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
            "a sort that promises nothing about ties",
            replace=("descending=True, stable=True", "descending=True"),
            expect="sort with stable=True",
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
        Mutant("int32", replace=(".indices[:, :k]", ".indices[:, :k].int()"), expect="another dtype"),
    ],
    "young_penalty": [
        Mutant(
            "divides negative logits",
            replace=("torch.where(logits > 0, logits / r, logits * r)", "logits / r"),
            expect="are wrong at [0, 2]",
        ),
        Mutant("spares everything but the prompt", replace=("- set(prompt)", "& set(prompt)"), expect="the logits"),
        Mutant(
            "float64",
            replace=(
                "torch.where(logits > 0, logits / r, logits * r), logits)",
                "torch.where(logits > 0, logits / r, logits * r), logits).double()",
            ),
            expect="another dtype",
        ),
    ],
    "typical_mask": [
        Mutant("ranks by probability", replace=("(-logp - entropy).abs()", "-logp"), expect="the mask [row, token]"),
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
    ],
}
