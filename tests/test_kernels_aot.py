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
    activation, flash_attention, matmul, norm, paged_decode, paged_prefill, rotary, sampling, softmax,
)  # fmt: skip
from minillm.kernels.build import Job, Report, build_all
from minillm.kernels.gpus import GPUS
from minillm.kernels.language import MODE

pytestmark = needs_triton
FP32, FP16 = torch.float32, torch.float16
POINTERS = {torch.bool: "*i1", FP32: "*fp32", FP16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64"}
# Triton from 3.3 on makes no tensor-core code for a T4.
T4_HAS_TENSOR_CORES = MODE != "absent" and tuple(map(int, version("triton").split(".")[:2])) < (3, 3)


def empty(*shape: int, dtype: torch.dtype = FP16) -> torch.Tensor:
    """A tensor of a shape and dtype, and no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def call_add_rms_norm(size: int):
    return norm.add_rms_norm, (empty(4, size), empty(4, size), empty(size), 1e-6)


def call_rotary(heads: int, kv_heads: int, head_dim: int, with_norm: bool):
    q, k, v = empty(64, heads + 2 * kv_heads, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    angles = empty(64, 1, head_dim)
    cache = empty(9, kv_heads, head_dim, 16), empty(9, kv_heads, 16, head_dim)
    weights = (empty(head_dim), empty(head_dim), 1e-6) if with_norm else ()
    return rotary.rotate_and_store, (q, k, v, angles, angles, *cache, empty(64, dtype=torch.int64), *weights)


def call_matmul(m: int, n: int, k: int, layout: str, dtype: torch.dtype = FP16):
    a = empty(m, k, dtype=dtype) if layout[0] == "n" else empty(k, m, dtype=dtype).t()
    return matmul.matmul, (a, empty(k, n, dtype=dtype) if layout[1] == "n" else empty(n, k, dtype=dtype).t())


def call_flash(head_dim: int, window: int | None = None, dtype: torch.dtype = FP16):
    q, k, v = empty(64, 24, head_dim, dtype=dtype).split([16, 4, 4], dim=1)
    return flash_attention.flash_attention, (q, k, v, empty(3, dtype=torch.int64), 4096, window)


def pages(kv_heads: int, head_dim: int, dtype: torch.dtype):
    return empty(9, kv_heads, head_dim, 16, dtype=dtype), empty(9, kv_heads, 16, head_dim, dtype=dtype)


def call_prefill(head_dim: int, window: int | None = None, dtype: torch.dtype = FP16, heads: int = 16):
    index = empty(8, dtype=torch.int64), empty(7, dtype=torch.int64), empty(7, 256, dtype=torch.int64)
    return paged_prefill.paged_prefill, (empty(64, heads, head_dim, dtype=dtype), *pages(2, head_dim, dtype), *index, 4096, window)


def call_decode(head_dim: int, num_splits: int, window: int | None = None, dtype: torch.dtype = FP16, heads: int = 16):
    index = empty(7, dtype=torch.int64), empty(7, 256, dtype=torch.int64)
    return paged_decode.paged_decode, (empty(7, heads, head_dim, dtype=dtype), *pages(2, head_dim, dtype), *index, num_splits, window)


def call_sample(vocab_size: int, filtered: bool):
    floats, ints = empty(4, dtype=FP32), empty(4, dtype=torch.int64)
    filters = (floats, ints, floats) if filtered else ()
    return sampling.sample, (empty(4, vocab_size, dtype=FP32), floats, ints, ints, empty(4, dtype=torch.bool), *filters)


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
                elif value == 1:  # a launch compiles it in
                    constants[name] = 1
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
            most = 64 if "256" in name else 32 if name == "prefill, 128, window" else 0
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


def test_splitting_adds_one_small_kernel(built):
    _, reports = built
    assert len(reports["decode, 128"]) == 1 and len(reports["decode, 128, split"]) == 2
    merge = reports["decode, 128, split"][1]
    assert merge.shared_bytes < 8192 and not merge.uses_tensor_cores
