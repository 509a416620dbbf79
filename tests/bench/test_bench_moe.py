"""`minillm bench moe` at toy size: tokens checked first, every figure there, experts counted, files for others."""

from __future__ import annotations

import json

import pytest
import torch

from minillm.bench import llama_cpp, moe
from minillm.bench.compare.request import Answer
from minillm.bench.moe_gguf import write_moe_gguf
from minillm.model.attention import NoCacheAttention
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import load_config, load_model

WORKLOAD = moe.Workload("toy", "float32", batches=(1, 5), prompt_tokens=4, output_tokens=5)


def test_every_engine_is_checked_and_timed(monkeypatch):
    monkeypatch.setattr(moe, "engines_of", lambda workload: ["minillm", "dense", "transformers"])
    done = []
    measured = moe.run(WORKLOAD, on_run=done.append)
    assert json.loads(json.dumps(measured)).keys() == measured.keys() and measured["name"] == "moe-toy"
    assert len(done) == moe.num_runs(WORKLOAD)
    sizes = measured["figures"]["parameters"]
    assert sizes["dense"] < sizes["active"] < sizes["all"], "routers are what the dense model lacks"
    for batch in (1, 5):
        f = measured["figures"][f"batch {batch}"]
        assert f["agreeing_tokens"]["transformers"] == 1
        assert f["speedup"].keys() == {"dense", "transformers"}
        rate = f["tokens_per_second"]
        assert f["speedup"]["transformers"] == pytest.approx(rate["minillm"] / rate["transformers"])
    assert measured["figures"]["batch 1"]["experts_touched"] == 2
    assert 2 < measured["figures"]["batch 5"]["experts_touched"] <= 4
    assert measured["figures"]["batch 5"]["experts_predicted"] == pytest.approx(4 * (1 - 0.5**5))
    assert moe.tables(measured)


def test_engines_that_disagree_are_not_timed(monkeypatch):
    monkeypatch.setattr(moe, "engines_of", lambda workload: ["minillm", "dense", "transformers"])
    monkeypatch.setattr(
        moe.Transformers, "answer", lambda self, request: Answer([[1] * 5] * len(request.prompts), 1, 0, 1)
    )
    with pytest.raises(RuntimeError, match="of the greedy tokens differ from those of transformers"):
        moe.run(WORKLOAD)


def test_a_step_reads_the_experts_that_were_chosen(tmp_path):
    config = load_config(moe.write_checkpoint(moe.SHAPES["toy"], tmp_path / "toy", torch.float32, 0))
    one = moe.bytes_per_step(config, torch.float32, 1, 2, WORKLOAD)
    all_experts = moe.bytes_per_step(config, torch.float32, 1, 4, WORKLOAD)
    assert all_experts - one == 2 * 2 * 3 * 64 * 64 * 4  # layers, experts, matrices of 64 x 64 float32
    with pytest.raises(ValueError, match="shape='x' is unknown; choose one of qwen3-moe-1b, toy"):
        moe.run(moe.Workload("x"))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_the_file_for_llama_cpp_is_the_same_model(kind, tmp_path):
    path = moe.write_checkpoint(moe.SHAPES["toy"], tmp_path / "toy", torch.float32, 0)
    config = load_config(path)
    file = write_moe_gguf(path, config, kind, tmp_path / "float32.gguf")
    tokens = [5, 9, 200, 31, 7]
    found, expected = (
        load_model(place, "float32", "cpu")(ForwardBatch.single(tokens), NoCacheAttention(config.layer_windows))
        for place in (file, path)
    )
    worst = (found - expected).abs().max() / expected.abs().max()
    assert worst < (1e-5 if kind == "F32" else 0.1)
    with pytest.raises(ValueError, match="kind='Q3' is not written"):
        write_moe_gguf(path, config, "Q3", tmp_path / "other.gguf")
    if kind == "F32" and llama_cpp.installed():
        peer = llama_cpp.LlamaCpp(file, 1, 64)
        assert next(iter(peer(tokens))) == int(expected.argmax())
        peer.close()
