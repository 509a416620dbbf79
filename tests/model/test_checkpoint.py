"""Checkpoints are found, read whole, and refused with an error that names the file or the tensor."""

from __future__ import annotations

import json
import shutil

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from minillm import zoo
from minillm.kv_cache.contiguous import ContiguousAttention, ContiguousKVCache
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import (
    CheckpointError,
    load_config,
    load_model,
    load_tokenizer,
    read_model,
    resolve_model,
)
from minillm.model.quantized_folder import save_quantized
from minillm.model.weights import weight_files
from minillm.quantization.config import resolve
from tests.helpers.model_zoo import save_checkpoint

NAME = "qwen2-max-window-layers"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    save_checkpoint(folder, NAME)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    """A copy to damage."""
    return shutil.copytree(original, tmp_path / "model")


def change(folder, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def logits(folder, dtype="float32", quantization=None) -> torch.Tensor:
    model = load_model(folder, dtype, "cpu", quantization)
    config = model.config
    cache = ContiguousKVCache(config.num_layers, config.num_kv_heads, config.head_dim, 8, model.dtype)
    return model(ForwardBatch.single([5, 6, 7], all_logits=True), ContiguousAttention(cache, config))


def test_shards_give_the_same_as_one_file(original, tmp_path):
    save_checkpoint(tmp_path, NAME, max_shard_size="40KB")
    assert len(weight_files(tmp_path)) > 2 and not (tmp_path / "model.safetensors").exists()
    assert torch.equal(logits(tmp_path), logits(original))


def test_a_missing_shard_is_named(tmp_path):
    save_checkpoint(tmp_path, NAME, max_shard_size="40KB")
    lost = weight_files(tmp_path)[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        load_model(tmp_path)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_are_converted(folder, stored, dtype):
    plain = load_file(folder / "model.safetensors")
    change(folder, lambda tensors: tensors.update({name: tensor.to(stored) for name, tensor in plain.items()}))
    model = load_model(folder, dtype, "cpu")
    wanted = getattr(torch, dtype)
    assert model.dtype is wanted
    assert torch.equal(model.embed_tokens, plain["model.embed_tokens.weight"].to(stored).to(wanted))
    k_rows = slice(model.config.num_heads * model.config.head_dim, None)
    k = plain["model.layers.2.self_attn.k_proj.weight"].to(stored).to(wanted)
    assert torch.equal(model.layers[2].self_attn.qkv_proj.weight[k_rows][: len(k)], k)


def test_missing_tensors_are_named(folder):
    change(folder, lambda tensors: [tensors.pop(f"model.layers.{i}.self_attn.k_proj.bias") for i in range(2)])
    with pytest.raises(CheckpointError, match=r"2 missing: model.layers.0.self_attn.k_proj.bias, model.layers.1"):
        load_model(folder)


def test_surplus_tensors_are_named(folder):
    change(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(12)}))
    with pytest.raises(CheckpointError, match=r"1 surplus: model.layers.0.self_attn.q_norm.weight"):
        load_model(folder)


def test_misshapen_tensors_are_named_with_both_shapes(folder):
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(CheckpointError, match=r"1 misshapen: model.norm.weight is \[47\], .* \[48\]"):
        load_model(folder)


def test_tensors_of_another_dtype_are_not_silently_converted(folder):
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=r"model.norm.weight is torch.int8"):
        load_model(folder)


def test_a_long_list_is_cut(folder):
    change(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1" in name])
    with pytest.raises(CheckpointError, match=r"12 missing: .* and 7 more"):
        load_model(folder)


def test_rotary_frequencies_and_a_second_tied_head_are_harmless(tmp_path):
    save_checkpoint(tmp_path, "qwen2-full")
    expected = logits(tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    extras = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6), "lm_head.weight": embedding.clone()}
    change(tmp_path, lambda tensors: tensors.update(extras))
    assert torch.equal(logits(tmp_path), expected) and load_model(tmp_path, "float32", "cpu").config.tie_word_embeddings


def test_a_head_that_differs_is_not_tied_whatever_the_configuration_says(tmp_path):
    """As in transformers 5: what the files hold decides."""
    save_checkpoint(tmp_path, "qwen2-full")
    tied = logits(tmp_path)
    head = torch.randn(97, 48, generator=torch.Generator().manual_seed(1))
    change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": head}))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([[5, 6, 7]])).logits[0]
    torch.testing.assert_close(logits(tmp_path), expected, rtol=0, atol=1e-4)
    assert (expected - tied).abs().max() > 1
    again = tmp_path / "quantized"
    model = read_model(tmp_path, "float32", "cpu", "int8")
    save_quantized(model, resolve("int8"), tmp_path, again)
    assert load_model(again, "float32", "cpu").embed_tokens is not None
    assert torch.equal(logits(again), logits(tmp_path, quantization="int8"))


