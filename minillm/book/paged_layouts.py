"""What the compiler makes of chapter 13's kernels: a loop over pages in three layouts, and `paged_decode` on four GPUs.
Built in chapter 13."""

from __future__ import annotations

from minillm.kernels.build import Job, Report, build_all, occupancy
from minillm.kernels.flash_attention import take_in
from minillm.kernels.gpus import GPU, GPUS
from minillm.kernels.language import tl, triton
from minillm.kernels.paged_decode import choose_tile, paged_decode_kernel

VARIANTS = {
    "keys turned, a mask for each position": dict(WHOLE=False, TURNED=True),
    "keys turned, a mask for whole blocks": dict(WHOLE=True, TURNED=True),
    "keys in rows, a mask for each position": dict(WHOLE=False, TURNED=False),
}
_SHAPE = dict(
    GROUP=4, ROWS=16, HEAD_DIM=128, WIDTH=128, BLOCK_SIZE=16, WINDOW=0, SPLIT=False, PRECISION="tf32", SINKS=0,
    q_sink=None, sink_logits=None, key_scales=None, value_scales=None,
)  # fmt: skip


@triton.jit
def toy_layout_kernel(
    q, keys, values, table, out, length, scale, key_block, value_block, WHOLE: tl.constexpr,
    TURNED: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One group of 16 heads over one sequence, with keys transposed (TURNED) or in rows."""
    rows, dims = tl.arange(0, 16), tl.arange(0, DIM)
    queries = tl.load(q + rows[:, None] * DIM + dims[None, :])
    best, total = tl.full((16,), float("-inf"), tl.float32), tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, DIM), tl.float32)
    for tile in range(0, length, TILE):
        positions = tile + tl.arange(0, TILE)
        there, offsets = positions < length, positions % BLOCK_SIZE
        held = positions // BLOCK_SIZE * BLOCK_SIZE < length if WHOLE else there  # whole: one answer for a block
        blocks = tl.load(table + positions // BLOCK_SIZE, held, 0).to(tl.int64)
        if TURNED:
            where = (blocks * key_block + offsets)[None, :] + dims[:, None] * BLOCK_SIZE
            page = tl.load(keys + where, held[None, :], 0.0)
        else:
            where = (blocks * key_block + offsets * DIM)[:, None] + dims[None, :]
            page = tl.trans(tl.load(keys + where, held[:, None], 0.0))
        scores = tl.where(there[None, :], tl.dot(queries, page) * scale, float("-inf"))
        where = (blocks * value_block + offsets * DIM)[:, None] + dims[None, :]
        page = tl.load(values + where, there[:, None], 0.0)
        best, total, acc = take_in(best, total, acc, scores, page, True, "tf32")
    tl.store(out + rows[:, None] * DIM + dims[None, :], acc / total[:, None])


def build_layouts(capability: int = 80) -> dict[str, Report]:
    """The toy's three variants and the package's kernel, for heads of 128 and blocks of 16."""
    tile, stages = choose_tile(128, 2, 2, capability)
    types = _types(halves="q keys values out", longs="table", aligned="key_block value_block", numbers="length")
    constants = dict(DIM=128, BLOCK_SIZE=16, TILE=tile)
    jobs = [
        Job(toy_layout_kernel, types, constants | variant, capability, num_stages=stages)
        for variant in VARIANTS.values()
    ]
    jobs.append(_decode_job(capability))
    return dict(zip([*VARIANTS, "the package's kernel"], build_all(jobs)))


def build_decode(*names: str) -> list[tuple[GPU, Report]]:
    """The package's kernel for each of these GPUs, with the tile and the stages that it takes there."""
    gpus = [GPUS[name] for name in names]
    return list(zip(gpus, build_all([_decode_job(gpu.capability) for gpu in gpus])))


def fit(gpu: GPU, report: Report, in_flight: int) -> dict[str, object]:
    """How many programs fit on an SM, and how many are needed, each with `in_flight` bytes on their way."""
    held, wanted = occupancy(report, gpu), gpu.memory_bandwidth * 1e-6  # bytes in 1 µs
    tile, stages = choose_tile(128, 2, 2, gpu.capability)
    return {
        "head 128": gpu.name,
        "positions x stages": f"{tile} x {stages}",
        "registers": report.registers,
        "shared": f"{report.shared_bytes / 1024:.0f} KB",
        "fit on an SM": held.blocks_per_sm,
        "limited by": held.limited_by,
        "async copies": report.count("cp.async"),
        "in flight for 1 µs": f"{wanted / 1e3:,.0f} kB",
        "programs for that / places": f"{-(-wanted // in_flight):.0f} / {held.blocks_per_sm * gpu.num_sms}",
    }


def _decode_job(capability: int) -> Job:
    tile, stages = choose_tile(128, 2, 2, capability)
    types = _types(
        halves="q keys values part", floats="logs parts", ints="plan counters", longs="seq_lens block_table",
        aligned="q_seq q_head part_seq part_head part_split key_block value_block", numbers="table_row",
    )  # fmt: skip
    return Job(paged_decode_kernel, types, _SHAPE | {"TILE_N": tile}, capability, num_stages=stages)


def _types(**names_of: str) -> dict[str, str]:
    kinds = dict(halves="*fp16", floats="*fp32", longs="*i64", ints="*i32", aligned="i32:16", numbers="i32")
    return {name: kinds[kind] for kind, names in names_of.items() for name in names.split()} | {"scale": "fp32"}
