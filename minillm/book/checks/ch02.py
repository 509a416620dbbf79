"""Checks of chapter 02: interleaved rotary, GQA without copies, a ragged window mask, a FLOP counter, cache bytes.
Built in chapter 02.

The references are in `ch02_oracle`: complex numbers and plain loops in float64. Copies of K are not inferred from the
source: a dispatch mode watches every tensor that the student's code makes.
"""

from __future__ import annotations

import math
import re

import torch

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch02_cache import check_cache_bytes
from minillm.book.checks.ch02_oracle import (
    attention_case,
    bias_equal,
    flops,
    flops_equal,
    gqa_close,
    no_copy,
    rotary_close,
)
from minillm.model.config import ModelConfig, RopeConfig

__all__ = [
    "check_cache_bytes",
    "check_count_flops",
    "check_gqa_attention",
    "check_interleaved_rotary",
    "check_window_bias",
]

check_interleaved_rotary = Checker(
    "interleaved_rotary",
    hint="Dimensions 2i and 2i+1 turn together, by position · theta^(-2i / head_dim), counter-clockwise.",
    forbid=("minillm.model.layers.apply_rotary",),
)
check_gqa_attention = Checker(
    "gqa_attention",
    hint="Query head h reads KV head h % num_kv_heads; give q a group dimension instead of repeating K.",
    forbid=("minillm.model.attention.causal_attention",),
)
check_window_bias = Checker(
    "window_bias",
    hint="New token j of a sequence is at position p = seq_len - query_len + j and sees positions p - window to p.",
    forbid=("minillm.model.attention.causal_mask",),
)
check_count_flops = Checker(
    "count_flops", hint="Two FLOPs for each multiply-add; go through the products of a layer one by one."
)


@check_interleaved_rotary.part("example")
def _rotary_example(case: Case) -> None:
    x = torch.tensor([[[1.0, 0.0, 1.0, 0.0]]])  # two pairs, both pointing along their first axis
    expected = torch.tensor([[[math.cos(2), math.sin(2), math.cos(1), math.sin(1)]]])  # theta=4: frequencies 1 and 1/2
    rotary_close(case, x, torch.tensor([2]), 4.0, expected)


@check_interleaved_rotary.part("edges")
def _rotary_edges(case: Case) -> None:
    x = case.randn(3, 2, 8)
    case.close(
        case.call(x, torch.zeros(3, dtype=torch.int64), 10000.0),
        x,
        "the vectors at position 0",
        hint="At position 0 every angle is 0: nothing turns.",
    )
    steps = torch.arange(4)
    rotary_close(case, x, torch.tensor([7, 7, 3]), 100.0)
    rotary_close(case, case.randn(4, 1, 2), steps, 10000.0)
    rotary_close(case, case.randn(4, 4, 4), steps, 10.0)  # as many tokens as heads: positions must go along the tokens
    rotary_close(case, case.randn(2, 5, 6).transpose(0, 1), torch.arange(5), 50.0)
    with case.hinting(
        "x may be a view whose last dimension has a stride: take the pairs by indexing, or make x contiguous first."
    ):
        rotary_close(case, case.randn(8, 2, 4).permute(2, 1, 0), steps, 100.0)


@check_interleaved_rotary.part("random")
def _rotary_random(case: Case) -> None:
    for _ in range(20):
        tokens, heads, head_dim = case.randint(1, 7), case.randint(1, 5), 2 * case.randint(1, 17)
        theta = case.rng.choice((100.0, 10000.0, 500000.0))
        x, positions = case.randn(tokens, heads, head_dim), case.randint(0, 2000, tokens)
        rotary_close(case, x, positions, theta)
    for _ in range(10):
        q, k = case.randn(1, 1, 16), case.randn(1, 1, 16)
        m, n, shift = case.randint(0, 1000, 1), case.randint(0, 1000, 1), case.randint(1, 1000)
        scores = [float((case.call(q, m + s, 10000.0) * case.call(k, n + s, 10000.0)).sum()) for s in (0, shift)]
        case.close(
            scores[1],
            scores[0],
            f"the dot product after both positions moved by {shift}",
            atol=5e-3,
            hint="It may depend on the distance of the two positions only.",
        )


