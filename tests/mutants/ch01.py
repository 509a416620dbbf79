"""Plausible mistakes in the exercises of chapter 01: every one of them must fail its checks."""
from minillm.book.proofs import Mutant

MUTANTS = {
    "top_p_mask": [
        Mutant("leaves out the token that crosses p", replace=("(before < p[:, None])", "(before + ranked <= p[:, None])"), expect="top_p_mask"),
        Mutant("forgets the floor", replace=("    keep[:, :min_keep] = True\n", ""), expect="min_keep=3"),
        Mutant("keeps what can never be drawn", replace=("mask & logits.isfinite()", "mask"), expect="-inf is never kept"),
        Mutant("takes the first row's p for all", replace=("(before < p[:, None])", "(before < p[0])"), expect="the mask [row, token]"),
        Mutant("does not carry the mask back", replace=("torch.zeros_like(keep).scatter(1, order, keep)", "keep"), expect="the mask"),
        Mutant("drops tokens at p = 1 by rounding", replace=(" | (p[:, None] >= 1)", ""), expect="p = 1 keeps every token"),
    ],
    "gumbel_top_k": [
        Mutant("one logarithm instead of two", replace=("-torch.log(-torch.log(uniform))", "-torch.log(uniform)"), expect="gumbel_top_k"),
        Mutant("noise before the temperature", replace=("torch.where(greedy, logits, scaled + noise)",
               "torch.where(greedy, logits, scaled + noise / torch.where(greedy, 1.0, temperature[:, None]))"), expect="tokens [row, order of drawing]"),
        Mutant("noise on greedy rows too", replace=("torch.where(greedy, logits, scaled + noise)", "scaled + noise"), expect="temperature 0"),
        Mutant("ties to the larger id", replace=("scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]",
               "(scores.shape[1] - 1 - scores.flip(1).sort(dim=-1, descending=True, stable=True).indices)[:, :k]"), expect="smaller id"),
    ],
    "young_penalty": [
        Mutant("punishes as often as the token occurred", source='''
def young_penalty(logits, prompt_ids, output_ids, penalty, window):
    logits = logits.clone()
    for row, (prompt, output) in enumerate(zip(prompt_ids, output_ids)):
        for token in output[-window:]:
            if token not in prompt:
                z, r = logits[row, token], penalty[row]
                logits[row, token] = z / r if z > 0 else z * r
    return logits
''', expect="occurred twice"),
        Mutant("divides negative logits", replace=("torch.where(logits > 0, logits / r, logits * r)", "logits / r"), expect="is wrong at [0, 2]"),
        Mutant("punishes the prompt", replace=("sorted(set(output[-window:]) - set(prompt))", "sorted(set(output[-window:]))"), expect="stands in the prompt"),
        Mutant("forgets the window", replace=("output[-window:]", "output"), expect="window=1"),
        Mutant("spares everything but the prompt", replace=("- set(prompt)", "& set(prompt)"), expect="the logits"),
    ],
    "typical_mask": [
        Mutant("ranks by probability", replace=("(-logp - entropy).abs()", "-logp"), expect="the mask [row, token]"),
        Mutant("lets NaN into the entropy", replace=("torch.where(p > 0, p * logp, 0.0)", "(p * logp)"), expect="NaN"),
        Mutant("signed distance", replace=("(-logp - entropy).abs()", "(-logp - entropy)"), expect="the mask"),
        Mutant("stops one token early", replace=("ranked.cumsum(-1) - ranked < mass[:, None]", "ranked.cumsum(-1) < mass[:, None]"), expect="the mask"),
    ],
}
