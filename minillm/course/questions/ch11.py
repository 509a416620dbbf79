"""Questions of chapter 11, matrix products."""

from __future__ import annotations

from minillm.course.questions.question import Bank, Draw, Variant

BANK = Bank()


@BANK.computed(
    11,
    "how many bytes a matrix product loads",
    title="Bytes of a tiled product",
    minutes=6,
    unit="MB",
    tolerance=0.01,
    within=(30, 300),
    rubric=("how often A is read", "how often B is read", "bytes of both"),
)
def tiled_bytes(draw: Draw) -> Variant:
    def loaded(drawn: tuple[int, ...]) -> tuple[float, float]:
        m, n, k, tile_m, tile_n = drawn
        return 2 * m * k * (n // tile_n) / 1e6, 2 * k * n * (m // tile_m) / 1e6

    m, n, k, tile_m, tile_n = drawn = draw.until(
        lambda: (
            draw.number(1024, 2048, 256),
            draw.number(1024, 2048, 256),
            draw.number(1024, 2048, 256),
            draw.of(32, 64, 128),
            draw.of(32, 64, 128),
        ),
        lambda d: 33 < sum(loaded(d)) < 280 and d[3] != d[4] and d[0] != d[1],
    )
    a, b = loaded(drawn)
    return Variant(
        f"$C = A B$ with A of {m} × {k} and B of {k} × {n} numbers in bfloat16 is computed in tiles of C of {tile_m} "
        f"× {tile_n}; each program walks along $k$ and loads what it needs once. Nothing is cached between programs. "
        "How many megabytes ($10^6$ bytes) do all programs load together?",
        a + b,
        (
            f"A row strip of A is loaded by every column of tiles: {n} / {tile_n} = {n // tile_n} times, {a:.1f} MB.",
            f"B is loaded {m} / {tile_m} = {m // tile_m} times, {b:.1f} MB.",
            f"Together {a + b:.1f} MB.",
        ),
        {
            "A is loaded by every column of tiles, too": 2 * m * k / 1e6 + b,
            "each matrix is loaded more than once": 2 * (m * k + k * n) / 1e6,
        },
    )


@BANK.computed(
    11,
    "compute occupancy by hand",
    title="Warps on an SM",
    minutes=7,
    unit="warps",
    within=(8, 48),
    rubric=("the limit by registers", "the limit by shared memory", "the limit by warps", "the smallest, in warps"),
)
def warps_per_sm(draw: Draw) -> Variant:
    def limits(drawn: tuple[int, ...]) -> tuple[int, int, int]:
        warps, registers, shared = drawn
        return 65536 // (warps * 32 * registers), 164 // (shared + 1), 64 // warps

    warps, registers, shared = drawn = draw.until(
        lambda: (draw.of(2, 4, 8), draw.number(64, 200, 8), draw.number(8, 40)),
        lambda d: 2 <= limits(d)[0] < limits(d)[1] < limits(d)[2] <= 32,
    )
    by_registers, by_shared, by_warps = limits(drawn)
    return Variant(
        "An SM has 65,536 registers, 164 KB of shared memory and room for 64 warps. A program of a kernel has "
        f"{warps} warps of 32 threads, each thread {registers} registers, and takes {shared} KB of shared memory, "
        "beside 1 KB that the system keeps for every program. How many warps does the SM hold at once?",
        by_registers * warps,
        (
            f"Registers: 65,536 / ({warps} · 32 · {registers}) = {by_registers}, rounded down.",
            f"Shared memory: 164 / {shared + 1} = {by_shared}, rounded down.",
            f"Warps: 64 / {warps} = {by_warps}.",
            f"The smallest: {by_registers} programs, {by_registers * warps} warps.",
        ),
        {"registers are given out first": by_shared * warps, "warps are not all that is limited": by_warps * warps},
        "limited by registers",
    )


@BANK.computed(
    11,
    "how many bytes a matrix product loads",
    title="Intensity of a tile",
    minutes=5,
    unit="FLOP a byte",
    tolerance=0.01,
    within=(15, 120),
    rubric=("operations of one turn", "bytes of one turn", "the ratio"),
)
def tile_intensity(draw: Draw) -> Variant:
    itemsize = draw.of(2, 4)
    tile_m, tile_n, inner = draw.of(32, 64, 96, 128), draw.of(64, 128, 192, 256), draw.of(16, 32, 64)
    tile_m, tile_n = draw.until(
        lambda: (draw.of(32, 64, 96, 128), draw.of(64, 128, 192, 256)),
        lambda t: t[0] != t[1] and 16 < 2 * t[0] * t[1] / (t[0] + t[1]) / itemsize < 110,
    )
    flops, loaded = 2 * tile_m * tile_n * inner, (tile_m + tile_n) * inner * itemsize
    return Variant(
        f"In each turn of its loop a program of a matrix product loads a tile of A of {tile_m} × {inner} and one of B "
        f"of {inner} × {tile_n}, {itemsize} bytes a number, and multiplies them. What is its arithmetic intensity?",
        flops / loaded,
        (
            f"Operations: $2 · {tile_m} · {tile_n} · {inner} = {flops:,}$.",
            f"Bytes: $({tile_m} + {tile_n}) · {inner} · {itemsize} = {loaded:,}$.",
            f"{flops / loaded:.2f} FLOP a byte: the inner side cancels.",
        ),
        {
            "a multiplication and an addition are two operations": flops / loaded / 2,
            "a number has several bytes": flops / loaded * itemsize,
        },
    )


BANK.written(
    11,
    "say why the best matrix product has little",
    "Little occupancy",
    "A fast matrix product often runs with an occupancy of 25% or less. What are the registers used for instead, and "
    "by what else than many warps is the latency of memory hidden?",
    "The registers hold a large tile of sums, which increases the reuse of every byte that is loaded. Latency is "
    "hidden by asynchronous copies of the next tiles into shared memory (pipelining), independent instructions in a "
    "thread, and long tensor-core operations.",
    rubric=("registers hold the tile of sums", "more reuse, fewer bytes", "pipelining hides latency"),
)
