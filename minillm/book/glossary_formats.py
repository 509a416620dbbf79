"""The terms of number formats and rotations. Built in chapter 91."""

from __future__ import annotations

from minillm.book.glossary_terms import Term

# A term is one to three lines; the formatter would give each of its names a line of its own.
# fmt: off
FORMAT_TERMS = [
    Term("block scaling",
         "A scale for each run of neighbouring inputs; the sum over the inputs falls apart into one for each block.",
         "`weight_block_size`", "`weight_block_size`", "fine-grained quantization (DeepSeek-V3)", 15),
    Term("double quantization", "The scales of blocks are rounded to 8 bits, under a scale of their own.",
         "", "", "Dettmers et al., 2023 (QLoRA)", 15),
    Term("Hadamard matrix",
         "A square matrix of 1 and −1 with orthogonal rows; over the square root of its size it is a rotation.",
         "", "", "QuIP#, QuaRot", 16),
    Term("MXFP4", "fp4 in blocks of 32, each with a scale that is a power of two in 8 bits.",
         "`--quantization mxfp4`", "`--quantization mxfp4`", "Rouhani et al., 2023", 15),
    Term("NF4", "Four bits that name one of sixteen quantiles of a normal distribution, with a scale for each block.",
         "", "", "NormalFloat (QLoRA)", 15),
    Term("NVFP4", "fp4 in blocks of 16, each with a scale in e4m3, and one scale in 32 bits for the whole tensor.",
         "`modelopt_fp4`", "`modelopt_fp4`", "", 15),
    Term("rotation (of a model)",
         "An orthogonal matrix multiplies the residual stream and its readers undo it, so that no channel stands out.",
         "", "", "R1 and R2 (SpinQuant)", 16),
    Term("two-level scale", "A low-bit scale for each block, and one number for all of these scales.",
         "", "", "", 15),
]
