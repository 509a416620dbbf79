"""Plausible mistakes in the exercises of chapter 02 that no misconception of its checkers covers."""

from minillm.book.proofs import Mutant, edited

MUTANTS = {
    "interleaved_rotary": [
        edited(
            "positions along the heads", "positions[:, None, None]", "positions[:, None]", "interleaved_rotary: edges"
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
        edited("float64", "dim=-1).flatten(-2)", "dim=-1).flatten(-2).double()", "another dtype"),
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
        edited("float64", "v).flatten(1, 2)", "v).flatten(1, 2).double()", "another dtype"),
        edited(
            "exponentials without a maximum",
            "scores.masked_fill(~allowed, -torch.inf).softmax(-1)",
            "(scores.exp() * allowed) / (scores.exp() * allowed).sum(-1, keepdim=True)",
            "use softmax on the masked scores",
        ),
    ],
    "window_bias": [
        edited(
            "an error without numbers",
            'f"query_len={query_len} is more than its seq_len={seq_len}"',
            '"query_len larger than seq_len"',
            "it must name 14 and 13",
        ),
        edited(
            "an error with the largest numbers",
            'f"query_len={query_len} is more than its seq_len={seq_len}"',
            'f"{max(query_lens)}, {max(seq_lens)}"',
            "it must name 14 and 13",
        ),
        edited(
            "a mask instead of a bias", "torch.where(visible, 0.0, -torch.inf)", "visible", "another kind of number"
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
        edited("a float", "return 2 * multiply_adds", "return 2.0 * multiply_adds", "a float, not an int"),
        edited(
            "a tensor",
            "return 2 * multiply_adds",
            "return torch.tensor(2 * multiply_adds)",
            "an int64 tensor, not an int",
        ),
    ],
}
