"""Whole decoders through GPTQ, AWQ, SmoothQuant and LLM.int8():
the function stays, statistics are those of the real inputs, errors are named."""

from __future__ import annotations

import pytest
import torch

from minillm.model.attention import NoCacheAttention
from minillm.model.calibration import CalibrationWalk, calibration_sequences, perplexity, whole_sequences
from minillm.model.checkpoint import load_tokenizer, read_model, resolve_model
from minillm.model.quantize import quantize_decoder, quantize_linear, rescale
from minillm.quantization.config import QuantizationConfig, resolve
from minillm.quantization.outliers import plant_outliers
from tests.helpers.model_zoo import save_checkpoint
from tests.quantization.test_quantization_methods import random_weight, seen

FAMILIES = ["llama-mqa-biases-tied", "llama-rope-llama3", "mistral-window", "qwen2-full", "qwen3-biases-window"]
SEQUENCES = [
    [1, *torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist()]
    for length in (40, 31, 22)
]


def logits(decoder) -> torch.Tensor:
    return decoder(whole_sequences(SEQUENCES, all_logits=True), NoCacheAttention(decoder.config.layer_windows))


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_folding_preserves_the_function(tmp_path, monkeypatch, family, method):
    """AWQ's search may find nothing to scale; any scales will do here, one for each input or source of inputs."""

    def any_scales(weight, inputs, *grid, source):
        return torch.rand(weight.shape[1] if source is None else int(source.max()) + 1) + 0.5

    monkeypatch.setattr("minillm.model.quantize.search_scales", any_scales)
    save_checkpoint(tmp_path, family)
    decoder = read_model(tmp_path, "float32", "cpu")
    expected, config = logits(decoder), resolve(method)
    walk = CalibrationWalk(decoder, SEQUENCES)
    group = decoder.config.num_heads // decoder.config.num_kv_heads
    for layer in decoder.layers:
        products = layer.linears()
        before = {name: linear.plain.clone() for name, linear in products.items()}
        with torch.no_grad():
            statistics = walk.observe(layer)
            rescale(layer, config, statistics, group)
        changed = {name for name, linear in products.items() if not torch.allclose(linear.plain, before[name])}
        assert changed == set(products) if method == "awq" else changed == {"self_attn.qkv_proj", "mlp.gate_up_proj"}
        for name, again in walk.observe(layer).items():  # the statistics were divided as the inputs were
            torch.testing.assert_close(statistics[name].hessian, again.hessian, rtol=1e-3, atol=1e-3)
        walk.advance(layer)
    torch.testing.assert_close(logits(decoder), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_planted_outliers_preserve_the_function_to_the_last_bit(tmp_path, family):
    from safetensors.torch import load_file, save_file

    save_checkpoint(tmp_path, family)
    expected = logits(read_model(tmp_path, "float32", "cpu"))
    file = tmp_path / "model.safetensors"
    changed = plant_outliers(load_file(file), strength=256.0, num_channels=3)
    save_file(changed, file)
    decoder = read_model(tmp_path, "float32", "cpu")
    torch.testing.assert_close(logits(decoder), expected, rtol=1e-5, atol=1e-5)
    walk = CalibrationWalk(decoder, SEQUENCES)
    for layer in decoder.layers:
        largest = walk.observe(layer)["self_attn.qkv_proj"].largest.sort().values
        assert (largest > 20 * largest.median()).sum() in (2, 3)  # one may have hardly any weight in its norm
        walk.advance(layer)


@pytest.mark.parametrize(
    "wrong, said", [({"strength": 100.0}, "not a power of two"), ({"num_channels": 49}, "the model has 48")]
)
def test_outliers_that_cannot_be_planted_are_named(wrong, said):
    with pytest.raises(ValueError, match=said):
        plant_outliers({"model.layers.0.input_layernorm.weight": torch.ones(48)}, **wrong)


def test_static_scales_are_what_calibration_saw_and_leave_outliers_out():
    inputs, weight = seen(torch.tensor([[1.0, -3.0, 200.0], [2.0, 0.5, -100.0]])), random_weight(4, 3)
    config = resolve({"name": "llm_int8", "activation_scales": "static"})
    assert quantize_linear(weight, config, inputs).activation_scale == pytest.approx(3 / 127)
    config = resolve({"name": "int8", "activations": "int8", "activation_scales": "static"})
    assert quantize_linear(weight, config, inputs).activation_scale == pytest.approx(200 / 127)
    assert quantize_linear(weight, resolve("smoothquant"), inputs).activation_scale is None


def test_a_layer_is_calibrated_with_the_errors_before_it(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, "llama-mha")
    decoder, inputs = read_model(tmp_path, "float32", "cpu"), []
    observe = CalibrationWalk.observe
    monkeypatch.setattr(
        CalibrationWalk,
        "observe",
        lambda walk, layer: (inputs.append([h.clone() for h in walk.hidden]), observe(walk, layer))[1],
    )
    quantize_decoder(decoder, QuantizationConfig("gptq", "int2", 16, lm_head=None), SEQUENCES)
    assert len(inputs) == 3
    batch = whole_sequences(SEQUENCES)
    hidden = decoder.layers[0](
        decoder.embed(batch.token_ids),
        decoder.rotary(batch.positions),
        NoCacheAttention(decoder.config.layer_windows),
        batch,
    )
    torch.testing.assert_close(inputs[1][0], hidden)


# Errors


def test_what_cannot_be_calibrated_is_named(tmp_path):
    save_checkpoint(tmp_path, "llama-mha")
    decoder = read_model(tmp_path, "float32", "cpu")
    with pytest.raises(ValueError, match=r"layer 0, self_attn.qkv_proj: group_size=64 does not divide in_features=48"):
        quantize_decoder(decoder, resolve("gptq"), SEQUENCES)
    with pytest.raises(ValueError, match="method='gptq' is calibrated: it needs texts"):
        quantize_decoder(decoder, QuantizationConfig("gptq", group_size=16))
    with pytest.raises(ValueError, match="method='gtpq' is not allowed; allowed: rtn, gptq"):
        resolve({"method": "gtpq"})


def test_calibration_text_is_enough_and_not_the_held_out(tmp_path):
    tokenizer = load_tokenizer(resolve_model("tinyworld"))
    with pytest.raises(ValueError, match=r"calibration text of .* tokens .1 documents. is too little; at least 256"):
        calibration_sequences(tokenizer, 1)
    with pytest.raises(ValueError, match="seed=1 is the held-out text"):
        calibration_sequences(tokenizer, seed=1)
    file = tmp_path / "my.txt"
    file.write_text("Once upon a time. " * 20)
    with pytest.raises(ValueError, match=r"my.txt.* is too little.*take a longer text"):
        calibration_sequences(tokenizer, file=file)
    file.write_text("Once upon a time there was a bird. " * 200)
    sequences = calibration_sequences(tokenizer, num_documents=2, file=file)
    assert [len(ids) for ids in sequences] == [512, 512]
    assert sequences[0][0] == tokenizer.bos_token_id


def test_perplexity_is_that_of_each_sequence_by_itself(tmp_path):
    save_checkpoint(tmp_path, "qwen3-biases-window")
    decoder = read_model(tmp_path, "float32", "cpu")
    losses = []
    for ids in SEQUENCES:
        found = decoder(whole_sequences([ids], all_logits=True), NoCacheAttention(decoder.config.layer_windows))
        losses += torch.nn.functional.cross_entropy(found[:-1], torch.tensor(ids[1:]), reduction="none").tolist()
    assert perplexity(decoder, SEQUENCES) == pytest.approx(torch.tensor(losses).mean().exp().item(), rel=1e-5)
