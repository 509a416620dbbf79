"""The oracle: logits and greedy tokens equal transformers, for every family and every way to cut a prompt."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from minillm.kv_cache.contiguous import ContiguousAttention, ContiguousKVCache
from minillm.model.adapted import adapted
from minillm.model.attention import NoCacheAttention
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import load_model
from minillm.model.decoder import Decoder
from tests.helpers.model_zoo import ALL, BASE, save_checkpoint

PROMPT_LEN = 40  # longer than every sliding window and than the original length of every stretched rope
TOLERANCE = dict(rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    @cache
    def load(name: str) -> tuple[PreTrainedModel, Decoder, Path]:
        folder = tmp_path_factory.mktemp(name)
        return save_checkpoint(folder, name), load_model(folder, "float32", "cpu"), folder

    return load


def prompt(seed: int = 0, length: int = PROMPT_LEN) -> torch.Tensor:
    return torch.randint(3, BASE["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed))


def contiguous(model: Decoder, max_len: int = 64) -> ContiguousAttention:
    config = model.config
    cache = ContiguousKVCache(config.num_layers, config.num_kv_heads, config.head_dim, max_len, model.dtype)
    return ContiguousAttention(cache, config)


@torch.no_grad()
def expected_logits(oracle: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    return oracle(token_ids[None]).logits[0]


@pytest.mark.parametrize("chunk", [PROMPT_LEN, 9, 1], ids=["in one go", "in chunks", "token by token"])
@pytest.mark.parametrize("name", ALL)
def test_logits_equal_transformers(checkpoints, name, chunk):
    oracle, model, _ = checkpoints(name)
    token_ids, attention = prompt(), contiguous(model)
    logits = torch.cat(
        [
            model(ForwardBatch.single(token_ids[start : start + chunk], start, all_logits=True), attention)
            for start in range(0, PROMPT_LEN, chunk)
        ]
    )
    expected = expected_logits(oracle, token_ids)
    assert expected.std() > 0.5  # flat logits would prove nothing
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize("name", ALL)
def test_greedy_tokens_equal_transformers(checkpoints, name):
    oracle, model, _ = checkpoints(name)
    token_ids, attention, new_tokens = prompt(), contiguous(model), []
    batch = ForwardBatch.single(token_ids)
    for position in range(PROMPT_LEN, PROMPT_LEN + 20):
        new_tokens.append(model(batch, attention)[0].argmax().item())
        batch = ForwardBatch.single(new_tokens[-1:], start=position)
    mask = torch.ones(1, PROMPT_LEN, dtype=torch.int64)
    settings = dict(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    generated = oracle.generate(token_ids[None], attention_mask=mask, **settings)
    assert new_tokens == generated[0, PROMPT_LEN:].tolist()


@pytest.mark.parametrize("name", ["llama-mha", "mistral-window", "qwen3-biases-window"])
def test_a_ragged_batch_gives_each_sequence_what_it_gets_alone(checkpoints, name):
    _, model, _ = checkpoints(name)
    prompts = [prompt(seed, length) for seed, length in enumerate([11, 1, 17])]
    bounds = torch.tensor([0, 11, 12, 29])
    wanted = [28, 11, 10, 3]  # in any order, several of one sequence
    batch = ForwardBatch(
        token_ids=torch.cat(prompts),
        positions=torch.cat([torch.arange(len(ids)) for ids in prompts]),
        query_start_loc=bounds,
        seq_lens=bounds.diff(),
        block_table=None,
        slot_mapping=None,
        max_query_len=17,
        logits_indices=torch.tensor(wanted),
        max_seq_len=17,
    )
    attention = NoCacheAttention(model.config.layer_windows)
    alone = torch.cat([model(ForwardBatch.single(ids, all_logits=True), attention) for ids in prompts])
    torch.testing.assert_close(model(batch, attention), alone[wanted], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(checkpoints, dtype):
    oracle, _, folder = checkpoints("qwen3-biases-window")
    model = load_model(folder, dtype, "cpu")
    attention, token_ids = contiguous(model), prompt()
    logits = model(ForwardBatch.single(token_ids, all_logits=True), attention)
    expected = expected_logits(oracle, token_ids)
    assert logits.dtype is torch.float32 and model.embed_tokens.dtype is dtype
    assert (logits - expected).norm() < (0.1 if dtype is torch.bfloat16 else 0.02) * expected.norm()


def test_forward_keeps_no_graph(checkpoints):
    _, model, _ = checkpoints("llama-mha")
    logits = model(ForwardBatch.single([5, 6]), contiguous(model))
    assert logits.is_inference() and not any(parameter.requires_grad for parameter in model.parameters())


def test_a_backend_is_called_by_what_it_declares(checkpoints):
    """Methods of those names are not a declaration: without one there is `attend`, and nothing else is called."""

    class Undeclared(NoCacheAttention):
        run_layer = rotate_and_store = attend_stored = None

    class Declared(Undeclared):
        fused_store = True

    _, model, _ = checkpoints("llama-mha")
    batch, windows = ForwardBatch.single(prompt(length=9)), model.config.layer_windows
    assert torch.equal(model(batch, Undeclared(windows)), model(batch, NoCacheAttention(windows)))
    with pytest.raises(TypeError, match="not callable"):
        model(batch, Declared(windows))


@pytest.mark.parametrize("name", ALL)
def test_linears_are_the_matrices_of_the_checkpoint_by_name(checkpoints, name):
    """Every product of `transformers`, once, as the rows of one of ours."""
    oracle, model, _ = checkpoints(name)
    modules = {f"{place}.weight": module for place, module in oracle.named_modules()}
    stored = {name: module.weight for name, module in modules.items() if isinstance(module, torch.nn.Linear)}
    theirs = {name.removesuffix(".weight"): weight for name, weight in adapted(model.config, stored.items())}
    ours = {}
    for place, linear in model.linears().items():
        prefix = "" if place == "lm_head" else "model."
        ours |= {matrix: linear.weight[rows] for matrix, rows in linear.checkpoint_rows(prefix + place).items()}
    assert list(model.layers[1].linears()) == [
        "self_attn.qkv_proj",
        "self_attn.o_proj",
        "mlp.gate_up_proj",
        "mlp.down_proj",
    ]
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[matrix], theirs[matrix]) for matrix in theirs)


def test_a_tied_head_is_the_embedding(checkpoints):
    _, model, _ = checkpoints("qwen2-full")
    assert torch.equal(model.lm_head.weight, model.embed_tokens)
    assert "lm_head.weight" not in Decoder(model.config, torch.float32).checkpoint_views()
