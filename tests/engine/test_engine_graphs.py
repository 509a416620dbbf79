"""Recorded steps: what is sent to the device for them, what they share, and prompts in recorded pieces."""

from __future__ import annotations

import random

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.engine import block_tables, build
from minillm.engine.graphs import DecodeGraphs, Inputs
from minillm.engine.input_batch import InputBatch
from minillm.engine.pieces import PIECE_SIZES, PieceGraphs, piece_sizes
from minillm.engine.runner import ModelRunner
from minillm.kv_cache.triton_attention import TritonAttention
from tests.engine.test_triton_engine import announce, load, pages, rows_of, settings_of, step_of, text_of
from tests.helpers.tiny import save_tiny_llama

CPU = torch.device("cpu")


def test_only_what_changed_of_the_tables_is_sent(monkeypatch):
    sent = []
    monkeypatch.setattr(
        block_tables,
        "upload",
        lambda *columns, device: sent.append(len(columns[0])) or [torch.from_numpy(c.copy()) for c in columns],
    )
    requests = InputBatch(4, "cuda")
    sent.clear()  # the empty table
    rows = rows_of(9, 3, 14)  # tables of 3, 1 and 4 blocks
    announce(requests, rows)
    slots = requests.inputs(rows).slots
    assert requests.blocks.rows(slots, 4)[1][:, :3].tolist()[0] == rows[0].block_ids and sent[0] == 3 + 1 + 4
    sent.clear()
    later = [row._replace(block_ids=[], first_block=len(row.block_ids)) for row in rows]
    later[1] = later[1]._replace(block_ids=[11])
    requests.inputs(later)
    on_host, on_device = requests.blocks.rows(slots, 4)
    assert sent == [1, 3] and on_device.tolist() == on_host.tolist()  # one entry, and the slots of the three rows
    assert on_host[1, :2].tolist() == [4, 11]
    requests.blocks.set(slots[0], 1, [30, 31]), requests.blocks.set(slots[0], 2, [32])  # the last one wins
    assert requests.blocks.rows(slots, 3)[1][0].tolist() == [1, 30, 32]


