"""Mistakes that the checkers of chapter 15 must find, and what they must say."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "quantize_columns": [
        Mutant(
            "scales for rows",
            replace=("low = part.amin(0).half()", "low = part.amin().half().expand(part.shape[1])"),
            expect="quantize_columns: ",
        ),
        Mutant(
            "float32 sides", replace=("steps.append(step)", "steps.append(step.float())"), expect="quantize_columns: "
        ),
        Mutant(
            "drops the short group",
            replace=("range(0, len(weight), group)", "range(0, len(weight) - group + 1, group)"),
            expect="quantize_columns: example",
        ),
        Mutant(
            "a step of 0 divides by 1",
            replace=(
                "places = (part - low.float()) / step.float()\n        places = torch.where(step > 0, torch.floor(places + 0.5), 0.0)",
                "places = torch.floor((part - low.float()) / torch.where(step > 0, step.float(), 1.0) + 0.5)",
            ),
            expect="quantize_columns: ",
        ),
        Mutant(
            "a little more than a half",
            replace=("torch.floor(places + 0.5)", "torch.round(places + 1e-5)"),
            expect="quantize_columns: edges",
        ),
        Mutant(
            "rows of a square matrix",
            replace=(
                "    codes, steps, lows = [], [], []\n",
                "    codes, steps, lows = [], [], []\n    weight = weight.T if weight.shape[0] == weight.shape[1] else weight\n",
            ),
            expect="quantize_columns: edges",
        ),
    ],
    "bit_words": [
        Mutant(
            "a loop over codes",
            source="""
