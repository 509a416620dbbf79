"""GGUF files load whole: configuration, weights of every type, tokenizer."""

from __future__ import annotations

import copy
import shutil
from itertools import islice

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

from minillm import LLM, SamplingParams
from minillm.bench import llama_cpp
from minillm.kv_cache.contiguous import ContiguousAttention, ContiguousKVCache
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import load_config, load_model, load_tokenizer
from minillm.model.gguf import hf_name, read_blocks
from tests.helpers.gguf_writer import write
from tests.helpers.model_zoo import LLAMA3, YARN
from tests.helpers.tiny import save_tiny_llama

SIZES = dict(hidden_size=64, intermediate_size=96)
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = ["the cat sat", "then the naïve cat ate 10"]
FAMILIES = {
    "llama": {},
    "llama tied": dict(tie_word_embeddings=True),
    "llama with biases": dict(attention_bias=True, mlp_bias=True),
    "llama 3": dict(rope_parameters=LLAMA3),
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen2 yarn": dict(model_type="qwen2", rope_parameters=YARN),
    "qwen3": dict(model_type="qwen3", head_dim=32),
}


def logits(model, tokens=range(3, 60)) -> torch.Tensor:
    config, tokens = model.config, list(tokens)
    cache = ContiguousKVCache(config.num_layers, config.num_kv_heads, config.head_dim, 64, model.dtype)
    return model(ForwardBatch.single(tokens, all_logits=True), ContiguousAttention(cache, config))


def weights(model) -> dict[str, torch.Tensor]:
    """Every weight of our model by checkpoint name, dequantized."""
    model = dict(model.named_modules())
    return {name: module.weight for name, module in model.items() if hasattr(module, "in_features")}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """A folder as transformers writes it, and its model, by name."""
    folders = {name: tmp_path_factory.mktemp(name.replace(" ", "-")) for name in FAMILIES}
    return {name: (folder, save_tiny_llama(folder, **SIZES | FAMILIES[name])) for name, folder in folders.items()}


# Weights


@pytest.mark.parametrize("kind, bits", [(Type.Q8_0, 8), (Type.Q4_0, 4)])
def test_blocks_are_what_the_gguf_library_dequantizes(kind, bits):
    values = np.random.default_rng(0).normal(size=(6, 96)).astype(np.float32)
    data = gguf.quantize(values, kind)
    weight = read_blocks(data, bits)
    assert weight.format.name == f"int{bits}" and weight.scales.dtype is torch.float16 and weight.group_size == 32
    assert torch.equal(weight.dequantize(), torch.from_numpy(gguf.dequantize(data, kind)))
    every_byte = np.arange(2 * 34 * 64, dtype=np.int64).astype(np.uint8).reshape(2, -1)[:, : 34 * 18]
    every_byte.reshape(2, -1, 34 if bits == 8 else 18)[:, :, :2] = np.frombuffer(np.float16(0.37).tobytes(), np.uint8)
    assert torch.equal(read_blocks(every_byte, bits).dequantize(), torch.from_numpy(gguf.dequantize(every_byte, kind)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16])
def test_plain_files_are_the_safetensors_model(family, kind, families, tmp_path):
    folder, theirs = families[family]
    if kind is not Type.F32:
        with torch.no_grad():
            dtype = torch.float16 if kind is Type.F16 else torch.bfloat16
            theirs = type(theirs)(theirs.config).eval()
            theirs.load_state_dict(
                {
                    name: tensor.to(dtype).float() if tensor.dim() == 2 else tensor
                    for name, tensor in load_model_state(folder, theirs).items()
                }
            )
            theirs.save_pretrained(tmp_path / "folder")
            shutil.copy(folder / "generation_config.json", tmp_path / "folder")
            folder = tmp_path / "folder"
    path = write(tmp_path / "model.gguf", theirs, kind)
    ours, expected = load_model(path, "float32", "cpu"), load_model(folder, "float32", "cpu")
    assert ours.checkpoint_views().keys() == expected.checkpoint_views().keys()
    for name, weight in weights(expected).items():
        assert torch.equal(weights(ours)[name], weight), name
    assert torch.equal(logits(ours), logits(expected)) or family == "llama 3"
    torch.testing.assert_close(logits(ours), logits(expected), rtol=1e-4, atol=1e-4)
    a, b = load_config(path), load_config(folder)
    for field in (
        "model_type",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "rms_norm_eps",
        "tie_word_embeddings",
        "qkv_bias",
        "layer_windows",
        "bos_token_id",
    ):
        assert (
            getattr(a, field) == pytest.approx(getattr(b, field))
            if field == "rms_norm_eps"
            else getattr(a, field) == getattr(b, field)
        ), field
    assert a.eos_token_ids == (1, 2)  # of a text, and of a turn


