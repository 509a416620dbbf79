"""Rotations: Hadamard matrices of many orders; a rotated decoder computes what it did; what would not is named."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from minillm import LLM
from minillm.model.attention import NoCacheAttention
from minillm.model.calibration import CalibrationWalk, whole_sequences
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.model.quantize import quantize_decoder
from minillm.model.rotation import check_rotates, rotate_decoder
from minillm.quantization.config import QuantizationConfig
from minillm.quantization.hadamard import Rotation, hadamard_transform, paley_order
from tests.helpers.model_zoo import ALL, BASE, EXPERTS
from tests.quantization.test_quantization_decoders import SEQUENCES

NORMED_AFTER = ("olmo2", "olmo2-biases", "gemma2-uncapped", "gemma3")
NO_MATRIX = ("qwen3-biases-window",)  # heads of 18 dimensions
FAMILIES = [name for name in ALL | EXPERTS if name not in NORMED_AFTER + NO_MATRIX]


@torch.no_grad()
def random_decoder(family: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """Every tensor random, gains and biases too."""
    raw = AutoConfig.for_model(**BASE | (ALL | EXPERTS)[family]).to_dict()
    decoder, generator = Decoder(ModelConfig.from_hf(raw), dtype), torch.Generator().manual_seed(0)
    for name, view in decoder.checkpoint_views().items():
        drawn = torch.randn(view.shape, generator=generator)
        view.copy_(1 + 0.3 * drawn if name.endswith("norm.weight") else 0.2 * drawn)
    return decoder


def logits(decoder: Decoder) -> torch.Tensor:
    attention = NoCacheAttention(decoder.config.layer_windows, decoder.config.attention_softcap)
    return decoder(whole_sequences(SEQUENCES, all_logits=True), attention)


# The matrices


@pytest.mark.parametrize("size", [1, 2, 8, 12, 20, 24, 28, 36, 44, 48, 60, 80, 96, 104, 576, 960])
def test_a_transform_is_a_rotation_by_ones_and_minus_ones(size):
    matrix = hadamard_transform(torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(matrix.abs(), torch.full((size, size), size**-0.5, dtype=torch.float64))
    x = torch.randn(3, 2, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(hadamard_transform(x), x @ matrix)
    rotation = Rotation(size, seed=3)
    torch.testing.assert_close(rotation(x).norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rotation(x), hadamard_transform(x * rotation.signs))
    assert size < 8 or not torch.equal(rotation.signs, Rotation(size, seed=4).signs)


def test_powers_of_two_are_sylvesters():
    found = hadamard_transform(torch.eye(4, dtype=torch.float64)) * 2
    assert found.tolist() == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]


@pytest.mark.parametrize("size", [0, 3, 6, 18, 50, 52, 100, 577])
def test_a_size_without_a_matrix_is_named(size):
    with pytest.raises(ValueError, match=f"size={size} has no Hadamard matrix here; allowed: powers of two"):
        Rotation(size)


@pytest.mark.parametrize("size", [576, 896, 1024, 1536, 2048, 2304, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192])
def test_hidden_sizes_of_released_models_have_a_matrix(size):
    assert size % paley_order(size) == 0


# The function


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rotated_decoder_computes_what_it_did(family):
    decoder = random_decoder(family)
    expected, before = logits(decoder), {name: one.plain.clone() for name, one in decoder.linears().items()}
    stream = decoder.embed(torch.arange(20)).clone()
    rotate_decoder(decoder, seed=1)
    found = logits(decoder)
    close = dict(rtol=0, atol=2e-4 * float(expected.abs().max()))
    torch.testing.assert_close(found, expected, **close)
    assert expected.std() > 0.1 and decoder.rotated and not decoder.config.tie_word_embeddings
    for name, linear in decoder.linears().items():
        assert not torch.allclose(linear.plain, before[name], atol=0.05), name
    rotated = decoder.embed(torch.arange(20))
    assert not torch.allclose(rotated, stream, atol=0.05)
    torch.testing.assert_close(rotated @ rotated.t(), stream @ stream.t(), rtol=1e-3, atol=1e-3)
    assert all(bool((norm == 1).all()) for norm in gains(decoder))


def gains(decoder: Decoder) -> list[torch.Tensor]:
    layers = [(layer.input_layernorm.weight, layer.post_attention_layernorm.weight) for layer in decoder.layers]
    return [decoder.norm.weight, *(weight for pair in layers for weight in pair)]


def test_in_bfloat16_it_is_rounded_once():
    decoder = random_decoder("llama-mha", torch.bfloat16)
    expected = logits(decoder)
    rotate_decoder(decoder)
    assert (logits(decoder) - expected).norm() < 0.05 * expected.norm()


def test_outliers_of_the_stream_are_spread_over_all_channels():
    """A channel that every embedding makes large, as large models have them."""
    decoder = random_decoder("llama-mha")
    with torch.no_grad():
        decoder.embed_tokens[:, 5] = 20.0
    spread = []
    for _ in range(2):
        seen = CalibrationWalk(decoder, SEQUENCES).observe(decoder.layers[0])["self_attn.qkv_proj"]
        spread.append(float(seen.largest.max() / seen.largest.median()))
        if not decoder.rotated:
            rotate_decoder(decoder)
    assert spread[0] > 15 and spread[1] < 3


@pytest.mark.parametrize("family", NORMED_AFTER)
def test_norms_behind_a_half_of_a_layer_are_refused_by_name(family):
    decoder = random_decoder(family)
    with pytest.raises(ValueError, match=f"rotate=True .*model_type='{decoder.config.model_type}' norms what a half"):
        rotate_decoder(decoder)


def test_a_size_or_another_product_is_refused_by_name():
    with pytest.raises(ValueError, match=r"rotate=True .* head_dim: size=18 has no Hadamard matrix"):
        rotate_decoder(random_decoder("qwen3-biases-window"))
    decoder = random_decoder("llama-mha")
    decoder.layers[1].self_attn = torch.nn.Identity()
    with pytest.raises(ValueError, match="layer 1 of model_type='llama' has other products than qkv"):
        check_rotates(decoder)


# In use


def test_rotation_comes_before_every_method(tmp_path):
    """The same codes as those of a decoder that was rotated by hand."""
    for method in ("rtn", "gptq", "awq"):
        config = QuantizationConfig(method, "int4", 16, rotate=True, seed=7)
        decoder, by_hand = random_decoder("llama-mqa-biases-tied"), random_decoder("llama-mqa-biases-tied")
        quantize_decoder(decoder, config, SEQUENCES)
        rotate_decoder(by_hand, seed=7)
        quantize_decoder(by_hand, QuantizationConfig(method, "int4", 16), SEQUENCES)
        for name, linear in decoder.linears().items():
            assert torch.equal(linear.quantized.dequantize(), by_hand.linears()[name].quantized.dequantize())
        assert decoder.embed_tokens is not None and torch.equal(decoder.embed_tokens, by_hand.embed_tokens)


def test_what_reads_hidden_states_of_the_checkpoint_is_refused(tmp_path):
    rotated = {"weights": "int8", "group_size": None, "rotate": True}
    llm = LLM("tinyworld-draft", device="cpu", quantization=rotated)
    assert len(llm.generate("Once", use_tqdm=False)[0].outputs[0].token_ids)
    for call in (llm.embed, llm.encode):
        with pytest.raises(ValueError, match=r"rotate=True: its hidden states are not those of the checkpoint"):
            call("Once upon a time")
    with pytest.raises(ValueError, match=r"enable_lora=True is not allowed with a model .* rotate=True"):
        LLM("tinyworld-draft", device="cpu", quantization=rotated, enable_lora=True)
    head = {"method": "eagle", "model": "tinyworld-eagle"}
    with pytest.raises(ValueError, match=r"method='eagle' with a model .* rotate=True .* use method='draft_model'"):
        LLM("tinyworld", device="cpu", quantization=rotated, speculative_config=head)