def test_a_tied_head_alone_is_the_embedding(tmp_path):
    """transformers ties whichever of the two the files hold."""
    save_checkpoint(tmp_path, "qwen2-full")
    expected = logits(tmp_path)
    change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert torch.equal(logits(tmp_path), expected)


def test_what_automodel_writes_is_read_where_the_head_is_the_embedding(tmp_path):
    """Without a head its names lack "model."; one that is not tied is missed by name."""
    model = save_checkpoint(tmp_path / "whole", "qwen3-wide-heads")
    model.model.save_pretrained(tmp_path / "base")
    assert torch.equal(logits(tmp_path / "base"), logits(tmp_path / "whole"))
    save_checkpoint(tmp_path / "two", NAME).model.save_pretrained(tmp_path / "headless")
    with pytest.raises(CheckpointError, match=r"do not fit their config.json. 1 missing: lm_head.weight$"):
        load_model(tmp_path / "headless")


@pytest.mark.parametrize("with_model", [True, False])
def test_an_adapter_is_not_taken_for_a_model(folder, with_model):
    """transformers would load what it was trained on, and apply it."""
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/model"}')
    if not with_model:
        (folder / "config.json").unlink()
        (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"adapter_config.json: .*'org/model'.*merge_and_unload\(\).save_pretrained"
    ):
        load_model(folder)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_tensor_in_two_files_is_refused_with_both(tmp_path, indexed):
    save_checkpoint(tmp_path, NAME, max_shard_size="40KB")
    first, last = weight_files(tmp_path)[0], weight_files(tmp_path)[-1]
    twice = next(iter(load_file(last)))
    save_file(load_file(first) | {twice: torch.ones(1)}, first)
    if not indexed:
        (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=f"{twice} stands in {first.name} and in {last.name}"):
        load_model(tmp_path, "float32", "cpu")


@pytest.mark.parametrize("keep", [4, 100, -100], ids=["in the length", "in the header", "in the data"])
def test_a_truncated_file_is_named(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged or cut off .* bytes: fetch it again"):
        load_model(folder)


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "model.pt"])
def test_pickle_is_refused_and_why(folder, pickle):
    (folder / "model.safetensors").rename(folder / pickle)
    with pytest.raises(CheckpointError, match=f"it has {pickle}, but a pickle file can run any code"):
        load_model(folder)
    with pytest.raises(CheckpointError, match="refused: a pickle file can run any code"):
        resolve_model(folder / pickle)


def test_a_folder_without_weights_or_config(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*.safetensors file; nor any other weights"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config.json"):
        load_config(folder)


def test_a_cut_config_is_named(folder):
    file = folder / "config.json"
    file.write_text(file.read_text()[:50])
    with pytest.raises(CheckpointError, match=r"config.json is not valid JSON"):
        load_model(folder)


def test_names_folders_and_bundled_models(folder, monkeypatch):
    assert resolve_model(folder) == resolve_model(str(folder)) == folder
    monkeypatch.setattr(zoo, "bundled", lambda: {"tinyworld": folder})
    assert resolve_model("tinyworld") == folder
    with pytest.raises(CheckpointError, match=r"'tinywrld' is neither .*bundled .tinyworld"):
        resolve_model("tinywrld")
    with pytest.raises(CheckpointError, match="is a file; pass the folder"):
        resolve_model(folder / "config.json")


def test_a_hub_id_downloads_no_pickle_and_no_code(folder, monkeypatch):
    asked = {}

    def snapshot_download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("someone/Some-Model_1.5") == folder
    assert asked["repo_id"] == "someone/Some-Model_1.5"
    wanted = huggingface_hub.utils.filter_repo_objects(
        [
            "config.json",
            "model-00001-of-00002.safetensors",
            "tokenizer.json",
            "pytorch_model.bin",
            "modeling_x.py",
            "original/model.safetensors",
            "consolidated.safetensors",
        ],
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(wanted) == ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("x"), ConnectionError("x")])
def test_offline_says_what_to_do(monkeypatch, error):
    def snapshot_download(*args, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match="hf download someone/model --local-dir") as raised:
        resolve_model("someone/model")
    assert "out of reach" in str(raised.value) and raised.value.__cause__ is error


def test_remote_code_is_never_run(folder):
    """A configuration that names its own code is read as the family it says it is, or refused."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"auto_map": {"AutoModel": "evil.Evil"}}))
    (folder / "evil.py").write_text("raise SystemExit('code of a checkpoint was run')")
    load_model(folder)
    (folder / "config.json").write_text(json.dumps(raw | {"model_type": "evil"}))
    with pytest.raises(ValueError, match="model_type='evil'"):
        load_model(folder)


def test_a_missing_tokenizer_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json"):
        load_tokenizer(tmp_path)
