"""Every kernel compiled ahead of time, without a GPU, for a T4, A100, L4 and H100: what a launcher launches must build,
keep its registers, fit in shared memory, and use what the GPU has."""

from __future__ import annotations

import inspect
import os
import re
from importlib.metadata import version

import pytest
import torch

from minillm.kernels.build import Job, Report, build_all, occupancy
from minillm.kernels.generations import generation_of, way_of
from minillm.kernels.gpus import GPUS
from minillm.kernels.language import MODE
from tests.helpers.aot_calls import CALLS, FP8, FP16, FP32, INT4, INT8, empty
from tests.helpers.kernel_cases import needs_triton

pytestmark = needs_triton
POINTERS = {
    INT8: "*i8",
    INT4: "*u8",
    FP8: "*fp8e4nv",
    torch.bool: "*i1",
    FP32: "*fp32",
    FP16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
# Triton from 3.3 on makes no tensor-core code for a T4.
T4_HAS_TENSOR_CORES = MODE != "absent" and tuple(map(int, version("triton").split(".")[:2])) < (3, 3)


def jobs_of(launcher, arguments: tuple, capability: int, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """What `launcher` would launch on such a GPU, as jobs for the compiler: with its types, constants and warps."""
    jobs, module = [], inspect.getmodule(launcher)
    helpers = {inspect.getmodule(value) for value in vars(module).values() if inspect.isfunction(value)}
    modules = {module} | {helper for helper in helpers if helper.__name__.startswith("minillm.kernels.")}

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return self.launch

        def launch(self, *values, num_warps=4, num_stages=3, **constants):
            signature, options = {}, getattr(self.kernel, "kwargs", vars(self.kernel))
            loose = [
                name
                for key in ("do_not_specialize", "do_not_specialize_on_alignment")
                for name in options.get(key) or ()
            ]
            tensors = {
                name: constants.pop(name) for name, value in [*constants.items()] if isinstance(value, torch.Tensor)
            }
            for name, value in [*zip(self.kernel.arg_names, values), *tensors.items()]:
                if isinstance(value, torch.Tensor):
                    signature[name] = POINTERS[value.dtype] + ":1" * (name in loose)
                elif isinstance(value, float):
                    signature[name] = "fp32"
                elif value is None or (value == 1 and name not in loose):  # a launch compiles it in
                    constants[name] = value
                else:
                    signature[name] = ("i32" if abs(value) < 2**31 else "i64") + ":16" * (
                        value % 16 == 0 and name not in loose
                    )
            jobs.append(Job(self.kernel, signature, constants, capability, num_warps, num_stages))

    with monkeypatch.context() as patch:
        for owner, name in [(place, name) for place in modules for name in vars(place) if name.endswith("_kernel")]:
            patch.setattr(owner, name, Recorder(getattr(owner, name)))
        patch.setattr(module, "capability", lambda x: capability, raising=False)
        patch.setattr(module, "plan_tiles", lambda *shape: empty(9, 2, dtype=torch.int32), raising=False)
        launcher(*arguments)
    assert jobs, f"{launcher.__name__} launched nothing"
    return jobs


def left_to_torch(name: str, capability: int) -> bool:
    """Tiles that want tensor cores do not fit a T4: prompts, and latents altogether, are left to torch there."""
    return capability == 75 and name.startswith(("flash", "prefill", "latents"))


@pytest.fixture(scope="module", params=["T4", "A100", "L4", "H100"])
def built(request) -> tuple[int, dict[str, list[Report]]]:
    """The capability of a GPU, and the reports on everything in CALLS, compiled for it in one process."""
    capability, jobs = GPUS[request.param].capability, {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, (launcher, arguments) in CALLS.items():
            if capability == 75 and ("bf16" in name or "W8A8" in name):
                continue  # a T4 has neither
            if capability == 75 and name.startswith("decode") and "drafts" in name:
                continue  # there fewer tokens share a tile
            if left_to_torch(name, capability) and re.search("int8|int4|sinks|latents", name):
                continue
            jobs[name] = jobs_of(launcher, arguments, capability, monkeypatch)
    reports = iter(build_all([job for some in jobs.values() for job in some]))
    return capability, {name: [next(reports) for _ in some] for name, some in jobs.items()}


def test_every_kernel_builds_fits_and_keeps_its_registers(built):
    capability, reports = built
    most_shared = min(gpu.max_shared_per_block for gpu in GPUS.values() if gpu.capability == capability)
    for name, some in reports.items():
        for report in some:
            assert not report.error, f"{name}: {report.error}"
            assert report.registers > 0 and report.ptx, name
            if left_to_torch(name, capability):
                continue
            # A few registers do not fit at the largest head of a decode step. Prompts have tiles chosen to spill
            # nothing.
            most = (
                0 if name.startswith(("flash", "prefill")) else 64 if "256" in name else 8 if "bf16, fp8" in name else 0
            )
            if capability == 75 and name.startswith("W4A16"):
                most = 64  # 16 rows at least, without tensor cores
            if capability == 89 and name == "W4A16, many rows, bf16":
                most = 16  # its zero points
            assert max(report.spill_store_bytes, report.spill_load_bytes) <= most, f"{name} spills"
            assert report.shared_bytes <= most_shared, f"{name}: {report.shared_bytes} bytes of shared memory"


@pytest.mark.parametrize(
    "capability, name", [(120, "prefill, 128, window"), (100, "prefill, 128"), (86, "flash, 128, window")]
)
def test_prompts_on_gpus_without_a_data_sheet_here_keep_their_registers(capability, name, monkeypatch):
    """sm_120 is newer than an H100 and has neither its products nor its shared memory: it must not get its tiles."""
    (report,) = build_all(jobs_of(*CALLS[name], capability, monkeypatch))
    assert not report.error and report.spill_store_bytes == 0 and report.uses_tensor_cores, report
    assert report.shared_bytes <= (227 if capability == 100 else 99) * 1024


def test_streaming_kernels_load_16_bytes_a_thread(built):
    """Half precision, rows aligned: eight elements in one instruction, and few registers, so that many programs fit."""
    _, reports = built
    for name in ("rms_norm, hidden state", "add_rms_norm", "add_rms_norm, not a power of two", "silu_mul", "softmax"):
        (report,) = reports[name]
        assert 0 < report.count("ld.global.v4") == report.count("ld.global"), name
        assert report.registers <= 40, name
    for name in ("rotary", "rotary, normed", "rotary, 80 dimensions"):
        assert reports[name][0].registers <= 48, name


def test_matmul_uses_the_tensor_cores_of_its_gpu(built):
    capability, reports = built
    for name, (report,) in ((name, some) for name, some in reports.items() if name.startswith("matmul")):
        if "fp32" in name:
            assert not report.uses_tensor_cores and report.count("fma.rn"), "float32 was rounded to tf32"
        elif capability == 75:
            assert report.uses_tensor_cores == T4_HAS_TENSOR_CORES
        else:
            assert report.uses_tensor_cores
            assert report.count("cp.async"), f"{name}: tiles are not on their way while others are multiplied"
            few_rows = name == "matmul, few rows"  # wgmma takes 64 rows at least
            assert bool(report.count("wgmma")) == (capability == 90 and not few_rows), name


def test_experts_use_the_tensor_cores_of_their_gpu(built):
    capability, reports = built
    for name, (report,) in ((name, some) for name, some in reports.items() if name.startswith("experts")):
        assert report.uses_tensor_cores == (capability >= 80 and "fp32" not in name) or capability == 75, name
        if capability >= 80 and "fp32" not in name:
            assert report.count("cp.async"), f"{name}: weights are not on their way while others are multiplied"


def test_attention_uses_the_tensor_cores_of_its_gpu(built):
    capability, reports = built
    for name, (report, *_) in (
        (name, some) for name, some in reports.items() if name.startswith(("flash", "prefill", "decode", "latents"))
    ):
        if "fp32" in name:
            assert not report.uses_tensor_cores, "float32 was rounded to tf32"
        elif capability >= 80:
            assert report.uses_tensor_cores, name
            assert report.count("cp.async"), f"{name}: keys and values are not on their way ahead of their use"
            # 16 rows, a group's query heads, are too few for wgmma; prompts fill its 64.
            assert bool(report.count("wgmma")) == (
                capability == 90 and not name.startswith(("decode", "latents")) and not name.endswith("short")
            ), name


def test_pages_are_read_16_bytes_at_a_time(built):
    """A mask that cut a block would make the loads of its transposed keys as narrow as an element."""
    capability, reports = built
    for name in (
        "decode, 64",
        "decode, 128",
        "decode, 128, split",
        "decode, 64, planned",
        "decode, 128, planned",
        "decode, 128, planned, drafts",
        "prefill, 64",
        "prefill, 128",
    ):
        if left_to_torch(name, capability) or (capability == 75 and "drafts" in name):
            continue
        ptx = reports[name][0].ptx
        assert "ld.global.b16" not in ptx, name
        if capability >= 80:
            sizes = set(re.findall(r"cp\.async\.c[ag]\.shared\.global[^\[]*\[[^\]]*\], \[[^\]]*\], (\w+)", ptx))
            assert "0x10" in sizes or "16" in sizes, (name, sizes)


def test_codes_are_read_many_at_a_time_and_by_the_gpu_itself_where_it_can(built):
    capability, reports = built
    for name in (
        name for name in reports if re.match("prefill|decode|latents", name) and re.search("int8|fp8|int4", name)
    ):
        ptx = reports[name][0].ptx
        assert not re.search(r"ld\.global[.\w]*\.[bsu]?(8|16)\s", ptx), f"{name}: codes are loaded one by one"
        if capability >= 80:  # 4 bytes at a time are the scales
            sizes = set(re.findall(r"cp\.async\.c[ag]\.shared\.global[^\[]*\[[^\]]*\], \[[^\]]*\], (\w+)", ptx))
            assert sizes & {"0x8", "8", "0x10", "16"}, (name, sizes)
        if "fp8" in name:
            assert bool(re.search(r"cvt[.\w]*e4m3x2", ptx)) == (capability >= 89), name
    for name in ("rotary, int8", "rotary, fp8, normed", "rotary, int4"):
        assert reports[name][0].registers <= 48, name
        assert reports[name][0].count("div.rn"), (
            f"{name}: a scale that is rounded otherwise than torch's gives other codes"
        )


def test_tiles_of_a_decode_step_are_on_their_way_two_ahead(built):
    """Block ids that were loaded in the iteration that needs them would cost the pipeline every stage but one."""
    capability, reports = built
    if capability >= 80:
        gpu = next(gpu for gpu in GPUS.values() if gpu.capability == capability)
        tiles, programs = 3 if capability >= 90 else 2, 2 if capability == 89 else 4  # under way, and on an SM
        for name in ("decode, 64, planned", "decode, 128, planned", "decode, 128, planned, drafts"):
            report = reports[name][0]
            waits = [int(count) for count in re.findall(r"cp\.async\.wait_group\s+(\w+);", report.ptx)]
            assert max(waits) == 2 * (tiles - 1), (name, waits)  # copies of keys and of values
            assert occupancy(report, gpu).blocks_per_sm >= programs - ("drafts" in name), name


def test_splitting_adds_one_small_kernel(built):
    _, reports = built
    assert len(reports["decode, 128"]) == 1 and len(reports["decode, 128, split"]) == 2
    merge = reports["decode, 128, split"][1]
    assert merge.shared_bytes < 8192 and not merge.uses_tensor_cores


def test_packed_weights_are_read_16_bytes_at_a_time_and_multiplied_by_tensor_cores(built):
    capability, reports = built
    for name, some in reports.items():
        if not name.startswith(("W4A16", "W8A")) or "dequantize" in name or capability == 75:
            continue
        (report,) = some
        assert report.uses_tensor_cores == ("fp32" not in name), name
        if not name.endswith("fp32"):
            assert re.search(r"cp\.async\.cg\.shared\.global \[[^\]]*\], \[[^\]]*\], (0x10|16)", report.ptx), name
            wants_wgmma = capability == 90 and ("few rows" not in name or name.endswith("50")) and "ragged" not in name
            assert bool(report.count("wgmma")) == wants_wgmma, name


def test_adapters_use_the_tensor_cores_of_their_gpu(built):
    """Their matrices are read 16 bytes at a time; in `shrink` tiles are on their way while others are multiplied."""
    capability, reports = built
    for name in ("LoRA, few tokens", "LoRA, many tokens", "LoRA, fp32"):
        shrink, expand = reports[name]
        for report in (shrink, expand):
            assert report.uses_tensor_cores == (capability >= 80 and "fp32" not in name), name
            assert bool(report.count("wgmma")) == (capability == 90 and "many" in name), name
            assert "ld.global.b16" not in report.ptx, name
        if capability >= 80:
            assert shrink.count("cp.async"), name


def test_decoding_a_pair_of_weights_takes_one_multiply_and_no_conversion(built):
    """Two weights an instruction, and no shuffle: the pipeline's 32-bit words are operands as they are."""
    capability, reports = built
    if capability >= 80:
        report = reports["W4A16, few rows"][0]
        # 64 outputs of a unit, 128 inputs: 64 threads hold 128 weights each, which are 64 pairs.
        assert report.count("fma.rn.f16x2") == 64 and report.count("shfl") == 0
        assert report.count("cvt.rn.f16") == 0


# The kernels that multiply, once each. MINILLM_ALL_BUILDS=1 builds everything in CALLS instead, some minutes long.
PRODUCTS = ("matmul, large", "flash, 64", "decode, 64, planned", "W4A16, many rows", "W8A8 fp8")


def test_kernels_build_for_blackwell_with_its_instructions(monkeypatch):
    """sm_100 is the data centre's, sm_120 the desktop's: the second multiplies as Ampere does."""
    names = list(CALLS) if os.environ.get("MINILLM_ALL_BUILDS") else PRODUCTS
    jobs = {(name, c): jobs_of(*CALLS[name], c, monkeypatch) for c in (100, 120) for name in names}
    reports = iter(build_all([job for some in jobs.values() for job in some]))
    for (name, capability), some in jobs.items():
        for report in [next(reports) for _ in some]:
            assert not report.error, f"{name}, sm_{capability}: {report.error}"
            most = 64 if re.search("256|sinks|bf16", name) else 16 if "LoRA" in name else 0
            assert report.registers > 0 and report.spill_store_bytes <= most, (name, capability, report)
            assert report.shared_bytes <= (227 if capability == 100 else 99) * 1024, (name, capability)
            assert report.count("wgmma") == 0, f"{name}: wgmma is Hopper's alone"
            if name in PRODUCTS and not report.name.startswith(("plan", "merge")):
                way, own = way_of(report), generation_of(capability)
                wide = capability == 120 or not name.startswith("decode")  # 16 rows are too few for tcgen05
                assert way.product == (own.product if wide else "mma.sync"), (name, capability, way)
                assert way.copy == "cp.async", (name, capability)  # pointers, not descriptors
                assert way.sums == ("tensor memory" if way.product == "tcgen05.mma" else "registers"), name
