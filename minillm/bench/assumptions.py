"""What predictions assume: shares of the limits that kernels reach, and launches. Built in chapter 14."""

from __future__ import annotations

import torch

from . import kernel_cases, kv_cases, latent_cases, quantized_cases

DTYPE, NAME = torch.bfloat16, "bfloat16"
META = torch.device("meta")  # shapes without memory
# Of a recorded step: products, norms, rotation, attention, SwiGLU; ends.
LAUNCHES_A_LAYER, LAUNCHES_A_STEP = (8, 10), (4, 14)
GAP = (0.8e-6, 2.0e-6)  # seconds between two launches of a recorded step
EAGER = (4e-6, 20e-6)  # seconds of the host for a launch or an operation of torch
STREAMING = (0.65, 0.92)  # of the bandwidth, over the matrices of a step
# fmt: off
KERNELS = {  # family -> (cases, share of the limit, seconds beside it, why)
    "prefill": (kernel_cases.prefill_cases, (0.30, 0.62), (2e-6, 20e-6),
        "plain Triton is 0.76 of FlashAttention-3, which is 0.6 to 0.75 of the rate at 16k"),
    "decode": (kernel_cases.decode_cases, (0.70, 0.95), (2e-6, 12e-6),
        "well-kept Triton is level with the best library, near the bandwidth at 1 GB and more"),
    "matmul": (kernel_cases.matmul_cases, (0.45, 0.80), (1e-6, 5e-6),
        "cuBLAS is about 0.7 to 0.8 of the rate on random data; a Triton tile without TMA less"),
    "elementwise": (kernel_cases.elementwise_cases, (0.70, 0.95), (1e-6, 5e-6),
        "a pass over memory is a copy: 0.9 of the data sheet"),
    "w4a16": (quantized_cases.w4a16_cases, (0.30, 0.85), (1e-6, 8e-6),
        "Marlin is near the bytes' limit up to 16 rows; from 64 on the rate decides"),
    "w8a8": (quantized_cases.w8a8_cases, (0.25, 0.85), (1e-6, 8e-6),
        "the limit counts 8-bit operations at twice the rate"),
    "kv8": (kv_cases.kv8_cases, (0.55, 0.95), (2e-6, 15e-6),
        "as over 16 bits, with the conversion beside the loads"),
    "kv4": (kv_cases.kv4_cases, (0.35, 0.90), (2e-6, 15e-6),
        "two codes of each byte are taken apart: more arithmetic for half of the bytes of 8 bits"),
    "latents": (latent_cases.latent_cases, (0.30, 0.90), (2e-6, 15e-6),
        "with 16 heads a copy decides, as in decode; with 128 the products, at a tile without TMA"),
}
PEERS = (  # result, case, peer, its seconds over ours, why
    ("prefill", "causal attention 16384", "SDPA flash", (0.9, 1.7),
     "SDPA's flash on Hopper is FlashAttention-2, about 0.35 of the rate; the goal is 1.15"),
    ("prefill", "causal attention 16384", "SDPA cuDNN", (0.55, 1.0),
     "cuDNN is level with FlashAttention-3; the goal is 0.75"),
    ("prefill", "causal attention 16384", "FlexAttention", (0.8, 1.6),
     "Triton too, with a mask that is read block by block"),
    ("prefill", "causal attention 16384", "minillm, paged", (0.97, 1.3),
     "the same loop with addresses from a table; the goal is 0.97"),
    ("matmul", "matmul 4096 x 4096 x 4096", "torch", (0.55, 1.05),
     "cuBLAS has TMA and warps of one task each; our tile has neither"),
    ("w4a16", "W4A16 1 x 4096 -> 14336", "torch bfloat16", (1.8, 3.8),
     "a quarter of the bytes, less what a launch costs; Marlin 3.87 at 16 rows and fewer"),
    ("w4a16", "W4A16 16 x 4096 -> 14336", "torch bfloat16", (1.8, 3.8),
     "as with one row: the bytes decide"),
)
# fmt: on
