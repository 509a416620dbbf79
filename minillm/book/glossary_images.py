"""The terms of chapter 25 in the glossary, in alphabetical order. Built in chapter 91."""

from __future__ import annotations

from minillm.book.glossary_terms import Term

# fmt: off
IMAGE_TERMS = [
    Term("content hash", "Names an image by its bytes, so that the same picture is known under any file name.",
         "`mm_hash`", "`pad_value`", "", 25),
    Term("encoder budget", "The most image tokens that a step may encode; an image is encoded whole or not at all.",
         "`max_num_encoder_input_tokens`", "", "", 25),
    Term("encoder cache", "Embeddings of images by the hash of their content, kept until their prompt is processed.",
         "`EncoderCacheManager`", "`MultiModalStaticCache`", "", 25),
    Term("patch", "A small square of an image, from which an encoder makes an embedding.", "", "",
         "patch (Dosovitskiy et al., 2021)", 25),
    Term("placeholder token", "Stands in the prompt where an image's embedding will stand.",
         "`PlaceholderRange`", "`pad_value`", "", 25),
]
