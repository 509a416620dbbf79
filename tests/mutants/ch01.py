"""Plausible mistakes in the exercises of chapter 01: every one of them must fail its checks."""

from minillm.book.proofs import Mutant, edited

MUTANTS = {
    "top_p_mask": [
        edited(
            "leaves out the token that crosses p",
            "(before < p[:, None])",
            "(before + ranked <= p[:, None])",
            "top_p_mask",
        ),
        edited("takes the first row's p for all", "(before < p[:, None])", "(before < p[0])", "the mask [row, token]"),
        edited("does not carry the mask back", "torch.zeros_like(keep).scatter(1, order, keep)", "keep", "the mask"),
        edited(
            "a sort that promises nothing about ties",
            "descending=True, stable=True",
            "descending=True",
            "sort with stable=True",
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
        edited(
            "one logarithm instead of two", "-torch.log(-torch.log(uniform))", "-torch.log(uniform)", "gumbel_top_k"
        ),
        edited(
            "noise before the temperature",
            "torch.where(greedy, logits, scaled + noise)",
            "torch.where(greedy, logits, scaled + noise / torch.where(greedy, 1.0, temperature[:, None]))",
            "tokens [row, order of drawing]",
        ),
        edited(
            "noise on greedy rows too", "torch.where(greedy, logits, scaled + noise)", "scaled + noise", "temperature 0"
        ),
        edited(
            "a sort that promises nothing about ties",
            "descending=True, stable=True",
            "descending=True",
            "sort with stable=True",
        ),
        edited(
            "topk",
            "scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]",
            "scores.topk(k, -1).indices",
            "sort with stable=True",
        ),
        *(
            edited(
                f"temperature {least} instead of 0, noise and all",
                "    scores = torch.where(greedy, logits, scaled + noise)",
                f"    scores = logits / temperature.clamp(min={least})[:, None] + noise",
                "a case of its own",
            )
            for least in (1e-2, 1e-6, 1e-12)
        ),
        edited(
            "keeps u away from 0 and 1",
            "torch.log(uniform)",
            "torch.log(uniform.clamp(1e-4, 1 - 1e-4))",
            "u as it stands",
        ),
        edited(
            "a little something in each logarithm",
            "-torch.log(-torch.log(uniform))",
            "-torch.log(-torch.log(uniform + 1e-10) + 1e-10)",
            "u as it stands",
        ),
        edited("int32", ".indices[:, :k]", ".indices[:, :k].int()", "another dtype"),
    ],
    "young_penalty": [
        edited(
            "divides negative logits",
            "torch.where(logits > 0, logits / r, logits * r)",
            "logits / r",
            "are wrong at [0, 2]",
        ),
        edited("spares everything but the prompt", "- set(prompt)", "& set(prompt)", "the logits"),
        edited(
            "float64",
            "torch.where(logits > 0, logits / r, logits * r), logits)",
            "torch.where(logits > 0, logits / r, logits * r), logits).double()",
            "another dtype",
        ),
    ],
    "typical_mask": [
        edited("ranks by probability", "(-logp - entropy).abs()", "-logp", "the mask [row, token]"),
        edited("signed distance", "(-logp - entropy).abs()", "(-logp - entropy)", "the mask"),
        edited(
            "stops one token early",
            "ranked.cumsum(-1) - ranked < mass[:, None]",
            "ranked.cumsum(-1) < mass[:, None]",
            "the mask",
        ),
        edited("a sort that promises nothing about ties", "dim=-1, stable=True", "dim=-1", "sort with stable=True"),
    ],
}
