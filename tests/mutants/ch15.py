"""Mistakes that the checkers of chapter 15 must find, and what they must say."""

from minillm.book.proofs import Mutant, edited

MUTANTS = {
    "quantize_columns": [
        edited(
            "scales for rows",
            "low = part.amin(0).half()",
            "low = part.amin().half().expand(part.shape[1])",
            "quantize_columns: ",
        ),
        edited("float32 sides", "steps.append(step)", "steps.append(step.float())", "quantize_columns: "),
        edited(
            "drops the short group",
            "range(0, len(weight), group)",
            "range(0, len(weight) - group + 1, group)",
            "quantize_columns: example",
        ),
        edited(
            "a step of 0 divides by 1",
            "places = (part - low.float()) / step.float()\n        places = torch.where(step > 0, torch.floor(places + 0.5), 0.0)",
            "places = torch.floor((part - low.float()) / torch.where(step > 0, step.float(), 1.0) + 0.5)",
            "quantize_columns: ",
        ),
        edited(
            "a little more than a half",
            "torch.floor(places + 0.5)",
            "torch.round(places + 1e-5)",
            "quantize_columns: edges",
        ),
        edited(
            "rows of a square matrix",
            "    codes, steps, lows = [], [], []\n",
            "    codes, steps, lows = [], [], []\n    weight = weight.T if weight.shape[0] == weight.shape[1] else weight\n",
            "quantize_columns: edges",
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
        edited("words of 64 bits", "32)).to(torch.int32)", "32))", "another dtype"),
        edited(
            "clamps instead of wrapping",
            "32)).to(torch.int32)",
            "32)).clamp(-(2**31), 2**31 - 1).to(torch.int32)",
            "bit_words: ",
        ),
        edited("forgets & 1", "torch.arange(width - 1, -1, -1) & 1", "torch.arange(width - 1, -1, -1)", "bit_words: "),
        edited(
            "accepts what does not fit",
            "if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < 2**self.bits:",
            "if False:",
            "bit_words: edges",
        ),
        edited(
            "accepts words that are too many",
            "if words.shape[1] != -(-count",
            "if words.shape[1] < -(-count",
            "bit_words: edges",
        ),
        edited(
            "one width for all objects",
            "        self.bits = bits\n",
            "        BitWords.bits = bits\n",
            "bit_words: edges",
        ),
        edited(
            "looks at the first row only",
            "int(codes.max()) < 2**self.bits",
            "int(codes[0].max()) < 2**self.bits",
            "expected it to raise ValueError",
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
        edited(
            "a list of its own kind",
            "    return list(best[spent][1])",
            "    return type('Places', (list,), {})(best[spent][1])",
            "not a list",
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
        edited(
            "the smallest error of each, then nothing fits",
            "if total <= budget and (total not in after or loss < after[total][0]):",
            "if total not in after or loss < after[total][0]:",
            "choose_options: ",
        ),
        edited("one byte short", "if total <= budget and", "if total < budget and", "choose_options: "),
        edited(
            "the last, not the best", "(total not in after or loss < after[total][0])", "True", "a better choice exists"
        ),
        edited("ties to more bytes", "(best[spent][0], spent))", "(best[spent][0], -spent))", "Ties go to fewer bytes"),
        edited("spends all it can", "(best[spent][0], spent))", "(-spent, best[spent][0]))", "a better choice exists"),
        edited(
            "tells errors, not places",
            "return list(best[spent][1])",
            "return best[spent]",
            "not a list with a place for each matrix",
        ),
        edited(
            "nothing fits, and nobody says so",
            "    if not best:\n",
            "    if not best:\n        return [0] * len(matrices)\n    if not best:\n",
            "choose_options: edges",
        ),
        edited(
            "True for 1",
            "    return list(best[spent][1])",
            "    return [bool(place) if place < 2 else place for place in best[spent][1]]",
            "choose_options: ",
        ),
        edited(
            "a negative budget is 0",
            "    best = {0: (0, ())}\n",
            "    best, budget = {0: (0, ())}, max(budget, 0)\n",
            "choose_options: edges",
        ),
    ],
    "to_mxfp4": [],
    "to_nvfp4": [
        edited(
            "scales in float32",
            "return packed.to(torch.uint8), scales, whole",
            "return packed.to(torch.uint8), scales.float(), whole",
            "scales are wrong: another dtype",
        ),
        edited(
            "a Python number for the tensor's scale",
            "return packed.to(torch.uint8), scales, whole",
            "return packed.to(torch.uint8), scales, float(whole)",
            "tensor_scale is wrong: a float, not a tensor",
        ),
        edited(
            "the scale of the first row", "(blocks.abs().max() / 2688)", "(blocks[0].abs().max() / 2688)", "to_nvfp4: "
        ),
        edited("codes in float32", "x.double().reshape", "x.reshape", "in float64 (m / 6) / g is"),
        edited(
            "block scales of the exact tensor scale",
            "/ 6 / whole.double())",
            "/ 6 / (blocks.abs().max() / 2688).clamp(min=1e-40))",
            "in float64 (m / 6) / g is",
        ),
        edited(
            "the exact tensor scale",
            "(blocks.abs().max() / 2688).float()",
            "(blocks.abs().max() / 2688)",
            "another dtype",
        ),
    ],
}
