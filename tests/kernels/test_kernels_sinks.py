"""Attention sinks, kept tokens and learned logits, in the Triton kernels against float64, and a model over 8-bit pages
or with sinks, in Triton and in torch. Interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from minillm.book.traffic import record_traffic
from minillm.engine.graphs import DecodeGraphs
from minillm.kernels import decode_plan
from minillm.kernels.decode_plan import plan_decode
from minillm.kernels.kv_codes import INT4
from minillm.kernels.language import MODE
from minillm.kernels.paged_decode import paged_decode, torch_paged_decode
from minillm.kernels.paged_prefill import paged_prefill, torch_paged_prefill
from minillm.kv_cache.paged import PagedKVCache
from minillm.kv_cache.retention import RetentionPolicy, SinkTurn
from minillm.kv_cache.torch_attention import TorchAttention
from minillm.kv_cache.triton_attention import TritonAttention
from tests.engine.test_triton_engine import PROMPT, batch_of, load, rows_of, settings_of, step_of, text_of
from tests.helpers.kernel_cases import error, needs_triton, poisoned
from tests.kernels.test_kernels_attention import TOLERANCE, paged, qkv, starts
from tests.kernels.test_kernels_kv_quantized import as_bytes, every_dtype, quantized_pages

pytestmark = needs_triton


def by_hand(
    q: Tensor, q_sink: Tensor, k: Tensor, v: Tensor, window: int, sinks: int, logits: Tensor | None = None
) -> Tensor:
    """Attention with sinks, query by query and head by head, in float64; `logits` are learned ones, [num_heads]."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for row in range(len(q)):
        t = len(k) - len(q) + row
        seen = [key for key in range(t + 1) if key < sinks or key > t - window]
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            scores = torch.stack(
                [(q_sink if key < sinks else q)[row, head].double() @ k[key, kv_head].double() for key in seen]
            )
            scores = scores / q.shape[2] ** 0.5
            if logits is not None:
                scores = torch.cat([scores, logits[head, None].double()])
            out[row, head] = scores.softmax(0)[: len(seen)] @ v[seen, kv_head].double()
    return out


SINK_CASES = [  # length, tokens it brings, sinks, window
    (3, 3, 4, 8),  # fewer than the sinks
    (12, 12, 4, 8),
    (40, 7, 4, 20),
    (150, 30, 4, 9),  # whole tiles between the sinks and the window
    (150, 2, 17, 33),  # sinks over several blocks
    (150, 3, 4, 200),  # all of it within the window
]


