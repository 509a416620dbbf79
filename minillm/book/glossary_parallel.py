"""The terms of chapter 20 in the glossary, in alphabetical order. Built in chapter 91."""

from __future__ import annotations

from minillm.book.glossary_terms import Term

# fmt: off
PARALLEL_TERMS = [
    Term("all-gather", "Every device gets the tensors of all, one after the other.", "", "", "", 20),
    Term("alpha-beta model", "A message takes a latency, and its bytes over a bandwidth.",
         "", "", "Hockney, 1994", 20),
    Term("bubble", "The time in which a stage of a pipeline waits for work.", "", "", "GPipe", 20),
    Term("collective", "An operation that completes only when every rank has called it.",
         "`GroupCoordinator`", "`GroupCoordinator`", "", 20),
    Term("column parallel", "Each rank computes some outputs of a matrix from the whole input, and sends nothing.",
         "`ColumnParallelLinear`", "`ColumnParallelLinear`", "Megatron-LM", 20),
    Term("data parallel attention",
         "Each rank has the requests and the KV cache of its own, and shares the MLP with the others.",
         "`enable_expert_parallel` with `data_parallel_size`", "`--enable-dp-attention`", "", 20),
    Term("micro-batch", "A part of a batch that moves through a pipeline on its own.", "", "", "GPipe", 20),
    Term("rank", "One of the workers that compute a model together: a device, or a process.",
         "`rank`", "`tp_rank`, `pp_rank`", "", 20),
    Term("reduce-scatter", "The sum over all devices, of which each gets a part; an all-gather makes it an all-reduce.",
         "", "", "", 20),
    Term("row parallel", "Each rank has some inputs of a matrix and a part of each output; an all-reduce adds them up.",
         "`RowParallelLinear`", "`RowParallelLinear`", "Megatron-LM", 20),
    Term("zigzag placement", "A rank holds a chunk from the front of a sequence and its mirror image from the back.",
         "", "", "", 20),
]
# fmt: on
