"""Plausible mistakes in the exercises of chapter 02: every one of them must fail its checks."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "interleaved_rotary": [
        Mutant(
            "the half-split layout of the checkpoints",
            source="""
def interleaved_rotary(x, positions, theta):
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)
""",
            expect="half-split layout",
        ),
        Mutant(
            "turns clockwise",
            replace=(
                "a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()",
                "a * angles.cos() + b * angles.sin(), b * angles.cos() - a * angles.sin()",
            ),
            expect="clockwise",
        ),
        Mutant(
            "takes pairs apart and does not put them back side by side",
            replace=("torch.stack(turned, dim=-1).flatten(-2)", "torch.cat(turned, dim=-1)"),
            expect="they must alternate",
        ),
        Mutant(
            "counts positions instead of reading them",
            replace=("positions[:, None, None]", "torch.arange(len(x))[:, None, None]"),
            expect="the rotated vectors",
        ),
        Mutant(
            "positions along the heads",
            replace=("positions[:, None, None]", "positions[:, None]"),
            expect="interleaved_rotary: edges",
        ),
        Mutant(
            "frequencies fall half as fast",
            replace=("torch.arange(0, x.shape[-1], 2) /", "torch.arange(x.shape[-1] // 2) /"),
            expect="the rotated vectors",
        ),
        Mutant(
            "complex numbers over whatever strides there are",
            source="""
def interleaved_rotary(x, positions, theta):
    angles = positions[:, None, None] * theta ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
""",
            expect="whose last dimension has a stride",
        ),
        Mutant(
            "float64",
            replace=("dim=-1).flatten(-2)", "dim=-1).flatten(-2).double()"),
            expect="must be a float32 tensor",
        ),
        Mutant(
            "the package's rotation in a helper",
            source="""
def halves(x, angles):
    from minillm.model.layers import apply_rotary
    return apply_rotary(x, angles.cos(), angles.sin())


def interleaved_rotary(x, positions, theta):
    angles = positions[:, None] * theta ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    turned = halves(torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1), angles)
    return turned.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
""",
            expect="layers.apply_rotary, here or in a function that it calls",
        ),
    ],
    "gqa_attention": [
        Mutant(
            "deals heads in consecutive groups",
            source="""
