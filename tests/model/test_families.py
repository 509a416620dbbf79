"""Families beyond Llama, Mistral and Qwen: through the engine, in few bits, and on backends with fused layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.engine import pooling
from minillm.engine.config import EngineConfig
from minillm.engine.parts import build_attention, retention_of
from minillm.engine.pieces import PieceGraphs
from minillm.engine.pooling import hidden_states
from minillm.kv_cache.native_attention import NativeAttention
from minillm.kv_cache.paged import PagedKVCache
from minillm.model.attention import NoCacheAttention, can
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import load_model, read_model
from minillm.model.fused import run_layers
from minillm.model.quantize import quantize_decoder
from minillm.model.quantized_folder import save_quantized
from minillm.quantization.config import resolve
from tests.helpers import packed_weights as pw
from tests.helpers.kernel_cases import device
from tests.helpers.model_zoo import ALL, CAPPED, FURTHER, LONGROPE, make_model, save_checkpoint
from tests.helpers.tiny import save_tiny_llama

GPTQ4 = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
SERVED = ("phi3-longrope", "smollm3-biases-window-tied", "olmo2", "granite", "gemma2", "gemma3")
PROMPT = [3 + i * 7 % 90 for i in range(21)]


def settings_of(name: str) -> dict:
    """With heads of 16, the smallest of the kernels."""
    rope = {"short_factor": [1.0, 1.1, 1.3, 1.2], "long_factor": [1.0, 2.0, 3.5, 4.0]}
    longrope = {"rope_parameters": LONGROPE | rope} if name == "phi3-longrope" else {}
    return (ALL | {"gemma2": CAPPED})[name] | dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3) | longrope


def logits(model, tokens=PROMPT) -> torch.Tensor:
    """Through pages, the prompt in two pieces."""
    cache = pages(model)
    attention = build_attention(model, cache, "torch")
    pieces = [(0, 9), (9, len(tokens))]
    return torch.cat([model(batch_of(tokens[start:end], start), attention) for start, end in pieces])


def pages(model) -> PagedKVCache:
    sizes = model.config.num_layers, model.config.num_kv_heads, model.config.head_dim
    return PagedKVCache(*sizes, 12, 4, torch.float32, model.device)


def batch_of(token_ids: list[int], start: int) -> ForwardBatch:
    batch = ForwardBatch.single(token_ids, start, all_logits=True, device=device())
    batch.block_table = torch.tensor([[7, 2, 11, 4, 5, 9, 1, 3, 10, 6]], device=device())
    batch.slot_mapping = batch.block_table[0][batch.positions // 4] * 4 + batch.positions % 4
    return batch


@torch.no_grad()
def expected_logits(oracle, tokens=PROMPT) -> torch.Tensor:
    return oracle(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("name", SERVED)
def test_greedy_text_is_that_of_transformers(name, backend, tmp_path):
    """The prompt alone is longer than the length from which Phi-3 turns otherwise."""
    oracle = save_tiny_llama(tmp_path, **settings_of(name))
    oracle.config._attn_implementation = "eager"  # torch's own attention caps nothing
    prompts = [[5 + (i * step) % 250 for i in range(40)] for step in (7, 11)]
    llm = LLM(str(tmp_path), dtype="float32", device="cpu", max_model_len=64, attention_backend=backend)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    for ids, answer in zip(prompts, answers):
        settings = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        mask = torch.ones(1, len(ids), dtype=torch.int64)
        generated = oracle.generate(torch.tensor([ids]), attention_mask=mask, **settings)
        assert answer.outputs[0].token_ids == generated[0, len(ids) :].tolist()


def test_short_texts_of_phi3_turn_as_in_transformers(tmp_path):
    """Where no text is longer than the original length, and the engine was told so."""
    oracle = save_tiny_llama(tmp_path, **settings_of("phi3-longrope"))
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = {}
    for longest in (32, 33):
        llm = LLM(str(tmp_path), dtype="float32", device="cpu", max_model_len=longest)
        [answer] = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        rows = answer.prompt_logprobs[1:]
        found[longest] = torch.tensor([row[token].logprob for row, token in zip(rows, PROMPT[1:])])
    expected = expected_logits(oracle).log_softmax(-1)[torch.arange(20), PROMPT[1:]]
    torch.testing.assert_close(found[32], expected, rtol=0, atol=1e-4)
    assert (found[33] - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["phi3-longrope", "smollm3-no-rope", "olmo2", "granite", "gemma3"])
def test_the_triton_backend_serves_fused_or_through_attend(name, tmp_path):
    """Layers that the fused kernels do not compute declare nothing but `attend`, and no graph records them."""
    oracle = save_tiny_llama(tmp_path, **settings_of(name))
    model = load_model(tmp_path, "float32", device(), max_model_len=32)
    attention = build_attention(model, pages(model), "triton")
    is_plain = name.startswith(("phi3", "smollm3"))
    assert (can(attention, "fused_store"), can(attention, "graph_safe")) == (is_plain, is_plain)
    found = [model(batch_of(PROMPT[start:end], start), attention) for start, end in ((0, 9), (9, 20), (20, 21))]
    torch.testing.assert_close(torch.cat(found).cpu(), expected_logits(oracle), rtol=1e-4, atol=1e-4)


def test_recorded_pieces_hold_the_angles_of_every_kind_of_layer(tmp_path):
    oracle = save_tiny_llama(tmp_path, **settings_of("smollm3-no-rope"))
    model = load_model(tmp_path, "float32", device())
    graphs = PieceGraphs(model, build_attention(model, pages(model), "triton"), [16, 32])
    found = [graphs.forward(batch_of(PROMPT[start:end], start)) for start, end in ((0, 19), (19, 21))]
    torch.testing.assert_close(torch.cat(found).cpu(), expected_logits(oracle), rtol=1e-4, atol=1e-4)


def test_a_backend_that_claims_such_layers_is_refused_by_name(tmp_path):
    save_checkpoint(tmp_path, "olmo2")
    model = load_model(tmp_path, "float32", "cpu")
    batch = ForwardBatch.single([5, 6])
    model.layers[0].input_layernorm = model.norm  # what a fused layer begins with
    with pytest.raises(ValueError, match="model_type='olmo2' have no fused kernels"):
        run_layers(model, model.embed(batch.token_ids), model.rotary(batch.positions), NativeAttention, batch)


def test_sinks_are_not_turned_where_layers_rotate_differently(tmp_path):
    save_checkpoint(tmp_path, "smollm3-no-rope")
    config = EngineConfig(model=str(tmp_path), kv_retention={"sinks": 4, "window": 16})
    with pytest.raises(ValueError, match="this model's layers have several; keep no sinks"):
        retention_of(config, load_model(tmp_path, "float32", "cpu"))


# Capped scores (Gemma 2)


@pytest.mark.parametrize("window", [6, 40])
@pytest.mark.parametrize("chunk", [40, 9, 1], ids=["in one go", "in chunks", "token by token"])
def test_capped_scores_are_those_of_transformers(chunk, window, tmp_path):
    oracle = make_model(**CAPPED | {"sliding_window": window})
    oracle.config._attn_implementation = "eager"  # torch's own attention caps nothing
    oracle.save_pretrained(tmp_path)
    model = load_model(tmp_path, "float32", "cpu")
    tokens = [3 + i * 7 % 90 for i in range(40)]
    attention = build_attention(model, pages(model), "auto")
    starts = range(0, 40, chunk)
    found = torch.cat([model(batch_of(tokens[start : start + chunk], start), attention) for start in starts])
    expected = expected_logits(oracle, tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    whole = model(ForwardBatch.single(tokens, all_logits=True), NoCacheAttention(model.config.layer_windows, 1.5))
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-4)
    for layer in oracle.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert (expected_logits(oracle, tokens) - expected).abs().max() > 0.1


def test_a_backend_that_caps_nothing_is_refused_by_name(tmp_path):
    make_model(**CAPPED).save_pretrained(tmp_path)
    model = load_model(tmp_path, "float32", "cpu")
    for backend in ("native", "triton"):
        with pytest.raises(ValueError, match=f"attention_backend='{backend}' caps no scores, .* capped at 1.5"):
            build_attention(model, pages(model), backend)
    attention = NativeAttention(pages(model), model.config.layer_windows)
    with pytest.raises(ValueError, match=r"NativeAttention caps scores at None, this model at 1.5; TorchAttention can"):
        model(batch_of(PROMPT, 0), attention)


@pytest.mark.parametrize("chunk", [2048, 3, 1])
def test_hidden_states_are_those_of_transformers(chunk, tmp_path, monkeypatch):
    """Behind the last norm, as embeddings are made of them."""
    monkeypatch.setattr(pooling, "CHUNK", chunk)
    oracle = make_model(**CAPPED)
    oracle.config._attn_implementation = "eager"
    oracle.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = oracle.model(torch.tensor([PROMPT])).last_hidden_state[0]
    found = hidden_states(load_model(tmp_path, "float32", "cpu"), PROMPT)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


# In few bits


@pytest.mark.parametrize("name", FURTHER)
def test_a_quantized_folder_of_ours_is_read_as_it_was_written(name, tmp_path: Path):
    """What was cut apart, or changed its place, when it was loaded is not changed again."""
    save_checkpoint(tmp_path / "source", name)
    config = resolve({"weights": "int8", "group_size": None})
    model = read_model(tmp_path / "source", "float32", "cpu", config)
    save_quantized(model, config, tmp_path / "source", tmp_path / "int8")
    again = read_model(tmp_path / "int8", "float32", "cpu")
    assert torch.equal(logits(again.prepare()), logits(model.prepare()))


@pytest.mark.parametrize("act_order", [None, 7])
def test_a_fused_matrix_in_gptq_is_cut_apart_and_turned(act_order, tmp_path):
    """Phi-3's q, k and v in one tensor of codes, of which q's and k's rows change places."""
    save_checkpoint(tmp_path / "source", "phi3-partial", max_shard_size="1GB")

    def pack(module, weight):
        if module == "lm_head" or weight.shape[0] % 8:
            return None
        rounded = pw.round_weight(weight, 4, 16, act_order)
        return pw.gptq(rounded, 4), rounded.dequantize()

    quantized, plain = pw.save_folders(tmp_path / "source", tmp_path, GPTQ4, pack)
    few, full = (load_model(folder, "float32", "cpu") for folder in (quantized, plain))
    assert all(layer.self_attn.qkv_proj.quantized is not None for layer in few.layers)
    torch.testing.assert_close(logits(few), logits(full), rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
def test_scales_that_have_no_norm_to_go_to_are_refused_by_name(method, tmp_path):
    save_checkpoint(tmp_path, "olmo2")
    asked = {"name": method} | ({"group_size": 16} if method == "awq" else {})
    with pytest.raises(
        ValueError, match=f"method='{method}' folds .* model_type='olmo2' has none there; use rtn or gptq"
    ):
        quantize_decoder(read_model(tmp_path, "float32", "cpu"), resolve(asked), [[5, 6, 7]])


@pytest.mark.parametrize("name, method", [("granite", "awq"), ("phi3-partial", "smoothquant"), ("olmo2", "gptq")])
def test_calibrated_weights_stay_near(name, method, tmp_path):
    save_checkpoint(tmp_path, name)
    model, plain = (read_model(tmp_path, "float32", "cpu") for _ in range(2))
    asked = {"name": method, "lm_head": None} | ({"weights": "int8"} if method != "smoothquant" else {})
    texts = [[3 + (i * step) % 90 for i in range(60)] for step in (7, 11, 13)]
    quantize_decoder(model, resolve(asked | {"group_size": None if method == "smoothquant" else 16}), texts)
    found, expected = logits(model.prepare()), logits(plain.prepare())
    assert (found - expected).norm() < 0.15 * expected.norm()
