"""Small checkpoints of every kind, and seeded ways to damage their files."""

from __future__ import annotations

import copy
import json
import os
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from minillm.model.checkpoint import read_model
from minillm.model.quantized_folder import save_quantized
from minillm.quantization.config import resolve
from tests.helpers.gguf_writer import write
from tests.helpers.model_zoo import GEMMA3_ROPES, LONGROPE, YARN
from tests.helpers.packed_weights import compressed, gptq, round_weight, save_folders
from tests.helpers.tiny import save_tiny_llama

DEFAULTS = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 9}
SIZES = dict(hidden_size=64, intermediate_size=96)
FAMILIES = {
    "qwen3": dict(model_type="qwen3", head_dim=16, rope_parameters=YARN),
    "phi3": dict(
        model_type="phi3",
        original_max_position_embeddings=32,
        rope_parameters=LONGROPE | {"partial_rotary_factor": 1.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    ),
    "gemma3": dict(
        model_type="gemma3_text",
        head_dim=16,
        rope_parameters=GEMMA3_ROPES,
        tie_word_embeddings=True,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=7,
    ),
    "smollm3": dict(model_type="smollm3", no_rope_layers=[1, 0]),
    "granite": dict(model_type="granite", embedding_multiplier=3.0, logits_scaling=0.5),
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "checkpoint_format": "gptq"}
SCHEME = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": SCHEME}},
    "ignore": ["lm_head"],
}


def sound_folders(root: Path) -> dict[str, Path]:
    """A sound checkpoint of every layout that is read, by name."""
    plain = root / "plain"
    model = save_tiny_llama(plain, **SIZES)
    sharded = Path(shutil.copytree(plain, root / "sharded"))
    (sharded / "model.safetensors").unlink()
    model.save_pretrained(sharded, max_shard_size="150KB")
    packed = {name: _packed(plain, root / name, name) for name in ("gptq", "compressed")}
    own = save_quantized(read_model(plain, "float32", "cpu", "int8"), resolve("int8"), plain, root / "minillm")
    files = {name: root / name / "model.gguf" for name in ("q8_0", "f16")}
    for file, kind in zip(files.values(), (Type.Q8_0, Type.F16)):
        file.parent.mkdir()
        write(file, model, kind)
    families = {name: root / name for name in FAMILIES}
    for name, settings in FAMILIES.items():
        save_tiny_llama(families[name], **SIZES, **settings)
    folders = {"plain": plain, "sharded": sharded, "minillm": own, **packed, **families}
    for folder in folders.values():
        file = folder / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | DEFAULTS))
    return folders | {name: file.parent for name, file in files.items()}


def _packed(source: Path, folder: Path, name: str) -> Path:
    settings, pack = {"gptq": (GPTQ, gptq), "compressed": (COMPRESSED, compressed)}[name]

    def of_matrix(module: str, weight):
        if module == "lm_head":
            return None
        rounded = round_weight(weight, 4, 32)
        return pack(rounded, 4), rounded.dequantize()

    return save_folders(source, folder, settings, of_matrix)[0]


ODD = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 0.5, -2.5, 1e-320, float("nan"), float("inf")),
    *(10**9, 2**31, 2**63, -(2**63), 10**30, "", "x", "7", "\x00", "../model.safetensors", "/etc/passwd", "."),
    *("é\udc80", [], [1], ["x"], [None], [[]], [True, 2.0], {}, {"a": 1}),
)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456789\n"
CONTENTS = (
    *(b"", b"\n", POINTER, b"<!DOCTYPE html><html>404</html>", b"\x80\x04\x95pickle", b"PK\x03\x04", b"null", b"[]"),
    *(b"7", b'{"a": 1}', b"{}", b"\xff\xfe{\x00}\x00", b"[" * 100_000, b'{"a":' * 100_000, b"\x00" * 4096),
)


@dataclass
class Damage:
    """What was done to which file; `where` is the place in it."""

    file: Path
    what: str
    where: tuple = ()


