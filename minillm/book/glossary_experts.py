"""The terms of chapter 21 in the glossary, in alphabetical order. Built in chapter 91."""

from __future__ import annotations

from minillm.book.glossary_terms import Term

# fmt: off
EXPERT_TERMS = [
    Term("all-to-all", "Each rank sends each other rank a different part of what it holds.",
         "`All2AllManagerBase`", "", "DeepEP", 21),
    Term("capacity factor", "How many tokens an expert takes, over an even share; those beyond it are dropped.",
         "none: dropless", "none: dropless", "Switch Transformers", 21),
    Term("correction bias", "A number for each expert that takes part in the choice, and not in the weights.",
         "`e_score_correction_bias`", "`correction_bias`", "auxiliary-loss-free balancing (DeepSeek-V3)", 21),
    Term("dispatch, combine", "Tokens travel to the ranks of their experts, and the results travel back.",
         "", "", "DeepEP", 21),
    Term("grouped matmul", "Each group of rows is multiplied by a matrix of its own, in one launch.",
         "`fused_moe_kernel`", "", "MegaBlocks", 21),
    Term("imbalance", "The largest load of a rank over the mean; 1 is perfect.", "", "", "", 21),
    Term("redundant expert", "A copy of a hot expert on a further rank, which takes a part of its tokens.",
         "`num_redundant_experts`", "`--ep-num-redundant-experts`", "EPLB, DeepSeek-V3", 21),
    Term("router of experts", "The matrix that gives a token a logit for each expert; the best few are chosen.",
         "`gate`", "`gate`", "gating network (Shazeer et al., 2017)", 21),
    Term("shared expert", "An MLP beside the experts that every token goes through.", "`shared_experts`",
         "`shared_experts`", "DeepSeekMoE", 21),
]
# fmt: on