def test_the_tables_on_the_device_are_those_of_the_rows_whatever_happened_before():
    rng, inputs, requests = random.Random(3), Inputs(6, 5, CPU), InputBatch(4, "cpu", 1, 1)
    for _ in range(200):
        rows = rows_of(*(rng.randint(1, 18) for _ in range(rng.randint(1, 3))))
        rows = [
            row._replace(num_tokens=count, draft=(7,) * (count - 1)) for row in rows for count in [rng.randint(1, 2)]
        ]
        rows = [
            row if row.start + row.num_tokens <= 4 * len(row.block_ids) else row._replace(num_tokens=1, draft=())
            for row in rows
        ]
        for row in rows:
            row.block_ids[:] = [rng.randint(1, 40) for _ in row.block_ids]
        announce(requests, rows)
        size = rng.choice([6, max(2, sum(row.num_tokens for row in rows))])
        inputs.fill(requests.inputs(rows), requests, size)
        tables = [row.block_ids for row in rows for _ in range(row.num_tokens)]
        token_ids, positions, slots, lengths, indices = (x.tolist() for x in inputs.numbers_of(size))
        read = [-(-length // 4) for length in lengths]
        assert [inputs.table[at, : read[at]].tolist() for at in range(len(tables))] == [
            table[: read[at]] for at, table in enumerate(tables)
        ]
        wanted = [position for row in rows for position in range(row.start, row.start + row.num_tokens)]
        padding = size - len(wanted)
        assert positions == wanted + [0] * padding and lengths == [at + 1 for at in wanted] + [0] * padding
        assert indices == [index for row in rows for index in range(row.num_tokens)] + [0] * padding
        assert slots == [table[at // 4] * 4 + at % 4 for table, at in zip(tables, wanted)] + [-1] * padding
        assert token_ids[: len(wanted)] == [token_id for row in rows for token_id in (text_of(row)[-1], *row.draft)]
        for row in rows:
            if rng.random() < 0.5:
                requests.remove(row.request_id)


def test_columns_of_every_size_are_aligned():
    inputs = Inputs(7, 3, CPU)
    assert all(
        x.data_ptr() % 16 == inputs.numbers.data_ptr() % 16 for size in range(1, 8) for x in inputs.numbers_of(size)
    )


def test_all_sizes_write_their_logits_to_one_place(tmp_path):
    _, model = load(tmp_path, **settings_of("llama-mha"))
    cache = pages(model)
    for layer in (*cache.keys, *cache.values):
        layer.zero_()
    graphs = DecodeGraphs(model, TritonAttention(cache, model.config.layer_windows, 4), 4, 24, [1, 2])
    one = graphs.run(graphs.fill(*step_of(rows_of(3))))
    two = graphs.run(graphs.fill(*step_of(rows_of(3, 5))))
    assert one.data_ptr() == two.data_ptr() and torch.equal(one, two[:1])


def test_piece_sizes():
    assert piece_sizes(1) == [16] and piece_sizes(16) == [16] and piece_sizes(17) == [16, 32]
    assert piece_sizes(8192) == list(PIECE_SIZES)


def test_pieces_between_attention_compute_the_step(tmp_path):
    """Prompts, a chunk behind a past, and decodes, padded to the next size: logits and pages are those of the whole
    forward pass, and padding writes nothing."""
    _, model = load(tmp_path, **settings_of("qwen3-wide-heads"))
    caches = [pages(model), pages(model)]
    for cache in caches:
        torch.manual_seed(0)
        for layer in (*cache.keys, *cache.values):
            layer[1:] = torch.randn_like(layer[1:])
            layer[0] = 5.0  # a write to the null block would show
    attentions = [TritonAttention(cache, model.config.layer_windows, model.config.num_heads) for cache in caches]
    pieces = PieceGraphs(model, attentions[0], [8, 16])
    decode, whole, chunk = rows_of(9, 6, 14)

    def built(rows):
        runner = ModelRunner(model, caches[0], attentions[0])
        announce(runner.requests, rows)
        return runner.build_batch(runner.requests.inputs(rows))[0]

    steps = (
        [decode, whole._replace(start=0, num_tokens=6), chunk._replace(start=9, num_tokens=5)],
        [decode._replace(start=0, num_tokens=9, samples=0), chunk._replace(start=12, num_tokens=2)],
        [decode],
    )
    for rows in steps:
        batch = built(rows)
        assert pieces.serves(batch)
        torch.testing.assert_close(pieces.forward(batch), model(batch, attentions[1]), rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(caches[0].keys + caches[0].values, caches[1].keys + caches[1].values):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not pieces.serves(built([decode._replace(start=0, num_tokens=9), chunk._replace(start=0, num_tokens=14)]))


@pytest.mark.parametrize(
    "knobs",
    [
        dict(
            speculative_config={"method": "ngram", "prompt_lookup_min": 1},
            max_num_batched_tokens=12,
            async_scheduling=False,
        ),
        dict(
            kv_cache_dtype="int8", preemption_mode="swap", host_kv_bytes=2**16, num_kv_blocks=9, async_scheduling=True
        ),
    ],
)
def test_an_engine_with_recorded_pieces_generates_the_plain_engines_tokens(knobs, tmp_path, monkeypatch):
    """Chunks, draft tokens, prefix hits, preemptions: prompts run in pieces, decodes in graphs."""
    save_tiny_llama(tmp_path, head_dim=16)
    used = []

    def pieces_on_a_cpu(model, graphs, config):
        pieces = PieceGraphs(model, graphs.attention, [8, 16, 32], graphs.recorder)
        forward = pieces.forward
        pieces.forward = lambda batch: used.append(batch.num_tokens) or forward(batch)
        return pieces

    settings = dict(dtype="float32", num_kv_blocks=40, max_num_seqs=3, block_size=4, max_model_len=32) | knobs
    prompts = [[5, 6, 7, 8] * 3, [9] * 10, [5, 6, 7, 8, 5, 6, 7, 8, 20], [31, 40]]
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)

    def generate(backend):
        llm = LLM(tmp_path, attention_backend=backend, **settings)
        return [
            out.outputs[0].token_ids
            for out in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        ]

    expected = generate("torch")
    monkeypatch.setattr(build, "build_pieces", pieces_on_a_cpu)
    assert generate("triton") == expected
    assert len(used) >= 2 and max(used) > 8