def load_model_state(folder, model):
    tensors = load_file(folder / "model.safetensors")
    return tensors | (
        {"lm_head.weight": tensors["model.embed_tokens.weight"]} if "lm_head.weight" not in tensors else {}
    )


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0])
@pytest.mark.parametrize("family", ["llama", "llama tied", "llama with biases", "qwen2", "qwen3"])
def test_quantized_files_stay_quantized_and_mean_the_same(family, kind, families, tmp_path):
    reading = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    path = write(tmp_path / "model.gguf", families[family][1], kind)
    ours = load_model(path, "float32", "cpu")
    layer = ours.layers[0]
    linears = [
        layer.self_attn.qkv_proj,
        layer.self_attn.o_proj,
        layer.mlp.gate_up_proj,
        layer.mlp.down_proj,
        ours.lm_head,
    ]
    bits = 8 if kind is Type.Q8_0 else 4
    assert all(linear.quantized is not None for linear in linears)
    # Two blocks of 32 a row.
    assert linears[0].quantized.num_bytes == linears[0].out_features * 2 * (2 + 32 * bits // 8)
    assert (ours.embed_tokens is None) == ours.config.tie_word_embeddings
    theirs = copy.deepcopy(families[family][1])
    loaded = reading.load_gguf_checkpoint(path, return_tensors=True, model_to_load=theirs)["tensors"]
    state = theirs.state_dict() | {name: tensor.float() for name, tensor in loaded.items()}
    theirs.load_state_dict(state)
    assert len(loaded) == len(dict(theirs.named_parameters()))
    for name, parts in {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}.items():
        together = torch.cat([state[f"model.layers.1.{name.split('.')[0]}.{part}_proj.weight"] for part in parts])
        assert torch.equal(ours.layers[1].get_submodule(name).weight, together), name
    ids = torch.arange(300)
    torch.testing.assert_close(ours.embed(ids), state["model.embed_tokens.weight"], rtol=0, atol=0)
    torch.testing.assert_close(logits(ours), theirs(torch.arange(3, 60)[None]).logits[0].detach(), rtol=1e-3, atol=1e-3)


def test_parts_of_different_types_and_types_we_only_dequantize(families, tmp_path):
    """v in other bits than q and k, Q6_K and Q4_K in blocks of 256 (hidden size 256), a head in Q5_0."""
    folder = tmp_path / "folder"
    theirs = save_tiny_llama(folder, hidden_size=256, intermediate_size=256, num_attention_heads=4)
    random = np.random.default_rng(1)
    sizes = {kind: gguf.GGML_QUANT_SIZES[kind] for kind in (Type.Q6_K, Type.Q4_K)}
    change = {}
    for name, kind, rows in (("blk.0.ffn_down.weight", Type.Q6_K, 256), ("blk.1.attn_output.weight", Type.Q4_K, 256)):
        data = random.integers(0, 256, (rows, sizes[kind][1]), dtype=np.uint8)
        scales = slice(-2, None) if kind is Type.Q6_K else slice(0, 4)
        data[:, scales] = np.frombuffer(
            np.full((len(range(sizes[kind][1])[scales]) // 2,), 0.002, np.float16).tobytes(), np.uint8
        )
        change[name] = data
    kinds = {
        "blk.0.attn_v.weight": Type.Q4_0,
        "blk.1.ffn_up.weight": Type.F16,
        "output.weight": Type.Q5_0,
        "blk.0.ffn_down.weight": Type.Q6_K,
        "blk.1.attn_output.weight": Type.Q4_K,
    }
    path = write(tmp_path / "model.gguf", theirs, Type.Q8_0, kinds, change=change)
    ours = load_model(path, "float32", "cpu")
    quantized = {name for name, module in ours.named_modules() if getattr(module, "quantized", None) is not None}
    assert quantized == {
        "layers.0.self_attn.o_proj",
        "layers.0.mlp.gate_up_proj",
        "layers.1.self_attn.qkv_proj",
        "layers.1.mlp.down_proj",
    }
    file = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors}
    for name, target in {
        "layers.0.mlp.down_proj": "blk.0.ffn_down",
        "layers.1.self_attn.o_proj": "blk.1.attn_output",
        "lm_head": "output",
    }.items():
        assert torch.equal(ours.get_submodule(name).weight, torch.from_numpy(file[f"{target}.weight"])), name
    v = ours.layers[0].self_attn.qkv_proj.weight[-2 * 64 :]
    assert torch.equal(v, torch.from_numpy(file["blk.0.attn_v.weight"]))
    assert load_model(path, "bfloat16", "cpu").lm_head.weight.dtype is torch.bfloat16


def test_names():
    assert hf_name("blk.12.attn_q_norm.weight") == "model.layers.12.self_attn.q_norm.weight"
    assert (
        hf_name("output_norm.weight") == "model.norm.weight" and hf_name("blk.0.ssm_in.weight") == "blk.0.ssm_in.weight"
    )


# Text


@pytest.mark.parametrize("family, kind", [("llama", Type.F32), ("qwen2", Type.F32), ("qwen3", Type.F16)])
def test_text_is_that_of_the_folder(family, kind, families, tmp_path):
    folder, theirs = families[family]
    path = write(tmp_path / "model.gguf", theirs, kind)
    said = [
        LLM(str(source), dtype="float32", device="cpu", max_model_len=64).generate(PROMPTS, PARAMS, use_tqdm=False)
        for source in (path, folder)
    ]
    found, expected = ([(a.prompt_token_ids, a.outputs[0].text) for a in answers] for answers in said)
    if kind is Type.F32:
        assert found == expected
    assert [ids for ids, _ in found] == [ids for ids, _ in expected] and found[0][1] != found[1][1]


def test_the_tokenizer_is_that_of_the_folder(families, tmp_path):
    folder, theirs = families["llama"]
    ours, expected = load_tokenizer(write(tmp_path / "model.gguf", theirs)), load_tokenizer(folder)
    for text in [*PROMPTS, "<|user|>so, 10 crêpes 😀 日本語<|end|>", "  two  spaces\n\n"]:
        assert ours.encode(text) == expected.encode(text), text
        assert ours.decode(ours.encode(text)) == expected.decode(expected.encode(text))
    chat = [{"role": "user", "content": "the cat"}]
    said = [
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        for tokenizer in (ours, expected)
    ]
    assert said[0] == said[1]
    assert (ours.bos_token_id, ours.eos_token_id) == (expected.bos_token_id, expected.eos_token_id)


def agreeing_with_llama_cpp(path, count=30) -> int:
    """How many greedy tokens llama.cpp and our decoder have in common, from one prompt."""
    pytest.importorskip("llama_cpp", reason="needs llama.cpp: pip install -e '.[compare]'")
    peer = llama_cpp.LlamaCpp(path, 1, 64)
    theirs = list(islice(peer([5, 6, 7]), count))
    peer.close()
    model, tokens = load_model(path, "float32", "cpu"), [5, 6, 7]
    for _ in range(count):
        tokens.append(int(logits(model, tokens)[-1].argmax()))
    return next((i for i, (a, b) in enumerate(zip(theirs, tokens[3:])) if a != b), count)


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_says_the_same(family, families, tmp_path):
    """Biases, scaled rotations, head sizes: read by both as the file means them. (A cache in float32 for that name.)"""
    assert agreeing_with_llama_cpp(write(tmp_path / "float32.gguf", families[family][1])) == 30


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_the_benchmark_writes_every_matrix_in_few_bits(kind, families, tmp_path):
    folder, _ = families["llama tied"]
    path = llama_cpp.write_gguf(folder, load_config(folder), kind, tmp_path / "float32.gguf")
    types = {tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) == 2}
    assert types == {Type[kind]}
    # llama.cpp rounds activations to 8 bits beside quantized weights, we do not: a close race may end otherwise.
    assert agreeing_with_llama_cpp(path) >= 2


def test_the_writer_names_what_it_does_not_write(families, tmp_path):
    folder, _ = families["llama"]
    with pytest.raises(ValueError, match="kind='Q4_K' is not written; allowed: F32, BF16, Q8_0, Q4_0"):
        llama_cpp.write_gguf(folder, load_config(folder), "Q4_K", tmp_path / "x.gguf")
    save_tiny_llama(tmp_path / "odd")
    with pytest.raises(ValueError, match="hidden_size=48 and intermediate_size=80 are not whole blocks of 32"):
        llama_cpp.write_gguf(tmp_path / "odd", load_config(tmp_path / "odd"), "Q8_0", tmp_path / "x.gguf")
