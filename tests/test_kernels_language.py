"""Triton imported early, late, or not there at all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from minillm.kernels.language import MODE, next_power_of_2


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
from minillm.kernels import activation, flash_attention, language, matmul, norm, paged_decode, paged_prefill, rotary, sampling, softmax
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
print(len(llm.generate("Once", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids))
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
x = torch.randn(3, 5)
print(torch.allclose(softmax(x), torch_softmax(x)))
""")
    assert said == "True"


@pytest.mark.skipif(MODE == "absent", reason="Triton is not installed")
@pytest.mark.parametrize("asked, mode", [("0", "compiled"), ("1", "interpreted")])
def test_the_environment_overrides_the_choice(asked, mode):
    assert run("from minillm.kernels.language import MODE; print(MODE)", TRITON_INTERPRET=asked) == mode


def test_next_power_of_2():
    assert [next_power_of_2(n) for n in (1, 2, 3, 4, 5, 1000, 1024)] == [1, 2, 4, 4, 8, 1024, 1024]
