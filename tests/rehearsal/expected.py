"""What is allowed today, scenario by scenario. Every figure is exact, so that the table is lowered when the engine gets
better.

Of each scenario: the times that the host waits for the device while prompts are computed, in steps that requests have
joined or left ("changed"), in those that go on as before ("steady"), and between steps; waits for tokens beyond one a
step; and kernels that are compiled after the start. What is not named is 0, and 0 everywhere is the goal:
the host should wait for nothing but the tokens. `python -m tests.rehearsal NAME --verbose` says which line waits for
what.
"""

from __future__ import annotations

EVERYWHERE = {
    "plain": {},
    "seeded": {},
    "penalties": {},
    "logprobs": {},
    "prompt logprobs": {},
    "samples": {},
    "chunks": {},
    "eager": {},
    "quantized head": {},
    "fp8 both": {},
    "8-bit cache": {},
    "sinks": {},
    "swap": {},
    "disk": {"between": 2},  # at the end memory is spilled to the disk: that has to wait
    "offload": {},
    "ngram": {},
    "draft model": {"between": 5},  # the guesses, which the host has to propose: once a step
    "grammar": {},
    "beams": {},
    "adapters": {},
    "memory": {},
    "again": {},
    "Qwen3-0.6B": {},
}
ON_OTHER_GPUS = ("seeded", "quantized head", "8-bit cache")  # H200 plays all

# What a recorded step of Qwen3-0.6B launches, 266 in all. A layer needs 9: four matrix products, attention,
# and what is fused between them. Outside of the layers are the head, the plan of attention, the embedding,
# the angles (7 small operations, which a kernel could make while it rotates), the first norm, the rows that are wanted,
# and the copy into the one logits buffer.
LAUNCHES = {
    "linear": 4 * 28 + 1, "triton rotate_and_store_kernel": 28, "triton paged_decode_kernel": 28,
    "triton add_rms_norm_kernel": 2 * 28, "triton silu_mul_kernel": 28,
    "triton rms_norm_kernel": 1, "triton plan_decode_kernel": 1,
    "embedding": 1, "mul": 3, "cos": 1, "sin": 1, "_to_copy": 2, "index_select": 2, "copy_": 1,
}  # fmt: skip
# The most variants of a kernel that a scenario needs; each takes a second or so to compile.
VARIANTS = {
    "rms_norm_kernel": 2, "add_rms_norm_kernel": 2, "rotate_and_store_kernel": 2, "silu_mul_kernel": 2,
    "plan_decode_kernel": 3, "paged_decode_kernel": 4, "plan_tiles_kernel": 8, "paged_prefill_kernel": 8,
    "group_max_kernel": 1, "aim_kernel": 2, "collect_kernel": 1, "threshold_kernel": 1, "draw_kernel": 2,
    "pick_kernel": 2, "few_rows_kernel": 7, "many_rows_kernel": 2, "scaled_matmul_kernel": 3, "dequantize_kernel": 2,
    "quantize_rows_kernel": 2, "shrink_kernel": 2, "expand_kernel": 2,
}  # fmt: skip
# MiB on an H200, of memory with an ideal allocator. "over": what was in use at some moment beyond
# gpu_memory_utilization.
FACTS = {
    "memory": {"graphs MiB": 3, "over MiB": 0, "second": "fits or is refused", "kept MiB": 0, "gone": True},
    "Qwen3-0.6B": {"graphs MiB": 76, "over MiB": 0, "second": "fits or is refused", "kept MiB": 0, "gone": True},
    "again": {"again": "fits", "fewer blocks": 0},
}


def expected(gpu: str, name: str) -> dict[str, int]:
    return EVERYWHERE[name]


def played(gpu: str) -> list[str]:
    return list(EVERYWHERE) if gpu == "H200" else list(ON_OTHER_GPUS)


def drawn(gpu: str) -> list[str]:
    """A few of those that `rehearsal.drawn` draws, others for each GPU."""
    return {
        "H200": ["random 5", "random 11", "random 4", "random 7"],
        "A100": ["random 1"], "L4": ["random 2"], "T4": ["random 15"],
    }[gpu]  # fmt: skip
