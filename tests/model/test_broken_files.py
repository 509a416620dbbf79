"""Whatever is wrong with a checkpoint's files, loading ends in a CheckpointError with the path and the way out."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from minillm import LLM
from minillm.model import files
from minillm.model.checkpoint import CheckpointError, load_config, load_model, load_tokenizer
from minillm.model.gguf_file import Container
from tests.helpers.corrupt import POINTER
from tests.helpers.gguf_writer import write
from tests.helpers.packed_weights import set_config
from tests.helpers.tiny import TIMES, save_tiny_llama

CASES = 40  # of each of twelve layouts
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("llama"), hidden_size=64, intermediate_size=96)


@pytest.fixture(scope="module")
def sound(model, tmp_path_factory):
    """The model in shards, and beside them as a GGUF file."""
    folder = tmp_path_factory.mktemp("sound")
    save_tiny_llama(folder, hidden_size=64, intermediate_size=96)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="150KB")
    write(folder / "model.gguf", model)
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    """A copy to damage."""
    return shutil.copytree(sound, tmp_path / "model")


def refused(load, path: Path, said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as raised:
        load(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process, and looks into /proc")
def test_seeded_damage_of_every_layout_is_refused_or_harmless():
    """In a process of its own, which may take no more than 2 GiB for all cases together."""
    seed = "0" if TIMES == 1 else str(random.randrange(10**9))
    command = [sys.executable, "-m", "tests.helpers.corrupt_run", str(CASES * TIMES), seed]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["raw"] == []
    assert report["refused"] > report["loaded"] / 2 > 0
    assert (report["handles"], report["mapped"]) == (0, 0)


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("num_hidden_layers", 10**9, "a whole number from 1 to 10,000"),
        ("num_hidden_layers", 3000, "model.layers.2 and what follows .num_hidden_layers=3000"),
        ("num_hidden_layers", "2", "a whole number"),
        ("num_hidden_layers", True, "a whole number"),
        ("hidden_size", 64.0, "a whole number"),
        ("vocab_size", 2**31 - 1, r"embed_tokens.weight is \[300, 64\], the configuration says \[2147483647, 64\]"),
        ("intermediate_size", 10**9, r"gate_proj.weight is \[96, 64\], the configuration says \[1000000000, 64\]"),
        ("head_dim", 10**9, "a whole number from 1 to 65,536"),
        ("num_attention_heads", 10**10, "a whole number from 1 to 65,536"),
        ("num_attention_heads", -4, "a whole number"),
        ("num_key_value_heads", [2], "a whole number"),
        ("max_position_embeddings", 1e6, "a whole number"),
        ("sliding_window", -(2**63), "a whole number from 0"),
        ("rms_norm_eps", float("nan"), "a number"),
        ("rms_norm_eps", float("inf"), "a number"),
        ("hidden_act", ["silu"], "a text"),
        ("model_type", ["llama"], "a text"),
        ("tie_word_embeddings", "no", "true or false"),
        ("rope_parameters", [1], "an object"),
        ("rope_parameters", {"rope_type": "linear", "factor": "4"}, "rope_parameters: factor='4' .* a number above 0"),
        ("rope_parameters", {"rope_theta": 0}, "rope_parameters: rope_theta=0 .* a number above 1"),
        ("quantization_config", "gptq", "an object"),
        ("eos_token_id", 10**30 + 0.5, "a token id"),
        ("layer_types", [1, 2], "a list of texts"),
    ],
)
def test_a_field_of_another_kind_or_size_is_named(folder, name, value, allowed):
    set_config(folder, **{name: value})
    refused(lambda path: load_model(path, "float32", "cpu"), folder, f"{re.escape(name)}.*{allowed}|{allowed}")


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "0 bytes"),
        (POINTER, "a pointer of git-lfs, .* run `git lfs pull` in "),
        (b"\xef\xbb\xbf{}", "a byte-order mark"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b'{"model_type": "llama", "model_type": "qwen2"}', "'model_type' stands in it twice"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"vocab_size": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b"[]", "not an object"),
    ],
)
def test_a_configuration_that_is_no_json_object_is_named(folder, content, said):
    (folder / "config.json").write_bytes(content)
    refused(load_config, folder, rf"config\.json .*{said}")


@pytest.mark.parametrize("name", ["config.json", INDEX, "model-00001-of-00003.safetensors", "model.gguf"])
def test_what_stands_in_the_place_of_a_file_is_named(folder, name, monkeypatch):
    path, file = folder / name if name.endswith(".gguf") else folder, folder / name
    content = file.read_bytes()
    for what, said in (
        (lambda: file.write_bytes(POINTER), "run `git lfs pull`"),
        (file.mkdir, "is a folder, and should be a file"),
        (lambda: os.mkfifo(file), "a device or a pipe"),
        (lambda: file.symlink_to("gone"), "a link to a file that is missing|lacks model-00001"),
        (lambda: file.symlink_to(name), "a link to a file that is missing|lacks model-00001|symbolic links"),
    ):
        file.rmdir() if file.is_dir() else file.unlink()
        what()
        refused(lambda path: load_model(path, "float32", "cpu"), path, said)
    file.unlink()
    file.write_bytes(content)

    def denied(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "open", denied, raising=False)
    refused(lambda path: load_model(path, "float32", "cpu"), path, "Permission denied.; check its owner")


@pytest.mark.parametrize(
    "name, said",
    [
        ("../model.safetensors", "names of files in its own folder"),
        ("/etc/passwd", "names of files in its own folder"),
        ("x\0.safetensors", "names of files in its own folder"),
        ("\udc80.safetensors", "names of files in its own folder"),
        ("..", "allowed are"),
        (5, "names of files in its own folder"),
        (["x"], "names of files in its own folder"),
        ("pytorch_model.bin", "a pickle file can run any code"),
        ("gone.safetensors", "lacks gone.safetensors"),
        ("x" * 300 + ".safetensors", "lacks x"),
    ],
)
def test_an_index_that_names_another_file_is_refused(folder, name, said):
    raw = json.loads((folder / INDEX).read_text())
    raw["weight_map"][next(iter(raw["weight_map"]))] = name
    (folder / INDEX).write_text(json.dumps(raw))
    refused(load_model, folder, said)


@pytest.mark.parametrize("weight_map", [None, {}, [], "model.safetensors"])
def test_an_index_without_files_is_refused(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(load_model, folder, "has no weight_map")


def test_a_snapshot_of_links_to_blobs_is_read(folder, tmp_path):
    """The cache of the Hugging Face hub is laid out so."""
    snapshot, blobs = tmp_path / "snapshots" / "1a2b", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for index, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(index))
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", str(index)))
    assert load_model(snapshot, "float32", "cpu").config.num_layers == 2
    assert load_tokenizer(snapshot).encode("cat")


def after(data: bytes, key: bytes, skip: int) -> int:
    return data.index(key) + len(key) + skip


@pytest.mark.parametrize(
    "place, number, said",
    [
        (lambda data: 8, 2**63, "has 0 sizes|would end after its"),
        (lambda data: 16, 2**63, "would end after its|twice|type"),
        (lambda data: after(data, b"tokenizer.ggml.tokens", 8), 2**62, "would end after its"),
        (lambda data: after(data, b"tokenizer.ggml.token_type", 8), 2**61, "would end after its"),
        (lambda data: after(data, b"token_embd.weight", 4), 2**40, "would end after its"),
        (lambda data: after(data, b"token_embd.weight", 4), 0, "blocks of"),
        (lambda data: after(data, b"output_norm.weight", 16), 2**63, "overlap|would end after its|should begin at"),
        (lambda data: after(data, b"llama.block_count", 4), 10**9, r"llama\.block_count=1000000000 is not allowed"),
        (lambda data: after(data, b"llama.embedding_length", 4), 2**30, "the configuration says|head_dim"),
    ],
)
def test_counts_and_sizes_of_a_gguf_file_are_held_against_it(folder, place, number, said):
    path = folder / "model.gguf"
    data = bytearray(path.read_bytes())
    at = place(data)
    width = 4 if number < 2**31 and b"llama." in data[at - 40 : at] and at < data.index(b"token_embd.weight") else 8
    data[at : at + width] = number.to_bytes(width, "little")
    path.write_bytes(data)
    refused(lambda path: load_model(path, "float32", "cpu"), path, said)


def test_an_array_of_arrays_and_bytes_behind_the_tensors_are_refused(folder):
    path = folder / "model.gguf"
    sound = path.read_bytes()
    path.write_bytes(sound + b"\0" * 64)
    refused(load_model, path, "the data of its tensors ends after")
    at = after(sound, b"tokenizer.ggml.tokens", 4)
    path.write_bytes(sound[:at] + struct.pack("<I", 9) + sound[at + 4 :])
    refused(load_model, path, "an array of type 9; readable are numbers and texts")


def test_a_long_array_is_refused_before_it_is_read(folder, monkeypatch):
    monkeypatch.setattr("minillm.model.gguf_file.MOST_VALUES", 200)  # the vocabulary has 300
    with pytest.raises(ValueError, match=r"has a length of .*; allowed: up to 200"):
        Container(folder / "model.gguf")


@pytest.mark.parametrize("keywords", [{"dtype": "float8"}, {"device": "abacus"}, {"quantization": "int1"}])
def test_keywords_are_checked_before_the_files_are_read(folder, keywords):
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=next(iter(keywords))) as raised:
        LLM(folder, **{"device": "cpu", "generation_config": "vllm"} | keywords)
    assert not isinstance(raised.value, CheckpointError)


def test_a_template_that_cannot_be_applied_is_named(folder):
    for text, said in (("{% for %}", "TemplateSyntaxError"), ("{{ absent.name }}", "UndefinedError")):
        (folder / "chat_template.jinja").write_text(text)
        llm = LLM(folder, device="cpu", num_kv_blocks=8)
        with pytest.raises(ValueError, match=f"the chat template of {re.escape(str(folder))} cannot be .*{said}"):
            llm.chat([{"role": "user", "content": "a"}])
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    refused(load_tokenizer, folder, r"chat_template\.jinja is not UTF-8")


def test_a_wrong_default_is_an_error_of_the_file(folder):
    (folder / "generation_config.json").write_text('{"temperature": "warm"}')
    refused(lambda path: LLM(path, device="cpu"), folder, "generation_config.json: temperature='warm' is not allowed")
