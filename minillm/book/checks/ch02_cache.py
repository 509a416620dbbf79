"""The check of chapter 02's cache formula: heads, windows and latents, from the fields of a config.json.
Built in chapter 02."""

from __future__ import annotations

from typing import Any

from minillm.book.checks import Draw, FunctionChecker


def cache_bytes(
    config: dict[str, Any], num_tokens: int, bytes_per_number: int, *,
    latents: bool = True, latent_vectors: int = 1, rotary: bool = True, vectors: int = 2, query_heads: bool = False,
    given_size: bool = True, nulls: bool = True, window: str = "of its layers", most: bool = True,
) -> int:  # fmt: skip
    """Bytes that the cache holds after `num_tokens` tokens. The keywords are mistakes."""
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    if latents and config.get("kv_lora_rank") is not None:
        numbers = latent_vectors * (config["kv_lora_rank"] + rotary * config["qk_rope_head_dim"])
    else:
        kv_heads = config.get("num_key_value_heads", heads)
        kv_heads = heads if query_heads or (nulls and kv_heads is None) else kv_heads
        size = config.get("head_dim") if given_size else None
        numbers = vectors * kv_heads * (config["hidden_size"] // heads if size is None else size)
    kinds = config.get("layer_types") or ["full_attention"] * layers
    kept = 0
    for kind in kinds:
        slides = window == "everywhere" or (window == "of its layers" and kind == "sliding_attention")
        limit = config.get("sliding_window") if slides else None
        kept += num_tokens if limit is None else min(num_tokens, limit) if most else limit
    return kept * numbers * bytes_per_number


def _config(**changed: Any) -> dict[str, Any]:
    return dict(num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, hidden_size=36, head_dim=5) | changed


def _latent(**changed: Any) -> dict[str, Any]:
    """As such files are: what they say of KV heads and of a head's size is of the naive form."""
    fields = dict(num_attention_heads=4, num_key_value_heads=4, hidden_size=48, head_dim=10)
    return _config(**fields | dict(kv_lora_rank=24, qk_rope_head_dim=8, v_head_dim=12) | changed)


_SLIDES = ["sliding_attention", "full_attention", "sliding_attention"]


def _random(draw: Draw) -> tuple:
    layers, kv_heads = draw.randint(1, 6), draw.randint(1, 4)
    heads = kv_heads * draw.randint(2, 5)
    config = _config(num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
                     hidden_size=heads * draw.randint(3, 9), head_dim=draw.rng.choice((None, 16, 11)))  # fmt: skip
    if draw.rng.random() < 0.3:
        config = _latent(
            num_hidden_layers=layers, kv_lora_rank=draw.randint(9, 60), qk_rope_head_dim=draw.randint(1, 9)
        )
    if draw.rng.random() < 0.4:
        kinds = [draw.rng.choice(_SLIDES) for _ in range(layers)]
        config |= dict(sliding_window=draw.randint(1, 30), layer_types=kinds)
    if draw.rng.random() < 0.3:
        del config[draw.rng.choice(("num_key_value_heads", "head_dim"))]
    return config, draw.randint(0, 50), draw.rng.choice((1, 2, 4))


check_cache_bytes = FunctionChecker(
    "cache_bytes",
    cache_bytes,
    returns="the bytes",
    examples=[(_config(), 7, 2), (_latent(), 7, 2)],
    edges={
        "num_key_value_heads is null: as many as query heads": (_config(num_key_value_heads=None), 7, 2),
        "head_dim is null": (_config(head_dim=None), 7, 2),
        "only the first and the last layer slide": (_config(layer_types=_SLIDES, sliding_window=4), 11, 2),
        "fewer tokens than the window": (_config(layer_types=_SLIDES, sliding_window=40), 11, 2),
        "sliding_window without layer_types": (_config(sliding_window=4), 11, 2),
        "kv_lora_rank is null": (_config(kv_lora_rank=None, qk_rope_head_dim=8), 7, 2),
        "latents in layers that slide": (_latent(layer_types=_SLIDES, sliding_window=4), 11, 1),
        "no token yet": (_config(), 0, 4),
    },
    random=_random,
    misconceptions={
        "Query heads leave nothing behind: count num_key_value_heads.": dict(query_heads=True),
        "A token leaves a key and a value in each KV head: two vectors.": dict(vectors=1),
        "The file gives head_dim, which need not be hidden_size / num_attention_heads.": dict(given_size=False),
        "A file with kv_lora_rank keeps latents; its num_key_value_heads and head_dim are of the naive form.": dict(
            latents=False
        ),
        "A latent is kept once: the values are computed from the same numbers as the keys.": dict(latent_vectors=2),
        "Beside the latent a token keeps its rotary key, qk_rope_head_dim numbers.": dict(rotary=False),
        "num_key_value_heads may be there and be null (None): then there are as many as query heads.": dict(
            nulls=False
        ),
        "A layer that slides keeps at most sliding_window tokens.": dict(window="nowhere"),
        "Only the layers that layer_types calls sliding_attention have the window.": dict(window="everywhere"),
        "A sequence shorter than the window is kept whole: min(num_tokens, sliding_window).": dict(most=False),
    },
)
