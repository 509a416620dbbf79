"""References of chapter 02's checks: complex rotations, attention head by head, counted products. Built in chapter 02.

Each comparison knows the likeliest mistakes: it computes what they would give, and names the one that was returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from minillm.book.checks import Case
from minillm.book.checks.watch import LargestTensor
from minillm.model.config import ModelConfig

INF = float("inf")


def rotary_close(case: Case, x: Tensor, positions: Tensor, theta: float, expected: Tensor | None = None) -> None:
    """Calls the student's rotation and compares it with complex numbers."""
    expected = rotated(x, positions, theta) if expected is None else expected
    halves = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    guesses = {
        "This is the half-split layout of Hugging Face checkpoints; here neighbours 2i and 2i+1 form a pair.": _apart(
            rotated(halves, positions, theta)
        ),
        (
            "The pairs are turned correctly, but then all first members stand before all second ones: "
            "they must alternate."
        ): _apart(expected),
        "The pairs turn clockwise: check the signs, (a cos - b sin, b cos + a sin).": rotated(x, -positions, theta),
    }
    got, what = case.call(x, positions, theta), "the rotated vectors [token, head, dimension]"
    case.close(got, expected, what, atol=2e-3, hint=_likeliest(got, expected, guesses, atol=2e-3))
    case.is_a(got, torch.float32, "the result")


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """A pair as a complex number, its rotation as a product."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    frequencies = theta ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
    turns = torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None, None] * frequencies)
    return torch.view_as_real(pairs * turns).flatten(-2).float()


def _apart(x: Tensor) -> Tensor:
    """All first members of the pairs, then all second ones."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def attention_case(
    case: Case, queries: int, seq_len: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[Tensor, ...]:
    allowed = case.randn(queries, seq_len) > 0
    allowed[torch.arange(queries), case.randint(0, seq_len, queries)] = True
    return (
        case.randn(queries, heads, head_dim),
        case.randn(seq_len, kv_heads, head_dim),
        case.randn(seq_len, kv_heads, head_dim),
        allowed,
    )


def gqa_close(
    case: Case,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    expected: Tensor | None = None,
    what: str = "the output [query, head, dimension]",
    hint: str | None = None,
) -> None:
    """Calls the student's attention and compares it, head by head."""
    group, kv_heads, size = q.shape[1] // k.shape[1], k.shape[1], q.shape[2]
    got = case.call(q, k, v, allowed)
    expected = attend(q, k, v, allowed) if expected is None else expected
    guesses = {
        (
            "These are the values when consecutive query heads share a KV head: "
            f"here query head h reads KV head h % {kv_heads}, not h // {group}."
        ): attend(q, k, v, allowed, kv_head=lambda head: head // group),
        f"The scores were not scaled: divide them by sqrt(head_dim), here by {size**0.5:.3g}.": attend(
            q, k, v, allowed, divisor=1.0
        ),
        f"The scores were divided by head_dim = {size}: divide them by its square root, {size**0.5:.3g}.": attend(
            q, k, v, allowed, divisor=float(size)
        ),
        (
            "The mask is the wrong way round: True means that the query may look, so -inf goes where allowed is False."
        ): attend(q, k, v, ~allowed),
        "These are the values for attention over all keys: the mask was not applied.": attend(
            q, k, v, torch.ones_like(allowed)
        ),
    }
    if isinstance(got, Tensor) and got.isnan().any():
        hint = (
            "NaN comes from a softmax in which every score is -inf or one is inf: "
            "mask the scores before the softmax, where allowed is False."
        )
    case.close(got, expected, what, atol=1e-4, rtol=1e-4, hint=_likeliest(got, expected, guesses, atol=1e-4) or hint)
    case.is_a(got, torch.float32, "the result")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    divisor: float | None = None,
    kv_head: Callable[[int], int] | None = None,
) -> Tensor:
    """One head at a time, in float64."""
    heads = []
    for head in range(q.shape[1]):
        kv = kv_head(head) if kv_head else head % k.shape[1]
        scores = q[:, head].double() @ k[:, kv].double().T / (divisor or math.sqrt(q.shape[2]))
        heads.append(scores.masked_fill(~allowed, -INF).softmax(-1) @ v[:, kv].double())
    return torch.stack(heads, dim=1).float()


def _likeliest(got: object, expected: Tensor, guesses: dict[str, Tensor], atol: float) -> str | None:
    """The hint whose values were returned, unless they are right."""
    if (
        not isinstance(got, Tensor)
        or got.shape != expected.shape
        or got.is_complex()
        or torch.allclose(got.float(), expected, rtol=1e-4, atol=atol)
    ):
        return None
    return next(
        (
            hint
            for hint, guess in guesses.items()
            if torch.allclose(got.float(), guess, rtol=1e-4, atol=atol, equal_nan=True)
        ),
        None,
    )