@check_gqa_attention.part("example")
def _gqa_example(case: Case) -> None:
    q = torch.ones(1, 4, 2)
    v = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])  # one key, two KV heads: each query head returns what it reads
    gqa_close(
        case,
        q,
        torch.ones(1, 2, 2),
        v,
        torch.ones(1, 1, dtype=torch.bool),
        torch.tensor([[[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [3.0, 4.0]]]),
    )
    # The scores are 0 and 2 ln 3 / sqrt(4) = ln 3, so the weights are 1/4 and 3/4.
    k, v = (
        torch.tensor([0.0, math.log(3) / 2]).view(2, 1, 1).expand(2, 1, 4),
        torch.tensor([0.0, 4.0]).view(2, 1, 1).expand(2, 1, 4),
    )
    gqa_close(case, torch.ones(1, 1, 4), k, v, torch.ones(1, 2, dtype=torch.bool), torch.full((1, 1, 4), 3.0))
    no_copy(case, queries=1, seq_len=48, heads=8, kv_heads=2, head_dim=32)


@check_gqa_attention.part("edges")
def _gqa_edges(case: Case) -> None:
    q, k, v, allowed = attention_case(case, 1, 6, 4, 2, 8)
    one_key = torch.zeros(1, 6, dtype=torch.bool)
    one_key[0, 2] = True
    gqa_close(
        case,
        q,
        k,
        v,
        one_key,
        v[2][torch.arange(4) % 2][None],
        what="the output where one key is allowed",
        hint="Then its weight is 1: the output is its v.",
    )
    for heads, kv_heads in ((3, 3), (6, 1), (6, 2)):
        q, k, v, allowed = attention_case(case, 2, 5, heads, kv_heads, 4)
        gqa_close(case, q, k, v, allowed)
    q, k, v, allowed = attention_case(case, 1, 6, 4, 2, 8)
    gqa_close(case, q + 8, k + 8, v, allowed, hint="Large scores overflow exp(): use softmax on the masked scores.")
    with case.hinting(
        "q, k, v and allowed may be views with strides; view() cannot join two such dimensions, "
        "reshape() and flatten() can."
    ):
        gqa_close(case, *case.randn(5, 8, 4).split([4, 2, 2], dim=1), torch.ones(5, 5, dtype=torch.bool).tril())
        q, k, v, allowed = attention_case(case, 3, 7, 4, 2, 6)
        heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
        gqa_close(case, *heads_first, allowed.T.contiguous().T)
        gqa_close(case, *(x.permute(2, 1, 0).contiguous().permute(2, 1, 0) for x in (q, k, v)), allowed)
    no_copy(case, queries=1, seq_len=96, heads=8, kv_heads=2, head_dim=32)
    no_copy(case, queries=3, seq_len=64, heads=6, kv_heads=1, head_dim=64)


@check_gqa_attention.part("random")
def _gqa_random(case: Case) -> None:
    for _ in range(15):
        queries, kv_heads, head_dim = case.randint(1, 7), case.randint(1, 4), case.randint(2, 20)
        gqa_close(
            case,
            *attention_case(
                case, queries, queries + case.randint(0, 6), kv_heads * case.randint(1, 5), kv_heads, head_dim
            ),
        )
    for _ in range(3):
        kv_heads = case.randint(1, 4)
        no_copy(case, case.randint(1, 4), case.randint(48, 80), kv_heads * case.randint(3, 5), kv_heads, 64)


@check_window_bias.part("example")
def _bias_example(case: Case) -> None:
    # Sequence 0 is new and brings its 3 tokens; sequence 1 has 4 positions and brings the last of them.
    bias_equal(case, [3, 1], [3, 4], 1)


@check_window_bias.part("edges")
def _bias_edges(case: Case) -> None:
    bias_equal(case, [4], [4], None)
    bias_equal(case, [4], [4], 0)
    bias_equal(case, [2, 5], [9, 5], 100)
    bias_equal(case, [1, 1, 1], [1, 7, 3], 2)
    bias_equal(case, [0, 2], [6, 3], 1)
    error = case.raises(
        ValueError,
        case.student,
        [2, 14, 5],
        [2, 13, 39],
        None,
        hint="A sequence cannot have more new tokens than it is long.",
    )
    case.true(
        {"14", "13"} <= set(re.findall(r"\d+", str(error))),
        f"the message of the ValueError is {str(error)!r}; it must name both numbers, query_len 14 and seq_len 13",
    )


@check_window_bias.part("random")
def _bias_random(case: Case) -> None:
    for _ in range(20):
        seq_lens = [case.randint(1, 14) for _ in range(case.randint(1, 5))]
        query_lens = [case.randint(1, n + 1) for n in seq_lens]
        bias_equal(case, query_lens, seq_lens, case.rng.choice((None, 0, 1, 2, 5, 20)))


@check_count_flops.part("example")
def _flops_example(case: Case) -> None:
    # Projections 2·8·2·(2·2 + 2·1) = 192 a token, MLP 2·3·8·10 = 480, scores and sums 2·2·2·2 = 16 a key,
    # logits 2·8·20 = 320 a row.
    config = _config(
        hidden_size=8, intermediate_size=10, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, vocab_size=20
    )
    case.equal(flops(config, [3], [3], 1), (3 * (192 + 480), (1 + 2 + 3) * 16, 320), "the reference")
    flops_equal(case, config, [3], [3], 1)


@check_count_flops.part("edges")
def _flops_edges(case: Case) -> None:
    flops_equal(case, _config(), [1], [1000], 1, hint="One token is processed, and it looks at 1,000 keys.")
    flops_equal(case, _config(), [4], [4], 0, hint="No row needs logits here.")
    flops_equal(
        case,
        _config(hidden_size=16, head_dim=32),
        [2],
        [2],
        2,
        hint="q_proj is [num_heads · head_dim, hidden_size], and o_proj is [hidden_size, num_heads · head_dim].",
    )
    flops_equal(
        case,
        _config(num_layers=3, layer_windows=(None, 4, 1)),
        [5, 2],
        [9, 2],
        2,
        hint="In a layer with window W a query sees at most W positions, its own included.",
    )
    flops_equal(
        case,
        _config(tie_word_embeddings=False),
        [2],
        [2],
        1,
        hint="The embedding is a lookup and the logits are a product, whether or not they share a matrix.",
    )


@check_count_flops.part("random")
def _flops_random(case: Case) -> None:
    for _ in range(20):
        layers, kv_heads = case.randint(1, 5), case.randint(1, 4)
        config = _config(
            hidden_size=case.randint(8, 65),
            intermediate_size=case.randint(8, 99),
            num_layers=layers,
            num_kv_heads=kv_heads,
            num_heads=kv_heads * case.randint(1, 5),
            head_dim=2 * case.randint(1, 20),
            vocab_size=case.randint(10, 200),
            layer_windows=tuple(case.rng.choice((None, 1, 3, 8)) for _ in range(layers)),
        )
        seq_lens = [case.randint(1, 30) for _ in range(case.randint(1, 4))]
        flops_equal(case, config, [case.randint(1, n + 1) for n in seq_lens], seq_lens, case.randint(0, 5))


def _config(**changes) -> ModelConfig:
    settings = (
        dict(
            model_type="llama",
            vocab_size=50,
            hidden_size=24,
            intermediate_size=40,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=6,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=False,
            rope=RopeConfig(),
            eos_token_ids=(1,),
            bos_token_id=0,
        )
        | changes
    )
    settings.setdefault("layer_windows", (None,) * settings["num_layers"])
    return ModelConfig(**settings)
