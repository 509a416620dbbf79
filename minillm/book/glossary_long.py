"""The terms of chapter 17 in the glossary that came with layers made for long texts, in alphabetical order.
Built in chapter 91."""

from __future__ import annotations

from minillm.book.glossary_terms import Term

# fmt: off
LONG_TERMS = [
    Term("delta rule", "Before a key and value are added to a state, what the state says for that key is taken out.",
         "", "", "DeltaNet, Gated DeltaNet", 17),
    Term("gated linear attention", "Attention without a softmax: its sum over keys is a state that decays.",
         "`MambaSpec`", "", "Mamba-2, Gated DeltaNet", 17),
    Term("hybrid model", "A model some of whose layers attend over a cache, while the others keep a state.",
         "`KVCacheConfig.has_mamba_layers`", "", "Jamba, Qwen3-Next", 17),
    Term("learned sink logit", "A number of each head that stands in its softmax's denominator and has no value.",
         "`TritonAttentionImpl.sinks`", "", "gpt-oss", 17),
    Term("lightning indexer", "A small trained scorer that chooses the tokens which attention reads.",
         "", "", "DeepSeek-V3.2", 17),
    Term("sparse attention", "All keys are kept, and each query reads some of them.", "", "", "Quest, NSA, DSA", 17),
    Term("state snapshot", "A copy of a layer's state at a block boundary, from which a later prompt goes on.",
         "`MambaSpec.mamba_cache_mode`", "", "", 17),
]
# fmt: on
