"""The terms of newer GPUs in the glossary, in alphabetical order. Built in chapter 91."""

from __future__ import annotations

from minillm.book.glossary_terms import Term

# fmt: off
GPU_TERMS = [
    Term("conditional rescaling",
         "The online softmax rescales what it collected only when a score exceeds its reference by more than a slack.",
         "", "", "FlashAttention-4 (Zadouri et al., 2026)", 12),
    Term("CuTe DSL", "NVIDIA's language in Python for kernels whose layouts and copies the author writes down.",
         "", "", "CUTLASS", 11),
    Term("Gluon", "Triton's lower level: the author chooses layouts, shared memory, barriers and the roles of warps.",
         "", "", "", 11),
    Term("graph break", "A place where a tracer must return to Python, so that what it compiles falls into two pieces.",
         "`fullgraph=True` forbids it", "", "PyTorch 2 (Ansel et al., 2024)", 14),
    Term("megakernel", "One kernel for a whole forward pass, with a scheduler of its own in each SM.",
         "", "", "persistent megakernel; MPK", 14),
    Term("MUFU", "The unit of an SM that computes exponentials, reciprocals and square roots: 16 a clock.",
         "", "", "special function unit, SFU", 12),
    Term("persistent kernel", "One program for each SM, which takes tile after tile until none is left.",
         "`matmul_kernel_persistent`", "`matmul_kernel_persistent`", "", 11),
    Term("piecewise graph", "CUDA graphs of what stands between the calls of attention, which are launched anew.",
         "`CUDAGraphMode.PIECEWISE`", "`--enable-piecewise-cuda-graph`", "", 14),
    Term("ping-pong scheduling",
         "Two groups of warps alternate: one issues products while the other computes exponentials.",
         "", "", "FlashAttention-3 (Shah et al., 2024)", 12),
    Term("programmatic dependent launch",
         "A kernel starts before the one ahead of it has ended, and waits only where it needs that one's results.",
         "", "`enable_pdl`", "PDL", 14),
    Term("Stream-K", "The turns of tiles are dealt out evenly to all SMs; a tile that was cut is added up at the end.",
         "", "", "Osama et al., 2023", 11),
    Term("tcgen05", "Blackwell's tensor-core instructions: one thread issues a product, the sums are in tensor memory.",
         "", "", "fifth-generation tensor core, UMMA", 11),
    Term("tensor memory", "Memory of 256 KB in an SM of sm_100 for the sums of products, beside the registers.",
         "", "", "TMEM", 11),
    Term("TMA", "The unit that copies a tile between memory and shared memory; one thread starts it.",
         "", "", "Tensor Memory Accelerator", 11),
    Term("warp specialisation", "Warps of one program have different roles: some copy tiles, some multiply.",
         "", "", "warp specialization (CUTLASS)", 11),
    Term("wave quantization", "The loss of an incomplete last wave of programs, in which some SMs have no tile.",
         "", "", "quantization inefficiency (Stream-K)", 11),
    Term("wgmma", "Hopper's product of a warp group: four warps multiply 64 rows straight from shared memory.",
         "", "", "warpgroup MMA", 11),
]
# fmt: on