def damage(folder: Path, random: Random) -> Damage:
    """Damage one file of `folder`, which is changed."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    file = random.choice(files)
    kinds = [(1, whole_file), (2, flip_bytes)]
    if file.suffix == ".json":
        kinds += [(12, change_json), (2, change_text)]
    elif file.suffix == ".safetensors":
        kinds += [(6, change_header)]
    elif file.suffix == ".gguf":
        kinds += [(12, change_gguf)]
    weights, functions = zip(*kinds)
    return random.choices(functions, weights)[0](file, random)


def whole_file(file: Path, random: Random) -> Damage:
    what = random.randrange(5)
    if what == 0:
        file.unlink()
        return Damage(file, "removed")
    if what == 1:
        file.unlink()
        file.mkdir()
        return Damage(file, "a folder")
    if what == 2:
        file.unlink()
        file.symlink_to(random.choice(["nowhere", file.name, "/dev/null"]))
        return Damage(file, f"a link to {os.readlink(file)}")
    content = random.choice(CONTENTS)
    file.write_bytes(content)
    return Damage(file, f"holds {content[:20]!r}")


def flip_bytes(file: Path, random: Random) -> Damage:
    """Flip, cut, insert, remove, repeat."""
    data = bytearray(file.read_bytes())
    # Beginnings are where the structure is.
    at = min(int(len(data) ** random.random()), len(data) - 1) if random.random() < 0.7 else random.randrange(len(data))
    what = random.choice(["flip", "set", "cut", "insert", "remove", "swap"])
    if what == "flip":
        data[at] ^= 1 << random.randrange(8)
    elif what == "set":
        data[at : at + 4] = random.randbytes(4)
    elif what == "cut":
        del data[at:]
    elif what == "insert":
        data[at:at] = random.randbytes(random.choice([1, 8, 100]))
    elif what == "remove":
        del data[at : at + random.choice([1, 8, 100])]
    else:
        other = random.randrange(len(data))
        data[at : at + 8], data[other : other + 8] = data[other : other + 8], data[at : at + 8]
    file.write_bytes(data)
    return Damage(file, what, (at,))


def change_json(file: Path, random: Random) -> Damage:
    raw = json.loads(file.read_text())
    what, where, text = change_value(raw, random)
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    return Damage(file, what, where)


def change_value(raw: Any, random: Random) -> tuple[str, tuple, str]:
    """Change one value of the parsed JSON `raw`, at a random place; what, where, and all of it as text."""
    holder, key, where = raw, None, []
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = random.choice(keys)
        where.append(key)
        if not isinstance(holder[key], dict | list) or not holder[key] or random.random() < 0.25:
            break
        holder = holder[key]
    value, what = holder[key], random.randrange(8)
    if what == 0:
        del holder[key]
        return "removed", tuple(where), json.dumps(raw)
    if what == 1:
        other = random.choice(list(holder) if isinstance(holder, dict) else list(range(len(holder))))
        holder[key], holder[other] = holder[other], holder[key]
        return "swapped", (*where, other), json.dumps(raw)
    if what == 2 and isinstance(holder, dict):
        holder["@@"] = random.choice(ODD)
        return "doubled", tuple(where), json.dumps(raw).replace('"@@"', json.dumps(str(key)), 1)
    if what == 3 and isinstance(value, int | float) and not isinstance(value, bool):
        changed = random.choice(
            [-value, value + 1, value - 1, value * 2, float(value), value * 10**9, str(value), [value], value // 3]
        )
    elif what == 3 and isinstance(value, list):
        changed = random.choice([value[1:], value * 2, value[::-1], dict(enumerate(map(str, value)))])
    elif what == 3 and isinstance(value, str):
        changed = random.choice([value + "\x00", value.upper(), value[1:], list(value), value * 3])
    elif what == 4:
        holder[key] = "@@"
        deep = "[" * 100_000 + "]" * 100_000 if random.random() < 0.5 else '{"a":' * 500 + "1" + "}" * 500
        return "nested", tuple(where), json.dumps(raw).replace('"@@"', deep, 1)
    else:
        changed = copy.deepcopy(random.choice(ODD))
    holder[key] = changed
    return f"set to {changed!r:.40}", tuple(where), json.dumps(raw)


def change_text(file: Path, random: Random) -> Damage:
    text = file.read_text()
    what = random.randrange(8)
    if what == 0:
        file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    elif what == 1:
        file.write_bytes(text.encode("utf-16"))
    elif what == 2:
        file.write_bytes(text.replace("e", "é").encode("latin-1", errors="replace"))
    elif what == 3:
        file.write_text(text[: random.randrange(len(text))])
    elif what == 4:
        file.write_text(text + text)
    elif what == 5:
        file.write_text("// note\n" + text)
    elif what == 6:
        file.write_text(text.replace(": ", ": " + "1" * 5000, 1))
    else:
        file.write_text(text.replace("}", ",}", 1))
    return Damage(file, f"text {what}")


def change_header(file: Path, random: Random) -> Damage:
    """Change a value of a safetensors header, or its length."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    if random.random() < 0.2:
        length = random.choice(
            [0, 1, 7, length - 1, length + 1, len(data), 10**8 - 1, 10**8 + 1, 2**40, 2**63, 2**64 - 1]
        )
        file.write_bytes(struct.pack("<Q", length) + data[8:])
        return Damage(file, f"length {length}")
    raw = json.loads(data[8 : 8 + length])
    if random.random() < 0.4:
        what, where, text = _reinterpreted(raw, random)
    else:
        what, where, text = change_value(raw, random)
    header = text.encode("utf-8", errors="surrogatepass")
    file.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])
    return Damage(file, what, where)


