"""Folders of adapters: what PEFT writes is read; what is damaged, does not fit or is not served is refused by name."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm.model.checkpoint import load_model
from minillm.model.errors import AdapterError
from minillm.model.lora_adapter import Adapter, read_adapter, shapes_of
from minillm.model.lora_slots import LoraSlots
from tests.helpers.adapters import save_adapter
from tests.helpers.model_zoo import make_model

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(1, model_type="llama", num_hidden_layers=2).save_pretrained(folder)
    return load_model(folder, "float32", "cpu"), folder


@pytest.fixture(scope="module")
def written(model, tmp_path_factory) -> Path:
    return save_adapter(model[1], tmp_path_factory.mktemp("adapter") / "a", seed=1, r=4)


@pytest.fixture
def folder(written, tmp_path) -> Path:
    return shutil.copytree(written, tmp_path / "a")


def read(model, folder: Path, max_rank: int = 16, dtype: torch.dtype = torch.float32) -> Adapter:
    return read_adapter(folder, model[0].config, shapes_of(model[0]), max_rank, dtype)


def configure(folder: Path, **changed) -> None:
    raw = json.loads((folder / CONFIG).read_text()) | changed
    (folder / CONFIG).write_text(json.dumps(raw))


def change(folder: Path, **tensors) -> None:
    """Set tensors, or with None remove them."""
    found = load_file(folder / TENSORS) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, folder / TENSORS)


def test_an_adapter_has_the_scaling_in_b(model, folder):
    adapter, tensors = read(model, folder), load_file(folder / TENSORS)
    a, b = adapter.matrices["layers.0.self_attn.q_proj"]
    assert torch.equal(a, tensors[f"{Q}.lora_A.weight"])
    assert torch.equal(b, tensors[f"{Q}.lora_B.weight"] * 2.0)  # lora_alpha 8, r 4
    assert len(adapter.matrices) == 14 and adapter.rank == 4 and adapter.num_bytes > 0


def test_the_key_is_that_of_the_content(model, folder, tmp_path):
    first = read(model, folder).key
    assert read(model, shutil.copytree(folder, tmp_path / "b")).key == first
    assert read(model, folder, dtype=torch.bfloat16).key != first
    configure(folder, lora_alpha=9)
    other = read(model, folder).key
    assert other != first
    configure(folder, lora_alpha=8, lora_dropout=0.5)  # of the training alone
    assert read(model, folder).key == first
    tensor = load_file(folder / TENSORS)[f"{Q}.lora_A.weight"]
    tensor[0, 0] += 1
    change(folder, **{f"{Q}.lora_A.weight": tensor})
    assert read(model, folder).key not in (first, other)


@pytest.mark.parametrize(
    "prefix", ["base_model.model.", "base_model.model.model.", "base_model.model.model.language_model.", "model.", ""]
)
@pytest.mark.parametrize("suffix", [".weight", ".default.weight"])
def test_names_may_begin_as_peft_or_a_wrapper_begins_them(model, written, folder, prefix, suffix):
    found = load_file(folder / TENSORS)
    named = {
        name.replace("base_model.model.model.", prefix).replace(".weight", suffix): one for name, one in found.items()
    }
    save_file(named, folder / TENSORS)
    assert read(model, folder).key == read(model, written).key


REFUSED_SETTINGS = [
    (dict(peft_type="IA3"), "peft_type='IA3'"),
    (dict(use_dora=True), "use_dora=True .*DoRA"),
    (dict(modules_to_save=["lm_head"]), "modules_to_save=.*merge"),
    (dict(bias="all"), "bias='all' .*bias='none'"),
    (dict(lora_bias=True), "lora_bias=True"),
    (dict(fan_in_fan_out=True), "fan_in_fan_out=True"),
    (dict(layer_replication=[[0, 2]]), "layer_replication"),
    (dict(trainable_token_indices=[1]), "trainable_token_indices"),
    (dict(init_lora_weights="pissa_niter_4"), "init_lora_weights='pissa_niter_4' changes the weights"),
    (dict(r=0), "r=0 is not allowed; allowed: a whole number from 1 to max_lora_rank=16"),
    (dict(r=17), "r=17 .*larger max_lora_rank"),
    (dict(r="4"), "r='4'"),
    (dict(r=True), "r=True"),
    (dict(r=None), "r=None"),
    (dict(rank_pattern={"q_proj": 99}), r"rank_pattern\['q_proj'\]=99"),
    (dict(rank_pattern=[1]), "rank_pattern=.* is not allowed"),
    (dict(rank_pattern={"(a+)+": 1}), "may take for ever"),
    (dict(alpha_pattern={"[": 1}), "is no expression"),
    (dict(lora_alpha="8"), "lora_alpha='8'"),
    (dict(lora_alpha=float("nan")), "lora_alpha=nan"),
    (dict(target_modules=[]), "target_modules"),
    (dict(target_modules=[1]), "target_modules"),
    (dict(target_modules=["q_proj"]), "target_modules does not name .*down_proj"),
    (dict(r=5), "has A .*4.* says rank 5"),
]  # fmt: skip


@pytest.mark.parametrize("changed, told", REFUSED_SETTINGS, ids=lambda value: str(value)[:40])
def test_a_setting_that_is_not_served_is_refused_by_name(model, folder, changed, told):
    configure(folder, **changed)
    with pytest.raises(AdapterError, match=told):
        read(model, folder)


A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
BAD = torch.full((4, 48), float("nan"))
REFUSED_TENSORS = [
    ({A: None}, "has no lora_A of layers.0.self_attn.q_proj"),
    ({B: None}, "has no lora_B of layers.0.self_attn.q_proj"),
    ({A: None, B: None}, "lacks 1 targets: layers.0.self_attn.q_proj"),
    ({A: torch.zeros(4, 47)}, "made for another model: its layers.0.self_attn.q_proj has 47 inputs"),
    ({B: torch.zeros(47, 4)}, "47 outputs, this model's has 48 and 48"),
    ({A: torch.zeros(3, 48)}, r"A \[3, 48\] .*rank 4"),
    ({A: torch.zeros(4, 48, dtype=torch.int32)}, "torch.int32"),
    ({A: torch.zeros(4)}, "not a matrix"),
    ({A: BAD}, "is not finite"),
    ({Q.replace("layers.0", "layers.2") + ".lora_A.weight": torch.zeros(4, 48)}, "no lora_B of layers.2"),
    ({f"{Q}.lora_magnitude_vector": torch.zeros(48)}, "DoRA"),
    ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 97)}, "embedding is not served"),
    ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 48)}, "output matrix is not served"),
    ({"base_model.model.model.layers.0.mlp.gate_proj.weight": torch.zeros(4, 48)}, "is not A or B"),
    ({f"{Q}.lora_B.bias": torch.zeros(48)}, "biases are not served"),
    ({f"{Q}.lora_A.other.weight": torch.zeros(4, 48)}, "lora_A of layer 0's self_attn.q_proj twice"),
    ({"vision_tower." + A: torch.zeros(4, 48)}, "is not A or B of a layer"),
]  # fmt: skip


@pytest.mark.parametrize("changed, told", REFUSED_TENSORS, ids=lambda value: str(value)[-60:])
def test_a_tensor_that_does_not_fit_is_refused_by_name(model, folder, changed, told):
    change(folder, **changed)
    with pytest.raises(AdapterError, match=told):
        read(model, folder)


def test_a_matrix_that_the_model_lacks_is_named(model, folder):
    names = {"A": torch.zeros(4, 48), "B": torch.zeros(48, 4)}
    change(folder, **{f"base_model.model.model.layers.7.self_attn.q_proj.lora_{n}.weight": t for n, t in names.items()})
    with pytest.raises(AdapterError, match=r"changes layers\.7\.self_attn\.q_proj, which this model does not have"):
        read(model, folder)


def test_what_overflows_in_the_model_s_dtype_is_refused(model, folder):
    change(folder, **{A: torch.full((4, 48), 1e30)})
    read(model, folder)
    with pytest.raises(AdapterError, match=r"not finite in torch\.float16"):
        read(model, folder, dtype=torch.float16)


def test_a_folder_without_safetensors_is_refused(model, folder, tmp_path):
    for path in (tmp_path / "nowhere", "/proc/self/mem", "\0", "\ud800", "x" * 5000):
        with pytest.raises(AdapterError, match=r"is not a folder|cannot be read"):
            read(model, path)
    with pytest.raises(AdapterError, match="a user that is not known"):
        read(model, "~no-such-user/adapter")
    (folder / TENSORS).rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"it has adapter_model\.bin, and a pickle file can run any code"):
        read(model, folder)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(AdapterError, match="it is missing"):
        read(model, folder)
    (folder / TENSORS).mkdir()
    with pytest.raises(AdapterError, match="is a folder, and should be a file"):
        read(model, folder)


def test_a_file_that_is_too_large_is_not_read(model, folder):
    with open(folder / TENSORS, "ab") as file:
        file.truncate(2**30)
    with pytest.raises(AdapterError, match="has 1,073,741,824 bytes; an adapter of rank 64 for this model has at most"):
        read(model, folder)


def test_damage_anywhere_is_an_adapter_error_or_harmless(model, written, tmp_path):
    """Bytes flipped, cut and inserted: never another error, and never a number that is not finite."""
    rng = random.Random(0)
    texts = ["", "{", "[]", "null", '{"peft_type": "LORA"}', "[" * 5000, '{"r": 4, "r": 5}', "\ufeff{}", "{}" * 3]
    for trial in range(150):
        folder = shutil.copytree(written, tmp_path / str(trial))
        if trial < len(texts):
            (folder / CONFIG).write_text(texts[trial])
        else:
            file = folder / rng.choice((CONFIG, TENSORS, TENSORS))
            data = bytearray(file.read_bytes())
            for _ in range(rng.choice((1, 3, 20))):
                at = rng.randrange(len(data) if rng.random() < 0.5 else min(len(data), 400))
                match rng.randrange(3):
                    case 0:
                        data[at] = rng.randrange(256)
                    case 1:
                        del data[at : at + rng.randrange(1, 50)]
                    case 2:
                        data[at:at] = rng.randbytes(8)
            file.write_bytes(data)
        try:
            adapter = read(model, folder)
        except AdapterError as error:
            assert str(error)
        else:
            assert all(part.isfinite().all() for pair in adapter.matrices.values() for part in pair)
        shutil.rmtree(folder)


def test_a_batch_slot_holds_nothing_of_the_adapter_before(model, folder, tmp_path):
    slots = LoraSlots(model[0], max_loras=2, max_rank=8)
    small = save_adapter(model[1], tmp_path / "small", seed=2, r=2, targets=["q_proj"])
    assert slots.free_slot() == 0
    slots.put(1, read(model, folder, max_rank=8))
    slots.put(1, read(model, small, max_rank=8))
    for name, part in slots.parts.items():
        is_q = name.endswith("q_proj")
        assert set(part.users) == ({1} if is_q else set())
        assert bool(part.lora_a[1, :2].any()) == is_q == bool(part.lora_b[1, :, :2].any())
        assert not part.lora_a[1, 2:].any() and not part.lora_b[1, :, 2:].any() and not part.lora_a[0].any()
    assert slots.num_bytes == sum(2 * 8 * (a + b) * 4 for a, b in slots.shapes.values())
    for linear in model[0].linears().values():
        linear.adapters = ()
