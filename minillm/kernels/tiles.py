"""The tiles of prefill attention on each kind of GPU, chosen from builds. Built in chapter 12.

Queries and sums stay in registers, TILE_M x head_dim of each, shared by the warps. Keys and values pass through shared
memory, num_stages tiles of TILE_N x head_dim, the next ones copied while one is multiplied. The rules, in this order:

1. No build spills a register to memory, in 16 bits and 8, plain, windowed, padded and with sinks.
2. Three stages where they fit: with two, a tile's copy starts only when the tile before it is done with.
3. TILE_M of 128. The compiler gives each warp rows of its own where TILE_M is at least head_dim.
   Below, the warps share the columns: each reads all queries, and every maximum and sum goes through shared memory
   (7 to 11 barriers become 27 to 33).
4. The largest TILE_N that is left.

Times are not among them, as no builds have any: `minillm.kernels.tuning` times the candidates on the GPU that is there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from minillm.kernels.language import next_power_of_2


class Tiles(NamedTuple):
    """What a program is compiled for: its queries, the keys it takes in at a time, its warps,
    and the stages of its copies."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int


def tiles(*several: tuple[int, int, int, int]) -> list[Tiles]:
    """The builds' choice, and other candidates for a timing."""
    return [Tiles(*one) for one in several]


# Without tensor cores a product holds both of its factors in registers: float32 anywhere, all on a T4, where the engine
# leaves prompts to torch.
NO_TENSOR_CORES = {64: tiles((32, 32, 4, 2)), 128: tiles((16, 32, 4, 2)), 256: tiles((16, 16, 4, 1))}

# mma.sync takes both factors from registers: Ampere, Ada, and Blackwell without a wider instruction (sm_120),
# which has 99 KB of shared memory as Ada has. A build's registers of 255, where it is not said otherwise:
# 64 176, 128 196 to 255, 256 238.
MMA = {
    "half": {
        64: tiles((128, 64, 8, 3), (64, 64, 4, 3)),
        128: tiles((128, 32, 8, 3), (64, 32, 4, 3), (64, 64, 8, 2)),  # 128 x 64 spills 72 bytes
        256: tiles((64, 32, 8, 2), (32, 32, 4, 2)),
    },
    "codes": {  # codes take registers on their way to the tensor cores
        64: tiles((128, 32, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2)),  # 128 x 64 spills 24 bytes on an L4
        128: tiles((128, 32, 8, 2), (64, 64, 8, 2)),
        256: tiles((32, 32, 8, 2), (64, 32, 8, 2)),
    },
}
# A third stage spills 16.
ADA = {**MMA, "windowed": {128: tiles((128, 32, 8, 2))}, "padded": {128: tiles((128, 32, 8, 2))}}
# Hopper's wgmma and Blackwell's tcgen05 (sm_100) read keys and values from shared memory, of which there are 227 KB.
WIDE = {
    "half": {
        64: tiles((128, 64, 8, 3), (128, 128, 8, 2)),
        128: tiles((128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2)),  # 187 registers, 255 with 128 keys
        256: tiles((128, 32, 8, 2), (64, 32, 8, 2)),  # 246 registers; 64 x 64 spills 56 bytes
    },
    "codes": {
        64: tiles((128, 64, 8, 3), (128, 64, 8, 2)),
        128: tiles((128, 64, 8, 3), (128, 64, 8, 2)),
        256: tiles((64, 32, 4, 2), (64, 32, 8, 2)),
    },
}
# capability -> kind -> head_dim -> candidates. Two masks take registers, and are listed where that makes a difference:
# "windowed" at a window's edge, "padded" where a head (of 80, say) is no power of two.
TABLE: dict[int, dict[str, dict[int, list[Tiles]]]] = {
    75: {"half": NO_TENSOR_CORES, "codes": NO_TENSOR_CORES},
    80: {**MMA, "windowed": {128: tiles((128, 32, 8, 2))}},  # a third stage spills 32 bytes there
    # 128 x 32 spills 32 bytes of fp8
    86: {**ADA, "codes": {**MMA["codes"], 128: tiles((64, 64, 8, 2), (128, 32, 8, 2))}},
    89: ADA,
    90: WIDE,
    100: {**WIDE, "codes": {**WIDE["codes"], 128: tiles((128, 64, 8, 2), (128, 64, 8, 3))}},
    120: MMA,  # sinks spill 32 bytes there, whatever the stages
}

# What was timed in this process, by choose_tiles' arguments.
TUNED: dict[tuple[int, torch.dtype, int, bool, bool], Tiles] = {}


def choose_tiles(
    head_dim: int, dtype: torch.dtype, capability: int, codes: bool = False, windowed: bool = False
) -> Tiles:
    """The tiles for a GPU of this capability (80 is an A100, 90 an H100),
    for pages of 8-bit `codes` or as wide as `dtype`."""
    return candidate_tiles(head_dim, dtype, capability, codes, windowed)[0]


def candidate_tiles(
    head_dim: int, dtype: torch.dtype, capability: int, codes: bool = False, windowed: bool = False
) -> list[Tiles]:
    """The same first, then what may be faster."""
    width, kinds = max(64, next_power_of_2(head_dim)), TABLE[family(capability)]
    if dtype.itemsize == 4:
        return NO_TENSOR_CORES[width]
    if codes:
        return kinds["codes"][width]
    mask = "windowed" if windowed else "padded" if head_dim < width else ""
    return kinds.get(mask, {}).get(width, kinds["half"][width])


def family(capability: int) -> int:
    """The row of TABLE for a GPU: 86 for an 87. What is older than all of them gets the oldest."""
    return max((known for known in TABLE if known <= capability), default=min(TABLE))


def fit_to_queries(chosen: Tiles, rows: int, group: int = 1, codes: bool = False) -> Tiles:
    """Tiles for `rows` queries at most, of which `group` must not be parted. A smaller tile than the chosen one has no
    more warps than have 16 rows each, down to 4, which share the columns then. Under 64 rows there is no wgmma,
    and without it a third stage of 8-bit codes does not build: its copies would move less than 4 bytes a thread."""
    tile_m = max(16, next_power_of_2(group), min(chosen.tile_m, next_power_of_2(rows)))
    if tile_m >= chosen.tile_m:
        return chosen._replace(tile_m=tile_m)
    num_stages = min(chosen.num_stages, 2) if codes and tile_m < 64 else chosen.num_stages
    return Tiles(tile_m, chosen.tile_n, min(chosen.num_warps, max(4, tile_m // 16)), num_stages)
