"""Plausible mistakes in the exercises of chapter 10: every one of them must fail its checks."""

from minillm.book.proofs import Mutant, edited

_OUTSIDE = "mask the lanes that lie outside"
_WORD_EACH = """
def dequantize(packed, scales, zeros, out, group):
    kernel[scales.shape](packed, scales, zeros, out, packed.stride(0), scales.shape[1], out.shape[1], group, BLOCK=next_power_of_2(group))


@triton.jit
def kernel(packed, scales, zeros, out, row_stride, num_groups, width, group, BLOCK: tl.constexpr):
    row, number, lane = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    scale = tl.load(scales + row * num_groups + number).to(tl.float32)
    zero = tl.load(zeros + row * num_groups + number).to(tl.int32)
    column = number * group + lane
    inside = (lane < group) & (column < width)
    q = (tl.load(packed + row * row_stride + column // 4, inside, 0) >> (8 * (column % 4))) & 0xFF
    tl.store(out + row * width + column, (q - zero) * scale, inside)
"""
_BYTES = _WORD_EACH.replace("):\n    kernel[", "):\n    packed = packed.view(torch.uint8)\n    kernel[").replace(
    "(tl.load(packed + row * row_stride + column // 4, inside, 0) >> (8 * (column % 4))) & 0xFF",
    "tl.load(packed + row * row_stride + column, inside, 0).to(tl.int32)",
)

