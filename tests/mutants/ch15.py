"""Mistakes that the checkers of chapter 15 must find, and what they must say."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "quantize_columns": [
        Mutant("ties to even", replace=("torch.floor(places + 0.5)", "torch.round(places)"), expect="Ties go up"),
        Mutant(
            "cuts off the fraction",
            replace=("torch.floor(places + 0.5)", "torch.floor(places)"),
            expect="cut off below the point",
        ),
        Mutant(
            "codes for the unrounded step",
            replace=(
                "places = (part - low.float()) / step.float()",
                "places = (part - part.amin(0)) / ((part.amax(0) - part.amin(0)) / (2**bits - 1))",
            ),
            expect="They fit the unrounded",
        ),
        Mutant(
            "wraps below 0",
            replace=("places.clamp(0, 2**bits - 1).to(torch.uint8)", "(places.long() % 256).to(torch.uint8)"),
            expect="it wraps around",
        ),
        Mutant(
            "0 divided by 0",
            replace=("torch.where(step > 0, torch.floor(places + 0.5), 0.0)", "torch.floor(places + 0.5)"),
            expect="quantize_columns: edges",
        ),
        Mutant(
            "a step of 0 is 1",
            replace=(
                "places = (part - low.float()) / step.float()\n        places = torch.where(step > 0, torch.floor(places + 0.5), 0.0)",
                "places = torch.floor((part - low.float()) / torch.where(step > 0, step, 2**-24).float() + 0.5)",
            ),
            expect="all codes are 0",
        ),
        Mutant(
            "places in float16",
            replace=("places = (part - low.float()) / step.float()", "places = (part.half() - low) / step"),
            expect="computed in float32",
        ),
        Mutant(
            "a step for 2^b intervals",
            replace=("/ (2**bits - 1)).half()", "/ 2**bits).half()"),
            expect="rounded once, to float16",
        ),
        Mutant(
            "scales for rows",
            replace=("low = part.amin(0).half()", "low = part.amin().half().expand(part.shape[1])"),
            expect="The smallest weight of the group",
        ),
        Mutant("float32 sides", replace=("steps.append(step)", "steps.append(step.float())"), expect="steps must be"),
        Mutant(
            "drops the short group",
            replace=("range(0, len(weight), group)", "range(0, len(weight) - group + 1, group)"),
            expect="quantize_columns: example",
        ),
    ],
    "bit_words": [
        Mutant(
            "from the lowest bit",
            source="""
