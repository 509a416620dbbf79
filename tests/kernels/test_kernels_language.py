"""Triton imported early, late, or not there at all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from minillm.kernels.interpreter_fixes import repair_interpreter
from minillm.kernels.language import MODE, next_power_of_2, tl, triton

interpreted = pytest.mark.skipif(MODE != "interpreted", reason=f"Triton is {MODE} here")


@triton.jit
def count_kernel(out_ptr, n):
    total = 0
    for i in range(n):
        total += i
    tl.store(out_ptr, total)


def count(n: int) -> int:
    out = torch.full((1,), -1)
    count_kernel[(1,)](out, n)
    return int(out)


def run(code: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=kept | environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_without_triton_the_twins_serve():
    """As on macOS: every module can be imported, the engine speaks, and asking for Triton says what is missing."""
    said = run("""
import sys
sys.modules["triton"] = None  # as if it were not installed
from minillm import LLM, SamplingParams
from minillm.kernels import activation, flash_attention, language, matmul, norm, paged_decode, paged_prefill
from minillm.kernels import rotary, sampling, softmax
import torch
assert language.MODE == "absent"
x = torch.randn(2, 8)
assert norm.torch_rms_norm(x, torch.ones(8), 1e-6).shape == (2, 8)
try:
    norm.rms_norm(x, torch.ones(8), 1e-6)
except RuntimeError as error:
    print(error)
try:
    LLM("tinyworld", attention_backend="triton", num_kv_blocks=8)
except ValueError as error:
    print(error)
llm = LLM("tinyworld", num_kv_blocks=8)
params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
print(len(llm.generate("Once", params, use_tqdm=False)[0].outputs[0].token_ids))
""")
    first, second, third = said.splitlines()
    assert "Triton is not installed here" in first and "use attention_backend='torch'" in second and third == "3"


@pytest.mark.skipif(MODE == "absent", reason="Triton is not installed")
def test_triton_imported_before_the_choice_is_interpreted_all_the_same():
    said = run("""
import triton, triton.language  # as transformers does
import torch
torch.cuda.is_available = lambda: False
from minillm.kernels.softmax import softmax, torch_softmax
from minillm.kernels.matmul import matmul
x, y = torch.randn(3, 5), torch.randn(5, 4)
print(torch.allclose(softmax(x), torch_softmax(x)))
print(torch.allclose(matmul(x, y), x @ y, atol=1e-5))  # a loop with a run-time bound
""")
    assert said.splitlines() == ["True", "True"]


@pytest.mark.skipif(MODE == "absent", reason="Triton is not installed")
@pytest.mark.parametrize("asked, mode", [("0", "compiled"), ("1", "interpreted")])
def test_the_environment_overrides_the_choice(asked, mode):
    assert run("from minillm.kernels.language import MODE; print(MODE)", TRITON_INTERPRET=asked) == mode


@interpreted
def test_a_loop_with_a_run_time_bound_is_interpreted():
    """Without our repair, Triton up to 3.6 raises here with NumPy 2.4 and newer."""
    assert [count(n) for n in (0, 1, 7)] == [0, 0, 21]


@interpreted
@pytest.mark.parametrize(
    "version, needed", [("3.4.0", True), ("3.6.0", True), ("3.6.0+git1a2b", True), ("3.7.0", False), ("4.0.1", False)]
)
def test_the_repair_of_loops_with_a_run_time_bound(version, needed, monkeypatch):
    """An interpreter without the fix, whatever is installed, is repaired once if its version is old,
    and left alone otherwise."""
    from triton.runtime import interpreter

    upstream = interpreter._patch_lang_tensor

    def without_fix(tensor, *scope):
        upstream(tensor, *scope)

        def refuse(self):  # as `int(array)` of shape (1,) does under NumPy 2.4
            raise TypeError("only 0-dimensional arrays can be converted to Python scalars")

        tensor.__index__ = refuse

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", without_fix)
    monkeypatch.setattr(triton, "__version__", version)
    with pytest.raises(Exception, match="0-dimensional"):
        count(7)
    assert repair_interpreter() == needed
    if needed:
        repaired = interpreter._patch_lang_tensor
        assert count(7) == 21 and repair_interpreter() and interpreter._patch_lang_tensor is repaired
    else:
        assert interpreter._patch_lang_tensor is without_fix


def test_next_power_of_2():
    assert [next_power_of_2(n) for n in (1, 2, 3, 4, 5, 1000, 1024)] == [1, 2, 4, 4, 8, 1024, 1024]
