"""What a GPU will measure, computed before it does: limits from its data sheet, shares from the literature.
Built in chapter 14.

    minillm bench predict --gpu H200 --save minillm/bench/results

A prediction is a range, low to high, with the formula, its inputs and the reason. The limit of a figure follows from
the data sheet (`minillm.kernels.gpus`): the bytes that have to move over the bandwidth, or the operations over the
rate. The share of the limit that arrives is what other engines were measured to reach, and is named with each figure.
`compare` sets them beside what was measured; a range that is missed says that something is not understood.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from ..kernels.gpus import GPU, GPUS
from . import measure
from .predicted import Prediction, predict


def gpu_of(name: str) -> GPU:
    """The GPU of `minillm.kernels.gpus` that a device of this name is. Raises ValueError for one that is not there."""
    words = name.upper().replace("-", " ").split()
    for gpu in GPUS.values():
        if set(gpu.name.upper().split()) <= set(words):
            return gpu
    raise ValueError(
        f"gpu={name!r} is not among the GPUs whose data sheet minillm knows: {', '.join(GPUS)}; "
        "add its line to minillm/kernels/gpus.py"
    )


def result(name: str, command: str) -> dict:
    """The predictions for a GPU in the form of every result; a file for `measure.save`."""
    gpu = gpu_of(name)
    ceilings = {
        "copy_bytes_per_second": gpu.memory_bandwidth,
        "read_bytes_per_second": gpu.memory_bandwidth,
        "matmul_flops_per_second": {"bfloat16": gpu.fp16_tensor_flops},
    }
    head = measure.result("predictions", command, measure.torch.device("cpu"), {"gpu": gpu.name}, None, {}, {})
    figures = {one.name: asdict(one) for one in predict(gpu)}
    return head | {
        "hardware": {"name": gpu.name, "device": "none: a data sheet", "source": gpu.source},
        "ceilings": ceilings,
        "figures": figures,
    }


def committed(hardware: str) -> list[Prediction]:
    """What was predicted for this device before it ran; nothing for one that has no file, such as a CPU."""
    try:
        gpu = gpu_of(hardware)
    except ValueError:
        return []
    path = measure.RESULTS / f"predictions-{gpu.name.lower()}.json"
    if not path.exists():
        return []
    return [
        Prediction(**(fields | {"figure": tuple(fields["figure"])}))
        for fields in json.loads(path.read_text())["figures"].values()
    ]


def compare(predicted: list[Prediction], results: list[dict]) -> list[dict]:
    """Each prediction beside its measured figure, where there is one: ratio 1 is the middle of the range (its geometric
    mean), and `inside` whether the figure is in it."""
    by_name = {measured["name"]: measured for measured in results}
    found = []
    for one in predicted:
        value = _find(by_name.get(one.result), one.figure)
        if value is not None:
            middle = (one.low * one.high) ** 0.5
            found.append(
                {
                    "name": one.name,
                    "unit": one.unit,
                    "low": one.low,
                    "high": one.high,
                    "measured": value,
                    "ratio": value / middle,
                    "inside": one.low <= value <= one.high,
                }
            )
    return found


def _find(found: dict | None, keys: tuple[str, ...]) -> float | None:
    for key in keys:
        if not isinstance(found, dict):
            return None
        if key.endswith("*"):
            key = next((name for name in found if name.startswith(key[:-1])), key)
        found = found.get(key)
    return float(found) if isinstance(found, (int, float)) else None


def tables(compared: list[dict]) -> list:
    """Predicted beside measured (rich renderables); nothing where nothing can be compared."""
    from rich.table import Table

    if not compared:
        return []
    table = Table(
        "figure",
        "predicted",
        "measured",
        "ratio",
        "",
        title=f"{sum(c['inside'] for c in compared)} of {len(compared)} as predicted",
    )
    for c in compared:
        table.add_row(
            c["name"],
            f"{_number(c['low'])} to {_number(c['high'])} {c['unit']}",
            _number(c["measured"]),
            f"{c['ratio']:.2f}",
            "" if c["inside"] else "outside",
            style="" if c["inside"] else "yellow",
        )
    return [table]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def table(measured: dict):
    """Every prediction with its formula (a rich renderable)."""
    from rich.table import Table

    found = Table(
        "figure",
        "predicted",
        "formula",
        "why",
        title=f"{measured['hardware']['name']}: {measured['hardware']['source']}",
    )
    for f in measured["figures"].values():
        name = Prediction(**(f | {"figure": tuple(f["figure"])})).name
        found.add_row(name, f"{_number(f['low'])} to {_number(f['high'])} {f['unit']}", f["formula"], f["why"])
    return found
