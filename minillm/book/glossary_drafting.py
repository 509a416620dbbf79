"""The terms of chapter 18's draft heads and trees in the glossary, in alphabetical order. Built in chapter 91."""

from __future__ import annotations

from minillm.book.glossary_terms import Term

# fmt: off
DRAFTING_TERMS = [
    Term("acceptance by position",
         "Of the drafts that came to a position with everything before it accepted, the share accepted there, too.",
         "`vllm:spec_decode_num_accepted_tokens_per_pos`", "", "n-α (EAGLE)", 18),
    Term("draft head", "One layer that drafts from the target's hidden states; embedding and output matrix are shared.",
         '`"method": "eagle3"`', "`--speculative-algorithm EAGLE3`", "EAGLE, EAGLE-3", 18),
    Term("dynamic tree", "A tree of drafts that grows where the drafter is sure: the most probable paths are verified.",
         "", "`--speculative-eagle-topk`", "EAGLE-2", 18),
    Term("feature", "A hidden state of the target that a draft head reads; EAGLE-3 fuses a low, a mid and a high one.",
         "auxiliary hidden state", "auxiliary hidden state", "feature (EAGLE)", 18),
    Term("multi-token prediction", "Training a model to predict the tokens after the next one, too; the module drafts.",
         '`"method": "mtp"`', "`--speculative-algorithm NEXTN`", "MTP (DeepSeek-V3)", 18),
    Term("training-time test", "Training a draft head for several steps on its own features, as it will have to draft.",
         "", "", "EAGLE-3", 18),
]
# fmt: on
