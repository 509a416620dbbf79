"""Every kernel compiled ahead of time, without a GPU, for a T4, A100, L4 and H100: what a launcher launches must build,
keep its registers, fit in shared memory, and use what the GPU has."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import version

import pytest
import torch
from kernel_cases import needs_triton

from minillm.kernels import (
    activation, flash_attention, matmul, norm, packed_weight, paged_decode, paged_prefill, quantized_matmul, rotary, sampling,
    scaled_matmul, softmax,
)  # fmt: skip
from minillm.kernels.build import Job, Report, build_all
from minillm.kernels.gpus import GPUS
from minillm.kernels.language import MODE

pytestmark = needs_triton
FP32, FP16 = torch.float32, torch.float16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
POINTERS = {INT8: "*i8", torch.uint8: "*u8", FP8: "*fp8e4nv", torch.bool: "*i1", FP32: "*fp32", FP16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64"}
# Triton from 3.3 on makes no tensor-core code for a T4.
T4_HAS_TENSOR_CORES = MODE != "absent" and tuple(map(int, version("triton").split(".")[:2])) < (3, 3)


def empty(*shape: int, dtype: torch.dtype = FP16) -> torch.Tensor:
    """A tensor of a shape and dtype, and no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def call_add_rms_norm(size: int):
    return norm.add_rms_norm, (empty(4, size), empty(4, size), empty(size), 1e-6)