def no_copy(case: Case, queries: int, seq_len: int, heads: int, kv_heads: int, head_dim: int) -> None:
    """A shape at which K repeated for each query head would be the largest tensor by far."""
    q, k, v, allowed = attention_case(case, queries, seq_len, heads, kv_heads, head_dim)
    watch = LargestTensor()

    def watched(*tensors: Tensor) -> Tensor:
        with watch:
            return case.student(*tensors)

    watched.__qualname__ = getattr(case.student, "__qualname__", "gqa_attention")
    case.run(watched, q, k, v, allowed)
    case.true(
        not any("scaled_dot_product" in name for name in watch.operations),
        "torch's own attention was called; write the two products and the softmax yourself",
    )
    limit = max(k.numel(), q.numel(), heads * queries * seq_len)
    case.true(
        watch.largest <= limit,
        f"{watch.operation} made a tensor of {watch.largest:,} elements; q has {q.numel():,}, k has {k.numel():,}, the "
        f"scores have {heads * queries * seq_len:,}, and K repeated for every query head would have "
        f"{heads * seq_len * head_dim:,}",
        hint=(
            "Broadcasting in `@` copies too: put the query heads of a group side by side, as more rows of one product."
        ),
    )


def bias_equal(case: Case, query_lens: list[int], seq_lens: list[int], window: int | None) -> None:
    got = case.call(query_lens, seq_lens, window)
    case.is_a(got, torch.float32, "the bias")
    case.equal(list(got.shape), [sum(query_lens), max(seq_lens)], "the shape [queries, longest sequence]")
    queries = [(i, n - m + j) for i, (m, n) in enumerate(zip(query_lens, seq_lens)) for j in range(m)]
    for row, (sequence, position) in enumerate(queries):
        for key in range(max(seq_lens)):
            visible = key <= position and (window is None or key >= position - window)
            value = float(got[row, key])
            case.true(
                value == (0.0 if visible else -INF),
                f"row {row} (sequence {sequence}, position {position}), key {key} with window={window}: the bias is "
                f"{value}, expected {0.0 if visible else -INF}: the query may {'' if visible else 'not '}see this key",
            )


def flops(
    c: ModelConfig,
    query_lens: list[int],
    seq_lens: list[int],
    num_logits: int,
    mlp_products: int = 3,
    every_key: bool = False,
) -> tuple[int, int, int]:
    """FLOPs of the weights, of the visible scores, of the logits: layer by layer, query by query, key by key."""
    weights = pairs = 0
    for window in c.layer_windows:
        for new, length in zip(query_lens, seq_lens):
            for position in range(length - new, length):
                weights += c.hidden_size * c.num_heads * c.head_dim * 2  # q_proj, o_proj
                weights += c.hidden_size * c.num_kv_heads * c.head_dim * 2  # k_proj, v_proj
                weights += c.hidden_size * c.intermediate_size * mlp_products  # gate_proj, up_proj, down_proj
                last = length - 1 if every_key else position
                pairs += sum(1 for key in range(last + 1) if window is None or key > position - window)
    return 2 * weights, 2 * pairs * 2 * c.num_heads * c.head_dim, 2 * num_logits * c.hidden_size * c.vocab_size


def flops_equal(
    case: Case, c: ModelConfig, query_lens: list[int], seq_lens: list[int], num_logits: int, hint: str = ""
) -> None:
    """Calls the student's counter; a count that is off by one of the usual omissions is told so."""
    step = (c, query_lens, seq_lens, num_logits)
    weights, scores, logits = flops(*step)
    total, got = weights + scores + logits, case.call(*step)
    one_projection = weights - flops(*step, mlp_products=2)[0]
    guesses = {
        "The MLP of these models has three products: gate_proj, up_proj and down_proj.": total - one_projection,
        "A multiply-add is two FLOPs.": total // 2,
        "Each visible pair costs twice: a product for the score, and one for the weighted sum of V.": total
        - scores // 2,
        "A query sees no later key: count p + 1 keys for position p.": total - scores + flops(*step, every_key=True)[1],
        "Logits are computed for num_logits rows, however many new tokens there are.": total
        - logits
        + 2 * sum(query_lens) * c.hidden_size * c.vocab_size,
        "o_proj is a product too, [hidden_size, num_heads · head_dim].": total
        - 2 * sum(query_lens) * len(c.layer_windows) * c.hidden_size * c.num_heads * c.head_dim,
    }
    told = next(
        (told for told, guess in guesses.items() if guess != total and isinstance(got, (int, float)) and got == guess),
        hint,
    )
    case.equal(
        got,
        total,
        f"the FLOPs of query_lens={query_lens}, seq_lens={seq_lens}, num_logits={num_logits} "
        f"(hidden_size={c.hidden_size}, intermediate_size={c.intermediate_size}, {c.num_heads} heads, "
        f"{c.num_kv_heads} KV heads, head_dim={c.head_dim}, vocab_size={c.vocab_size}, "
        f"layer_windows={c.layer_windows})",
        hint=f"{told} Expected: weights {weights:,}, scores and sums {scores:,}, logits {logits:,}.".strip(),
    )
    case.is_a(got, int, "the result")
