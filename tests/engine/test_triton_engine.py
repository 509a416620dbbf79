"""The Triton backend behind the decoder and the engine: the logits of `transformers`, padding that touches nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.engine.graphs import DecodeGraphs, bucket_sizes
from minillm.engine.input_batch import InputBatch
from minillm.engine.runner import ModelRunner
from minillm.engine.step import NewRequest, ScheduledRequest
from minillm.engine.step_inputs import StepInputs
from minillm.kv_cache.paged import PagedKVCache
from minillm.kv_cache.triton_attention import TritonAttention
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import load_model
from minillm.model.decoder import Decoder
from tests.helpers.kernel_cases import device
from tests.helpers.model_zoo import BASE, CHECKPOINTS, make_model
from tests.helpers.tiny import save_tiny_llama

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
    got = [
        model(batch_of(PROMPT[start:end], start, table), attention)
        for start, end in ((0, 9), (9, 19), (19, 20), (20, 21))
    ]
    assert expected.std() > 0.5
    torch.testing.assert_close(torch.cat(got).cpu(), expected, rtol=1e-4, atol=1e-4)


def test_attend_alone_is_the_fused_way(tmp_path):
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
        blocks = list(range(first, first + -(-length // 4)))
        first += len(blocks)
        rows.append(ScheduledRequest(f"{index} {length}", length - 1, 1, blocks, 1))
    return rows


def text_of(row: ScheduledRequest) -> list[int]:
    """The prompt of a request that `rows_of` made."""
    return PROMPT[: int(row.request_id.split()[1])]


def step_of(rows: list[ScheduledRequest], **params) -> tuple[StepInputs, InputBatch]:
    """The step that a runner makes of them."""
    requests = InputBatch(4, "cpu")
    announce(requests, rows, **params)
    return requests.inputs(rows), requests


def announce(requests: InputBatch, rows: list[ScheduledRequest], **params) -> None:
    for row in rows:
        requests.add(
            NewRequest(row.request_id, text_of(row), len(text_of(row)), SamplingParams(**params), 0, 0, frozenset())
        )


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
    assert graphs.serves(step_of(rows)[0]) and not graphs.serves(step_of(rows * 3)[0])
    recorded = graphs.run(graphs.fill(*step_of(rows)))
    assert recorded.shape[0] == 4
    for index, row in enumerate(rows):
        batch = batch_of(text_of(row)[-1:], row.start, row.block_ids)
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
        graphs.run(graphs.fill(*step_of(rows_of(9, 3, 14, 6))))
    before = [layer.clone() for layer in cache.keys]
    graphs.run(graphs.fill(*step_of(rows_of(10))))
    batch = graphs.batches[4]
    assert batch.slot_mapping.tolist() == [3 * 4 + 1, -1, -1, -1] and batch.seq_lens.tolist() == [10, 0, 0, 0]
    changed = (cache.keys[0] != before[0]).any(dim=(1, 2)).nonzero().tolist()
    assert changed == [[3, 1]]


@pytest.mark.parametrize(
    "max_num_seqs, sizes",
    [
        (1, [1]),
        (3, [1, 2, 4]),
        (8, [1, 2, 4, 8]),
        (9, [1, 2, 4, 8, 16]),
        (40, [1, 2, 4, 8, 16, 32, 48]),
        (9999, [1, 2, 4, 8, *range(16, 513, 16)]),
    ],
)
def test_bucket_sizes(max_num_seqs, sizes):
    assert bucket_sizes(max_num_seqs) == sizes


def test_prompts_and_samples_are_not_recorded(tmp_path):
    _, model = load(tmp_path, **settings_of("llama-mha"))
    graphs = DecodeGraphs(model, TritonAttention(pages(model), model.config.layer_windows, 4), 4, 24, [2])
    (row,) = rows_of(9)

    def serves(*rows: ScheduledRequest, **params) -> bool:
        return graphs.serves(step_of(list(rows), **params)[0])

    assert serves(row)
    assert not serves(row._replace(samples=3))
    chunk = row._replace(start=4, num_tokens=5)
    assert not serves(row, chunk) and not serves(chunk, row)
    two = row._replace(num_tokens=2, draft=(7,))
    assert not serves(two)  # these graphs are not for drafts
    graphs.tokens_each = 2
    assert serves(two) and not serves(row, two)  # three tokens do not fit
    both = row._replace(start=row.start - 1, num_tokens=2)
    assert serves(both) and not serves(both, prompt_logprobs=0)  # it needs the logits of both


def test_guesses_are_rows_of_a_recorded_step(tmp_path):
    """Of rows with different numbers of guesses, and one that catches up on two tokens,
    the logits are those of the flat batch."""
    _, model = load(tmp_path, **settings_of("llama-mha"))
    plain, two, behind, one = rows_of(9, 6, 14, 3)
    rows = [  # in any order: a scheduler of one's own need not put rows of one token first
        two._replace(num_tokens=3, draft=(40, 41), block_ids=[*two.block_ids, 10]),  # into the next block
        behind._replace(start=behind.start - 1, num_tokens=2),
        one._replace(num_tokens=2, draft=(42,)),
        plain,
    ]
    attentions = []
    for _ in range(2):
        cache = pages(model)
        torch.manual_seed(0)
        for layer in (*cache.keys, *cache.values):
            layer[1:] = torch.randn_like(layer[1:])
        attentions.append(TritonAttention(cache, model.config.layer_windows, model.config.num_heads))
    graphs = DecodeGraphs(model, attentions[0], 4, 24, [2, 16], tokens_each=3)
    recorded, flat = ModelRunner(model, cache, attentions[0], graphs=graphs), ModelRunner(model, cache, attentions[1])
    for _ in range(2):  # the host has two buffers
        for runner in (recorded, flat):
            announce(runner.requests, rows)
        got, expected = recorded.forward(rows)[0], flat.forward(rows)[0]
        assert got.shape[0] == 3 + 1 + 2 + 1
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert graphs.batches[16].seq_lens.tolist() == [6, 7, 8, 13, 14, 3, 4, 9] + [0] * 8
    for ours, theirs in zip(*(attention.cache.keys + attention.cache.values for attention in attentions)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("speculation", ["ngram", "noisy draft"])
def test_all_steps_with_guesses_are_recorded(speculation, tmp_path, monkeypatch):
    target = save_tiny_llama(tmp_path / "target", head_dim=16)
    save_tiny_llama(tmp_path / "noisy", head_dim=16)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter += (
                0.1 * parameter.std() * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    target.save_pretrained(tmp_path / "noisy")
    config = {"method": "ngram", "prompt_lookup_min": 1}
    if speculation == "noisy draft":
        config = {"method": "draft_model", "model": tmp_path / "noisy", "num_speculative_tokens": 3}
    settings = dict(dtype="float32", num_kv_blocks=40, max_num_seqs=2)
    prompts = [{"prompt_token_ids": prompt} for prompt in ([5, 6, 7, 8] * 3, [9] * 10)]
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    eager, build = [], ModelRunner.build_batch  # lengths of the rows that are computed without a graph

    def counted(runner, step):
        eager.append(list(step.counts))
        return build(runner, step)

    llm = LLM(tmp_path / "target", attention_backend="triton", speculative_config=config, **settings)
    monkeypatch.setattr(ModelRunner, "build_batch", counted)
    said = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    drafted, accepted = (
        llm.engine.speculation.metrics.num_draft_tokens,
        llm.engine.speculation.metrics.num_accepted_tokens,
    )
    assert drafted > 5 and 0 < accepted < drafted, (drafted, accepted)
    assert eager and all(max(lengths) >= 10 for lengths in eager)  # prompts alone
    plain = LLM(tmp_path / "target", attention_backend="torch", **settings)
    assert said == [output.outputs[0].token_ids for output in plain.generate(prompts, params, use_tqdm=False)]


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