class BitWords:
    def __init__(self, bits):
        self.bits, self.of_code, self.of_word = bits, torch.arange(bits), torch.arange(32)

    def _num_words(self, count):
        return -(-count * self.bits // 32)

    def pack(self, codes):
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < 2**self.bits:
            raise ValueError("too large")
        num_rows, count = codes.shape
        stream = torch.zeros(num_rows, self._num_words(count) * 32, dtype=torch.int64)
        stream[:, : count * self.bits] = ((codes[:, :, None] >> self.of_code) & 1).flatten(1)
        return (stream.view(num_rows, self._num_words(count), 32) << self.of_word).sum(-1).to(torch.int32)

    def unpack(self, words, count):
        if words.shape[1] != self._num_words(count):
            raise ValueError("words")
        ones = ((words[:, :, None].long() >> self.of_word) & 1).flatten(1)[:, : count * self.bits]
        return (ones.reshape(len(words), count, self.bits) << self.of_code).sum(-1)
""",
            expect="begin at the lowest bit",
        ),
        Mutant(
            "lowest bit of a code first",
            replace=(
                "stream = bits_of(codes, self.bits).flatten(1)",
                "stream = bits_of(codes, self.bits).flip(-1).flatten(1)",
            ),
            expect="Of each code, the highest bit comes first",
        ),
        Mutant(
            "codes do not cross words",
            source="""
class BitWords:
    def __init__(self, bits):
        self.bits, self.each = bits, 32 // bits

    def pack(self, codes):
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < 2**self.bits:
            raise ValueError("too large")
        num_rows, count = codes.shape
        num_words = -(-count * self.bits // 32)
        padded = torch.zeros(num_rows, num_words * self.each, dtype=torch.int64)
        kept = min(count, num_words * self.each)
        padded[:, :kept] = codes[:, :kept]
        shifts = 32 - self.bits * (1 + torch.arange(self.each))
        return (padded.view(num_rows, num_words, self.each) << shifts).sum(-1).to(torch.int32)

    def unpack(self, words, count):
        shifts = 32 - self.bits * (1 + torch.arange(self.each))
        return ((words[:, :, None].long() >> shifts) & 2**self.bits - 1).flatten(1)[:, :count]
""",
            expect="Codes cross the borders of words",
        ),
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
        Mutant("words of 64 bits", replace=("32)).to(torch.int32)", "32))"), expect="what pack returns"),
        Mutant(
            "clamps instead of wrapping",
            replace=("32)).to(torch.int32)", "32)).clamp(-(2**31), 2**31 - 1).to(torch.int32)"),
            expect="bit_words: ",
        ),
        Mutant(
            "forgets & 1",
            replace=("torch.arange(width - 1, -1, -1) & 1", "torch.arange(width - 1, -1, -1)"),
            expect="keep one bit by & 1",
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
            "one stream for all rows",
            replace=(
                "        stream = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 32))\n        return number_of(stream.view(len(codes), stream.shape[1] // 32, 32))",
                "        stream, num_words = stream.flatten(), -(-stream.shape[1] // 32)\n        stream = torch.nn.functional.pad(stream, (0, len(codes) * num_words * 32 - len(stream)))\n        return number_of(stream.view(len(codes), num_words, 32))",
            ),
            expect="bit_words: edges",
        ),
    ],
    "choose_options": [
        Mutant(
            "the best gain first",
            source="""
def choose_options(matrices, budget):
    chosen = [min(range(len(options)), key=lambda i: (options[i].num_bytes, options[i].error)) for options in matrices]
    spent = sum(options[place].num_bytes for options, place in zip(matrices, chosen))
    if spent > budget:
        raise ValueError("budget")
    while True:
        moves = []
        for m, options in enumerate(matrices):
            now = options[chosen[m]]
            for place, option in enumerate(options):
                more, gain = option.num_bytes - now.num_bytes, now.error - option.error
                if gain > 0 and spent + more <= budget:
                    moves.append((gain / max(more, 1e-9), m, place, more))
        if not moves:
            return chosen
        _, m, place, more = max(moves)
        chosen[m], spent = place, spent + more
""",
            expect="a better choice exists",
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
    ],
    "to_mxfp4": [
        Mutant(
            "ties down",
            replace=(
                "(y[..., None] >= torch.tensor([0.75, 1.75, 3.5]))",
                "(y[..., None] > torch.tensor([0.75, 1.75, 3.5]))",
            ),
            expect="These ties go to the smaller value",
        ),
        Mutant(
            "ties up",
            replace=(
                "(y[..., None] > torch.tensor([0.25, 1.25, 2.5, 5.0]))",
                "(y[..., None] >= torch.tensor([0.25, 1.25, 2.5, 5.0]))",
            ),
            expect="These ties go to the larger value",
        ),
        Mutant(
            "the other half first",
            replace=("codes[:, 0::2] << 4 | codes[:, 1::2]", "codes[:, 1::2] << 4 | codes[:, 0::2]"),
            expect="is the upper half of the byte",
        ),
        Mutant(
            "a sign only below zero", replace=("8 * torch.signbit(blocks)", "8 * (blocks < 0)"), expect="torch.signbit"
        ),
        Mutant(
            "ceil, so that nothing is cut off",
            replace=("torch.frexp(most).exponent - 3)", "torch.ceil(torch.log2(most / 6)).nan_to_num(0, 0, -127))"),
            expect="the next power up",
        ),
        Mutant(
            "nothing is cut off below",
            replace=(
                "exponents = (torch.frexp(most).exponent - 3).clamp(-127, 125)",
                "exponents = torch.frexp(most).exponent - 3",
            ),
            expect="cut off, at -127",
        ),
        Mutant(
            "the logarithm itself",
            replace=("torch.frexp(most).exponent - 3)", "torch.frexp(most).exponent - 1)"),
            expect="two less than the logarithm",
        ),
        Mutant(
            "log2 in float32",
            replace=("torch.frexp(most).exponent - 3)", "torch.floor(torch.log2(most.float())) - 2)"),
            expect="Is the logarithm exact?",
        ),
        Mutant(
            "zeros store the bias",
            replace=(
                "exponents = torch.where(most > 0, exponents, -127)",
                "exponents = torch.where(most > 0, exponents, 0)",
            ),
            expect="A block of zeros stores 0",
        ),
        Mutant(
            "one exponent a row",
            replace=(
                "most = blocks.abs().amax(-1)",
                "most = blocks.abs().amax((1, 2))[:, None].expand(blocks.shape[:2])",
            ),
            expect="to_mxfp4: ",
        ),
    ],
}
