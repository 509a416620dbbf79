"""Checks of chapter 02: interleaved rotary, GQA without copies, a ragged window mask, a FLOP counter. Built in chapter 02.

The references are complex numbers and plain loops in float64. Copies of K are not guessed from the source: a
dispatch mode watches every tensor that the student's code makes.
"""
from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.book.checks import Case, Checker
from minillm.model.config import ModelConfig, RopeConfig

INF = float("inf")

check_interleaved_rotary = Checker(
    "interleaved_rotary", hint="Dimensions 2i and 2i+1 turn together, by position · theta^(-2i / head_dim), counter-clockwise.",
    forbid=("minillm.model.layers.apply_rotary",))
check_gqa_attention = Checker(
    "gqa_attention", hint="Query head h reads KV head h % num_kv_heads; give q a group dimension instead of repeating K.",
    forbid=("minillm.model.attention.causal_attention",))
check_window_bias = Checker(
    "window_bias", hint="Query j of a sequence stands at position seq_len - query_len + j and sees positions p - window to p.",
    forbid=("minillm.model.attention.causal_mask",))
check_count_flops = Checker("count_flops", hint="Two FLOPs for each multiply-add; go through the products of a layer one by one.")


@check_interleaved_rotary.part("example")
def _rotary_example(case: Case) -> None:
    x = torch.tensor([[[1.0, 0.0, 1.0, 0.0]]])  # two pairs, both pointing along their first axis
    expected = torch.tensor([[[math.cos(2), math.sin(2), math.cos(1), math.sin(1)]]])  # theta=4: frequencies 1 and 1/2
    _rotary_close(case, case.call(x, torch.tensor([2]), 4.0), expected, x, torch.tensor([2]), 4.0)


@check_interleaved_rotary.part("edges")
def _rotary_edges(case: Case) -> None:
    x = case.randn(3, 2, 8)
    case.close(case.call(x, torch.zeros(3, dtype=torch.int64), 10000.0), x, "the vectors at position 0",
               hint="At position 0 every angle is 0: nothing turns.")
    jumbled = torch.tensor([7, 7, 3])
    _rotary_close(case, case.call(x, jumbled, 100.0), _rotated(x, jumbled, 100.0), x, jumbled, 100.0)
    one_pair = case.randn(4, 1, 2)
    steps = torch.arange(4)
    _rotary_close(case, case.call(one_pair, steps, 10000.0), _rotated(one_pair, steps, 10000.0), one_pair, steps, 10000.0)
    square = case.randn(4, 4, 4)  # as many tokens as heads: positions must go along the tokens
    _rotary_close(case, case.call(square, steps, 10.0), _rotated(square, steps, 10.0), square, steps, 10.0)
    strided = case.randn(2, 5, 6).transpose(0, 1)
    _rotary_close(case, case.call(strided, torch.arange(5), 50.0), _rotated(strided, torch.arange(5), 50.0),
                  strided, torch.arange(5), 50.0)


@check_interleaved_rotary.part("random")
def _rotary_random(case: Case) -> None:
    for _ in range(20):
        tokens, heads, head_dim = case.randint(1, 7), case.randint(1, 5), 2 * case.randint(1, 17)
        theta = case.rng.choice((100.0, 10000.0, 500000.0))
        x, positions = case.randn(tokens, heads, head_dim), case.randint(0, 2000, tokens)
        _rotary_close(case, case.call(x, positions, theta), _rotated(x, positions, theta), x, positions, theta)
    for _ in range(10):
        q, k = case.randn(1, 1, 16), case.randn(1, 1, 16)
        m, n, shift = case.randint(0, 1000, 1), case.randint(0, 1000, 1), case.randint(1, 1000)
        scores = [float((case.call(q, m + s, 10000.0) * case.call(k, n + s, 10000.0)).sum()) for s in (0, shift)]
        case.close(scores[1], scores[0], f"the dot product after both positions moved by {shift}", atol=5e-3,
                   hint="It may depend on the distance of the two positions only.")


