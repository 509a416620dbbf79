"""GGUF files are found by path or folder, and what is wrong with one is named."""

from __future__ import annotations

import re
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from minillm.model.checkpoint import CheckpointError, load_config, load_model, load_tokenizer, resolve_model
from minillm.model.config import RopeConfig
from tests.helpers.gguf_writer import write
from tests.helpers.tiny import save_tiny_llama

YARN, NONE = gguf.RopeScalingType.YARN, gguf.RopeScalingType.NONE
DIVISORS = ("add_tensor", "rope_freqs.weight", np.ones(8, np.float32))
ROPE_KEYS = [
    ("add_rope_scaling_attn_factors", 1.5, "rope.scaling.attn_factor=1.5 is not supported"),
    ("add_rope_scaling_yarn_attn_factor", 1.5, "rope.scaling.yarn_attn_factor=1.5 is not supported"),
    ("add_rope_scaling_yarn_ext_factor", 0.5, "rope.scaling.yarn_ext_factor=0.5 is not supported"),
    ("add_rope_scaling_yarn_log_mul", 0.1, "rope.scaling.yarn_log_multiplier=0.1.* is not supported"),
    ("add_rope_dimension_sections", [2, 3, 3, 0], r"rope.dimension_sections=\[2, 3, 3, 0\] is not supported"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("llama"), hidden_size=64, intermediate_size=96)


@pytest.fixture(scope="module")
def sound(model, tmp_path_factory):
    return write(tmp_path_factory.mktemp("sound") / "model.gguf", model, Type.Q8_0)


@pytest.fixture
def path(sound, tmp_path):
    """A copy to damage."""
    return Path(shutil.copy(sound, tmp_path / "model.gguf"))


def test_a_path_or_the_folder_of_one_file(path):
    assert resolve_model(path) == resolve_model(path.parent) == resolve_model(str(path.parent)) == path
    shutil.copy(path, path.parent / "other.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF files and no config.json: name one of model.gguf, other.gguf"):
        resolve_model(path.parent)
    (path.parent / "config.json").write_text("{}")
    assert resolve_model(path.parent) == path.parent


def test_a_file_of_a_hub_repository(monkeypatch, path):
    import huggingface_hub

    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *args: str(path) if args == ("org/m-GGUF", "sub/m.gguf") else None
    )
    assert resolve_model("org/m-GGUF/sub/m.gguf") == path


@pytest.mark.parametrize(
    "keep",
    [0, 3, 20, 700, 20000, -200],
    ids=["empty", "in the magic", "in the counts", "in the metadata", "in the tensors", "in the data"],
)
def test_a_truncated_file_is_named(path, keep):
    path.write_bytes(path.read_bytes()[:keep])
    said = (
        "is empty; fetch it again"
        if keep == 0
        else "is not a GGUF file"
        if 0 < keep < 4
        else r"is damaged or cut off: .* would end after its [\d,]+ bytes; fetch it again"
    )
    for load in (load_config, load_model):
        with pytest.raises(CheckpointError, match=f"{re.escape(str(path))}.*{said}"):
            load(path)


def test_a_file_that_is_something_else(path):
    path.write_bytes(b"PK\x03\x04" + path.read_bytes()[4:])
    with pytest.raises(CheckpointError, match="not a GGUF file: it begins with b'PK"):
        load_model(path)


def test_metadata_that_is_wrong_or_missing_is_named(model, tmp_path):
    cases = [
        (dict(drop=("head_count",)), "no 'llama.attention.head_count'"),
        (dict(drop=("layer_norm_rms_eps",)), "no 'llama.attention.layer_norm_rms_epsilon'"),
        (
            dict(extra=[("add_rope_dimension_count", 8)]),
            "llama.rope.dimension_count=8 of head size 16 is not supported",
        ),
        (dict(extra=[("add_expert_count", 8)]), "0 of 2 layers have blk.N.ffn_down_exps; all must"),
        (
            dict(drop=("head_count_kv",), extra=[("add_head_count_kv", [2, 1])]),
            r"head_count_kv=\[2, 1\] differs by layer",
        ),
        (
            dict(extra=[("add_rope_scaling_type", gguf.RopeScalingType.LONGROPE), ("add_rope_scaling_factor", 2.0)]),
            "rope type 'longrope' is not supported",
        ),
        (dict(change={"token_embd.weight": None}), "no tensor token_embd.weight"),
        (dict(extra=[("add_causal_attention", False)]), "llama.attention.causal=False.*encoder"),
        (dict(extra=[("add_attention_scale", 0.5)]), "llama.attention.scale=0.5 is not supported"),
        (
            dict(extra=[("add_sliding_window", 7)]),
            "llama.attention.sliding_window=7 .* is less than the context of 128",
        ),
        *((dict(extra=[(method, value)]), said) for method, value, said in ROPE_KEYS),
        *(
            (dict(extra=[("add_rope_scaling_type", YARN), ("add_rope_scaling_factor", 2.0), (method, value)]), said)
            for method, value, said in ROPE_KEYS
        ),
        (
            dict(extra=[("add_rope_scaling_factor", 2.0), DIVISORS]),
            "rope_freqs.weight beside llama.rope.scaling.type='linear' is not supported",
        ),
        (
            dict(extra=[("add_tensor", "rope_freqs.weight", np.ones(1, np.float32))]),
            "rope_freqs.weight has 1 divisors.* 8",
        ),
        (dict(change={"blk.1.attn_k.weight": None}), "1 missing: model.layers.1.self_attn.k_proj.weight"),
        (
            dict(change={"blk.1.attn_k.weight": np.zeros((16, 64), np.float32)}),
            r"k_proj.weight is \[16, 64\], the configuration says \[32, 64\]",
        ),
    ]
    for index, (how, said) in enumerate(cases):
        path = write(tmp_path / f"{index}.gguf", model, **how)
        with pytest.raises(CheckpointError, match=said) as error:
            load_model(path, "float32", "cpu")
        assert str(path) in str(error.value)