def gqa_attention(q, k, v, allowed):
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("qkgd,skd->kgqs", grouped, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("kgqs,skd->qkgd", weights, v).flatten(1, 2)
""",
            expect="h % 2, not h // 2",
        ),
        Mutant(
            "repeats K and V",
            source="""
def gqa_attention(q, k, v, allowed):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat(1, group, 1), v.repeat(1, group, 1)
    scores = torch.einsum("qhd,shd->hqs", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("hqs,shd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v)
""",
            expect="K repeated for every query head",
        ),
        Mutant(
            "lets the product broadcast K, which copies it",
            source="""
def gqa_attention(q, k, v, allowed):
    grouped = q.unflatten(1, (-1, k.shape[1])).permute(2, 1, 0, 3)
    keys, values = k.transpose(0, 1)[:, None], v.transpose(0, 1)[:, None]
    scores = grouped @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
    out = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ values
    return out.permute(2, 1, 0, 3).flatten(1, 2)
""",
            expect="K repeated for every query head",
        ),
        Mutant("forgets the scale", replace=(" / q.shape[-1] ** 0.5", ""), expect="gqa_attention: example: the output"),
        Mutant("forgets the scale, and is told", replace=(" / q.shape[-1] ** 0.5", ""), expect="were not scaled"),
        Mutant(
            "divides by the size, not by its root",
            replace=(" / q.shape[-1] ** 0.5", " / q.shape[-1]"),
            expect="divided by head_dim = 4",
        ),
        Mutant(
            "masks what is allowed",
            replace=("masked_fill(~allowed", "masked_fill(allowed"),
            expect="the wrong way round",
        ),
        Mutant(
            "torch's attention",
            source="""
def gqa_attention(q, k, v, allowed):
    deal = torch.arange(q.shape[1]).view(-1, k.shape[1]).T.flatten()
    q, k, v = q[:, deal].transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)[0].transpose(0, 1)
    return out[:, deal.argsort()]
""",
            expect="gqa_attention: example: torch's own attention was called",
        ),
        Mutant(
            "joins two dimensions with view",
            source="""
def gqa_attention(q, k, v, allowed):
    num_kv_heads, size = k.shape[1:]
    rows = q.view(-1, num_kv_heads, size).transpose(0, 1)
    scores = (rows @ k.permute(1, 2, 0) / size ** 0.5).unflatten(1, (len(q), -1)).masked_fill(~allowed[:, None], -torch.inf)
    out = scores.softmax(-1).flatten(1, 2) @ v.transpose(0, 1)
    return out.transpose(0, 1).reshape(q.shape)
""",
            expect="view() cannot join",
        ),
        Mutant("float64", replace=("v).flatten(1, 2)", "v).flatten(1, 2).double()"), expect="must be a float32 tensor"),
        Mutant(
            "ignores the mask",
            replace=("scores.masked_fill(~allowed, -torch.inf)", "scores"),
            expect="one key is allowed",
        ),
        Mutant(
            "exponentials without a maximum",
            replace=(
                "scores.masked_fill(~allowed, -torch.inf).softmax(-1)",
                "(scores.exp() * allowed) / (scores.exp() * allowed).sum(-1, keepdim=True)",
            ),
            expect="gqa_attention: edges",
        ),
    ],
    "window_bias": [
        Mutant("one position too few", replace=("back <= window", "back < window"), expect="may see this key"),
        Mutant(
            "forgets where the queries begin",
            replace=("torch.arange(start, end)", "torch.arange(end - start)"),
            expect="window_bias: example",
        ),
        Mutant(
            "a window, and the future too",
            replace=("visible = back >= 0", "visible = back >= -len(positions)"),
            expect="window_bias: example",
        ),
        Mutant(
            "a large number instead of -inf", replace=("0.0, -torch.inf", "0.0, -1e9"), expect="window_bias: example"
        ),
        Mutant(
            "accepts more tokens than the sequence has",
            replace=("if query_len > seq_len:", "if False:"),
            expect="ValueError",
        ),
        Mutant(
            "an error without numbers",
            replace=('f"query_len={query_len} is more than its seq_len={seq_len}"', '"query_len larger than seq_len"'),
            expect="must name both numbers",
        ),
        Mutant(
            "an error with the largest numbers",
            replace=(
                'f"query_len={query_len} is more than its seq_len={seq_len}"',
                'f"{max(query_lens)}, {max(seq_lens)}"',
            ),
            expect="must name both numbers",
        ),
        Mutant(
            "a mask instead of a bias",
            replace=("torch.where(visible, 0.0, -torch.inf)", "visible"),
            expect="must be a float32 tensor; got a bool tensor",
        ),
        Mutant(
            "the package's mask in a helper",
            source="""
def rows(query_len, seq_len, longest, window):
    from minillm.model.attention import causal_mask
    if query_len > seq_len:
        raise ValueError(f"query_len={query_len} is more than its seq_len={seq_len}")
    mask = causal_mask(query_len, seq_len, None if window is None else window + 1)
    return torch.nn.functional.pad(mask, (0, longest - seq_len), value=False)


def window_bias(query_lens, seq_lens, window):
    masks = [rows(m, n, max(seq_lens), window) for m, n in zip(query_lens, seq_lens)]
    return torch.where(torch.cat(masks), 0.0, -torch.inf)
""",
            expect="attention.causal_mask, here or in a function that it calls",
        ),
    ],
    "count_flops": [
        Mutant(
            "every query sees every key",
            replace=(
                "p + 1 if window is None else min(p + 1, window) for p in new_positions",
                "max(seq_lens) if window is None else window for p in new_positions",
            ),
            expect="count_flops: example",
        ),
        Mutant(
            "K and V as wide as Q",
            replace=("(c.num_heads + c.num_kv_heads)", "(c.num_heads + c.num_heads)"),
            expect="count_flops: example",
        ),
        Mutant(
            "logits for every token",
            replace=("num_logits * c.hidden_size", "len(new_positions) * c.hidden_size"),
            expect="count_flops: example",
        ),
        Mutant(
            "a multiply-add as one operation",
            replace=("return 2 * multiply_adds", "return multiply_adds"),
            expect="count_flops: example",
        ),
        Mutant(
            "no windows",
            replace=("p + 1 if window is None else min(p + 1, window)", "p + 1"),
            expect="layer_windows=(None, 4, 1)",
        ),
        Mutant(
            "head_dim from the hidden size",
            replace=(
                "c.hidden_size * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)",
                "c.hidden_size * (c.hidden_size // c.num_heads) * 2 * (c.num_heads + c.num_kv_heads)",
            ),
            expect="count_flops:",
        ),
        Mutant(
            "two products in the MLP",
            replace=("3 * c.hidden_size", "2 * c.hidden_size"),
            expect="gate_proj, up_proj and down_proj",
        ),
        Mutant(
            "a float",
            replace=("return 2 * multiply_adds", "return 2.0 * multiply_adds"),
            expect="a float, not an int",
        ),
        Mutant(
            "a tensor",
            replace=("return 2 * multiply_adds", "return torch.tensor(2 * multiply_adds)"),
            expect="an int64 tensor, not an int",
        ),
    ],
}
