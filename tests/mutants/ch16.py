"""Mistakes that the checkers of chapter 16 must find beside those that they know by name, and what they must say."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "static_int8": [
        Mutant(
            "a list for a tuple",
            replace=(
                "    return places.clamp(-127, 127).to(torch.int8), scale, (places.abs() > 127).any(1)",
                "    return [places.clamp(-127, 127).to(torch.int8), scale, (places.abs() > 127).any(1)]",
            ),
            expect="a list, not a tuple",
        ),
        Mutant(
            "a Python number for the scale",
            replace=(".to(torch.int8), scale, (", ".to(torch.int8), float(scale), ("),
            expect="scale is wrong: a float, not a tensor",
        ),
        Mutant(
            "a scale in float64",
            replace=(".to(torch.int8), scale, (", ".to(torch.int8), scale.double(), ("),
            expect="scale is wrong: another dtype",
        ),
        Mutant(
            "codes in int32",
            replace=(".clamp(-127, 127).to(torch.int8)", ".clamp(-127, 127).to(torch.int32)"),
            expect="codes are wrong: another dtype",
        ),
        Mutant(
            "one number for all tokens",
            replace=("> 127).any(1)", "> 127).any()"),
            expect="cut_off is wrong: another shape",
        ),
        Mutant(
            "scale before codes",
            replace=(
                "    return places.clamp(-127, 127).to(torch.int8), scale, (places",
                "    return scale, places.clamp(-127, 127).to(torch.int8), (places",
            ),
            expect="in another order",
        ),
    ],
    "settle": [
        Mutant(
            "returns float32",
            replace=("moved[:, rest], smaller", "moved[:, rest].float(), smaller"),
            expect="weight is wrong: another dtype",
        ),
        Mutant(
            "computes in float32",
            replace=(
                "row = inverse[column]\n",
                "weight, inverse = weight.float().double(), inverse.float().double()\n    row = inverse[column]\n",
            ),
            expect="pass through float32",
        ),
        Mutant(
            "changes the weights in place",
            replace=(
                "moved = weight - torch.outer(error / row[column], row)",
                "moved = weight.sub_(torch.outer(error / row[column], row))",
            ),
            expect="changed one of its arguments",
        ),
    ],
    "search_grid": [
        Mutant(
            "an error that is a tensor",
            replace=("error = float(((d @ hessian) * d).sum())", "error = ((d @ hessian) * d).sum()"),
            expect="error is wrong: a float64 tensor, not a float",
        ),
        Mutant(
            "NumPy's alpha",
            replace=("    return best\n", "    import numpy\n\n    return numpy.float64(best[0]), *best[1:]\n"),
            expect="alpha is wrong: a float64, not a float",
        ),
        Mutant(
            "places in the lists",
            replace=("    return best\n", "    return alphas.index(best[0]), shrinks.index(best[1]), best[2]\n"),
            expect="are elements of",
        ),
    ],
    "shared_alpha": [
        Mutant(
            "scales in float32",
            replace=("return best[1], best[2]", "return best[1], best[2].float()"),
            expect="scales are wrong: another dtype",
        ),
        Mutant(
            "a list for a tuple",
            replace=("return best[1], best[2]", "return [best[1], best[2]]"),
            expect="a list, not a tuple",
        ),
        Mutant(
            "the first alpha",
            replace=("for alpha in sorted(alphas):", "for alpha in sorted(alphas)[:1]:"),
            expect="is possible",
        ),
    ],
    "fold_mlp": [
        Mutant(
            "changes its argument",
            replace=('"norm": layer["norm"] / s', '"norm": layer["norm"].div_(s)'),
            expect="changed one of its arguments",
        ),
        Mutant(
            "returns float32",
            replace=('"down": layer["down"] * t,', '"down": (layer["down"] * t).float(),'),
            expect="another dtype",
        ),
        Mutant(
            "forgets the norm",
            replace=('"norm": layer["norm"] / s', '"norm": layer["norm"] * 1'),
            expect="make the inputs *smaller*",
        ),
    ],
    "rotate_blocks": [
        Mutant(
            "a matrix",
            source="""
def rotate_blocks(x, signs, block):
    if block < 1 or block & (block - 1) or x.shape[1] % block:
        raise ValueError("block")
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < min(block, 4096):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    if block > 4096:
        raise MemoryError("34 GB")
    y = (x * signs).reshape(-1, block) @ matrix
    return y.reshape(x.shape) / block**0.5
""",
            expect="rotate_blocks: ",
        ),
        Mutant(
            "changes its argument",
            replace=("y = x * signs", "y = x.mul_(signs)"),
            expect="changed one of its arguments",
        ),
        Mutant(
            "returns float32",
            replace=(
                "    return y.reshape(x.shape) / block**0.5",
                "    return (y.reshape(x.shape) / block**0.5).float()",
            ),
            expect="another dtype",
        ),
        Mutant(
            "any block is allowed",
            replace=("if block < 1 or block & (block - 1) or size % block:", "if block < 1:"),
            expect="rotate_blocks: edges",
        ),
    ],
    "rotate_layer": [
        Mutant(
            "changes its argument",
            replace=(
                '"down_bias": layer["down_bias"] @ q',
                '"down_bias": layer["down_bias"].copy_(layer["down_bias"] @ q)',
            ),
            expect="changed one of its arguments",
        ),
        Mutant(
            "rotates the bias inside",
            replace=('"up_bias": layer["up_bias"].clone()', '"up_bias": layer["up_bias"] * 0'),
            expect="where nothing is rotated",
        ),
        Mutant(
            "forgets the key",
            replace=('        "up_bias": layer["up_bias"].clone(),\n', ""),
            expect="rotate_layer: ",
        ),
    ],
}
