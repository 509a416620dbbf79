"""Small kernels for the instructions of newer GPUs: built ahead of time and read, not launched by the engine.
Built in chapter 11.

    tma_matmul_kernel     a product whose tiles are copied by descriptors (TMA from sm_90 on), with or without warps of
                          two roles
    block_scaled_kernel   one tile of a product of mxfp8 or mxfp4 codes with a scale for every 32 of them
    dependent_add_kernel  x + y, started before the kernel ahead of it has ended (chapter 14)
    gluon_tile_kernel     one tile of a product in Gluon, where the author places everything: sm_100 only
"""

from __future__ import annotations

from minillm.kernels.build import Job
from minillm.kernels.language import MODE, tl, triton

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except (ImportError, AttributeError):  # Triton before 3.4, or none
    gdc_launch_dependents = gdc_wait = None
try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import blackwell as bw
except ImportError:  # Triton before 3.5, or none
    gluon = None


@triton.jit
def tma_matmul_kernel(
    a, b, c, m, n, k,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, SPECIALISE: tl.constexpr,
):  # fmt: skip
    """C = A B, all three contiguous, with rows of a multiple of 16 bytes. No mask: a descriptor knows its shape."""
    row = tl.program_id(0) // tl.cdiv(n, TILE_N) * TILE_M
    column = tl.program_id(0) % tl.cdiv(n, TILE_N) * TILE_N
    a_tiles = tl.make_tensor_descriptor(a, [m, k], [k, 1], [TILE_M, TILE_K])
    b_tiles = tl.make_tensor_descriptor(b, [k, n], [n, 1], [TILE_K, TILE_N])
    c_tiles = tl.make_tensor_descriptor(c, [m, n], [n, 1], [TILE_M, TILE_N])
    sums = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in tl.range(0, k, TILE_K, warp_specialize=SPECIALISE):
        sums = tl.dot(a_tiles.load([row, start]), b_tiles.load([start, column]), sums)
    c_tiles.store([row, column], sums.to(c.dtype.element_ty))


