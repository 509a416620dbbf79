"""The terms of latent attention in the glossary, in alphabetical order. Built in chapter 91."""

from __future__ import annotations

from minillm.book.glossary_terms import Term

# fmt: off
LATENT_TERMS = [
    Term("absorbed form",
         "Latent attention whose up-projections meet the query and the weighted sum, and no stored latent.",
         "`W_UK_T`, `W_UV`", "`w_kc`, `w_vc`", "DeepSeek-V2", 2),
    Term("decoupled rotary key",
         "The part of a key that is rotated; it is stored beside the latent, once for all heads.",
         "`k_pe`", "`k_pe`", "decoupled RoPE (DeepSeek-V2)", 2),
    Term("latent", "The compressed vector of a token from which the keys and values of all heads are computed.",
         "`kv_c`", "`latent_cache`", "compressed latent vector (DeepSeek-V2)", 2),
]
# fmt: on
