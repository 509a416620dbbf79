"""How many variants of each kernel a model's steps compile: those that differ in what they compute, and no others.

Triton's own binder decides, in a process of its own that pretends a GPU (tests/helpers/variants.py).
A slice that begins at an odd place, a batch of 1 or of 16, a table that grew wider: none may compile a variant while
requests are served.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.kernel_cases import needs_triton

pytestmark = needs_triton


@pytest.fixture(scope="module")
def variants() -> dict[str, dict[str, int]]:
    """Work -> kernel -> variants that it added."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "helpers/variants.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_attention_compiles_a_variant_for_each_window(variants):
    # The model without windows is met first.
    for work, rotate in (("plain", {"rotate_and_store_kernel": 1}), ("windows", {})):
        found = dict(variants[work])
        prompts = found.pop("paged_prefill_kernel")
        assert 1 <= prompts <= 4, "a tile of 16, 32, 64 or 128 queries, by the step's longest prompt"
        assert found.pop("plan_tiles_kernel", 0) == (prompts if work == "plain" else 0), (
            "a plan for each of these tiles"
        )
        assert found == rotate | {"plan_decode_kernel": 1, "paged_decode_kernel": 1}


def test_draft_tokens_that_share_keys_add_one_variant(variants):
    assert variants["drafts"] == {"plan_decode_kernel": 1, "paged_decode_kernel": 1}


def test_latents_compile_one_variant(variants):
    assert variants["latents"] == {"latent_decode_kernel": 1}  # its plan is that of other attention


def test_products_and_norms_compile_no_variant_for_a_batch_size(variants):
    assert variants["products"] == {
        "few_rows_kernel": 3,  # tiles of 16, 32 and 64 rows
        "many_rows_kernel": 2, "quantize_rows_kernel": 1,  # tiles of 64 and 128 rows
        "scaled_matmul_kernel": 3,  # likewise 16, 64 and 128
        "rms_norm_kernel": 2,  # a hidden state, and heads
        "add_rms_norm_kernel": 1, "silu_mul_kernel": 1,
    }  # fmt: skip