@every_dtype
@pytest.mark.parametrize("codes", [None, torch.float8_e4m3fn], ids=["plain", "fp8"])
@pytest.mark.parametrize("length, brings, sinks, window", SINK_CASES)
def test_sinks(length, brings, sinks, window, codes, dtype):
    torch.manual_seed(4)
    heads, kv_heads, dim, block_size = 4, 2, 16, 4
    pages, scales, exact, seq_lens, table = quantized_pages([length], kv_heads, dim, block_size, codes or torch.int8)
    if codes is None:
        pages, scales = [page.to(dtype) for page in exact], [None, None]
        exact = [page.double() for page in pages]
    first_kept = max(length - brings + 1 - window, sinks)  # what no query sees any more is given back: the null block
    for block in range(-(-sinks // block_size), first_kept // block_size):
        table[0, block] = 0
    for part in (*pages, *exact):
        as_bytes(part)[0] = 0
    if codes is not None:
        scales[0][0] = scales[1][0] = 0
    q, q_sink = qkv(brings, heads, kv_heads, dim, dtype)[0], qkv(brings, heads, kv_heads, dim, dtype)[0].contiguous()
    k, v = (
        exact[0][table[0]].permute(0, 3, 1, 2).flatten(0, 1)[:length],
        exact[1][table[0]].transpose(1, 2).flatten(0, 1)[:length],
    )
    reference = by_hand(q, q_sink, k, v, window, sinks)
    index = starts([brings]), seq_lens, table, brings, window
    out = poisoned(q.shape, dtype)
    paged_prefill(q, *pages, *index, None, out, *scales, sinks, q_sink)
    assert error(out, reference) < TOLERANCE[dtype]
    assert (
        error(torch_paged_prefill(q, *pages, *index, None, None, *scales, sinks, q_sink), reference) < TOLERANCE[dtype]
    )
    for num_splits in (1, 2):
        index = seq_lens, table, num_splits, window
        out = poisoned((1, heads, dim), dtype)
        paged_decode(q[-1:], *pages, *index, None, out, *scales, sinks, q_sink[-1:].clone())
        assert error(out, reference[-1:]) < TOLERANCE[dtype]
    twin = torch_paged_decode(q[-1:], *pages, *index, None, None, *scales, sinks, q_sink[-1:])
    assert error(twin, reference[-1:]) < TOLERANCE[dtype]


LEARNED_CASES = [  # lengths, tokens each brings, sinks, window
    ([1, 9], [1, 2], 0, None),
    ([150, 33, 64], [1, 1, 5], 0, 20),
    ([40], [7], 4, 20),  # kept tokens as well
]


@every_dtype
@pytest.mark.parametrize("codes", [None, torch.int8, INT4], ids=["plain", "int8", "int4"])
@pytest.mark.parametrize("lengths, brings, sinks, window", LEARNED_CASES)
def test_learned_sink_logits_count_once(lengths, brings, sinks, window, codes, dtype, monkeypatch):
    """Whatever the splits: some logits are far above all scores, some far below, one head has none."""
    torch.manual_seed(6)
    heads, kv_heads, dim, block_size = 6, 2, 16, 4
    pages, scales, exact, seq_lens, table = quantized_pages(lengths, kv_heads, dim, block_size, codes or torch.int8)
    if codes is None:
        pages, scales = [page.to(dtype) for page in exact], [None, None]
        exact = [page.double() for page in pages]
    logits = torch.tensor([0.0, 9.0, -9.0, float("-inf"), 1.5, -2.0], device=table.device)
    q, q_sink = qkv(sum(brings), heads, kv_heads, dim, dtype)[0], qkv(sum(brings), heads, kv_heads, dim, dtype)[0]
    q_sink, ends = q_sink.contiguous(), starts(brings).tolist()
    reference = []
    for row, (length, start, end) in enumerate(zip(lengths, ends, ends[1:])):
        k = exact[0][table[row]].permute(0, 3, 1, 2).flatten(0, 1)[:length]
        v = exact[1][table[row]].transpose(1, 2).flatten(0, 1)[:length]
        kept = window or length, sinks
        reference.append(by_hand(q[start:end], q_sink[start:end], k, v, *kept, logits))
    turned = (sinks, q_sink) if sinks else (0, None)
    index = starts(brings), seq_lens, table, max(brings), window
    for attend in (paged_prefill, torch_paged_prefill):
        out = poisoned(q.shape, dtype)
        attend(q, *pages, *index, None, out, *scales, *turned, sink_logits=logits)
        assert error(out, torch.cat(reference)) < TOLERANCE[dtype]
    monkeypatch.setattr(decode_plan, "MIN_SPLIT", 16)
    last = torch.tensor(ends[1:], device=table.device) - 1
    wanted, turned = torch.cat(reference)[last], (sinks, q_sink[last]) if sinks else (0, None)
    ways = dict(num_splits=1), dict(num_splits=3), dict(plan=plan_decode(seq_lens, kv_heads, max(lengths), 8, window))
    for attend, way in (*((paged_decode, way) for way in ways), (torch_paged_decode, {})):
        out, (num_kept, q_kept) = poisoned(wanted.shape, dtype), turned
        kept = dict(zip(("key_scales", "value_scales"), scales)) | dict(sinks=num_kept, q_sink=q_kept)
        attend(q[last], *pages, seq_lens, table, window=window, out=out, sink_logits=logits, **kept, **way)
        assert error(out, wanted) < TOLERANCE[dtype]


def test_a_row_that_only_fills_up_a_batch_stays_zero_beside_learned_logits():
    keys, values, _, table = paged([8], 1, 16, 4, torch.float32)
    seq_lens, logits = torch.tensor([0], device=table.device), torch.tensor([3.0, float("-inf")], device=table.device)
    q = qkv(1, 2, 1, 16, torch.float32)[0].contiguous()
    for num_splits in (1, 2):
        out = paged_decode(q, keys, values, seq_lens, table, num_splits, sink_logits=logits)
        assert torch.equal(out, torch.zeros_like(out))


def test_logits_of_another_shape_are_refused():
    keys, values, seq_lens, table = paged([8], 1, 16, 4, torch.float32)
    q = qkv(1, 2, 1, 16, torch.float32)[0].contiguous()
    for logits in (torch.zeros(3), torch.zeros(2, dtype=torch.float16), torch.zeros(4)[::2]):
        with pytest.raises(ValueError, match=r"sink_logits must be float32 \[2\] in one piece"):
            paged_decode(q, keys, values, seq_lens, table, sink_logits=logits)
        with pytest.raises(ValueError, match=r"sink_logits must be float32 \[2\] in one piece"):
            paged_prefill(q, keys, values, starts([1]), seq_lens, table, 1, sink_logits=logits)


@pytest.mark.skipif(MODE != "interpreted", reason="loads are recorded in the interpreter")
def test_tiles_between_the_sinks_and_the_window_are_not_read():
    keys, values, seq_lens, table = paged([600], 1, 64, 16, torch.float32)
    q = qkv(1, 1, 1, 64, torch.float32)[0].contiguous()
    block = keys[0].numel()
    for attend in (
        lambda: paged_decode(q, keys, values, seq_lens, table, 2, 32, sinks=4, q_sink=q),
        lambda: paged_prefill(q, keys, values, starts([1]), seq_lens, table, 1, 32, sinks=4, q_sink=q),
    ):
        with record_traffic() as traffic:
            attend()
        read = {int(element) // block for access in traffic.loads("keys") for element in access.elements}
        assert int(table[0, 0]) in read and int(table[0, 599 // 16]) in read
        assert len(read) <= 1 + 128 // 16, "more than the sinks' block and the window's tiles"


def cache_of(model, kv_dtype: str, num_blocks: int = 16) -> PagedKVCache:
    config = model.config
    return PagedKVCache(
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        num_blocks,
        4,
        torch.float32,
        model.device,
        kv_dtype=kv_dtype,
    )


def speak(model, attention, chunks: list[int], num_tokens: int) -> tuple[list[int], Tensor]:
    """Greedy tokens after PROMPT, read in these chunks, and the logits of all positions."""
    tokens, logits, table = list(PROMPT), [], [7, 2, 11, 4, 5, 9, 1, 3, 12, 14]
    bounds = [*chunks, *range(len(PROMPT), len(PROMPT) + num_tokens)]
    with torch.inference_mode():
        for start, end in pairwise(bounds):
            logits.append(model(batch_of(tokens[start:end], start, table), attention))
            if end >= len(tokens):
                tokens.append(int(logits[-1][-1].argmax()))
    return tokens, torch.cat(logits)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["llama-mha", "qwen3-wide-heads"])
def test_the_model_says_the_same_as_with_torch(name, kv_dtype, tmp_path):
    _, model = load(tmp_path, **settings_of(name))
    windows, heads = model.config.layer_windows, model.config.num_heads
    tokens, logits = speak(model, TritonAttention(cache_of(model, kv_dtype), windows, heads), [0, 9], 4)
    expected, expected_logits = speak(model, TorchAttention(cache_of(model, kv_dtype), windows, heads), [0], 4)
    assert tokens == expected
    # A code may be its neighbour where two roundings of one product differ: then logits differ by more than float32
    # does.
    torch.testing.assert_close(logits, expected_logits, rtol=2e-2, atol=2e-2)
    plain = speak(model, TorchAttention(cache_of(model, "auto"), windows, heads), [0], 4)[1]
    assert (logits - plain).abs().max() > 1e-4, "nothing was quantized"


@pytest.mark.parametrize("kv_dtype, torch_prefill", [("auto", False), ("int8", False), ("int8", True)])
def test_the_model_with_sinks_says_the_same_as_with_torch(kv_dtype, torch_prefill, tmp_path):
    _, model = load(tmp_path, **settings_of("llama-mha"))
    turn = SinkTurn(RetentionPolicy(3, 7), model.rotary.frequencies)
    windows, heads = [7] * model.config.num_layers, model.config.num_heads
    ours = TritonAttention(cache_of(model, kv_dtype), windows, heads, torch_prefill, turn)
    tokens, logits = speak(model, ours, [0, 2, 9], 3)
    theirs = TorchAttention(cache_of(model, kv_dtype), windows, heads, SinkTurn(turn.policy, turn.frequencies))
    expected, expected_logits = speak(model, theirs, [0], 3)
    assert tokens == expected
    torch.testing.assert_close(logits, expected_logits, rtol=2e-2, atol=2e-2)
    windowed = speak(model, TorchAttention(cache_of(model, kv_dtype), windows, heads), [0], 3)[1]
    assert (logits - windowed).abs().max() > 1e-2, "the sinks change nothing"


def test_recorded_steps_turn_their_queries_anew(tmp_path):
    """A recorded batch is one object for all steps: angles that were kept with it would be those of another step."""
    _, model = load(tmp_path, **settings_of("llama-mha"))
    turn = SinkTurn(RetentionPolicy(2, 4), model.rotary.frequencies)
    caches = [cache_of(model, "auto"), cache_of(model, "auto")]
    for cache in caches:
        torch.manual_seed(0)
        for layer in (*cache.keys, *cache.values):
            layer[1:] = torch.randn_like(layer[1:])
    recorded, eager = (
        TritonAttention(cache, [4] * model.config.num_layers, model.config.num_heads, sink_turn=turn)
        for cache in caches
    )
    graphs = DecodeGraphs(model, recorded, 4, 24, [2])
    for lengths in ((9, 14), (12, 7)):
        rows = rows_of(*lengths)
        got = graphs.run(graphs.fill(*step_of(rows)))
        for index, row in enumerate(rows):
            batch = batch_of(text_of(row)[-1:], row.start, row.block_ids)
            torch.testing.assert_close(got[index : index + 1], model(batch, eager), rtol=1e-4, atol=1e-4)


def test_sinks_without_a_window_are_refused(tmp_path):
    _, model = load(tmp_path, **settings_of("llama-mha"))
    turn = SinkTurn(RetentionPolicy(2, 4), model.rotary.frequencies)
    with pytest.raises(ValueError, match="sinks=2 need a window in every layer"):
        TritonAttention(cache_of(model, "auto"), [4, None], model.config.num_heads, sink_turn=turn)
