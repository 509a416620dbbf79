"""Layers in host memory: the same tokens, and as many bytes streamed as the formula says."""

from __future__ import annotations

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.kv_cache.contiguous import ContiguousAttention, ContiguousKVCache
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import load_model
from tests.helpers.tiny import VOCAB_SIZE, save_tiny_llama

NUM_LAYERS = 7
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = ["the cat sat on the mat", "10 crêpes", "日本語 and the naïve cat"]
# qkv, o, gate and up, down of hidden 48 with 4 heads and 2 KV heads of 16, intermediate 80.
LAYER_ELEMENTS = (4 + 2 + 2) * 16 * 48 + 48 * 4 * 16 + 2 * 80 * 48 + 80 * 48
LAYER_BYTES = 4 * LAYER_ELEMENTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seven-layers")
    settings = dict(num_hidden_layers=NUM_LAYERS, head_dim=16, attention_bias=True, mlp_bias=True)
    save_tiny_llama(folder, eos_token_id=VOCAB_SIZE - 1, **settings)
    return str(folder)


def logits_of(model, token_ids: list[int], start: int = 0, attention=None) -> torch.Tensor:
    batch = ForwardBatch.single(token_ids, start)
    return model.forward(batch, attention)


def new_attention(model) -> ContiguousAttention:
    config = model.config
    return ContiguousAttention(
        ContiguousKVCache(config.num_layers, config.num_kv_heads, config.head_dim, 64, model.dtype), config
    )


@pytest.mark.parametrize("streamed", [3, 4, 7])
def test_logits_are_the_same_and_the_bytes_are_counted(folder, streamed):
    plain = load_model(folder, "float32", "cpu")
    offloaded = load_model(folder, "float32", "cpu", cpu_offload_bytes=streamed * LAYER_BYTES + LAYER_BYTES - 1)
    assert offloaded.stream.layer_bytes == LAYER_BYTES and len(offloaded.stream.index) == streamed
    assert (
        list(offloaded.stream.index) == list(offloaded.layers)[-streamed:]
        and offloaded.fingerprint == plain.fingerprint
    )
    assert (
        offloaded.stream.slots.numel() * 4 == 2 * LAYER_BYTES
        and offloaded.stream.host.numel() * 4 == streamed * LAYER_BYTES
    )
    ours, theirs = new_attention(offloaded), new_attention(plain)
    for step, tokens in enumerate([[5, 6, 7, 8, 9], [10], [11], [12]]):
        start = 0 if step == 0 else 4 + step
        assert torch.allclose(
            logits_of(offloaded, tokens, start, ours), logits_of(plain, tokens, start, theirs), atol=1e-4
        )
        # The two slots were filled once at the start; since then a step reads every streamed layer once.
        assert offloaded.stream.bytes_streamed == 2 * LAYER_BYTES + (step + 1) * streamed * LAYER_BYTES


def test_a_step_that_failed_half_way_spoils_nothing(folder):
    plain, offloaded = (
        load_model(folder, "float32", "cpu"),
        load_model(folder, "float32", "cpu", cpu_offload_bytes=5 * LAYER_BYTES),
    )
    expected = logits_of(plain, [5, 6, 7], 0, new_attention(plain))
    attention = new_attention(offloaded)
    for failing in range(NUM_LAYERS):
        attend = attention.attend

        def fail(q, k, v, layer, batch):
            if layer == failing:
                raise KeyboardInterrupt
            return attend(q, k, v, layer, batch)

        attention.attend = fail
        with pytest.raises(KeyboardInterrupt):
            logits_of(offloaded, [5, 6, 7], 0, attention)
        attention.attend = attend
        assert torch.allclose(logits_of(offloaded, [5, 6, 7], 0, attention), expected, atol=1e-4)


@pytest.mark.parametrize("attention", ["torch", "native", "triton"])
def test_the_engine_says_the_same(folder, attention):
    if attention == "native" and load_model(folder, "float32", "cpu").layers[0].whole is None:
        pytest.skip("no C compiler here")
    settings = dict(device="cpu", dtype="float32", num_kv_blocks=40, attention_backend=attention)
    prompts, params, said = PROMPTS, PARAMS, []
    if attention == "triton":  # interpreted here: a little of it
        prompts, params = [{"prompt_token_ids": [5, 6]}], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    for cpu_offload_bytes in (0, 4 * LAYER_BYTES):
        if cpu_offload_bytes and attention == "triton":
            with pytest.warns(UserWarning, match="not recorded .CUDA graphs. with cpu_offload_bytes"):
                llm = LLM(folder, cpu_offload_bytes=cpu_offload_bytes, **settings)
            assert llm.engine.runner.graphs is None
        else:
            llm = LLM(folder, cpu_offload_bytes=cpu_offload_bytes, enforce_eager=True, **settings)
        said.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert said[0] == said[1]
    assert llm.model.stream.bytes_streamed == 2 * LAYER_BYTES + llm.engine.num_steps * 4 * LAYER_BYTES
    resident = [layer.whole is not None for layer in llm.model.layers]
    assert not any(resident[3:]) and len(set(resident[:3])) == 1  # whole-layer calls for those that are there


def test_settings_that_save_nothing_are_refused(folder):
    with pytest.raises(ValueError, match=f"holds 2 of 7 layers of {LAYER_BYTES} bytes.*raise it to {3 * LAYER_BYTES}"):
        LLM(folder, device="cpu", dtype="float32", cpu_offload_bytes=2 * LAYER_BYTES)
    with pytest.raises(ValueError, match="cpu_offload_bytes=1000 streams plain weights, quantization='int8'"):
        LLM(folder, device="cpu", cpu_offload_bytes=1000, quantization="int8")
    with pytest.raises(ValueError, match="cpu_offload_bytes=-1"):
        LLM(folder, device="cpu", cpu_offload_bytes=-1)


def test_the_bench_counts_what_is_copied():
    from minillm.bench import offload
    from minillm.bench.decode import Shape

    shape = Shape(
        vocab_size=1024, hidden_size=32, intermediate_size=64, num_layers=5, num_heads=2, num_kv_heads=1, head_dim=16
    )
    measured = offload.run(
        offload.Workload("tiny", "float32", share=0.8, output_tokens=4), "cpu", shapes={"tiny": shape}
    )
    figures = measured["figures"]
    layer_bytes = 4 * (64 * 32 + 32 * 32 + 2 * 64 * 32 + 64 * 32)
    assert figures["streamed_layers"] == 4 and figures["bytes_a_step"] == 4 * layer_bytes
    assert figures["limit_tokens_per_second"] == figures["bandwidth"] / (4 * layer_bytes)
    assert figures["tokens_per_second"] > 0 and figures["same_tokens"]
    assert offload.table(measured).row_count == 2
