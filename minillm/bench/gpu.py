"""Everything that needs a GPU, by one command: is it right, then how fast is it. Built in chapter 14.

    minillm bench gpu --out results/

Each part is a process of its own with a time limit, so that one that fails costs nothing but itself; its output goes
to OUT/<part>.log, its figures to OUT/*.json, and OUT/summary.json says how every part ended. The parts that check come
first: the kernels against float64, the engine against `transformers`, then the notebooks.
"""
from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import measure

PROJECT = Path(__file__).resolve().parents[2]
TESTS = ("test_kernels_triton.py", "test_kernels_attention.py", "test_kernels_sampling.py", "test_kernels_rotary.py",
         "test_kernels_quantized.py", "test_kernels_kv_quantized.py", "test_kernels_sinks.py", "test_triton_engine.py",
         "test_engine_ahead.py", "test_equivalence.py", "test_kernels_aot.py", "test_kernels_build.py")


@dataclass(frozen=True)
class Part:
    name: str
    command: tuple[str, ...]  # after the interpreter's name
    seconds: int  # at most


def parts_of(out: Path, toy: bool = False, device: str = "cuda") -> list[Part]:
    """What is run, in order. `toy` shrinks every part to what an interpreted kernel can do, to test this very program."""
    bench = ("-c", "from minillm.cli import app; app()", "bench")
    save = ("--device", device, "--save", str(out))
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    have_tests = (PROJECT / "tests").is_dir() and importlib.util.find_spec("pytest") is not None
    if toy:
        return [
            Part("describe", ("-c", "from minillm.device import describe; print(describe())"), 60),
            Part("kernels", (*bench, "kernels", "--family", "elementwise", "--scale", "64", "--dtype", "float32", *save), 120),
            Part("step", (*bench, "step", "--shape", "tinyworld", "--output-tokens", "4", *save), 300),
        ]
    tests = [Part("tests", (*pytest, *(str(PROJECT / "tests" / name) for name in TESTS)), 540)]
    notebooks = [Part("notebooks", (*pytest, str(PROJECT / "tests" / "test_notebooks.py")), 900)]
    steps = [Part(f"step-{shape}-{batch}", (*bench, "step", "--shape", shape, "--dtype", "bfloat16", "--batch", str(batch), *save), 240)
             for shape, batch in (("qwen3-0.6b", 1), ("qwen3-0.6b", 64), ("qwen2-0.5b", 256), ("llama-3.1-8b", 1))]
    offline = ("--requests", "256", "--shortest", "100", "--longest", "1024", "--dtype", "bfloat16")
    throughput = [Part(f"throughput-{shape}", (*bench, "throughput", "--shape", shape, *offline, *save), 420)
                  for shape in ("qwen3-0.6b", "qwen2-0.5b")]
    return [
        Part("describe", ("-c", "from minillm.device import describe; print(describe())"), 60),
        *(tests if have_tests else []),
        Part("kernels", (*bench, "kernels", "--dtype", "bfloat16", *save), 300),
        *steps,
        Part("decode", (*bench, "decode", "--shape", "qwen3-0.6b", "--dtype", "bfloat16", *save), 240),
        *throughput,
        Part("bits", (*bench, "bits", "--shape", "qwen3-0.6b", "--dtype", "bfloat16", *save), 300),
        Part("kv", (*bench, "kv", "--shape", "qwen3-0.6b", "--dtype", "bfloat16", *save), 240),
        Part("offload", (*bench, "offload", "--shape", "qwen3-0.6b", "--dtype", "bfloat16", *save), 120),
        Part("speculation", (*bench, "speculation", *save), 240),
        Part("structured", (*bench, "structured", *save), 120),
        *(notebooks if have_tests else []),
    ]


def run(out: Path, toy: bool = False, device: str = "cuda", only: tuple[str, ...] = (), on_run: Callable[[str], None] = lambda what: None) -> dict:
    """Run every part (or those whose names begin as one of `only`) and return the summary, which is written as well."""
    out.mkdir(parents=True, exist_ok=True)
    summary = {"hardware": measure.hardware(measure.torch.device(device)), "versions": measure.versions(), "parts": {}}
    for part in parts_of(out, toy, device):
        if only and not part.name.startswith(only):
            continue
        started = time.monotonic()
        with open(out / f"{part.name}.log", "w") as log:
            try:
                done = subprocess.run([sys.executable, *part.command], stdout=log, stderr=subprocess.STDOUT, timeout=part.seconds)
                ended = "passed" if done.returncode == 0 else f"failed with status {done.returncode}"
            except subprocess.TimeoutExpired:
                ended = f"stopped after {part.seconds} s"
        summary["parts"][part.name] = {"ended": ended, "seconds": round(time.monotonic() - started, 1), "last_line": last_line(out / f"{part.name}.log")}
        (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")  # after each part: the next may be cut off
        on_run(part.name)
    return summary


def last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def table(summary: dict):
    """How every part ended (a rich renderable)."""
    from rich.table import Table

    found = Table("part", "ended", "seconds", "its last line", title=summary["hardware"]["name"])
    for name, part in summary["parts"].items():
        found.add_row(name, part["ended"], f"{part['seconds']:.0f}", part["last_line"][:70])
    return found
