"""On a CPU with its own kernels a token's logits are the same to the last bit, however the text is cut into steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from minillm import LLM, SamplingParams
from minillm.kernels import native
from minillm.model.batch import ForwardBatch
from minillm.model.gpt_oss import ALPHA, LIMIT, ClampedSwiGLU
from minillm.model.layers import ACTIVATIONS
from minillm.zoo import corpus
from tests.helpers.model_zoo import make_model
from tests.helpers.tiny import VOCAB_SIZE, byte_tokenizer

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler")
LENGTH = 100
CUTS = {
    "token by token": [1] * LENGTH,
    "pairs": [2] * (LENGTH // 2),
    "few and many": [3, 4, 5, 8, 50, 30],
    "sevens": [20, 7, 7, 7, 7, 7, 15, 30],
    "a chunk of rows and more": [64, 6, 1, 29],
}
MODELS = {
    "llama": dict(model_type="llama"),
    "qwen3": dict(model_type="qwen3"),
    "a window": dict(model_type="mistral", sliding_window=9),
    "a window of blocks": dict(model_type="mistral", sliding_window=37),
}
ENGINES = {
    "plain": {},
    "kv int8": dict(kv_cache_dtype="int8"),
    "kv fp8": dict(kv_cache_dtype="fp8"),
    "kv int4": dict(kv_cache_dtype="int4"),
    "int8": dict(quantization="int8"),
    "int4": dict(quantization={"weights": "int4", "group_size": 16, "symmetric": False}),
    "sinks": dict(kv_retention={"sinks": 4, "window": 30}),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_logits_do_not_depend_on_the_cut(model, dtype, tmp_path):
    make_model(
        1, vocab_size=VOCAB_SIZE, num_hidden_layers=2, head_dim=16, max_position_embeddings=256, **MODELS[model]
    ).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    for block_size in (16, 7):
        for name, settings in ENGINES.items():
            if name == "sinks" and "window" in model:
                continue  # one window is enough
            llm = LLM(
                tmp_path,
                dtype=dtype,
                device="cpu",
                num_kv_blocks=20,
                block_size=block_size,
                attention_backend="native",
                **settings,
            )
            whole = logits_of(llm, [LENGTH], block_size)
            for cut, lengths in CUTS.items():
                assert torch.equal(logits_of(llm, lengths, block_size), whole), (block_size, name, cut)


def logits_of(llm: LLM, lengths: list[int], block_size: int) -> torch.Tensor:
    """Of every token of a text, computed so many at a time."""
    token_ids = [5 + place * 7 % (VOCAB_SIZE - 10) for place in range(LENGTH)]
    table = torch.arange(1, -(-LENGTH // block_size) + 1)[None]
    start, logits = 0, []
    for length in lengths:
        batch = ForwardBatch.single(token_ids[start : start + length], start, all_logits=True)
        slots = table[0][batch.positions // block_size] * block_size + batch.positions % block_size
        logits.append(
            llm.model.forward(replace(batch, block_table=table, slot_mapping=slots), llm.engine.runner.attention)
        )
        start += length
    return torch.cat(logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(33, 50), (96, 64), (40, 257)])
def test_a_row_of_a_product_does_not_depend_on_its_company(dtype, shape):
    torch.manual_seed(0)
    weight, x = native.pack(torch.randn(shape).to(dtype)), torch.randn(150, shape[1]).to(dtype)
    together = native.linear(x, weight, None, shape[0])
    for rows in (*range(1, 10), 17, 64, 65):
        assert torch.equal(native.linear(x[:rows], weight, None, shape[0]), together[:rows]), rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_of_a_row_does_not_depend_on_its_company(name, dtype):
    """The gates of many tokens are a view, those of one lie in one piece: torch may compute them in two ways."""
    torch.manual_seed(0)
    for size in (7, 80, 102):
        gate_up = torch.randn(64, 2 * size).to(dtype)
        together = ACTIVATIONS[name](gate_up.chunk(2, dim=-1)[0])
        for rows in (1, 2, 33):
            gate, _ = gate_up[:rows].chunk(2, dim=-1)
            assert torch.equal(ACTIVATIONS[name](gate), together[:rows]), (size, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [80, 88])
def test_a_row_of_a_clamped_expert_does_not_depend_on_its_company(size, dtype):
    """88 is no multiple of the numbers that torch computes at once: those at the end come from another formula."""
    torch.manual_seed(0)
    expert = ClampedSwiGLU(48, size, True, dtype, torch.device("cpu"))
    for linear in (expert.gate_up_proj, expert.down_proj):
        linear.plain.normal_(0, 0.3)
        linear.bias.normal_()
    x = torch.randn(64, 48).to(dtype)
    gate, up = F.linear(x, expert.gate_up_proj.plain, expert.gate_up_proj.bias).chunk(2, dim=-1)
    gate, up = gate.double().clamp(max=LIMIT), up.double().clamp(-LIMIT, LIMIT)
    made = (up + 1) * gate * torch.sigmoid(ALPHA * gate)
    right = F.linear(made, expert.down_proj.plain.double(), expert.down_proj.bias.double())
    for linear in (expert.gate_up_proj, expert.down_proj):
        linear.prepare(in_cache=True)
    together = expert(x)
    torch.testing.assert_close(together.double(), right, rtol=0, atol=1e-4 if dtype is torch.float32 else 0.5)
    for rows in range(1, 64):
        assert torch.equal(expert(x[:rows]), together[:rows]), rows


@pytest.mark.parametrize(
    "speculation", [{"method": "ngram", "prompt_lookup_min": 1}, {"method": "draft_model", "model": "tinyworld-draft"}]
)
def test_guessing_changes_no_token_in_bfloat16_either(speculation):
    """In bfloat16 the two best tokens are often as good as each other to two digits, and rounding decides."""
    prompts = [document.text[:60] for document in corpus.held_out("story", 12)]
    for params in (
        SamplingParams(temperature=0.0, max_tokens=60),
        SamplingParams(temperature=1.0, seed=3, max_tokens=60),
    ):
        plain, guessing = (
            LLM("tinyworld", dtype="bfloat16", device="cpu", speculative_config=config)
            for config in (None, speculation)
        )
        assert said(guessing, prompts, params) == said(plain, prompts, params)


def said(llm: LLM, prompts: list[str], params: SamplingParams) -> list[list[int]]:
    """One after the other, so that plain steps have one row and others have several."""
    return [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
