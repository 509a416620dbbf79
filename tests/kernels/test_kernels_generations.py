"""What each generation of GPUs has, and what a build for it uses: TMA, wgmma, tcgen05, tensor memory, warps of two
roles, block scales, dependent launches, Gluon. Without a GPU."""

from __future__ import annotations

import re

import pytest
import torch

from minillm.kernels import matmul, specimens
from minillm.kernels.build import Job, Report, build_all, occupancy
from minillm.kernels.generations import GENERATIONS, LARGE_COPY, Way, generation_of, way_of
from minillm.kernels.gpus import GPUS
from minillm.kernels.language import MODE, triton
from tests.helpers.kernel_cases import needs_triton

NEW = (90, 100, 120)


@pytest.fixture(scope="module")
def reports():
    """Everything that this file looks at, in one process."""
    if MODE == "absent":
        pytest.skip("Triton is not installed")
    sizes = dict.fromkeys("abc", "*fp16") | dict.fromkeys(("m", "n", "k", "a_row", "b_row"), "i32:16")
    tiles = dict(TILE_M=128, TILE_N=128, TILE_K=64, GROUP_M=8, PRECISION="tf32", a_column=1, b_column=1)
    jobs = {("pointers", c): Job(matmul.matmul_kernel, sizes, tiles, c, 8, 3) for c in (80, *NEW)}
    floats = sizes | dict.fromkeys("abc", "*fp32")
    jobs["tf32", 80] = Job(matmul.matmul_kernel, floats, tiles | {"TILE_M": 64, "TILE_N": 64, "TILE_K": 32}, 80)
    jobs |= {("tma", c): specimens.tma_job(c, num_warps=8) for c in (80, *NEW)}
    jobs["roles", 100] = specimens.tma_job(100, specialise=True, num_warps=4)
    jobs |= {(format, c): specimens.block_scaled_job(c, format) for c, format in
             ((100, "e4m3"), (100, "e2m1"), (120, "e4m3"), (120, "e2m1"), (90, "e2m1"))}  # fmt: skip
    jobs |= {("dependent", 90): specimens.dependent_job(90), ("gluon", 100): specimens.gluon_job()}
    return dict(zip(jobs, build_all(list(jobs.values())), strict=True))


@needs_triton
def test_all_of_them_build(reports):
    assert {name: report.error for name, report in reports.items() if report.error} == {}
    assert all(report.registers > 0 and report.spill_store_bytes == 0 for report in reports.values())


@needs_triton
@pytest.mark.parametrize("capability", [80, *NEW])
def test_each_generation_multiplies_by_its_own_instruction(reports, capability):
    own = generation_of(capability)
    for name in ("pointers", "tma"):
        way = way_of(reports[name, capability])
        assert way.product == own.product, name
        assert way.sums == ("tensor memory" if own.tensor_memory_columns else "registers"), name
    assert way_of(reports["pointers", capability]).copy == "cp.async"  # pointers: each thread copies
    assert way_of(reports["tma", capability]).copy == own.copy  # descriptors: TMA, where there is one


@needs_triton
def test_descriptors_take_the_mask_and_the_addresses_out_of_the_loop(reports):
    for capability in NEW:
        pointers, tma = reports["pointers", capability], reports["tma", capability]
        assert 0 < tma.count(LARGE_COPY) < pointers.count("cp.async")
        assert tma.count("mbarrier.try_wait") > 0  # a barrier counts the bytes that have arrived


@needs_triton
def test_the_sums_of_a_tile_leave_the_registers(reports):
    hopper, blackwell = reports["tma", 90], reports["tma", 100]
    assert blackwell.tensor_memory_columns >= 128  # 128 columns of float32
    assert hopper.tensor_memory_columns == 0
    assert blackwell.count("tcgen05.ld") > 0 and blackwell.count("tcgen05.alloc") == 1
    gluon = reports["gluon", 100]
    assert (gluon.tensor_memory_columns, gluon.count("tcgen05.mma"), gluon.count(LARGE_COPY)) == (128, 4, 2)


@needs_triton
def test_warps_of_two_roles(reports):
    roles, alike = reports["roles", 100], reports["tma", 100]
    assert way_of(roles).specialised and not way_of(alike).specialised
    assert roles.extra_warps > 0
    plain = Report("made up", 100, 4, 3, registers=100)
    more = Report("made up", 100, 4, 3, registers=100, extra_warps=8)
    assert roles.count("setmaxnreg") > 0  # registers move from the warps that copy to those that need them
    held = [occupancy(report, GPUS["H100"]) for report in (plain, more)]
    assert [(one.blocks_per_sm, one.warps_per_sm) for one in held] == [(4, 16), (1, 12)]  # 4 warps a quarter


@needs_triton
def test_block_scales_reach_the_tensor_cores_of_blackwell_only(reports):
    for format in ("e4m3", "e2m1"):
        assert re.search(r"tcgen05\.mma\S*block_scale", reports[format, 100].ptx), format
        assert re.search(r"mma\.sync\S*block_scale", reports[format, 120].ptx), format
    hopper = reports["e2m1", 90]
    assert not re.search(r"mma\S*block_scale", hopper.ptx) and hopper.count("wgmma")  # decoded to bfloat16 first


@needs_triton
def test_float32_is_truncated_to_tf32_not_rounded(reports):
    assert reports["tf32", 80].count("mma.sync") and "cvt.rna" not in reports["tf32", 80].ptx


@needs_triton
def test_a_dependent_launch_waits_after_its_first_load(reports):
    ptx = reports["dependent", 90].ptx
    first_load, wait, launch = (
        ptx.index(text) for text in ("ld.global", "griddepcontrol.wait", "griddepcontrol.launch")
    )
    assert first_load < wait < launch


@pytest.mark.skipif(MODE != "interpreted", reason="descriptors are interpreted on a CPU")
@pytest.mark.parametrize("m, n, k", [(64, 64, 64), (40, 72, 104), (17, 8, 8)])
def test_a_product_by_descriptors_equals_float64(m, n, k):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(m, k, generator=generator).half(), torch.randn(k, n, generator=generator).half()
    c = torch.full((m, n), float("nan"), dtype=torch.float16)
    grid = (triton.cdiv(m, 32) * triton.cdiv(n, 32),)
    specimens.tma_matmul_kernel[grid](a, b, c, m, n, k, TILE_M=32, TILE_N=32, TILE_K=16, SPECIALISE=False)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), atol=2e-2, rtol=2e-3)


def test_generations_are_in_order_and_cover_what_lies_between():
    assert [one.capability for one in GENERATIONS] == sorted(one.capability for one in GENERATIONS)
    names = {capability: generation_of(capability).name for capability in (75, 80, 86, 89, 90, 100, 103, 120, 121)}
    assert names[86] == names[89] == "Ampere" and names[103] == names[100] != names[120] == names[121]
    with pytest.raises(ValueError, match="capability=70"):
        generation_of(70)
    with pytest.raises(ValueError, match="did not compile for 90: no"):
        way_of(Report("made up", 90, 4, 3, error="no"))
    assert way_of(Report("made up", 75, 4, 3, ptx="fma.rn.f32 %f1;")) == Way("", "ld.global", "registers", False)