@check_gqa_attention.part("example")
def _gqa_example(case: Case) -> None:
    q = torch.ones(1, 4, 2)
    v = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])  # one key, two KV heads: each query head returns what it reads
    got = case.call(q, torch.ones(1, 2, 2), v, torch.ones(1, 1, dtype=torch.bool))
    case.close(got, torch.tensor([[[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [3.0, 4.0]]]), "the output [query, head, dimension]",
               hint="Heads 0 and 2 read KV head 0, heads 1 and 3 read KV head 1: h % 2, not h // 2.")


@check_gqa_attention.part("edges")
def _gqa_edges(case: Case) -> None:
    q, k, v, allowed = _attention_case(case, 1, 6, 4, 2, 8)
    one_key = torch.zeros(1, 6, dtype=torch.bool)
    one_key[0, 2] = True
    got = case.call(q, k, v, one_key)
    case.close(got, v[2][torch.arange(4) % 2][None], "the output where one key is allowed", hint="Then its weight is 1: the output is its v.")
    for heads, kv_heads in ((3, 3), (6, 1), (6, 2)):
        q, k, v, allowed = _attention_case(case, 2, 5, heads, kv_heads, 4)
        _gqa_close(case, q, k, v, allowed)
    q, k, v, allowed = _attention_case(case, 1, 6, 4, 2, 8)
    _gqa_close(case, q + 8, k + 8, v, allowed, hint="Large scores overflow exp(): use softmax on the masked scores.")
    fused = case.randn(5, 8, 4)
    _gqa_close(case, *fused.split([4, 2, 2], dim=1), torch.ones(5, 5, dtype=torch.bool).tril())
    _no_copy(case, queries=1, seq_len=96, heads=8, kv_heads=2, head_dim=32)
    _no_copy(case, queries=3, seq_len=64, heads=6, kv_heads=1, head_dim=64)


@check_gqa_attention.part("random")
def _gqa_random(case: Case) -> None:
    for _ in range(15):
        queries, kv_heads, head_dim = case.randint(1, 7), case.randint(1, 4), case.randint(2, 20)
        _gqa_close(case, *_attention_case(case, queries, queries + case.randint(0, 6), kv_heads * case.randint(1, 5), kv_heads, head_dim))
    for _ in range(3):
        kv_heads = case.randint(1, 4)
        _no_copy(case, case.randint(1, 4), case.randint(48, 80), kv_heads * case.randint(3, 5), kv_heads, 64)


@check_window_bias.part("example")
def _bias_example(case: Case) -> None:
    # Sequence 0 is new and brings its 3 tokens; sequence 1 has 4 positions and brings the last of them.
    _bias_equal(case, [3, 1], [3, 4], 1)


@check_window_bias.part("edges")
def _bias_edges(case: Case) -> None:
    _bias_equal(case, [4], [4], None)
    _bias_equal(case, [4], [4], 0)
    _bias_equal(case, [2, 5], [9, 5], 100)
    _bias_equal(case, [1, 1, 1], [1, 7, 3], 2)
    _bias_equal(case, [0, 2], [6, 3], 1)
    case.raises(ValueError, case.student, [2, 4], [2, 3], None, hint="A sequence cannot bring more tokens than it is long.")


@check_window_bias.part("random")
def _bias_random(case: Case) -> None:
    for _ in range(20):
        seq_lens = [case.randint(1, 14) for _ in range(case.randint(1, 5))]
        query_lens = [case.randint(1, n + 1) for n in seq_lens]
        _bias_equal(case, query_lens, seq_lens, case.rng.choice((None, 0, 1, 2, 5, 20)))


@check_count_flops.part("example")
def _flops_example(case: Case) -> None:
    # Projections 2·8·2·(2·2 + 2·1) = 192 a token, MLP 2·3·8·10 = 480, scores and sums 2·2·2·2 = 16 a key, logits 2·8·20 = 320 a row.
    config = _config(hidden_size=8, intermediate_size=10, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, vocab_size=20)
    case.equal(_flops(config, [3], [3], 1), (3 * (192 + 480), (1 + 2 + 3) * 16, 320), "the reference")
    _flops_equal(case, config, [3], [3], 1)


@check_count_flops.part("edges")
def _flops_edges(case: Case) -> None:
    _flops_equal(case, _config(), [1], [1000], 1, hint="One token goes through the layers, and looks at 1,000 keys.")
    _flops_equal(case, _config(), [4], [4], 0, hint="No row wants logits here.")
    _flops_equal(case, _config(hidden_size=16, head_dim=32), [2], [2], 2,
                 hint="q_proj is [num_heads · head_dim, hidden_size], and o_proj the other way round.")
    _flops_equal(case, _config(num_layers=3, layer_windows=(None, 4, 1)), [5, 2], [9, 2], 2,
                 hint="A layer with window W reads at most W keys for a query, its own position included.")
    _flops_equal(case, _config(tie_word_embeddings=False), [2], [2], 1,
                 hint="Tied or not, the embedding is a lookup and the logits are a product.")


@check_count_flops.part("random")
def _flops_random(case: Case) -> None:
    for _ in range(20):
        layers, kv_heads = case.randint(1, 5), case.randint(1, 4)
        config = _config(hidden_size=case.randint(8, 65), intermediate_size=case.randint(8, 99), num_layers=layers,
                         num_kv_heads=kv_heads, num_heads=kv_heads * case.randint(1, 5), head_dim=2 * case.randint(1, 20),
                         vocab_size=case.randint(10, 200), layer_windows=tuple(case.rng.choice((None, 1, 3, 8)) for _ in range(layers)))
        seq_lens = [case.randint(1, 30) for _ in range(case.randint(1, 4))]
        _flops_equal(case, config, [case.randint(1, n + 1) for n in seq_lens], seq_lens, case.randint(0, 5))


def _rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """A pair as a complex number, its rotation as a product."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    frequencies = theta ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
    turns = torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None, None] * frequencies)
    return torch.view_as_real(pairs * turns).flatten(-2).float()


def _rotary_close(case: Case, got: Tensor, expected: Tensor, x: Tensor, positions: Tensor, theta: float) -> None:
    """As case.close, with a hint for the likeliest mistakes: the other layout, the other direction."""
    halves = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    other_layout = _rotated(halves, positions, theta).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    hint = None
    if isinstance(got, Tensor) and got.shape == expected.shape:
        if torch.allclose(got.float(), other_layout, atol=2e-3):
            hint = "This is the half-split layout of Hugging Face checkpoints; here neighbours 2i and 2i+1 form a pair."
        elif torch.allclose(got.float(), _rotated(x, -positions, theta), atol=2e-3):
            hint = "The pairs turn clockwise: check the signs, (a cos - b sin, b cos + a sin)."
    case.close(got, expected, "the rotated vectors [token, head, dimension]", atol=2e-3, hint=hint)


def _attention_case(case: Case, queries: int, seq_len: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, ...]:
    allowed = case.randn(queries, seq_len) > 0
    allowed[torch.arange(queries), case.randint(0, seq_len, queries)] = True
    return case.randn(queries, heads, head_dim), case.randn(seq_len, kv_heads, head_dim), case.randn(seq_len, kv_heads, head_dim), allowed


def _gqa_close(case: Case, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, hint: str | None = None) -> None:
    heads = []
    for head in range(q.shape[1]):
        keys, values = k[:, head % k.shape[1]].double(), v[:, head % k.shape[1]].double()
        scores = q[:, head].double() @ keys.T / math.sqrt(q.shape[2])
        heads.append(scores.masked_fill(~allowed, -INF).softmax(-1) @ values)
    case.close(case.call(q, k, v, allowed), torch.stack(heads, dim=1).float(), "the output [query, head, dimension]",
               atol=1e-4, rtol=1e-4, hint=hint)


class _Watch(TorchDispatchMode):
    """Notes the largest tensor that is made with memory of its own (a view has none), and by which operation."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.operation, self.operations = 0, "", set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.operations.add(function.name())
        there = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in there:
                elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                if elements > self.largest:
                    self.largest, self.operation = elements, function.name()
        return out


def _no_copy(case: Case, queries: int, seq_len: int, heads: int, kv_heads: int, head_dim: int) -> None:
    """A shape at which K repeated for each query head would be the largest tensor by far."""
    q, k, v, allowed = _attention_case(case, queries, seq_len, heads, kv_heads, head_dim)
    watch = _Watch()

    def watched(*tensors: Tensor) -> Tensor:
        with watch:
            return case.student(*tensors)

    watched.__qualname__ = getattr(case.student, "__qualname__", "gqa_attention")
    case.run(watched, q, k, v, allowed)
    case.true(not any("scaled_dot_product" in name for name in watch.operations),
              "torch's own attention was called; write the two products and the softmax yourself")
    limit = max(k.numel(), q.numel(), heads * queries * seq_len)
    case.true(watch.largest <= limit,
              f"{watch.operation} made a tensor of {watch.largest:,} elements; K has {k.numel():,}, the scores "
              f"{heads * queries * seq_len:,}, and K repeated for every query head would have {heads * seq_len * head_dim:,}",
              hint="Broadcasting in `@` copies too: put the query heads of a group side by side, as more rows of one product.")


def _bias_equal(case: Case, query_lens: list[int], seq_lens: list[int], window: int | None) -> None:
    got = case.call(query_lens, seq_lens, window)
    case.true(isinstance(got, Tensor) and got.dtype == torch.float32, "the bias must be a float32 tensor")
    case.equal(list(got.shape), [sum(query_lens), max(seq_lens)], "the shape [queries, longest sequence]")
    queries = [(i, n - m + j) for i, (m, n) in enumerate(zip(query_lens, seq_lens)) for j in range(m)]
    for row, (sequence, position) in enumerate(queries):
        for key in range(max(seq_lens)):
            visible = key <= position and (window is None or key >= position - window)
            value = float(got[row, key])
            case.true(value == (0.0 if visible else -INF),
                      f"row {row} (sequence {sequence}, position {position}), key {key} with window={window}: the bias is "
                      f"{value}, expected {0.0 if visible else -INF}: the query may {'' if visible else 'not '}see this key")


def _config(**changes) -> ModelConfig:
    settings = dict(
        model_type="llama", vocab_size=50, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=6, max_position_embeddings=4096, rms_norm_eps=1e-5, tie_word_embeddings=True, qkv_bias=False, o_bias=False,
        mlp_bias=False, qk_norm=False, rope=RopeConfig(), eos_token_ids=(1,), bos_token_id=0) | changes
    settings.setdefault("layer_windows", (None,) * settings["num_layers"])
    return ModelConfig(**settings)


def _flops(c: ModelConfig, query_lens: list[int], seq_lens: list[int], num_logits: int) -> tuple[int, int, int]:
    """FLOPs of the weights, of the visible scores, of the logits: layer by layer, query by query, key by key."""
    weights = pairs = 0
    for window in c.layer_windows:
        for new, length in zip(query_lens, seq_lens):
            for position in range(length - new, length):
                weights += c.hidden_size * c.num_heads * c.head_dim * 2  # q_proj, o_proj
                weights += c.hidden_size * c.num_kv_heads * c.head_dim * 2  # k_proj, v_proj
                weights += c.hidden_size * c.intermediate_size * 3  # gate_proj, up_proj, down_proj
                pairs += sum(1 for key in range(position + 1) if window is None or key > position - window)
    return 2 * weights, 2 * pairs * 2 * c.num_heads * c.head_dim, 2 * num_logits * c.hidden_size * c.vocab_size


def _flops_equal(case: Case, c: ModelConfig, query_lens: list[int], seq_lens: list[int], num_logits: int, hint: str = "") -> None:
    weights, scores, logits = _flops(c, query_lens, seq_lens, num_logits)
    case.equal(case.call(c, query_lens, seq_lens, num_logits), weights + scores + logits,
               f"the FLOPs of query_lens={query_lens}, seq_lens={seq_lens}, num_logits={num_logits} (hidden_size={c.hidden_size}, "
               f"intermediate_size={c.intermediate_size}, {c.num_heads} heads, {c.num_kv_heads} KV heads, head_dim={c.head_dim}, "
               f"vocab_size={c.vocab_size}, layer_windows={c.layer_windows})",
               hint=f"{hint} Expected: weights {weights:,}, scores and sums {scores:,}, logits {logits:,}.".strip())
