"""The parts of `minillm bench gpu`, most valuable first. Built in chapter 14.

Every part ends within 8 minutes. Parts of one group run at once, each in a process of its own: the kernel tests, whose
time is compilation, on as many cores as there are. What measures time, or fills the GPU's memory, runs alone.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
KERNEL_TESTS = (
    "kernels/test_kernels_triton.py",
    "kernels/test_kernels_attention.py",
    "kernels/test_kernels_sampling.py",
    "kernels/test_kernels_rotary.py",
    "kernels/test_kernels_quantized.py",
    "kernels/test_kernels_kv_quantized.py",
    "kernels/test_kernels_sinks.py",
    "kernels/test_kernels_latent.py",
)
ENGINE_TESTS = ("engine/test_triton_engine.py", "engine/test_engine_ahead.py", "engine/test_equivalence.py")
BUILD_TESTS = ("kernels/test_kernels_aot.py", "kernels/test_kernels_build.py")
KERNEL_SHARDS, ENGINE_SHARDS, BUILD_SHARDS, NOTEBOOK_SHARDS = 12, 3, 3, 5
FAMILIES = (
    "prefill",
    "decode",
    "matmul",
    "elementwise",
    "w4a16",
    "w8a8",
    "kv8",
    "kv4",
    "latents",
)  # of `bench kernels`
STEPS = (("qwen3-0.6b", 1), ("qwen3-0.6b", 64), ("qwen2-0.5b", 256))


@dataclass(frozen=True)
class Part:
    name: str
    command: tuple[str, ...]  # after the interpreter's name
    seconds: int  # at most
    group: str = ""  # neighbours of the same group run at once


def parts_of(out: Path, toy: bool = False, device: str = "cuda") -> list[Part]:
    """What is run, in order. `toy` shrinks every part to what an interpreted kernel can do,
    to test this very program."""
    bench = ("-c", "from minillm.cli import app; app()", "bench")
    save = ("--device", device, "--save", str(out))
    describe = Part("describe", ("-c", "from minillm.device import describe; print(describe())"), 60)
    if toy:
        return [
            describe,
            Part(
                "kernels",
                (*bench, "kernels", "--family", "elementwise", "--scale", "64", "--dtype", "float32", *save),
                120,
            ),
            Part("step", (*bench, "step", "--shape", "tinyworld", "--output-tokens", "4", *save), 300),
        ]

    def of_model(name: str, seconds: int, *options: str, shape: str = "qwen3-0.6b") -> Part:
        command = name.partition("-")[0]
        return Part(name, (*bench, command, "--shape", shape, "--dtype", "bfloat16", *options, *save), seconds)

    offline = ("--requests", "256", "--shortest", "100", "--longest", "1024")
    return [
        describe,
        Part("rehearsal", (*bench, "rehearsal", *save), 180),
        *_tests("tests-kernels", KERNEL_TESTS, KERNEL_SHARDS, group="tests"),
        *(
            Part(f"kernels-{family}", (*bench, "kernels", "--family", family, "--dtype", "bfloat16", *save), 240)
            for family in FAMILIES
        ),
        *(of_model(f"throughput-{shape}", 420, *offline, shape=shape) for shape in ("qwen3-0.6b", "qwen2-0.5b")),
        of_model("decode", 180),
        *(of_model(f"step-{shape}-{batch}", 240, "--batch", str(batch), shape=shape) for shape, batch in STEPS),
        of_model("step-llama-3.1-8b-1", 300, "--rung", "torch", "--rung", "+ scheduled ahead", shape="llama-3.1-8b"),
        of_model("bits", 300),
        of_model("kv", 240),
        Part("speculation", (*bench, "speculation", *save), 300),
        Part("structured", (*bench, "structured", *save), 180),
        of_model("offload", 180),
        *_tests("tests-engine", ENGINE_TESTS, ENGINE_SHARDS),
        *_tests("tests-build", BUILD_TESTS, BUILD_SHARDS, group="builds"),
        *_tests("notebooks", ("book/test_notebooks.py",), NOTEBOOK_SHARDS, "-k", "running_it_again"),
    ]


def _tests(name: str, files: tuple[str, ...], shards: int, *options: str, group: str = "") -> list[Part]:
    """Tests in `shards` parts; none where the package is installed without them, or without pytest."""
    folder = PROJECT / "tests"
    if not folder.is_dir() or importlib.util.find_spec("pytest") is None:
        return []
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "minillm.bench.shard")
    paths = tuple(str(folder / file) for file in files)
    return [
        Part(f"{name}-{shard}", (*pytest, "--shard", f"{shard}/{shards}", *options, *paths), 480, group)
        for shard in range(1, shards + 1)
    ]