def call_rotary(heads: int, kv_heads: int, head_dim: int, with_norm: bool, pages_dtype: torch.dtype = FP16):
    q, k, v = empty(64, heads + 2 * kv_heads, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    angles = empty(64, 1, head_dim)
    weights = (empty(head_dim), empty(head_dim), 1e-6) if with_norm else (None, None, 0.0)
    cache = pages(kv_heads, head_dim, pages_dtype)
    return rotary.rotate_and_store, (q, k, v, angles, angles, *cache, empty(64, dtype=torch.int64), *weights, *scales(cache))


def call_matmul(m: int, n: int, k: int, layout: str, dtype: torch.dtype = FP16):
    a = empty(m, k, dtype=dtype) if layout[0] == "n" else empty(k, m, dtype=dtype).t()
    return matmul.matmul, (a, empty(k, n, dtype=dtype) if layout[1] == "n" else empty(n, k, dtype=dtype).t())


def call_flash(head_dim: int, window: int | None = None, dtype: torch.dtype = FP16):
    q, k, v = empty(64, 24, head_dim, dtype=dtype).split([16, 4, 4], dim=1)
    return flash_attention.flash_attention, (q, k, v, empty(3, dtype=torch.int64), 4096, window)


def pages(kv_heads: int, head_dim: int, dtype: torch.dtype):
    return empty(9, kv_heads, head_dim, 16, dtype=dtype), empty(9, kv_heads, 16, head_dim, dtype=dtype)


def scales(cache: tuple[torch.Tensor, torch.Tensor]):
    one = empty(*cache[1].shape[:3], dtype=FP32) if cache[0].element_size() == 1 else None
    return one, one


def call_prefill(head_dim: int, window: int | None = None, dtype: torch.dtype = FP16, heads: int = 16, codes=None, sinks: int = 0):
    index = empty(8, dtype=torch.int64), empty(7, dtype=torch.int64), empty(7, 256, dtype=torch.int64)
    q, cache = empty(64, heads, head_dim, dtype=dtype), pages(2, head_dim, codes or dtype)
    more = (window, None, None, *scales(cache), sinks, q if sinks else None)
    return paged_prefill.paged_prefill, (q, *cache, *index, 4096, *more)


def call_decode(
    head_dim: int, num_splits: int, window: int | None = None, dtype: torch.dtype = FP16, heads: int = 16, codes=None, sinks: int = 0
):
    index = empty(7, dtype=torch.int64), empty(7, 256, dtype=torch.int64)
    q, cache = empty(7, heads, head_dim, dtype=dtype), pages(2, head_dim, codes or dtype)
    more = (window, None, None, *scales(cache), sinks, q if sinks else None)
    return paged_decode.paged_decode, (q, *cache, *index, num_splits, *more)


def call_sample(vocab_size: int, filtered: bool):
    floats, ints = empty(4, dtype=FP32), empty(4, dtype=torch.int64)
    filters = (floats, ints, floats) if filtered else ()
    return sampling.sample, (empty(4, vocab_size, dtype=FP32), floats, ints, ints, empty(4, dtype=torch.bool), *filters)


def call_quantized(rows: int, format: str, group: int | None, zeros: bool = False, dtype: torch.dtype = FP16, splits: int = 1):
    unit, groups = 512 // packed_weight.carrier_bits(format), 4096 // group if group else 1
    weight = packed_weight.PackedWeight(
        empty(4096 // unit, 4096, 16, dtype=torch.int32), empty(groups, 4096, dtype=FP16 if group else FP32),
        empty(groups, 4096, dtype=torch.int8) if zeros else None, format, 4096, group or 4096, empty(256, dtype=torch.int32),
    )  # fmt: skip
    return quantized_matmul.quantized_matmul, (empty(rows, 4096, dtype=dtype), weight, empty(4096, dtype=dtype), splits)


def call_scaled(rows: int, dtype: torch.dtype):
    scales = empty(rows, dtype=FP32), empty(4096, dtype=FP32)
    return scaled_matmul.scaled_matmul, (empty(rows, 4096, dtype=dtype), scales[0], empty(4096, 4096, dtype=dtype), scales[1], None, FP16)


# name -> a launcher and its arguments, or a function of them. Add the kernels of a new module here.
CALLS = {
    "rms_norm, hidden state": (norm.rms_norm, (empty(4, 4096), empty(4096), 1e-6)),
    "rms_norm, heads": (norm.rms_norm, (empty(64, 32, 128)[:, :8], empty(128), 1e-6)),
    "add_rms_norm": call_add_rms_norm(4096),
    "add_rms_norm, not a power of two": call_add_rms_norm(2880),
    "silu_mul": (activation.silu_mul, (empty(4, 2 * 3072),)),
    "softmax": (softmax.softmax, (empty(4, 4096),)),
    "rotary": call_rotary(32, 8, 128, False),
    "rotary, normed": call_rotary(32, 8, 128, True),
    "rotary, 80 dimensions": call_rotary(9, 3, 80, True),
    "matmul, large": call_matmul(4096, 4096, 4096, "nn"),
    "matmul, large, weights": call_matmul(4096, 4096, 4096, "nt"),
    "matmul, medium": call_matmul(256, 512, 4096, "nt"),
    "matmul, few rows": call_matmul(16, 4096, 4096, "nt"),
    "matmul, fp32": call_matmul(512, 512, 512, "nn", FP32),
    "matmul, fp32, weights": call_matmul(512, 512, 512, "nt", FP32),
    "flash, 64": call_flash(64),
    "flash, 128": call_flash(128),
    "flash, 128, window": call_flash(128, 1024),
    "flash, 80, window": call_flash(80, 1024),
    "flash, 256": call_flash(256),
    "flash, fp32": call_flash(128, dtype=FP32),
    "prefill, 64": call_prefill(64),
    "prefill, 128": call_prefill(128),
    "prefill, 128, window": call_prefill(128, 1024),
    "prefill, 80": call_prefill(80),
    "prefill, 256": call_prefill(256, 1024),
    "prefill, group of 7": call_prefill(64, heads=14),
    "prefill, fp32": call_prefill(64, dtype=FP32),
    "decode, 64": call_decode(64, 1),
    "decode, 128": call_decode(128, 1),
    "decode, 128, split": call_decode(128, 8),
    "decode, 128, split, window": call_decode(128, 8, 1024),
    "decode, 80": call_decode(80, 1),
    "decode, 256, split": call_decode(256, 4),
    "decode, group of 7": call_decode(64, 8, heads=14),
    "decode, fp32": call_decode(128, 8, dtype=FP32),
    "rotary, int8": call_rotary(32, 8, 128, False, INT8),
    "rotary, fp8, normed": call_rotary(32, 8, 128, True, FP8),
    "prefill, 64, int8": call_prefill(64, codes=INT8),
    "prefill, 128, int8": call_prefill(128, codes=INT8),
    "prefill, 128, bf16, fp8": call_prefill(128, dtype=torch.bfloat16, codes=FP8),
    "prefill, 128, sinks": call_prefill(128, 1024, sinks=4),
    "decode, 64, int8": call_decode(64, 1, codes=INT8),
    "decode, 128, split, int8": call_decode(128, 8, codes=INT8),
    "decode, 128, split, fp8": call_decode(128, 8, codes=FP8),
    "decode, 128, split, bf16, fp8": call_decode(128, 8, dtype=torch.bfloat16, codes=FP8),
    "decode, 128, split, sinks, fp8": call_decode(128, 8, 1024, codes=FP8, sinks=4),
    "W4A16, few rows": call_quantized(16, "int4", 128, splits=8),
    "W4A16, few rows, bf16": call_quantized(16, "int4", 128, dtype=torch.bfloat16, splits=8),
    "W4A16, few rows, zeros": call_quantized(1, "int4", 64, True),
    "W4A16, few rows, 50": call_quantized(50, "int4", 64, splits=2),
    "W4A16, few rows, fp32": call_quantized(1, "int4", 64, dtype=FP32),
    "W4A16, many rows": call_quantized(256, "int4", 128),
    "W4A16, many rows, bf16": call_quantized(256, "int4", 64, True, torch.bfloat16),
    "W4A16, many rows, fp32": call_quantized(256, "int4", 64, dtype=FP32),
    "W8A16, few rows": call_quantized(8, "int8", None, splits=8),
    "W8A16, few rows, bf16": call_quantized(8, "int8", 64, True, torch.bfloat16),
    "W8A16, many rows, fp8": call_quantized(256, "fp8", 64),
    "W4A16, few rows, fp4": call_quantized(8, "fp4", 32),
    "W4A16, ragged groups": call_quantized(8, "fp4", 16),
    "W4A16, dequantize": call_quantized(2048, "int4", 64),
    "quantize rows, int8": (scaled_matmul.quantize_rows, (empty(8, 4096), "int8")),
    "quantize rows, fp8": (scaled_matmul.quantize_rows, (empty(8, 14336), "fp8", 0.1)),
    "W8A8 int8, few rows": call_scaled(16, torch.int8),
    "W8A8 int8": call_scaled(256, torch.int8),
    "W8A8 fp8, few rows": call_scaled(16, torch.float8_e4m3fn),
    "W8A8 fp8": call_scaled(256, torch.float8_e4m3fn),
    "sample": call_sample(151_936, False),
    "sample, filtered": call_sample(151_936, True),
}


def jobs_of(launcher, arguments: tuple, capability: int, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """What `launcher` would launch on such a GPU, as jobs for the compiler: with its types, constants and warps."""
    jobs, module = [], inspect.getmodule(launcher)

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return self.launch

        def launch(self, *values, num_warps=4, num_stages=3, **constants):
            signature = {}
            for name, value in zip(self.kernel.arg_names, values):
                if isinstance(value, torch.Tensor):
                    signature[name] = POINTERS[value.dtype]
                elif isinstance(value, float):
                    signature[name] = "fp32"
                elif value is None or value == 1:  # a launch compiles it in
                    constants[name] = value
                else:
                    signature[name] = ("i32" if abs(value) < 2**31 else "i64") + ":16" * (value % 16 == 0)
            jobs.append(Job(self.kernel, signature, constants, capability, num_warps, num_stages))

    with monkeypatch.context() as patch:
        for name, value in vars(module).items():
            if name.endswith("_kernel"):
                patch.setattr(module, name, Recorder(value))
        patch.setattr(module, "capability", lambda x: capability, raising=False)
        launcher(*arguments)
    assert jobs, f"{launcher.__name__} launched nothing"
    return jobs


def left_to_torch(name: str, capability: int) -> bool:
    """Tiles that want tensor cores do not fit a T4: `TritonAttention` leaves prompts to torch there."""
    return capability == 75 and name.startswith(("flash", "prefill"))


@pytest.fixture(scope="module", params=["T4", "A100", "L4", "H100"])
def built(request) -> tuple[int, dict[str, list[Report]]]:
    """The capability of a GPU, and the reports on everything in CALLS, compiled for it in one process."""
    capability, jobs = GPUS[request.param].capability, {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, (launcher, arguments) in CALLS.items():
            if capability == 75 and ("bf16" in name or "W8A8" in name):
                continue  # a T4 has neither
            if left_to_torch(name, capability) and re.search("int8|sinks", name):
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
            # A few registers do not fit at the largest head, and where a window's edge adds a third loop on an L4.
            most = 64 if "256" in name else 32 if name == "prefill, 128, window" else 8 if "bf16, fp8" in name else 0
            if capability == 75 and name.startswith("W4A16"):
                most = 64  # 16 rows at least, without tensor cores
            if capability == 89 and name == "W4A16, many rows, bf16":
                most = 16  # its zero points
            assert max(report.spill_store_bytes, report.spill_load_bytes) <= most, f"{name} spills"
            assert report.shared_bytes <= most_shared, f"{name}: {report.shared_bytes} bytes of shared memory"


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


def test_attention_uses_the_tensor_cores_of_its_gpu(built):
    capability, reports = built
    for name, (report, *_) in ((name, some) for name, some in reports.items() if name.startswith(("flash", "prefill", "decode"))):
        if "fp32" in name:
            assert not report.uses_tensor_cores, "float32 was rounded to tf32"
        elif capability >= 80:
            assert report.uses_tensor_cores, name
            assert report.count("cp.async"), f"{name}: keys and values are not on their way ahead of their use"
            # 16 rows, a group's query heads, are too few for wgmma; prompts fill its 64.
            assert bool(report.count("wgmma")) == (capability == 90 and not name.startswith("decode")), name


def test_pages_are_read_16_bytes_at_a_time(built):
    """A mask that cut a block would make the loads of its transposed keys as narrow as an element."""
    capability, reports = built
    for name in ("decode, 64", "decode, 128", "decode, 128, split", "prefill, 64", "prefill, 128"):
        if left_to_torch(name, capability):
            continue
        ptx = reports[name][0].ptx
        assert "ld.global.b16" not in ptx, name
        if capability >= 80:
            sizes = set(re.findall(r"cp\.async\.c[ag]\.shared\.global[^\[]*\[[^\]]*\], \[[^\]]*\], (\w+)", ptx))
            assert "0x10" in sizes or "16" in sizes, (name, sizes)


def test_codes_are_read_many_at_a_time_and_by_the_gpu_itself_where_it_can(built):
    capability, reports = built
    for name in (name for name in reports if name.startswith(("prefill", "decode")) and ("int8" in name or "fp8" in name)):
        ptx = reports[name][0].ptx
        assert not re.search(r"ld\.global[.\w]*\.[bsu]?(8|16)\s", ptx), f"{name}: codes are loaded one by one"
        if capability >= 80:  # 4 bytes at a time are the scales
            sizes = set(re.findall(r"cp\.async\.c[ag]\.shared\.global[^\[]*\[[^\]]*\], \[[^\]]*\], (\w+)", ptx))
            assert sizes & {"0x8", "8", "0x10", "16"}, (name, sizes)
        if "fp8" in name:
            assert bool(re.search(r"cvt[.\w]*e4m3x2", ptx)) == (capability >= 89), name
    for name in ("rotary, int8", "rotary, fp8, normed"):
        assert reports[name][0].registers <= 48, name
        assert reports[name][0].count("div.rn"), f"{name}: a scale that is rounded otherwise than torch's gives other codes"


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


def test_decoding_a_pair_of_weights_takes_one_multiply_and_no_conversion(built):
    """Two weights an instruction, and no shuffle: the pipeline's 32-bit words are operands as they are."""
    capability, reports = built
    if capability >= 80:
        report = reports["W4A16, few rows"][0]
        # 64 outputs of a unit, 128 inputs: 64 threads hold 128 weights each, which are 64 pairs.
        assert report.count("fma.rn.f16x2") == 64 and report.count("shfl") == 0
        assert report.count("cvt.rn.f16") == 0
