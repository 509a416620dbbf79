"""The Triton backend behind the decoder and the engine: the logits of `transformers`, padding that touches nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernel_cases import device
from model_zoo import BASE, CHECKPOINTS, make_model
from tiny import save_tiny_llama

from minillm import LLM, SamplingParams
from minillm.engine.graphs import DecodeGraphs, bucket_sizes
from minillm.engine.request import Request
from minillm.engine.scheduler import ScheduledRequest
from minillm.kv_cache.paged import PagedKVCache
from minillm.kv_cache.triton_attention import TritonAttention
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import load_model
from minillm.model.decoder import Decoder

PROMPT = [3 + i * 7 % 90 for i in range(21)]


def settings_of(name: str) -> dict:
    settings = CHECKPOINTS[name]
    plain = BASE["hidden_size"] // settings.get("num_attention_heads", BASE["num_attention_heads"])
    return settings if settings.get("head_dim", plain) >= 16 else settings | {"head_dim": 16}  # the kernels' smallest


def load(folder: Path, **settings) -> tuple[torch.nn.Module, Decoder]:
    oracle = make_model(**settings)
    oracle.save_pretrained(folder)
    return oracle, load_model(folder, "float32", device())


def pages(model: Decoder, num_blocks: int = 12, block_size: int = 4) -> PagedKVCache:
    config = model.config
    cache = PagedKVCache(
        config.num_layers, config.num_kv_heads, config.head_dim, num_blocks, block_size, torch.float32, model.device
    )
    for layer in (*cache.keys, *cache.values):
        layer[1:] = float("nan")
    return cache


def batch_of(token_ids: list[int], start: int, table: list[int], block_size: int = 4) -> ForwardBatch:
    batch = ForwardBatch.single(token_ids, start, all_logits=True, device=device())
    batch.block_table = torch.tensor([table], device=device())
    batch.slot_mapping = batch.block_table[0][batch.positions // block_size] * block_size + batch.positions % block_size
    return batch


@pytest.mark.parametrize("torch_prefill", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_transformers(name, torch_prefill, tmp_path):
    oracle, model = load(tmp_path, **settings_of(name))
    cache = pages(model)
    if torch_prefill:
        for layer in (*cache.keys, *cache.values):
            layer.zero_()  # torch multiplies what its mask hides by 0
    attention = TritonAttention(cache, model.config.layer_windows, model.config.num_heads, torch_prefill)
    table = [7, 2, 11, 4, 5, 9]
    with torch.inference_mode():
        expected = oracle(torch.tensor([PROMPT])).logits[0]
    got = [model(batch_of(PROMPT[start:end], start, table), attention) for start, end in ((0, 9), (9, 19), (19, 20), (20, 21))]
    assert expected.std() > 0.5
    torch.testing.assert_close(torch.cat(got).cpu(), expected, rtol=1e-4, atol=1e-4)


def test_attend_alone_is_attend_fused(tmp_path):
    """The seam of chapter 02 works too: queries and keys that are rotated already."""
    _, model = load(tmp_path, **settings_of("qwen3-wide-heads"))
    attention = TritonAttention(pages(model), model.config.layer_windows, model.config.num_heads)
    fused = model(batch_of(PROMPT, 0, [1, 2, 3, 4, 5, 6]), attention)

    class Plain:
        attend = attention.attend

    torch.testing.assert_close(model(batch_of(PROMPT, 0, [1, 2, 3, 4, 5, 6]), Plain()), fused, rtol=1e-4, atol=1e-4)


def rows_of(*lengths: int) -> list[ScheduledRequest]:
    """Sequences whose last token is to be computed, with tables that do not meet."""
    rows, first = [], 1
    for index, length in enumerate(lengths):
        request = Request(str(index), PROMPT[:length], SamplingParams(), max_tokens=4)
        blocks = list(range(first, first + -(-length // 4)))
        first += len(blocks)
        rows.append(ScheduledRequest(request, length - 1, 1, blocks, 1))
    return rows


def test_a_step_in_a_larger_bucket_computes_the_same_and_writes_nothing_else(tmp_path):
    _, model = load(tmp_path, **settings_of("llama-mha"))
    rows = rows_of(9, 3, 14)
    caches = [pages(model), pages(model)]
    for cache in caches:
        torch.manual_seed(0)
        for layer in (*cache.keys, *cache.values):
            layer[1:10] = torch.randn_like(layer[1:10])
    attentions = [TritonAttention(cache, model.config.layer_windows, model.config.num_heads) for cache in caches]
    graphs = DecodeGraphs(model, attentions[0], 4, 24, [1, 2, 4, 8])
    caches[0].keys[0][0] = 5.0  # a write to the null block would show
    assert graphs.serves(rows) and not graphs.serves(rows * 3)
    recorded = graphs.run(graphs.fill(rows))
    assert recorded.shape[0] == 4
    for index, row in enumerate(rows):
        batch = batch_of(row.request.token_ids[-1:], row.start, row.block_ids)
        torch.testing.assert_close(recorded[index : index + 1], model(batch, attentions[1]), rtol=1e-4, atol=1e-4)
    assert (caches[0].keys[0][0] == 5.0).all() and torch.equal(caches[0].values[0][0], caches[1].values[0][0])
    for ours, theirs in zip(caches[0].keys + caches[0].values, caches[1].keys + caches[1].values):
        torch.testing.assert_close(ours[1:], theirs[1:], equal_nan=True, rtol=1e-4, atol=1e-4)


def test_a_smaller_step_after_a_larger_one_leaves_no_row_behind(tmp_path):
    _, model = load(tmp_path, **settings_of("llama-mha"))
    cache = pages(model)
    for layer in (*cache.keys, *cache.values):
        layer[1:] = 0
    graphs = DecodeGraphs(model, TritonAttention(cache, model.config.layer_windows, model.config.num_heads), 4, 24, [4])
    for _ in range(2):  # the host's two buffers both
        graphs.run(graphs.fill(rows_of(9, 3, 14, 6)))
    before = [layer.clone() for layer in cache.keys]
    graphs.run(graphs.fill(rows_of(10)))
    batch = graphs.batches[4]
    assert batch.slot_mapping.tolist() == [3 * 4 + 1, -1, -1, -1] and batch.seq_lens.tolist() == [10, 0, 0, 0]
    changed = (cache.keys[0] != before[0]).any(dim=(1, 2)).nonzero().tolist()
    assert changed == [[3, 1]]


@pytest.mark.parametrize(
    "max_num_seqs, sizes",
    [(1, [1]), (3, [1, 2, 4]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 16]), (40, [1, 2, 4, 8, 16, 32, 48]), (9999, [1, 2, 4, 8, *range(16, 513, 16)])],
)
def test_bucket_sizes(max_num_seqs, sizes):
    assert bucket_sizes(max_num_seqs) == sizes


def test_prompts_and_samples_are_not_recorded(tmp_path):
    _, model = load(tmp_path, **settings_of("llama-mha"))
    graphs = DecodeGraphs(model, TritonAttention(pages(model), model.config.layer_windows, 4), 4, 24, [2])
    (row,) = rows_of(9)
    assert graphs.serves([row])
    assert not graphs.serves([row._replace(samples=3)])
    assert not graphs.serves([row, row._replace(start=4, num_tokens=5)])


def test_enforce_eager_records_nothing(tmp_path):
    save_tiny_llama(tmp_path, head_dim=16)
    settings = dict(dtype="float32", num_kv_blocks=20, max_num_seqs=2)
    assert LLM(tmp_path, attention_backend="triton", enforce_eager=True, **settings).engine.runner.graphs is None
    assert LLM(tmp_path, attention_backend="triton", **settings).engine.runner.graphs.sizes == [1, 2]
    assert LLM(tmp_path, attention_backend="torch", **settings).engine.runner.graphs is None


def test_small_heads_are_refused_with_the_way_out(tmp_path):
    save_tiny_llama(tmp_path)  # head_dim 12
    with pytest.raises(ValueError, match="head_dim 16 to 256, not 12; use 'torch'"):
        LLM(tmp_path, dtype="float32", attention_backend="triton", num_kv_blocks=20)