def _reinterpreted(header: dict[str, Any], random: Random) -> tuple[str, tuple, str]:
    """As many bytes under another shape, type or name."""
    name = random.choice([name for name in header if name != "__metadata__"])
    field, shape = header[name], header[name]["shape"]
    what = random.choice(["transposed", "flat", "deeper", "halved", "typed", "renamed"])
    if what == "transposed":
        field["shape"] = shape[::-1]
    elif what == "flat":
        field["shape"] = [int(np.prod(shape))]
    elif what == "deeper":
        field["shape"] = [1, *shape] if random.random() < 0.5 else [*shape, 1]
    elif what == "halved" and shape and shape[0] % 2 == 0:
        field["shape"] = (
            [shape[0] // 2, *shape[1:], 2] if random.random() < 0.5 else [shape[0] // 2, 2 * int(np.prod(shape[1:]))]
        )
    elif what == "typed":
        alike = {
            "F32": ["I32", "U32"],
            "F16": ["BF16", "I16", "U16"],
            "BF16": ["F16"],
            "I32": ["F32"],
            "U8": ["I8", "BOOL", "F8_E4M3", "F8_E8M0"],
            "I64": ["F64"],
        }
        field["dtype"] = random.choice(alike.get(field["dtype"], ["I8"]))
    else:
        header[
            random.choice(
                [name + "x", "x." + name, "lm_head.weight", "model.layers.7" + name[14:], name.rpartition(".")[0]]
            )
        ] = header.pop(name)
    return what, (name,), json.dumps(header)


def change_gguf(file: Path, random: Random) -> Damage:
    """Change one number, length, type or text of a GGUF file."""
    data = bytearray(file.read_bytes())
    reader = gguf.GGUFReader(file)
    start = reader.data.ctypes.data
    tensors = {f"tensor {tensor.name}": tensor.field for tensor in reader.tensors}
    name, field = random.choice(list((tensors if random.random() < 0.4 else reader.fields).items()))
    part = random.choice(field.parts[:12])
    if not part.size:
        return flip_bytes(file, random)
    at, size = part.ctypes.data - start, part.itemsize
    index = random.randrange(part.size)
    at += index * size
    value = part.flat[index]
    if part.dtype.kind in "iu":
        span = 2 ** (8 * size)
        new = (
            random.choice(
                [
                    0,
                    1,
                    2,
                    int(value) + 1,
                    int(value) - 1,
                    int(value) * 2,
                    span - 1,
                    span // 2,
                    span // 2 - 1,
                    10**9,
                    random.randrange(40),
                    random.randrange(span),
                ]
            )
            % span
        )
        data[at : at + size] = new.to_bytes(size, "little")
    elif part.dtype.kind == "f":
        new = random.choice([0.0, -1.0, float("nan"), float("inf"), 1e30, float(value) * 2])
        data[at : at + size] = np.array(new, part.dtype).tobytes()
    else:
        new = random.randrange(256)
        data[at] = new
    del reader, field, tensors, part
    file.write_bytes(data)
    return Damage(file, f"{value!r} -> {new!r}", (name,))