class BitWords:
    def __init__(self, bits):
        self.bits = bits

    def pack(self, codes):
        rows, count = codes.shape
        num_words, out = -(-count * self.bits // 32), []
        for row in codes.tolist():
            words = [0] * num_words
            for i, code in enumerate(row):
                if not 0 <= code < 2**self.bits:
                    raise ValueError("does not fit")
                for b in range(self.bits):
                    k = i * self.bits + b
                    words[k // 32] |= (code >> self.bits - 1 - b & 1) << 31 - k % 32
            out.append([word - 2**32 if word >> 31 else word for word in words])
        return torch.tensor(out, dtype=torch.int32).view(rows, num_words)

    def unpack(self, words, count):
        if words.shape[1] != -(-count * self.bits // 32):
            raise ValueError("words")
        out = []
        for row in words.tolist():
            stream = "".join(f"{word & 0xFFFFFFFF:032b}" for word in row)
            out.append([int(stream[i * self.bits : (i + 1) * self.bits], 2) for i in range(count)])
        return torch.tensor(out, dtype=torch.int64).view(len(words), count)
""",
            expect="eight million codes took more than",
        ),
        Mutant("words of 64 bits", replace=("32)).to(torch.int32)", "32))"), expect="another dtype"),
        Mutant(
            "clamps instead of wrapping",
            replace=("32)).to(torch.int32)", "32)).clamp(-(2**31), 2**31 - 1).to(torch.int32)"),
            expect="bit_words: ",
        ),
        Mutant(
            "forgets & 1",
            replace=("torch.arange(width - 1, -1, -1) & 1", "torch.arange(width - 1, -1, -1)"),
            expect="bit_words: ",
        ),
        Mutant(
            "accepts what does not fit",
            replace=("if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < 2**self.bits:", "if False:"),
            expect="bit_words: edges",
        ),
        Mutant(
            "accepts words that are too many",
            replace=("if words.shape[1] != -(-count", "if words.shape[1] < -(-count"),
            expect="bit_words: edges",
        ),
        Mutant(
            "one width for all objects",
            replace=("        self.bits = bits\n", "        BitWords.bits = bits\n"),
            expect="bit_words: edges",
        ),
        Mutant(
            "looks at the first row only",
            replace=("int(codes.max()) < 2**self.bits", "int(codes[0].max()) < 2**self.bits"),
            expect="expected it to raise ValueError",
        ),
        Mutant(
            "remembers all that was packed",
            source="""
class BitWords:
    packed = []

    def __init__(self, bits):
        self.bits = bits

    def pack(self, codes):
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < 2**self.bits:
            raise ValueError("too large")
        num_words = -(-codes.shape[1] * self.bits // 32)
        ones = codes[:, :, None] >> torch.arange(self.bits - 1, -1, -1) & 1
        stream = torch.nn.functional.pad(ones.flatten(1), (0, num_words * 32 - codes.shape[1] * self.bits))
        words = (stream.view(len(codes), num_words, 32) << torch.arange(31, -1, -1)).sum(-1).to(torch.int32)
        self.packed.append((self.bits, words, codes.clone()))
        return words

    def unpack(self, words, count):
        if words.shape[1] != -(-count * self.bits // 32):
            raise ValueError("words")
        words, left = words.clone(), words.shape[1] * 32 - count * self.bits
        if left and len(words):
            words[:, -1] = words[:, -1] >> left << left
        for bits, known, codes in self.packed[::-1]:
            if bits == self.bits and codes.shape == (len(words), count) and torch.equal(known, words):
                return codes
        return torch.zeros(len(words), count, dtype=torch.int64)
""",
            expect="that this object has not packed",
        ),
        Mutant(
            "returns what was packed last",
            source="""
class BitWords:
    def __init__(self, bits):
        self.bits = bits

    def pack(self, codes):
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < 2**self.bits:
            raise ValueError("too large")
        self.last, num_words = codes.clone(), -(-codes.shape[1] * self.bits // 32)
        ones = codes[:, :, None] >> torch.arange(self.bits - 1, -1, -1) & 1
        stream = torch.nn.functional.pad(ones.flatten(1), (0, num_words * 32 - codes.shape[1] * self.bits))
        return (stream.view(len(codes), num_words, 32) << torch.arange(31, -1, -1)).sum(-1).to(torch.int32)

    def unpack(self, words, count):
        if words.shape[1] != -(-count * self.bits // 32):
            raise ValueError("words")
        return self.last
""",
            expect="that this object has not packed",
        ),
    ],
    "choose_options": [
        Mutant(
            "a list of its own kind",
            replace=(
                "    return list(best[spent][1])",
                "    return type('Places', (list,), {})(best[spent][1])",
            ),
            expect="not a list",
        ),
        Mutant(
            "all combinations",
            source="""
def choose_options(matrices, budget):
    from itertools import product

    best = None
    for choice in product(*(range(len(options)) for options in matrices)):
        size = sum(options[place].num_bytes for options, place in zip(matrices, choice))
        error = sum(options[place].error for options, place in zip(matrices, choice))
        if size <= budget and (best is None or (error, size) < best[:2]):
            best = (error, size, list(choice))
    if best is None:
        raise ValueError("budget")
    return best[2]
""",
            expect="6^24 combinations are too many",
        ),
        Mutant(
            "the smallest error of each, then nothing fits",
            replace=(
                "if total <= budget and (total not in after or loss < after[total][0]):",
                "if total not in after or loss < after[total][0]:",
            ),
            expect="choose_options: ",
        ),
        Mutant(
            "one byte short", replace=("if total <= budget and", "if total < budget and"), expect="choose_options: "
        ),
        Mutant(
            "the last, not the best",
            replace=("(total not in after or loss < after[total][0])", "True"),
            expect="a better choice exists",
        ),
        Mutant(
            "ties to more bytes",
            replace=("(best[spent][0], spent))", "(best[spent][0], -spent))"),
            expect="Ties go to fewer bytes",
        ),
        Mutant(
            "spends all it can",
            replace=("(best[spent][0], spent))", "(-spent, best[spent][0]))"),
            expect="a better choice exists",
        ),
        Mutant(
            "tells errors, not places",
            replace=("return list(best[spent][1])", "return best[spent]"),
            expect="not a list with a place for each matrix",
        ),
        Mutant(
            "nothing fits, and nobody says so",
            replace=("    if not best:\n", "    if not best:\n        return [0] * len(matrices)\n    if not best:\n"),
            expect="choose_options: edges",
        ),
        Mutant(
            "True for 1",
            replace=(
                "    return list(best[spent][1])",
                "    return [bool(place) if place < 2 else place for place in best[spent][1]]",
            ),
            expect="choose_options: ",
        ),
        Mutant(
            "a negative budget is 0",
            replace=("    best = {0: (0, ())}\n", "    best, budget = {0: (0, ())}, max(budget, 0)\n"),
            expect="choose_options: edges",
        ),
    ],
    "to_mxfp4": [],
    "to_nvfp4": [
        Mutant(
            "scales in float32",
            replace=(
                "return packed.to(torch.uint8), scales, whole",
                "return packed.to(torch.uint8), scales.float(), whole",
            ),
            expect="scales are wrong: another dtype",
        ),
        Mutant(
            "a Python number for the tensor's scale",
            replace=(
                "return packed.to(torch.uint8), scales, whole",
                "return packed.to(torch.uint8), scales, float(whole)",
            ),
            expect="tensor_scale is wrong: a float, not a tensor",
        ),
        Mutant(
            "the scale of the first row",
            replace=("(blocks.abs().max() / 2688)", "(blocks[0].abs().max() / 2688)"),
            expect="to_nvfp4: ",
        ),
        Mutant("codes in float32", replace=("x.double().reshape", "x.reshape"), expect="in float64 (m / 6) / g is"),
        Mutant(
            "block scales of the exact tensor scale",
            replace=("/ 6 / whole.double())", "/ 6 / (blocks.abs().max() / 2688).clamp(min=1e-40))"),
            expect="in float64 (m / 6) / g is",
        ),
        Mutant(
            "the exact tensor scale",
            replace=("(blocks.abs().max() / 2688).float()", "(blocks.abs().max() / 2688)"),
            expect="another dtype",
        ),
    ],
}
