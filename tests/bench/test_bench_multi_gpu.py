"""`minillm bench multi-gpu` at toy size: several processes on this machine, with gloo."""

from __future__ import annotations

import json

import pytest

from minillm.bench import measure, multi_gpu
from minillm.book.roads.models import write_models


def test_every_split_has_the_tokens_of_one_device_and_the_bytes_of_the_formula(tmp_path):
    write_models(tmp_path)
    workload = multi_gpu.Workload(
        str(tmp_path / "llama"), ("2x1", "1x1"), "float32", prompt_tokens=8, decode_tokens=4, requests=2, shortest=2,
        longest=4, reduced_bytes=(1024,), repeats=1,
    )  # fmt: skip
    measured = multi_gpu.run(workload, "cpu", keep=lambda measured: measure.save(measured, tmp_path))
    assert "errors" not in measured and list(measured["figures"]) == ["1x1", "2x1"]
    for figures in measured["figures"].values():
        assert figures["agreeing_tokens"] == figures["of_tokens"] == 4 * multi_gpu.CHECKED_TOKENS
        assert figures["decode_step_seconds"] and figures["offline_tokens_per_second"] > 0
    two = measured["figures"]["2x1"]
    assert two["is_equal"] and two["all_reduce_seconds"]["1024"] > 0
    [file] = tmp_path.glob("*.json")
    assert json.loads(file.read_text())["figures"]["2x1"]["is_equal"]
    assert multi_gpu.table(measured).row_count == 2


def test_a_split_is_two_numbers():
    with pytest.raises(ValueError, match="ranks of a stage x stages, as in 2x1"):
        multi_gpu.parse("two")
