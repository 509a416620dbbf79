"""Mistakes that the checkers of chapter 16 must find, and what they must say."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "static_int8": [
        Mutant(
            "signed maximum",
            replace=("calibration.abs().flatten()", "calibration.flatten()"),
            expect="Magnitudes count",
        ),
        Mutant(
            "one too many",
            replace=(".values[spare]", ".values[min(spare + 1, calibration.numel() - 1)]"),
            expect="One too many was left out",
        ),
        Mutant(
            "distinct magnitudes",
            replace=(
                "calibration.abs().flatten().sort(descending=True).values[spare]",
                "calibration.abs().unique().flip(0)[min(spare, calibration.abs().unique().numel() - 1)]",
            ),
            expect="count one by one",
        ),
        Mutant("uses -128", replace=("places.clamp(-127, 127)", "places.clamp(-128, 127)"), expect="No code is -128"),
        Mutant(
            "wraps",
            replace=(
                "places.clamp(-127, 127).to(torch.int8)",
                "(places.long() % 256).to(torch.uint8).view(torch.int8)",
            ),
            expect="cut off at 127",
        ),
        Mutant(
            "the end counts as beyond",
            replace=("places.abs() > 127", "places.abs() >= 127"),
            expect="exactly 127 is not",
        ),
        Mutant("scale of x", replace=("calibration.abs()", "x.abs()"), expect="static_int8: example"),
        Mutant(
            "a scale of 0",
            replace=("torch.where(scale == 0, torch.ones_like(scale), scale)", "scale"),
            expect="With all magnitudes 0",
        ),
    ],
    "settle": [
        Mutant(
            "adds", replace=("moved = weight - torch.outer", "moved = weight + torch.outer"), expect="wrong direction"
        ),
        Mutant(
            "does not divide",
            replace=("torch.outer(error / row[column], row)", "torch.outer(error, row)"),
            expect="Divide the error by",
        ),
        Mutant(
            "as with Cholesky",
            replace=("torch.outer(error / row[column], row)", "torch.outer(error / row[column].sqrt(), row)"),
            expect="square root's row",
        ),
        Mutant(
            "always row 0", replace=("row = inverse[column]", "row = inverse[0] + 0 * column"), expect="settle: example"
        ),
        Mutant(
            "keeps a part of the inverse",
            replace=("smaller = inverse - torch.outer(row, row) / row[column]", "smaller = inverse"),
            expect="subtract the outer product first",
        ),
        Mutant(
            "does not move the others",
            replace=("moved = weight - torch.outer(error / row[column], row)", "moved = weight"),
            expect="do not move at all",
        ),
        Mutant("not cut off", replace=(".clamp(-largest, largest)", ".clamp(-100, 100)"), expect="cut off at"),
        Mutant(
            "cuts off after the error",
            replace=(
                "error = weight[:, column] - codes * scales",
                "error = weight[:, column] - (weight[:, column] / scales).round() * scales",
            ),
            expect="settle: edges",
        ),
    ],
    "search_grid": [
        Mutant(
            "diagonal only",
            replace=("((d @ hessian) * d).sum()", "(d * d * hessian.diagonal()).sum()"),
            expect="not only its diagonal",
        ),
        Mutant("ties to the later", replace=("error < best[2]", "error <= best[2]"), expect="Equal errors"),
        Mutant("shrinks upwards", replace=("sorted(shrinks, reverse=True)", "sorted(shrinks)"), expect="Equal errors"),
        Mutant(
            "does not scale back",
            replace=("clamp(-largest, largest) / scales", "clamp(-largest, largest)"),
            expect="back in the units",
        ),
        Mutant(
            "0 to the power alpha",
            replace=(
                "torch.where(magnitude > 0, magnitude / magnitude.max(), torch.ones_like(magnitude))",
                "magnitude / magnitude.max()",
            ),
            expect="search_grid: edges",
        ),
        Mutant(
            "one after the other",
            source="""
def search_grid(weight, hessian, magnitude, bits, alphas, shrinks):
    largest = 2 ** (bits - 1) - 1
    ratio = torch.where(magnitude > 0, magnitude / magnitude.max(), torch.ones_like(magnitude))

    def error(alpha, shrink):
        scaled = weight * ratio**alpha
        steps = shrink * scaled.abs().amax(1, keepdim=True) / largest
        steps = torch.where(steps == 0, torch.ones_like(steps), steps)
        d = weight - steps * (scaled / steps).round().clamp(-largest, largest) / ratio**alpha
        return float(((d @ hessian) * d).sum())

    alpha = min(sorted(alphas), key=lambda a: error(a, max(shrinks)))
    shrink = min(sorted(shrinks, reverse=True), key=lambda s: error(alpha, s))
    return alpha, shrink, error(alpha, shrink)
""",
            expect="a better pair exists",
        ),
    ],
    "shared_alpha": [
        Mutant(
            "first product only",
            replace=("torch.cat(weights).abs()", "weights[0].abs()"),
            expect="All products behind the norm",
        ),
        Mutant(
            "no powers of two",
            replace=(
                "torch.exp2((inputs**alpha / columns ** (1 - alpha)).log2().round())",
                "inputs**alpha / columns ** (1 - alpha)",
            ),
            expect="Powers of two",
        ),
        Mutant("the sum decides", replace=("worst = max(", "worst = sum("), expect="the worst product decides"),
        Mutant(
            "upside down",
            replace=("smooth = in_8_bits(x / scales)", "scales = 1 / scales\n        smooth = in_8_bits(x / scales)"),
            expect="Upside down",
        ),
        Mutant("ties to the later", replace=("worst < best[0]", "worst <= best[0]"), expect="Equal errors"),
        Mutant(
            "no floor",
            replace=("torch.cat(weights).abs().amax(0).clamp(min=1e-5)", "torch.cat(weights).abs().amax(0)"),
            expect="shared_alpha: edges",
        ),
    ],
    "fold_mlp": [
        Mutant(
            "the norm on the wrong side",
            source="""
def fold_mlp(layer, scales):
    s, t = scales["norm"], scales["down"]
    return {"norm": layer["norm"] * s, "gate": layer["gate"] / s, "up": layer["up"] / s / t[:, None],
            "up_bias": layer["up_bias"] / t, "down": layer["down"] * t}
""",
            expect="shall become *smaller*",
        ),
        Mutant(
            "gate carries it",
            replace=('"gate": layer["gate"] * s', '"gate": layer["gate"] * s / t[:, None]'),
            expect="silu(g / t) is not",
        ),
        Mutant("forgets the bias", replace=('layer["up_bias"] / t', 'layer["up_bias"]'), expect="row and bias of up"),
        Mutant(
            "divides down", replace=('layer["down"] * t', 'layer["down"] / t'), expect="down's columns are multiplied"
        ),
        Mutant(
            "columns for rows", replace=('layer["up"] * s / t[:, None]', 'layer["up"] * s'), expect="rows divided by"
        ),
        Mutant(
            "changes its argument",
            replace=('"norm": layer["norm"] / s', '"norm": layer["norm"].div_(s)'),
            expect="fold_mlp: ",
        ),
    ],
}