@triton.jit
def block_scaled_kernel(
    a, a_scales, b, b_scales, c,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """One tile: a [TILE_M, TILE_K] and b [TILE_K, TILE_N] in codes of FORMAT, "e4m3" or, two in a byte, "e2m1"; a scale
    (a power of two, its exponent in a byte) for every 32 codes along k: [TILE_M, TILE_K // 32], [TILE_N, TILE_K // 32].
    """
    PACKED: tl.constexpr = 2 if FORMAT == "e2m1" else 1
    rows, columns = tl.arange(0, TILE_M), tl.arange(0, TILE_N)
    inner, groups = tl.arange(0, TILE_K // PACKED), tl.arange(0, TILE_K // 32)
    a_codes = tl.load(a + rows[:, None] * (TILE_K // PACKED) + inner[None, :])
    b_codes = tl.load(b + inner[:, None] + columns[None, :] * (TILE_K // PACKED))
    a_scale = tl.load(a_scales + rows[:, None] * (TILE_K // 32) + groups[None, :])
    b_scale = tl.load(b_scales + columns[:, None] * (TILE_K // 32) + groups[None, :])
    sums = tl.dot_scaled(a_codes, a_scale, FORMAT, b_codes, b_scale, FORMAT)
    tl.store(c + rows[:, None] * TILE_N + columns[None, :], sums)


@triton.jit
def dependent_add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    """y is a weight, x what the kernel ahead writes: y is loaded before that kernel has ended."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(y + i, i < n)
    gdc_wait()  # until all of the kernel ahead has ended and what it wrote can be read
    value = tl.load(x + i, i < n)
    gdc_launch_dependents()  # the kernel behind may start
    tl.store(out + i, value + weight, i < n)


if gluon is not None:

    @gluon.jit
    def gluon_tile_kernel(a, b, c, TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr):
        """c [TILE_M, TILE_N] float32 = a [TILE_M, TILE_K] b [TILE_K, TILE_N], float16: one tile."""
        in_shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        a_source = bw.tma.make_tensor_descriptor(a, [TILE_M, TILE_K], [TILE_K, 1], [TILE_M, TILE_K], in_shared)
        b_source = bw.tma.make_tensor_descriptor(b, [TILE_K, TILE_N], [TILE_N, 1], [TILE_K, TILE_N], in_shared)
        a_tile = gl.allocate_shared_memory(gl.float16, [TILE_M, TILE_K], in_shared)
        b_tile = gl.allocate_shared_memory(gl.float16, [TILE_K, TILE_N], in_shared)
        copied, multiplied = bw.mbarrier.allocate_mbarrier(), bw.mbarrier.allocate_mbarrier()
        bw.mbarrier.init(copied, count=1)
        bw.mbarrier.init(multiplied, count=1)

        bw.mbarrier.expect(copied, 2 * TILE_K * (TILE_M + TILE_N))  # so many bytes will arrive
        bw.tma.async_load(a_source, [0, 0], copied, a_tile)
        bw.tma.async_load(b_source, [0, 0], copied, b_tile)
        bw.mbarrier.wait(copied, phase=0)

        layout: gl.constexpr = bw.TensorMemoryLayout([TILE_M, TILE_N], col_stride=1)
        sums = bw.allocate_tensor_memory(gl.float32, [TILE_M, TILE_N], layout)
        bw.tcgen05_mma(a_tile, b_tile, sums, use_acc=False, mbarriers=[multiplied])
        bw.mbarrier.wait(multiplied, phase=0)

        result = sums.load()
        rows = gl.arange(0, TILE_M, gl.SliceLayout(1, result.type.layout))
        columns = gl.arange(0, TILE_N, gl.SliceLayout(0, result.type.layout))
        gl.store(c + rows[:, None] * TILE_N + columns[None, :], result)


def tma_job(capability: int, tile: tuple[int, int, int] = (128, 128, 64), specialise: bool = False, **options) -> Job:
    """`tma_matmul_kernel` in float16 for one kind of GPU; sizes are multiples of 16, as a launch would find them."""
    signature = dict.fromkeys("abc", "*fp16") | dict.fromkeys("mnk", "i32:16")
    constants = dict(zip(("TILE_M", "TILE_N", "TILE_K"), tile, strict=True), SPECIALISE=specialise)
    return Job(tma_matmul_kernel, signature, constants, capability, **options)


def block_scaled_job(capability: int, format: str, tile: tuple[int, int, int] = (128, 128, 128)) -> Job:
    """`block_scaled_kernel` for codes of "e4m3" or "e2m1"."""
    codes = "*u8" if format == "e2m1" else "*fp8e4nv"
    signature = {"a": codes, "a_scales": "*u8", "b": codes, "b_scales": "*u8", "c": "*fp32"}
    constants = dict(zip(("TILE_M", "TILE_N", "TILE_K"), tile, strict=True), FORMAT=format)
    return Job(block_scaled_kernel, signature, constants, capability)


def dependent_job(capability: int) -> Job:
    """`dependent_add_kernel` in float32."""
    signature = dict.fromkeys(("x", "y", "out"), "*fp32") | {"n": "i32:16"}
    return Job(dependent_add_kernel, signature, {"BLOCK": 1024}, capability)


def gluon_job(tile: tuple[int, int, int] = (128, 128, 64)) -> Job:
    """`gluon_tile_kernel` for sm_100. RuntimeError where Triton has no Gluon."""
    if gluon is None:
        raise RuntimeError(f"Gluon comes with Triton 3.5 or newer; Triton is {MODE} here")
    signature = {"a": "*fp16", "b": "*fp16", "c": "*fp32"}
    return Job(gluon_tile_kernel, signature, dict(zip(("TILE_M", "TILE_N", "TILE_K"), tile, strict=True)), 100)
