"""The benchmarks of Part V: the enlarged model says the same, every figure is there, and answers are checked first."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from minillm import LLM, SamplingParams
from minillm.bench import speculation, structured
from minillm.bench.enlarged import write_enlarged
from minillm.model.checkpoint import resolve_model


@pytest.fixture(scope="module")
def enlarged(tmp_path_factory):
    return write_enlarged(resolve_model("tinyworld-draft"), tmp_path_factory.mktemp("models") / "large", num_layers=4)


def test_an_enlarged_model_says_the_same_and_is_larger(enlarged):
    small, large = LLM("tinyworld-draft", device="cpu"), LLM(str(enlarged), device="cpu")
    assert large.model.config.num_parameters() > 20 * (small.model.config.num_parameters() - 96 * 1024)
    prompts = ["Once upon a time", "Mia has 3 apples and", "Text: Omar is 9 years old.\nFields: name\nJSON:"]
    for params in (
        SamplingParams(temperature=0.0, max_tokens=40),
        SamplingParams(temperature=1.0, seed=1, max_tokens=40),
    ):
        said = [
            [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            for llm in (small, large)
        ]
        assert said[0] == said[1]


def test_factors_and_layers_that_cannot_be_are_named(tmp_path):
    small = resolve_model("tinyworld-draft")
    for factor in (2, 8, 3, 0):
        with pytest.raises(ValueError, match=f"factor={factor} is not allowed"):
            write_enlarged(small, tmp_path, 4, factor)
    with pytest.raises(ValueError, match="num_layers=1 is not allowed; the model has 2"):
        write_enlarged(small, tmp_path, 1)


def test_speculation_measures_every_task_and_batch(monkeypatch):
    monkeypatch.setattr(speculation, "TARGET_LAYERS", 4)
    monkeypatch.setattr(speculation, "DRAFT_LAYERS", 2)
    monkeypatch.setattr(speculation, "write_enlarged", lambda small, folder, layers: small)  # at their own size
    monkeypatch.setattr(speculation, "write_enlarged_head", lambda small, folder: small)
    workload, done = speculation.Workload(prompts=2, batches=(1, 2), dtype="float32"), []
    measured = speculation.run(workload, "cpu", on_run=done.append)
    assert len(done) == speculation.num_runs(workload)
    figures = json.loads(json.dumps(measured))["figures"]
    for task in speculation.TASKS:
        assert (
            figures[task]["plain"]["agreeing_tokens"]
            == figures[task]["ngram"]["agreeing_tokens"]
            == figures[task]["plain"]["tokens"]
            > 20
        )
        for name in ("ngram", "draft model", "eagle"):
            f = figures[task][name]
            assert (
                0
                <= f["alpha"]
                <= 1
                <= f["tokens_per_step"]
                <= 1 + max(workload.num_ngram_tokens, workload.num_draft_tokens)
            )
            assert f["formula"] > 0 and f["share_of_formula"] == pytest.approx(f["speedup"] / f["formula"])
    assert figures["copying"]["ngram"]["tokens_per_step"] > 1.6 and figures["copying"]["ngram"]["alpha"] > 0.6
    assert set(figures["batch 2"]) == {"plain", "draft model", "eagle", "adaptive"}
    Console(quiet=True).print(*speculation.tables(measured))


def test_speculation_refuses_to_time_an_engine_that_says_something_else(monkeypatch):
    plain = speculation._counted

    def wrong(llm, prompts, params):
        said, counted = plain(llm, prompts, params)
        return ([[0, *one] for one in said] if counted else said), counted

    monkeypatch.setattr(speculation, "write_enlarged", lambda small, folder, layers: small)
    monkeypatch.setattr(speculation, "write_enlarged_head", lambda small, folder: small)
    monkeypatch.setattr(speculation, "_counted", wrong)
    with pytest.raises(RuntimeError, match="ngram says other float32 tokens than plain decoding"):
        speculation.run(speculation.Workload(prompts=1, batches=(), dtype="float32"), "cpu")


def test_prompts_show_the_same_fields_and_copying_asks_again():
    for task in ("json", "copying"):
        for prompt in speculation.prompts_of(task, 4):
            texts = prompt.split("\n\n")
            assert len(texts) == 5 and len({text[text.index("Fields:") : text.index("\nJSON")] for text in texts}) == 1
            assert texts[0].startswith(texts[-1]) == (task == "copying")


def test_structured_measures_costs_jumps_and_answers():
    workload, done = structured.Workload(batches=(1, 2), documents=3, repeats=5), []
    measured = structured.run(workload, "cpu", on_run=done.append)
    assert len(done) == structured.num_runs(workload)
    figures = json.loads(json.dumps(measured))["figures"]
    for batch in ("batch 1", "batch 2"):
        f = figures[batch]
        assert set(f["inside"]) == {"none", "regex"} and set(f["alone"]) == {"regex", "json"}
        assert all(one["tokens"] > 10 and one["seconds_per_step"] > 0 for one in f["alone"].values())
        assert 2 * f["steps_with_jumps"] < 1.5 * f["steps"] < 1.5 * structured.MAX_TOKENS
    assert len(figures["valid"]) == 6
    for name, f in figures["valid"].items():
        assert 0 <= f["right"] <= f["valid"] <= 1
        assert not name.startswith("constrained") or f["valid"] + f["cut_off"] == 1
    Console(quiet=True).print(*structured.tables(measured))


def test_a_grammar_that_allows_everything_changes_no_token():
    """Else the two steps that are compared would not do the same."""
    llm = LLM("tinyworld", device="cpu")
    said = [
        llm.generate("Once upon a time", structured.free(0.0, constraint), use_tqdm=False)[0].outputs[0].token_ids
        for constraint in (None, *structured.ANYTHING.values())
    ]
    assert said[0] == said[1] and len(said[0]) == structured.MAX_TOKENS
