"""Plausible mistakes in the exercises of chapter 11: every one of them must fail its checks."""

from minillm.book.proofs import Mutant, edited

MUTANTS = {
    "tile_traffic": [
        edited("bytes as a float", "return best, cost(best)[0]", "return best, float(cost(best)[0])", "tile_traffic: "),
        edited(
            "a tile that is a list", "return best, cost(best)[0]", "return list(best), cost(best)[0]", "tile_traffic: "
        ),
        edited(
            "sorts the caller's list", "    if not fitting:", "    tiles.sort()\n    if not fitting:", "tile_traffic: "
        ),
        edited(
            "nothing fits, and it says so loudly",
            "        return None\n",
            "        raise ValueError('no tile fits')\n",
            "raised ValueError",
        ),
    ],
    "snake_order": [
        edited(
            "divmod",
            "row, column = within // width, within % width",
            "row, column = divmod(within, width)",
            "calls divmod",
        ),
        edited(
            "by way of a float",
            "number = program // (tiles_m * group)",
            "number = int(program / (tiles_m * group))",
            "divides with /",
        ),
        Mutant(
            "groups of rows",
            source="""
def snake_tile(program, tiles_m, tiles_n, group):
    number = program // (tiles_n * group)
    first = number * group
    height = min(group, tiles_m - first)
    within = program - first * tiles_n
    column, row = within // height, within % height
    if column % 2 == 1:
        row = height - 1 - row
    if number % 2 == 1:
        column = tiles_n - 1 - column
    return first + row, column
""",
            expect="program 1 gets tile (1, 0)",
        ),
        edited(
            "the last group is as wide as the others",
            "width = min(group, tiles_n - first)",
            "width = group",
            "The last group may be narrower",
        ),
        edited(
            "no turns", "    if row % 2 == 1:\n        column = width - 1 - column\n", "", "program 2 gets tile (1, 0)"
        ),
        edited(
            "every group from the top",
            "    if number % 2 == 1:\n        row = tiles_m - 1 - row\n",
            "",
            "program 6 gets tile (0, 2)",
        ),
        Mutant(
            "the row's number decides",
            source="""
def snake_tile(program, tiles_m, tiles_n, group):
    number = program // (tiles_m * group)
    first = number * group
    width = min(group, tiles_n - first)
    within = program - first * tiles_m
    row, column = within // width, within % width
    if number % 2 == 1:
        row = tiles_m - 1 - row
    if row % 2 == 1:
        column = width - 1 - column
    return row, first + column
""",
            expect="rows in the order in which they are walked",
        ),
        edited(
            "turns at the group's full width",
            "column = width - 1 - column",
            "column = group - 1 - column",
            "The last group may be narrower",
        ),
        edited("column and row", "return row, first + column", "return first + column, row", "snake_order: example"),
        edited(
            "divides with a slash",
            "within // width, within % width",
            "within / width, within % width",
            "Divide with //",
        ),
        Mutant(
            "walks",
            source="""
def snake_tile(program, tiles_m, tiles_n, group):
    for number, first in enumerate(range(0, tiles_n, group)):
        columns = range(first, min(first + group, tiles_n))
        for before in range(tiles_m):
            row = tiles_m - 1 - before if number % 2 else before
            for column in (reversed(columns) if before % 2 else columns):
                if program == 0:
                    return row, column
                program -= 1
""",
            expect="without a loop over the programs before it",
        ),
    ],
    "split_k": [
        edited(
            "masked lanes without other",
            "(rows < m)[:, None] & (inner < k)[None, :], 0.0)",
            "(rows < m)[:, None] & (inner < k)[None, :])",
            "what it holds is undefined unless tl.load has an `other`, 0.0",
        ),
        edited(
            "forgets where k ends in a",
            "(rows < m)[:, None] & (inner < k)[None, :], 0.0)\n        right",
            "(rows < m)[:, None], 0.0)\n        right",
            "A lane outside of the matrix needs a mask",
        ),
        edited(
            "forgets where k ends in both",
            "(inner < k)[None, :], 0.0)\n        right = tl.load(b + inner[:, None] * n + columns[None, :], (inner < k)[:, None] & ",
            "(inner >= 0)[None, :], 0.0)\n        right = tl.load(b + inner[:, None] * n + columns[None, :], (inner >= 0)[:, None] & ",
            "A lane outside of the matrix needs a mask",
        ),
        edited(
            "no mask on the columns",
            "(inner < k)[:, None] & (columns < n)[None, :], 0.0)",
            "(inner < k)[:, None], 0.0)",
            "A lane outside of the matrix needs a mask",
        ),
        edited(
            "drops the last tile of k", "tiles = tl.cdiv(k, TILE)", "tiles = k // TILE", "The last tile may be narrower"
        ),
        edited(
            "the longer slices last",
            "    first = number * each + tl.minimum(number, longer)\n    last = (number + 1) * each + tl.minimum(number + 1, longer)\n",
            "    first = number * tiles // num_slices\n    last = (number + 1) * tiles // num_slices\n",
            "Of the slices of k, the longer ones come first",
        ),
        edited(
            "equal slices only",
            "    first = number * each + tl.minimum(number, longer)\n    last = (number + 1) * each + tl.minimum(number + 1, longer)\n",
            "    first = number * each\n    last = first + each\n",
            "never loads",
        ),
        edited(
            "slices as long as the first",
            "    first = number * each + tl.minimum(number, longer)\n    last = (number + 1) * each + tl.minimum(number + 1, longer)\n",
            "    each = tl.cdiv(tiles, num_slices)\n    first = number * each\n    last = tl.minimum(first + each, tiles)\n",
            "num_splits=4",
        ),
        edited(
            "every program sums all of k",
            "for tile in range(first, last):",
            "for tile in range(0, tiles):",
            "which is not its own",
        ),
        edited(
            "programs without work",
            "num_slices = min(num_splits, triton.cdiv(k, TILE))",
            "num_slices = num_splits",
            "expected 4",
        ),
        edited(
            "starts every tile anew",
            "tl.dot(left, right, total, input_precision",
            "tl.dot(left, right, input_precision",
            "the output",
        ),
        edited(
            "partial sums in the inputs' dtype",
            "torch.empty(num_slices, m, n, dtype=torch.float32,",
            "torch.empty(num_slices, m, n, dtype=a.dtype,",
            "has 2 bytes",
        ),
        edited(
            "returns float32",
            "torch.empty(m, n, dtype=a.dtype,",
            "torch.empty(m, n, dtype=torch.float32,",
            "has 4 bytes",
        ),
        edited(
            "from the last slice to the first",
            "        total += tl.load(partials + index, inside, 0.0)\n        partials += num_elements\n",
            "        total += tl.load(partials + (num_slices - 1 - number) * num_elements + index, inside, 0.0)\n",
            "loads slice 1 after slice 2",
        ),
        edited(
            "forgets the last slice",
            "for number in range(0, num_slices):",
            "for number in range(0, num_slices - 1):",
            "Every slice is added",
        ),
        edited(
            "rounds after every slice",
            "    total = tl.zeros((BLOCK,), tl.float32)\n    for number in range(0, num_slices):\n        total += tl.load(partials + index, inside, 0.0)\n",
            "    total = tl.zeros((BLOCK,), tl.float32)\n    for number in range(0, num_slices):\n        total = (total + tl.load(partials + index, inside, 0.0)).to(out.dtype.element_ty).to(tl.float32)\n",
            "in float16, 2048 + 1 would be 2048",
        ),
        edited(
            "the sum has no mask",
            "    inside = index < num_elements\n",
            "    inside = index >= 0\n",
            "A lane outside of the matrix needs a mask",
        ),
        edited(
            "torch adds",
            "    sum_kernel[(triton.cdiv(m * n, 256),)](partials, out, m * n, num_slices, BLOCK=256)\n    return out\n",
            "    return partials.sum(0).to(a.dtype)\n",
            "a torch operation read or wrote numbers",
        ),
        Mutant(
            "atomic",
            source="""
@triton.jit
def split_kernel(a, b, out, m, n, k, num_slices, TILE: tl.constexpr):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for tile in range(tl.program_id(2), tl.cdiv(k, TILE), num_slices):
        inner = tile * TILE + tl.arange(0, TILE)
        left = tl.load(a + rows[:, None] * k + inner[None, :], (rows < m)[:, None] & (inner < k)[None, :], 0.0)
        right = tl.load(b + inner[:, None] * n + columns[None, :], (inner < k)[:, None] & (columns < n)[None, :], 0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    tl.atomic_add(out + rows[:, None] * n + columns[None, :], total, (rows < m)[:, None] & (columns < n)[None, :])


@triton.jit
def zero_kernel(out, num_elements, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, tl.zeros((BLOCK,), tl.float32), index < num_elements)


def split_k_matmul(a, b, num_splits):
    (m, k), n = a.shape, b.shape[1]
    num_slices = min(num_splits, triton.cdiv(k, TILE))
    out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    zero_kernel[(triton.cdiv(m * n, 256),)](out, m * n, BLOCK=256)
    split_kernel[(triton.cdiv(m, TILE), triton.cdiv(n, TILE), num_slices)](a, b, out, m, n, k, num_slices, TILE=TILE)
    return out
""",
            expect="launch 1, zero_kernel, has 2 programs",
        ),
    ],
    "last_tile": [
        edited(
            "halves into the product",
            'tl.dot(left, right, total, input_precision="ieee")',
            "tl.dot(left.to(tl.float16), right.to(tl.float16), total)",
            "Tiles go into tl.dot as they were loaded",
        ),
        edited(
            "bfloat16 on the way",
            "tl.dot(left, right, total",
            "tl.dot(left.to(tl.bfloat16).to(tl.float32), right.to(tl.bfloat16).to(tl.float32), total",
            "Tiles go into tl.dot as they were loaded",
        ),
        edited(
            "rounds after every turn",
            'total, input_precision="ieee")',
            'total, input_precision="ieee").to(a.dtype.element_ty).to(tl.float32)',
            "2049 is no float16",
        ),
        edited(
            "tl.where after a load without a mask on k",
            "(rows < m)[:, None] & (inner < k - start)[None, :], 0.0)\n",
            "(rows < m)[:, None], 0.0)\n        left = tl.where((inner < k - start)[None, :], left, 0.0)\n",
            "not a tl.where afterwards",
        ),
        edited(
            "masked lanes without other",
            "(rows < m)[:, None] & (inner < k - start)[None, :], 0.0)",
            "(rows < m)[:, None] & (inner < k - start)[None, :])",
            "what it holds is undefined unless tl.load has an `other`, 0.0",
        ),
        edited(
            "the broken one",
            "for start in range(0, k, TILE):",
            "for start in range(0, k // TILE * TILE, TILE):",
            "never loads a[0, 32] (missing: rows 0–15; 128 of 640 elements)",
        ),
        edited(
            "one turn more, the masks as they were",
            "        left = tl.load(a_tile, (rows < m)[:, None] & (inner < k - start)[None, :], 0.0)\n        right = tl.load(b_tile, (inner < k - start)[:, None]",
            "        left = tl.load(a_tile, (rows < m)[:, None] & (inner < k)[None, :], 0.0)\n        right = tl.load(b_tile, (inner < k)[:, None]",
            "A lane outside of the matrix needs a mask",
        ),
        edited(
            "the mask of a only as it was",
            "(rows < m)[:, None] & (inner < k - start)[None, :]",
            "(rows < m)[:, None] & (inner < k)[None, :]",
            "A lane outside of the matrix needs a mask",
        ),
        edited(
            "the mask of b only as it was",
            "(inner < k - start)[:, None] & (columns < n)",
            "(inner < k)[:, None] & (columns < n)",
            "A lane outside of the matrix needs a mask",
        ),
        edited(
            "loses a column",
            "(rows < m)[:, None] & (inner < k - start)[None, :]",
            "(rows < m)[:, None] & (inner < k - start - 1)[None, :]",
            "never loads a[0, 39]",
        ),
        Mutant(
            "torch",
            source="""
def repaired_matmul(a, b):
    return a @ b
""",
            expect="a torch operation read or wrote numbers",
        ),
    ],
    "fused_epilogue": [
        edited(
            "halves into the product",
            "gate = tl.dot(left, tl.load(weight, inside, 0.0), gate",
            "gate = tl.dot(left.to(tl.float16), tl.load(weight, inside, 0.0).to(tl.float16), gate",
            "rounded too early",
        ),
        edited(
            "masked lanes without other",
            "(rows < m)[:, None] & (inner < k)[None, :], 0.0)",
            "(rows < m)[:, None] & (inner < k)[None, :])",
            "what it holds is undefined unless tl.load has an `other`, 0.0",
        ),
        edited(
            "up and gate changed over",
            "gate / (1 + tl.exp(-gate)) * up",
            "up / (1 + tl.exp(-up)) * gate",
            "the gate is the first half of the rows",
        ),
        edited("without silu", "gate / (1 + tl.exp(-gate)) * up", "gate * up", "the output"),
        edited("sigmoid in place of silu", "gate / (1 + tl.exp(-gate)) * up", "up / (1 + tl.exp(-gate))", "the output"),
        edited(
            "rounds the products",
            "    result = gate",
            "    gate, up = gate.to(out.dtype.element_ty).to(tl.float32), up.to(out.dtype.element_ty).to(tl.float32)\n    result = gate",
            "Round once, at the store",
        ),
        edited(
            "loads x twice",
            "        up = tl.dot(left, ",
            "        left = tl.load(x + rows[:, None] * k + inner[None, :], (rows < m)[:, None] & (inner < k)[None, :], 0.0)\n        up = tl.dot(left, ",
            "2 times",
        ),
        edited(
            "the rows lie interleaved",
            "weight = gate_up + columns[None, :] * k",
            "weight = gate_up + 2 * columns[None, :] * k",
            "the address was made for another shape",
        ),
        edited(
            "gate runs into up",
            "inside = (inner < k)[:, None] & (columns < n)[None, :]",
            "inside = (inner < k)[:, None] & (columns < 2 * n)[None, :]",
            "gate_up",
        ),
        edited(
            "as if it were [k, 2n]",
            "gate_up + columns[None, :] * k + inner[:, None]",
            "gate_up + inner[:, None] * 2 * n + columns[None, :]",
            "fused_epilogue: example",
        ),
        Mutant(
            "two kernels",
            source="""
@triton.jit
def product_kernel(x, gate_up, out, m, n, k, TILE: tl.constexpr):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, k, TILE):
        inner = start + tl.arange(0, TILE)
        left = tl.load(x + rows[:, None] * k + inner[None, :], (rows < m)[:, None] & (inner < k)[None, :], 0.0)
        weight = tl.load(gate_up + columns[None, :] * k + inner[:, None], (inner < k)[:, None] & (columns < n)[None, :], 0.0)
        total = tl.dot(left, weight, total, input_precision="ieee")
    tl.store(out + rows[:, None] * n + columns[None, :], total, (rows < m)[:, None] & (columns < n)[None, :])


@triton.jit
def silu_kernel(both, out, size, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = index // n * 2 * n + index % n
    gate, up = tl.load(both + place, index < size, 0.0), tl.load(both + place + n, index < size, 0.0)
    tl.store(out + index, gate / (1 + tl.exp(-gate)) * up, index < size)


def gated_product(x, gate_up):
    (m, k), n = x.shape, gate_up.shape[0] // 2
    both, out = torch.empty(m, 2 * n), torch.empty(m, n, dtype=x.dtype)
    product_kernel[(triton.cdiv(m, TILE), triton.cdiv(2 * n, TILE))](x, gate_up, both, m, 2 * n, k, TILE=TILE)
    silu_kernel[(triton.cdiv(m * n, 256),)](both, out, m * n, n, BLOCK=256)
    return out
""",
            expect="Neither product is ever stored",
        ),
    ],
}
