"""The check of chapter 03's bytes of a cache. Built in chapter 03."""

from __future__ import annotations

from typing import Any

from minillm.book.checks import Draw, FunctionChecker, Raised

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def cache_bytes(
    config: dict[str, Any],
    num_tokens: int,
    kv_dtype: str | None = None,
    *,
    query_heads: bool = False,
    keys_only: bool = False,
    divides: bool = False,
    always_slides: bool = False,
    never_slides: bool = False,
    old_dtype: bool = False,
) -> int:
    """The sum over the layers; the keywords are mistakes."""
    heads = config["num_attention_heads"]
    kv_heads = heads if query_heads else config.get("num_key_value_heads") or heads
    head_dim = (None if divides else config.get("head_dim")) or config["hidden_size"] // heads
    names = ("torch_dtype", "dtype") if old_dtype else ("dtype", "torch_dtype")
    dtype = kv_dtype or next(config[name] for name in names if config.get(name))
    if dtype not in _BYTES:
        raise ValueError(dtype)
    plain = "sliding_attention" if always_slides and config.get("sliding_window") else "full_attention"
    kept = 0
    for kind in config.get("layer_types") or [plain] * config["num_hidden_layers"]:
        slides = kind == "sliding_attention" and not never_slides
        kept += min(num_tokens, config["sliding_window"]) if slides else num_tokens
    return kept * (1 if keys_only else 2) * kv_heads * head_dim * _BYTES[dtype]


def _random(draw: Draw) -> tuple:
    layers, heads, head_dim = draw.randint(1, 40), draw.rng.choice((4, 8, 32)), draw.randint(2, 130)
    dtype, override = draw.rng.choice(list(_BYTES)), draw.rng.choice((None, *_BYTES))
    config = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "hidden_size": heads * head_dim,
        draw.rng.choice(("dtype", "torch_dtype")): dtype,
    }
    if draw.rng.random() < 0.6:
        config["num_key_value_heads"] = draw.rng.choice((1, 2, 4))
    if draw.rng.random() < 0.6:
        kinds = [draw.rng.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
        config |= {"sliding_window": draw.randint(1, 3000), "layer_types": kinds}
    tokens = draw.randint(0, 6000)
    return (config, tokens, override) if override else (config, tokens)


def _explain(got: Any, expected: Any, config: dict[str, Any], *rest: Any) -> str | None:
    if isinstance(expected, Raised):
        return "Raise ValueError for a dtype that is not in the table."
    return None


_LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "torch_dtype": "float16"}
_OSS = {
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "dtype": "bfloat16",
}
_BASE = {"num_hidden_layers": 3, "num_attention_heads": 6, "hidden_size": 48, "torch_dtype": "bfloat16"}
_TWO_SLIDE = {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
check_cache_bytes = FunctionChecker(
    "cache_bytes",
    cache_bytes,
    returns="the size in bytes",
    raises=(ValueError,),
    examples={"it is Llama-2-7B, for one token": (_LLAMA, 1), "it is gpt-oss-20b, for 8,192 tokens": (_OSS, 8192)},
    edges={
        "there are no tokens": (_BASE, 0),
        **{
            f"{entry} is null in this file, so it is there and is None: that means the same as a missing entry": (
                {entry: None} | _BASE,
                5,
            )
            for entry in ("num_key_value_heads", "head_dim", "layer_types")
        },
        "there is a head_dim": (_BASE | {"head_dim": 20}, 5),
        "there are dtype and torch_dtype": (_BASE | {"dtype": "float8_e4m3fn"}, 5),
        "there is a kv_dtype": (_BASE | {"dtype": "float32"}, 5, "float8_e4m3fn"),
        **{
            f"two layers have a window of 4, for {tokens} tokens": (_BASE | _TWO_SLIDE, tokens)
            for tokens in (3, 4, 5, 100)
        },
        "there is a sliding_window but no layer_types": (_BASE | {"sliding_window": 4}, 100),
        "there is no such dtype": (_BASE, 5, "int3"),
    },
    random=_random,
    trials=25,
    explain=_explain,
    hint="Sum over the layers: 2 · KV heads · head size · bytes per number · positions that this layer keeps.",
    misconceptions={
        "Keys and values have KV heads, which may be fewer than the query heads.": dict(query_heads=True),
        "A layer keeps keys and values: that is two numbers for each.": dict(keys_only=True),
        "head_dim need not be hidden_size / num_attention_heads.": dict(divides=True),
        "Newer files have dtype; if both entries are there, dtype counts.": dict(old_dtype=True),
        "A layer that slides keeps at most sliding_window positions.": dict(never_slides=True),
        "Without layer_types every layer is full, whatever sliding_window says.": dict(always_slides=True),
    },
    forbid=("minillm.model.config.ModelConfig",),
)
