"""The check of chapter 02's FLOP counter. Built in chapter 02."""

from __future__ import annotations

from typing import Any

from minillm.book.checks import Draw, FunctionChecker
from minillm.model.config import ModelConfig, RopeConfig


def counted(
    c: ModelConfig, query_lens: list[int], seq_lens: list[int], num_logits: int, *, products: int = 3,
    every_key: bool = False, flops: int = 2, sums: int = 2, every_logit: bool = False, out: int = 1,
    windows: bool = True, one_more: int = 0, kv_heads: str = "num_kv_heads", divides: bool = False, tied: bool = True,
) -> int:  # fmt: skip
    """The FLOPs of the weights, of the visible scores, of the logits. The keywords are mistakes."""
    head_dim = c.hidden_size // c.num_heads if divides else c.head_dim
    weights = pairs = 0
    for window in c.layer_windows:
        for new, length in zip(query_lens, seq_lens):
            for position in range(length - new, length):
                weights += c.hidden_size * c.num_heads * head_dim * (1 + out)  # q_proj, o_proj
                weights += c.hidden_size * getattr(c, kv_heads) * head_dim * 2  # k_proj, v_proj
                weights += c.hidden_size * c.intermediate_size * products  # gate_proj, up_proj, down_proj
                keys = (length - 1 if every_key else position) + 1
                pairs += keys if window is None or not windows else min(keys, window + one_more)
    rows = sum(query_lens) if every_logit else num_logits
    logits = rows * c.hidden_size * c.vocab_size * (tied or not c.tie_word_embeddings)
    return flops * (weights + pairs * sums * c.num_heads * c.head_dim + logits)


def _parts(got: Any, expected: int, c: ModelConfig, query_lens: list[int], seq_lens: list[int], num_logits: int) -> str:
    logits = expected - counted(c, query_lens, seq_lens, 0)
    scores = 2 * (expected - counted(c, query_lens, seq_lens, num_logits, sums=1))
    return (
        f"Here are {sum(query_lens)} new tokens, {c.num_layers} layers with the windows {list(c.layer_windows)} and "
        f"{num_logits} rows of logits: weights {expected - scores - logits:,}, scores and sums {scores:,}, logits "
        f"{logits:,}. Which of the three is another one with you?"
    )


def _config(**changes: Any) -> ModelConfig:
    settings = dict(
        model_type="llama", vocab_size=50, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=6, max_position_embeddings=4096, rms_norm_eps=1e-5, tie_word_embeddings=True,
        qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False, rope=RopeConfig(), eos_token_ids=(1,),
        bos_token_id=0,
    ) | changes  # fmt: skip
    settings.setdefault("layer_windows", (None,) * settings["num_layers"])
    return ModelConfig(**settings)


def _random(draw: Draw) -> tuple:
    layers, kv_heads = draw.randint(1, 5), draw.randint(1, 4)
    config = _config(
        hidden_size=draw.randint(8, 65),
        intermediate_size=draw.randint(8, 99),
        num_layers=layers,
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw.randint(1, 5),
        head_dim=2 * draw.randint(1, 20),
        vocab_size=draw.randint(10, 200),
        layer_windows=tuple(draw.rng.choice((None, 1, 3, 8)) for _ in range(layers)),
    )
    seq_lens = [draw.randint(1, 30) for _ in range(draw.randint(1, 4))]
    return config, [draw.randint(1, n + 1) for n in seq_lens], seq_lens, draw.randint(0, 5)


check_count_flops = FunctionChecker(
    "count_flops",
    counted,
    returns=lambda c, query_lens, seq_lens, num_logits: (
        f"the number of FLOPs of query_lens={query_lens}, seq_lens={seq_lens}, num_logits={num_logits}"
    ),
    # Projections 2·8·2·(2·2 + 2·1) = 192 a token, MLP 2·3·8·10 = 480, scores and sums 2·2·2·2 = 16 a key,
    # logits 2·8·20 = 320 a row: 3 · (192 + 480) + 6 · 16 + 320 = 2432.
    examples=[
        (
            _config(
                hidden_size=8, intermediate_size=10, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2,
                vocab_size=20,
            ),
            [3],
            [3],
            1,
        )
    ],
    edges={
        "one token is processed, and it looks at 1,000 keys": (_config(), [1], [1000], 1),
        "no row needs logits": (_config(), [4], [4], 0),
        "q_proj is [num_heads · head_dim, hidden_size], and o_proj is [hidden_size, num_heads · head_dim]": (
            _config(hidden_size=16, head_dim=32), [2], [2], 2,
        ),
        "in a layer with window W a query sees at most W positions, its own included": (
            _config(num_layers=3, layer_windows=(None, 4, 1)), [5, 2], [9, 2], 2,
        ),
        "the embedding is a lookup and the logits are a product, whether or not they share a matrix": (
            _config(tie_word_embeddings=False), [2], [2], 1,
        ),
    },
    random=_random,
    trials=20,
    explain=_parts,
    hint="Two FLOPs for each multiply-add; go through the products of a layer one by one.",
    misconceptions={
        "The MLP of these models has three products: gate_proj, up_proj and down_proj.": dict(products=2),
        "A multiply-add is two FLOPs.": dict(flops=1),
        "Each visible pair costs twice: a product for the score, and one for the weighted sum of V.": dict(sums=1),
        "A query sees no later key: count p + 1 keys for position p.": dict(every_key=True),
        "Logits are computed for num_logits rows, however many new tokens there are.": dict(every_logit=True),
        "o_proj is a product too, [hidden_size, num_heads · head_dim].": dict(out=0),
        "A layer with a window has fewer visible keys: min(p + 1, window) at position p.": dict(windows=False),
        "The window counts the query's own position: W keys, not W + 1.": dict(one_more=1),
        "k_proj and v_proj are as wide as the KV heads, which are fewer than the query heads.":
            dict(kv_heads="num_heads"),
        "The configuration gives head_dim, which need not be hidden_size / num_heads.": dict(divides=True),
        "The logits are a product also where the matrix is the embedding's.": dict(tied=False),
    },
)  # fmt: skip