MUTANTS = {
    "gated": [
        edited(
            "copies what another has put there",
            "    tl.store(out + index, gate * tl.sigmoid(1.702 * gate) * (up + 1), inside)",
            "    tl.store(out + index, tl.load(out + index, inside, 0.0), inside)",
            "the kernel loads numbers of out",
        ),
        edited(
            "no grid",
            "gated_kernel[(triton.cdiv(num_outputs, 128),)](x,",
            "gated_kernel(x,",
            "A kernel is launched with a grid",
        ),
        edited(
            "a pointer with an index",
            "tl.load(x + 2 * index, inside, 0.0)",
            "tl.load(x[2 * index], inside, 0.0)",
            "A pointer has no elements",
        ),
        edited("no mask on the load", "tl.load(x + 2 * index, inside, 0.0)", "tl.load(x + 2 * index)", _OUTSIDE),
        edited("no mask on the store", "* (up + 1), inside)", "* (up + 1))", _OUTSIDE),
        edited("a mask off by one", "index < num_outputs", "index <= num_outputs", _OUTSIDE),
        edited("the mask counts inputs", "index < num_outputs", "index < 2 * num_outputs", _OUTSIDE),
        edited("one program too few", "triton.cdiv(num_outputs, 128)", "num_outputs // 128", "was never stored"),
        Mutant(
            "the chapter's layout",
            source="""
@triton.jit
def gated_kernel(x, out, width, limit, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.minimum(tl.load(x + row * 2 * width + column, inside).to(tl.float32), limit)
    up = tl.maximum(tl.minimum(tl.load(x + row * 2 * width + width + column, inside).to(tl.float32), limit), -limit)
    tl.store(out + row * width + column, gate * tl.sigmoid(1.702 * gate) * (up + 1), inside)


def gated(x, out, limit):
    gated_kernel[(len(x),)](x, out, out.shape[1], limit, BLOCK=next_power_of_2(out.shape[1]))
""",
            expect="gates before up values",
        ),
        edited(
            "a limit of 7 for everybody",
            "x, out, num_outputs, limit, BLOCK=128",
            "x, out, num_outputs, 7.0, BLOCK=128",
            "gated: edges: out is wrong",
        ),
        Mutant(
            "arithmetic in the dtype of x",
            source="""
@triton.jit
def gated_kernel(x, out, num_outputs, limit, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_outputs
    gate, up = tl.load(x + 2 * index, inside, 0.0), tl.load(x + 2 * index + 1, inside, 0.0)
    gate = tl.minimum(gate, limit).to(x.dtype.element_ty)
    up = tl.maximum(tl.minimum(up, limit), -limit).to(x.dtype.element_ty)
    glu = gate * tl.sigmoid(1.702 * gate.to(tl.float32)).to(x.dtype.element_ty)
    tl.store(out + index, glu * (up + 1).to(x.dtype.element_ty), inside)


def gated(x, out, limit):
    gated_kernel[(triton.cdiv(out.numel(), 128),)](x, out, out.numel(), limit, BLOCK=128)
""",
            expect="more than one rounding",
        ),
        edited(
            "loads the gate again for the product",
            "gate * tl.sigmoid(1.702 * gate)",
            "tl.minimum(tl.load(x + 2 * index, inside, 0.0).to(tl.float32), limit) * tl.sigmoid(1.702 * gate)",
            "x[0, 0] was loaded 2 times, by program (0, 0, 0); expected once",
        ),
        edited("programs overlap", "tl.program_id(0) * BLOCK", "tl.program_id(0) * (BLOCK // 2)", "was never stored"),
        Mutant(
            "programs overlap, and there are enough of them",
            source="""
@triton.jit
def gated_kernel(x, out, num_outputs, limit, BLOCK: tl.constexpr):
    index = tl.program_id(0) * (BLOCK // 2) + tl.arange(0, BLOCK)
    inside = index < num_outputs
    gate = tl.minimum(tl.load(x + 2 * index, inside).to(tl.float32), limit)
    up = tl.maximum(tl.minimum(tl.load(x + 2 * index + 1, inside).to(tl.float32), limit), -limit)
    tl.store(out + index, gate * tl.sigmoid(1.702 * gate) * (up + 1), inside)


def gated(x, out, limit):
    gated_kernel[(triton.cdiv(out.numel(), 64),)](x, out, out.numel(), limit, BLOCK=128)
""",
            expect="out[0, 64] was stored 2 times, by program (0, 0, 0) and program (1, 0, 0); expected once",
        ),
        Mutant(
            "torch does it",
            source="""
def gated(x, out, limit):
    gate, up = x[:, ::2].float().clamp(max=limit), x[:, 1::2].float().clamp(-limit, limit)
    out.copy_(gate * torch.sigmoid(1.702 * gate) * (up + 1))
""",
            expect="no Triton kernel was launched",
        ),
        edited(
            "torch does half of it",
            "    num_outputs = out.numel()\n",
            "    x, num_outputs = x.clamp(max=limit), out.numel()\n",
            "a torch operation read or wrote numbers: clamp",
        ),
        edited(
            "a launch for each row",
            "    gated_kernel[(triton.cdiv(num_outputs, 128),)](x, out, num_outputs, limit, BLOCK=128)",
            "    for row in range(len(x)):\n        gated_kernel[(triton.cdiv(out.shape[1], 128),)](x[row], out[row], out.shape[1], limit, BLOCK=128)",
            "kernels were launched, expected 1",
        ),
        Mutant(
            "the package's",
            source="""
from minillm.kernels.activation import silu_mul


def gated(x, out, limit):
    out.copy_(silu_mul(torch.cat([x[:, ::2], x[:, 1::2]], 1)))
""",
            expect="this uses the package's minillm.kernels.activation.silu_mul",
        ),
    ],
    "rotate_pairs": [
        Mutant(
            "the half-split layout",
            source="""
def rotate_pairs(x, positions, table):
    kernel[(len(x),)](x, positions, table, x.stride(0), x.stride(1), x.shape[1], table.shape[1] // 2,
                      HEADS=next_power_of_2(x.shape[1]), PAIRS=next_power_of_2(table.shape[1] // 2))


@triton.jit
def kernel(x, positions, table, token_stride, head_stride, num_heads, num_pairs, HEADS: tl.constexpr, PAIRS: tl.constexpr):
    token, pair, head = tl.program_id(0), tl.arange(0, PAIRS), tl.arange(0, HEADS)
    row = table + tl.load(positions + token) * 2 * num_pairs + pair
    cos, sin = tl.load(row, pair < num_pairs)[None, :], tl.load(row + num_pairs, pair < num_pairs)[None, :]
    inside = (head < num_heads)[:, None] & (pair < num_pairs)[None, :]
    first = x + token * token_stride + head[:, None] * head_stride + pair[None, :]
    a, b = tl.load(first, inside).to(tl.float32), tl.load(first + num_pairs, inside).to(tl.float32)
    tl.store(first, a * cos - b * sin, inside)
    tl.store(first + num_pairs, a * sin + b * cos, inside)
""",
            expect="half-split layout",
        ),
        edited(
            "stores a before it loads b",
            "    b = tl.load(first + 1, inside).to(tl.float32)\n    tl.store(first, a * cos - b * sin, inside)\n",
            "    tl.store(first, a * cos - tl.load(first + 1, inside).to(tl.float32) * sin, inside)\n    a = tl.load(first, inside).to(tl.float32)\n    b = tl.load(first + 1, inside).to(tl.float32)\n",
            "x is wrong",
        ),
        Mutant(
            "a program for each head",
            source="""
def rotate_pairs(x, positions, table):
    kernel[(len(x), x.shape[1])](x, positions, table, x.stride(0), x.stride(1), table.shape[1] // 2, PAIRS=next_power_of_2(table.shape[1] // 2))


@triton.jit
def kernel(x, positions, table, token_stride, head_stride, num_pairs, PAIRS: tl.constexpr):
    token, head, pair = tl.program_id(0), tl.program_id(1), tl.arange(0, PAIRS)
    inside = pair < num_pairs
    row = table + tl.load(positions + token) * 2 * num_pairs + pair
    cos, sin = tl.load(row, inside), tl.load(row + num_pairs, inside)
    first = x + token * token_stride + head * head_stride + 2 * pair
    a, b = tl.load(first, inside).to(tl.float32), tl.load(first + 1, inside).to(tl.float32)
    tl.store(first, a * cos - b * sin, inside)
    tl.store(first + 1, a * sin + b * cos, inside)
""",
            expect="The row of the table is loaded once for a token",
        ),
        Mutant(
            "a block of pointers into the table",
            source="""
def rotate_pairs(x, positions, table):
    kernel[(len(x),)](x, positions, table, x.stride(0), x.stride(1), x.shape[1], table.shape[1] // 2,
                      HEADS=next_power_of_2(x.shape[1]), PAIRS=next_power_of_2(table.shape[1] // 2))


@triton.jit
def kernel(x, positions, table, token_stride, head_stride, num_heads, num_pairs, HEADS: tl.constexpr, PAIRS: tl.constexpr):
    token, pair, head = tl.program_id(0), tl.arange(0, PAIRS)[None, :], tl.arange(0, HEADS)[:, None]
    inside = (head < num_heads) & (pair < num_pairs)
    row = table + tl.load(positions + token) * 2 * num_pairs + pair + 0 * head
    cos, sin = tl.load(row, inside), tl.load(row + num_pairs, inside)
    first = x + token * token_stride + head * head_stride + 2 * pair
    a, b = tl.load(first, inside).to(tl.float32), tl.load(first + 1, inside).to(tl.float32)
    tl.store(first, a * cos - b * sin, inside)
    tl.store(first + 1, a * sin + b * cos, inside)
""",
            expect="was loaded 2 times, by program (0, 0, 0); expected once",
        ),
        Mutant(
            "loads every number and its partner",
            source="""
def rotate_pairs(x, positions, table):
    dim = table.shape[1]
    kernel[(len(x),)](x, positions, table, x.stride(0), x.stride(1), x.shape[1], dim, HEADS=next_power_of_2(x.shape[1]), DIM=next_power_of_2(dim))


@triton.jit
def kernel(x, positions, table, token_stride, head_stride, num_heads, dim, HEADS: tl.constexpr, DIM: tl.constexpr):
    token, d, head = tl.program_id(0), tl.arange(0, DIM), tl.arange(0, HEADS)
    row = table + tl.load(positions + token) * dim + d // 2
    cos, sin = tl.load(row, d < dim)[None, :], tl.load(row + dim // 2, d < dim)[None, :]
    inside = (head < num_heads)[:, None] & (d < dim)[None, :]
    start = x + token * token_stride + head[:, None] * head_stride
    mine = tl.load(start + d[None, :], inside).to(tl.float32)
    other = tl.load(start + (d ^ 1)[None, :], inside).to(tl.float32)
    tl.store(start + d[None, :], mine * cos + tl.where(d % 2 == 0, -1, 1)[None, :] * other * sin, inside)
""",
            expect="x[0, 0, 0] was loaded 2 times, by program (0, 0, 0); expected once",
        ),
        edited(
            "a pair too many",
            "inside = (head < num_heads) & (pair < num_pairs)",
            "inside = (head < num_heads) & (pair <= num_pairs)",
            "rotate_pairs: edges",
        ),
        edited(
            "no mask on the pairs",
            "inside = (head < num_heads) & (pair < num_pairs)",
            "inside = (head < num_heads) & (pair >= 0)",
            "carry no position",
        ),
        edited(
            "no mask on the heads",
            "inside = (head < num_heads) & (pair < num_pairs)",
            "inside = (head >= 0) & (pair < num_pairs)",
            "rotate_pairs: edges",
        ),
        edited(
            "trusts in heads side by side",
            "x, positions, table, x.stride(0), x.stride(1),",
            "x, positions, table, x.shape[1] * x.shape[2], x.shape[2],",
            "between the elements of a view",
        ),
        edited(
            "rotates a copy",
            "    (num_tokens, num_heads, _), num_pairs =",
            "    x = x.contiguous()\n    (num_tokens, num_heads, _), num_pairs =",
            "a torch operation read or wrote numbers",
        ),
        Mutant(
            "returns a new tensor",
            source="""
def rotate_pairs(x, positions, table):
    x, dim = x.clone(), table.shape[1]
    cos, sin = table[positions][:, None].chunk(2, -1)
    a, b = x[..., 0:dim:2].float(), x[..., 1:dim:2].float()
    x[..., 0:dim:2], x[..., 1:dim:2] = a * cos - b * sin, a * sin + b * cos
    return x
""",
            expect="no Triton kernel was launched",
        ),
        Mutant(
            "turns in the dtype of x",
            source="""
def rotate_pairs(x, positions, table):
    kernel[(len(x),)](x, positions, table, x.stride(0), x.stride(1), x.shape[1], table.shape[1] // 2,
                      HEADS=next_power_of_2(x.shape[1]), PAIRS=next_power_of_2(table.shape[1] // 2))


@triton.jit
def kernel(x, positions, table, token_stride, head_stride, num_heads, num_pairs, HEADS: tl.constexpr, PAIRS: tl.constexpr):
    token, pair, head = tl.program_id(0), tl.arange(0, PAIRS), tl.arange(0, HEADS)
    row = table + tl.load(positions + token) * 2 * num_pairs + pair
    cos, sin = tl.load(row, pair < num_pairs)[None, :].to(x.dtype.element_ty), tl.load(row + num_pairs, pair < num_pairs)[None, :].to(x.dtype.element_ty)
    inside = (head < num_heads)[:, None] & (pair < num_pairs)[None, :]
    first = x + token * token_stride + head[:, None] * head_stride + 2 * pair[None, :]
    a, b = tl.load(first, inside), tl.load(first + 1, inside)
    tl.store(first, a * cos - b * sin, inside)
    tl.store(first + 1, a * sin + b * cos, inside)
""",
            expect="more than one rounding",
        ),
    ],
    "dequantize": [
        Mutant(
            "a word for each weight",
            source=_WORD_EACH,
            expect="packed[0, 0] was loaded 4 times, by program (0, 0, 0); expected once",
        ),
        Mutant("bytes in place of words", source=_BYTES, expect="in pieces of 1 bytes; expected words of 4"),
        Mutant(
            "a scale for each weight",
            source="""
def dequantize(packed, scales, zeros, out, group):
    width = out.shape[1]
    kernel[(len(out),)](packed, scales, zeros, out, packed.stride(0), scales.shape[1], width // 4, group // 4, WORDS=next_power_of_2(width // 4))


@triton.jit
def kernel(packed, scales, zeros, out, row_stride, num_groups, row_words, group_words, WORDS: tl.constexpr):
    row, word, byte = tl.program_id(0), tl.arange(0, WORDS), tl.arange(0, 4)
    inside = word < row_words
    scale = tl.load(scales + row * num_groups + word // group_words, inside).to(tl.float32)
    zero = tl.load(zeros + row * num_groups + word // group_words, inside).to(tl.int32)
    q = (tl.load(packed + row * row_stride + word, inside, 0)[:, None] >> (8 * byte)[None, :]) & 0xFF
    tl.store(out + row * 4 * row_words + 4 * word[:, None] + byte[None, :], (q - zero[:, None]) * scale[:, None], inside[:, None])
""",
            expect="A group's program loads this number once",
        ),
        edited(
            "the first weight in the highest bits",
            "(8 * byte)[None, :]",
            "(24 - 8 * byte)[None, :]",
            "not in the highest",
        ),
        edited(
            "the first group's zero point for the row",
            "tl.load(zeros + row * num_groups + number)",
            "tl.load(zeros + row * num_groups)",
            "out is wrong",
        ),
        edited(
            "no mask at the end of a group",
            "(lane < group_words) & (word < row_words)",
            "word < row_words",
            "Perhaps the weights of the next group",
        ),
        edited(
            "no mask at the end of a row",
            "(lane < group_words) & (word < row_words)",
            "lane < group_words",
            "dequantize: edges",
        ),
        edited("a mask off by one", "(word < row_words)", "(word <= row_words)", "dequantize: edges"),
        edited(
            "rows side by side",
            "packed, scales, zeros, out, packed.stride(0),",
            "packed, scales, zeros, out, packed.shape[1],",
            "between the elements of a view",
        ),
        edited(
            "no last group",
            "dequantize_kernel[(num_rows, num_groups)]",
            "dequantize_kernel[(num_rows, max(1, out.shape[1] // group))]",
            "was never stored",
        ),
        Mutant(
            "groups of powers of two",
            source="""
def dequantize(packed, scales, zeros, out, group):
    num_rows, num_groups = scales.shape
    kernel[(num_rows, num_groups)](packed, scales, zeros, out, packed.stride(0), num_groups, packed.shape[1], WORDS=next_power_of_2(group // 4))


@triton.jit
def kernel(packed, scales, zeros, out, row_stride, num_groups, row_words, WORDS: tl.constexpr):
    row, number, byte = tl.program_id(0), tl.program_id(1), tl.arange(0, 4)
    word = number * WORDS + tl.arange(0, WORDS)
    inside = word < row_words
    scale, zero = tl.load(scales + row * num_groups + number).to(tl.float32), tl.load(zeros + row * num_groups + number).to(tl.int32)
    q = (tl.load(packed + row * row_stride + word, inside, 0)[:, None] >> (8 * byte)[None, :]) & 0xFF
    tl.store(out + row * 4 * row_words + 4 * word[:, None] + byte[None, :], (q - zero) * scale, inside[:, None])
""",
            expect="dequantize: edges",
        ),
        edited(
            "two roundings",
            "(weights - zero) * scale",
            "(weights * scale).to(out.dtype.element_ty) - (zero * scale).to(out.dtype.element_ty)",
            "more than one rounding",
        ),
        Mutant(
            "torch does it",
            source="""
def dequantize(packed, scales, zeros, out, group):
    q = packed.contiguous().view(torch.uint8).float()
    scale, zero = (part.float().repeat_interleave(group, 1)[:, :q.shape[1]] for part in (scales, zeros))
    out.copy_((q - zero) * scale)
""",
            expect="no Triton kernel was launched",
        ),
        edited(
            "torch spreads the scales",
            "    num_rows, num_groups = scales.shape\n",
            "    zeros, (num_rows, num_groups) = zeros.int(), scales.shape\n",
            "a torch operation read or wrote numbers: _to_copy",
        ),
    ],
    "repair_log_softmax": [
        Mutant(
            "the broken one",
            source="""
repaired_log_softmax = broken_log_softmax
""",
            expect=_OUTSIDE,
        ),
        edited(
            "only the mask", 'float("-inf")', "0.0", "what do the other 3 bring into the maximum, and into the sum?"
        ),
        edited("only the poison", "mask = column < num_tokens", "mask = column <= num_tokens", _OUTSIDE),
        edited(
            "the store as it was",
            "x - tl.log(tl.sum(tl.exp(x), 0)), mask)",
            "x - tl.log(tl.sum(tl.exp(x), 0)), column <= num_tokens)",
            "repair_log_softmax: example",
        ),
        edited("one too few", "column < num_tokens", "column < num_tokens - 1", "out[0, 4] was never stored"),
        edited("a small number instead of none", 'float("-inf")', "-10000.0", "a row far below zero"),
        edited("the smallest float16", 'float("-inf")', "-65504.0", "a row far below zero"),
        edited("no maximum", "    x = x - tl.max(x, 0)\n", "", "must be subtracted before exp"),
        edited("the sum without its logarithm", "tl.log(tl.sum(tl.exp(x), 0))", "tl.sum(tl.exp(x), 0)", "out is wrong"),
        edited(
            "loads once for the maximum and once for the sum",
            "    x = x - tl.max(x, 0)\n",
            '    x = x - tl.max(tl.load(logits + row * num_tokens + column, mask, float("-inf")).to(tl.float32), 0)\n',
            "logits[0, 0] was loaded 2 times, by program (0, 0, 0); expected once",
        ),
        Mutant(
            "pads with torch",
            source="""
def repaired_log_softmax(logits, out):
    wide = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)
    out.copy_(wide.float().log_softmax(-1)[:, :-1])
""",
            expect="no Triton kernel was launched",
        ),
        edited(
            "writes what it loaded",
            "tl.store(out + row * num_tokens + column, x - tl.log(tl.sum(tl.exp(x), 0)), mask)",
            "tl.store(logits + row * num_tokens + column, x - tl.log(tl.sum(tl.exp(x), 0)), mask)",
            "logits",
        ),
        Mutant(
            "the package's softmax and a logarithm",
            source="""
from minillm.kernels.softmax import softmax


def repaired_log_softmax(logits, out):
    out.copy_(softmax(logits).log())
""",
            expect="this uses the package's minillm.kernels.softmax.softmax",
        ),
    ],
}
