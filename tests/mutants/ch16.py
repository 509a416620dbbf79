"""Mistakes that the checkers of chapter 16 must find beside those that they know by name, and what they must say."""

from minillm.book.proofs import Mutant, edited

MUTANTS = {
    "static_int8": [
        edited(
            "a list for a tuple",
            "    return places.clamp(-127, 127).to(torch.int8), scale, (places.abs() > 127).any(1)",
            "    return [places.clamp(-127, 127).to(torch.int8), scale, (places.abs() > 127).any(1)]",
            "a list, not a tuple",
        ),
        edited(
            "a Python number for the scale",
            ".to(torch.int8), scale, (",
            ".to(torch.int8), float(scale), (",
            "scale is wrong: a float, not a tensor",
        ),
        edited(
            "a scale in float64",
            ".to(torch.int8), scale, (",
            ".to(torch.int8), scale.double(), (",
            "scale is wrong: another dtype",
        ),
        edited(
            "codes in int32",
            ".clamp(-127, 127).to(torch.int8)",
            ".clamp(-127, 127).to(torch.int32)",
            "codes are wrong: another dtype",
        ),
        edited("one number for all tokens", "> 127).any(1)", "> 127).any()", "cut_off is wrong: another shape"),
        edited(
            "scale before codes",
            "    return places.clamp(-127, 127).to(torch.int8), scale, (places",
            "    return scale, places.clamp(-127, 127).to(torch.int8), (places",
            "in another order",
        ),
    ],
    "settle": [
        edited(
            "returns float32",
            "moved[:, rest], smaller",
            "moved[:, rest].float(), smaller",
            "weight is wrong: another dtype",
        ),
        edited(
            "computes in float32",
            "row = inverse[column]\n",
            "weight, inverse = weight.float().double(), inverse.float().double()\n    row = inverse[column]\n",
            "pass through float32",
        ),
        edited(
            "changes the weights in place",
            "moved = weight - torch.outer(error / row[column], row)",
            "moved = weight.sub_(torch.outer(error / row[column], row))",
            "changed one of its arguments",
        ),
    ],
    "search_grid": [
        edited(
            "an error that is a tensor",
            "error = float(((d @ hessian) * d).sum())",
            "error = ((d @ hessian) * d).sum()",
            "error is wrong: a float64 tensor, not a float",
        ),
        edited(
            "NumPy's alpha",
            "    return best\n",
            "    import numpy\n\n    return numpy.float64(best[0]), *best[1:]\n",
            "alpha is wrong: a float64, not a float",
        ),
        edited(
            "places in the lists",
            "    return best\n",
            "    return alphas.index(best[0]), shrinks.index(best[1]), best[2]\n",
            "are elements of",
        ),
    ],
    "shared_alpha": [
        edited(
            "scales in float32",
            "return best[1], best[2]",
            "return best[1], best[2].float()",
            "scales are wrong: another dtype",
        ),
        edited("a list for a tuple", "return best[1], best[2]", "return [best[1], best[2]]", "a list, not a tuple"),
        edited("the first alpha", "for alpha in sorted(alphas):", "for alpha in sorted(alphas)[:1]:", "is possible"),
    ],
    "fold_mlp": [
        edited(
            "changes its argument",
            '"norm": layer["norm"] / s',
            '"norm": layer["norm"].div_(s)',
            "changed one of its arguments",
        ),
        edited(
            "returns float32", '"down": layer["down"] * t,', '"down": (layer["down"] * t).float(),', "another dtype"
        ),
        edited(
            "forgets the norm", '"norm": layer["norm"] / s', '"norm": layer["norm"] * 1', "make the inputs *smaller*"
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
        edited("changes its argument", "y = x * signs", "y = x.mul_(signs)", "changed one of its arguments"),
        edited(
            "returns float32",
            "    return y.reshape(x.shape) / block**0.5",
            "    return (y.reshape(x.shape) / block**0.5).float()",
            "another dtype",
        ),
        edited(
            "any block is allowed",
            "if block < 1 or block & (block - 1) or size % block:",
            "if block < 1:",
            "rotate_blocks: edges",
        ),
    ],
    "rotate_layer": [
        edited(
            "changes its argument",
            '"down_bias": layer["down_bias"] @ q',
            '"down_bias": layer["down_bias"].copy_(layer["down_bias"] @ q)',
            "changed one of its arguments",
        ),
        edited(
            "rotates the bias inside",
            '"up_bias": layer["up_bias"].clone()',
            '"up_bias": layer["up_bias"] * 0',
            "where nothing is rotated",
        ),
        edited("forgets the key", '        "up_bias": layer["up_bias"].clone(),\n', "", "rotate_layer: "),
    ],
}