def test_the_same_heads_for_all_layers_and_a_window_that_nothing_leaves(model, tmp_path):
    lists = [("add_head_count_kv", [2, 2]), ("add_sliding_window", 128)]
    config = load_config(write(tmp_path / "m.gguf", model, drop=("head_count_kv",), extra=lists))
    assert config.num_kv_heads == 2 and config.layer_windows == (None, None)


@pytest.mark.parametrize(
    "extra, rope",
    [
        ([("add_rope_scaling_factor", 4.0)], RopeConfig(10000.0, "linear", 4.0, 128)),
        ([("add_float32", "llama.rope.scale_linear", 4.0)], RopeConfig(10000.0, "linear", 4.0, 128)),
        ([("add_rope_scaling_type", NONE), ("add_rope_scaling_factor", 4.0)], RopeConfig(10000.0)),
        (
            [("add_rope_scaling_attn_factors", 1.0), ("add_rope_scaling_yarn_ext_factor", 0.0)],
            RopeConfig(10000.0),
        ),
        ([("add_rope_scaling_factor", 0.0)], RopeConfig(10000.0)),
    ],
    ids=["a factor without a type is linear", "its old name", "no scaling", "neutral ones", "zero is none"],
)
def test_rope_scaling_is_read_as_llama_cpp_reads_it(model, tmp_path, extra, rope):
    assert load_config(write(tmp_path / "m.gguf", model, extra=extra)).rope == rope


def test_tensors_that_overlap_or_stand_twice_are_named(path):
    data = bytearray(path.read_bytes())
    places = {tensor.name: tensor.field.parts for tensor in gguf.GGUFReader(path).tensors}
    at = data.index(b"blk.1.attn_k.weight") + len("blk.1.attn_k.weight") + 4 + 16 + 4  # its sizes and type, then offset
    first = int(places["blk.0.attn_k.weight"][-1][0])
    data[at : at + 8] = struct.pack("<Q", first)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"blk.[01].attn_k.weight and blk.[01].attn_k.weight overlap"):
        load_model(path)
    sound = data.replace(b"blk.1.attn_k.weight", b"blk.0.attn_k.weight")
    path.write_bytes(sound)
    with pytest.raises(CheckpointError, match=r"blk.0.attn_k.weight stands in it twice"):
        load_model(path)


def test_a_key_that_stands_twice_is_named(path):
    path.write_bytes(path.read_bytes().replace(b"llama.rope.freq_base", b"llama.context_length", 1))
    with pytest.raises(CheckpointError, match=r"its metadata has 'llama.context_length' twice"):
        load_model(path)


def test_an_unknown_architecture_is_named(path):
    path.write_bytes(path.read_bytes().replace(struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 5) + b"mamba", 1))
    with pytest.raises(
        CheckpointError, match=r"general.architecture='mamba' is not supported; supported: llama, qwen2, qwen3"
    ):
        load_model(path)


def test_a_type_that_is_not_known_is_named(path):
    data = path.read_bytes()
    name = b"blk.0.attn_k.weight"
    at = data.index(name) + len(name) + 4 + 16  # the number of dimensions, two of them, then the type
    assert data[at : at + 4] == struct.pack("<I", Type.Q8_0)
    path.write_bytes(data[:at] + struct.pack("<I", 99) + data[at + 4 :])
    with pytest.raises(CheckpointError, match=r"attn_k\.weight is of type 99, which the gguf library does not know"):
        load_model(path, "float32", "cpu")


def test_a_type_that_cannot_be_dequantized_is_named(model, tmp_path):
    name = "blk.0.attn_k.weight"
    how = dict(kinds={name: Type.I8}, change={name: np.zeros((32, 64), np.int8)})
    with pytest.raises(CheckpointError, match=f"{name} is of type I8, which the gguf library cannot dequantize"):
        load_model(write(tmp_path / "m.gguf", model, **how), "float32", "cpu")


def test_a_file_without_a_vocabulary_has_no_tokenizer(model, tmp_path):
    path = write(tmp_path / "m.gguf", model, drop=("tokenizer",))
    with pytest.raises(
        CheckpointError, match=f"no tokenizer could be loaded from the metadata of {re.escape(str(path))}"
    ):
        load_tokenizer(path)


def test_plain_files_can_be_quantized_and_quantized_ones_cannot_again(model, path, tmp_path):
    plain = write(tmp_path / "f16.gguf", model, Type.F16)
    assert load_model(plain, "float32", "cpu", "int8").layers[0].mlp.down_proj.quantized is not None
    with pytest.raises(CheckpointError, match=r"quantized already .gguf, Q8_0.: leave quantization out"):
        load_model(path, "float32", "cpu", "int8")
