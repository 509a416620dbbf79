"""The measurements at toy size: what they count, check and write; never how long anything takes."""

from __future__ import annotations

import io
import json
import math
import shutil
import threading
from dataclasses import replace
from itertools import islice

import pytest
import torch

from minillm.bench import decode, ladder, llama_cpp, measure, timed_parts, tour
from minillm.kv_cache.contiguous import ContiguousAttention

CPU = torch.device("cpu")
TOY = decode.Shape(vocab_size=512, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return decode.write_random_checkpoint(TOY, tmp_path_factory.mktemp("toy"))


# measure


def test_candidates_are_run_in_turns_after_a_warm_up():
    order, heard = [], []
    samples = measure.interleave(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=5, warmup=1, on_run=heard.append
    )
    assert order == heard == ["a", "b"] * 6
    assert [len(s.seconds) for s in samples.values()] == [5, 5]


def test_a_candidate_may_time_itself():
    own = iter([9.0, 1.0, 5.0, 2.0, 4.0, 3.0])
    samples = measure.interleave({"a": lambda: next(own)}, repeats=5)
    assert samples["a"].seconds == (1.0, 5.0, 2.0, 4.0, 3.0)
    assert samples["a"].median == 3.0 and samples["a"].spread == pytest.approx(4 / 3)


def test_too_few_repeats_are_refused():
    with pytest.raises(ValueError, match=r"repeats=4.*5"):
        measure.interleave({"a": lambda: None}, repeats=4)


@pytest.fixture(scope="module")
def ceilings():
    return measure.measure_ceilings(CPU, (torch.float32,), megabytes=1)


def test_ceilings_are_measured(ceilings):
    assert ceilings.bandwidth == max(ceilings.copy_bytes_per_second, ceilings.read_bytes_per_second) > 0
    assert ceilings.matmul_flops_per_second["float32"] > 0


def test_a_result_says_where_and_how_and_comes_back_from_its_file(ceilings, tmp_path):
    samples = {"a": measure.Samples((1.0, 2.0, 3.0))}
    written = measure.result(
        "decode-toy", "minillm bench decode", CPU, {"tokens": 3}, ceilings, {"speed": 2.0}, samples
    )
    path = measure.save(written, tmp_path)
    assert path.name.startswith("decode-toy-") and measure.load("decode-*", tmp_path) == [written]
    assert written["samples_seconds"] == {"a": [1.0, 2.0, 3.0]}
    assert written["versions"]["torch"] == torch.__version__ and written["hardware"]["device"] == "cpu"
    assert {"name", "command", "date", "workload", "ceilings", "figures"} < written.keys()


def test_cpus_of_one_name_that_compute_with_different_instructions_keep_a_file_each(tmp_path):
    written = measure.result("decode-toy", "minillm bench decode", CPU, {}, None, {}, {})
    machines = [written["hardware"] | {"architecture": f"x86_64, {found}"} for found in ("AVX2", "AVX512", "AVX2")]
    paths = [measure.save(written | {"hardware": machine}, tmp_path).name for machine in machines]
    assert paths[0].endswith("threads-avx2.json") and paths[1].endswith("threads-avx512.json")
    assert paths[2] == paths[0]


def test_committed_results_have_every_field():
    for path in measure.RESULTS.glob("*.json"):
        found = json.loads(path.read_text())
        assert found.keys() == {
            "name",
            "command",
            "date",
            "hardware",
            "versions",
            "workload",
            "ceilings",
            "figures",
            "samples_seconds",
        }, path.name
        assert found["command"].startswith("minillm ") and path.name.startswith(found["name"])
        assert path == measure.path_of(found)


# decode


def test_decode_checks_the_outputs_and_writes_every_figure(monkeypatch):
    monkeypatch.setattr(llama_cpp, "installed", lambda: False)
    done = []
    workload = decode.Workload("toy", ("float32", "bfloat16"), prompt_tokens=4, output_tokens=6)
    measured = decode.run(workload, "cpu", shapes={"toy": TOY}, on_run=done.append)
    assert json.loads(json.dumps(measured)).keys() == measured.keys()
    assert measured["figures"]["float32"]["outputs_checked"] and not measured["figures"]["bfloat16"]["outputs_checked"]
    assert measured["figures"]["float32"]["agreeing_tokens"] == 6
    assert {len(seconds) for seconds in measured["samples_seconds"].values()} == {5}
    assert measured["samples_seconds"].keys() == {
        f"{d}/{e}" for d in workload.dtypes for e in ("transformers", "minillm")
    }
    for figures in measured["figures"].values():
        assert figures["speedup"] == pytest.approx(
            figures["minillm_tokens_per_second"] / figures["transformers_tokens_per_second"]
        )
        assert figures["share_of_limit"] == pytest.approx(
            figures["minillm_tokens_per_second"] / figures["limit_tokens_per_second"]
        )
        assert all(seconds > 0 for seconds in figures["parts"].values()), figures["parts"]
    assert len(done) == 1 + 2 * (2 * 6 + 1)
    assert len(decode.tables(measured)) == 3


def test_llama_cpp_says_the_same_where_it_is_installed(toy, tmp_path):
    pytest.importorskip("llama_cpp", reason="needs llama.cpp: pip install -e '.[compare]'")
    path = llama_cpp.write_gguf(toy, decode.load_config(toy), torch.float32, tmp_path / "float32.gguf")
    theirs = list(islice(llama_cpp.LlamaCpp(path, 1, 64)([5, 6, 7]), 30))
    assert (
        theirs
        == ladder.record(
            "", ladder.with_engine()(str(toy), CPU, torch.float32), [5, 6, 7], 30, ignore_eos=True
        ).token_ids
    )
    measured = decode.run(
        decode.Workload("toy", ("float32",), prompt_tokens=4, output_tokens=8), "cpu", shapes={"toy": TOY}
    )
    figures = measured["figures"]["float32"]
    assert figures["llama_cpp_agreeing_tokens"] == 8 and len(measured["samples_seconds"]["float32/llama.cpp"]) == 5
    assert figures["speedup_over_llama_cpp"] == pytest.approx(
        figures["minillm_tokens_per_second"] / figures["llama_cpp_tokens_per_second"]
    )


def test_only_a_plain_llama_is_written_for_llama_cpp(toy, tmp_path):
    config = replace(decode.load_config(toy), qkv_bias=True)
    with pytest.raises(ValueError, match="only a plain Llama"):
        pytest.importorskip("gguf")
        llama_cpp.write_gguf(toy, config, torch.float32, tmp_path / "x.gguf")


def test_decode_refuses_to_time_engines_that_disagree(monkeypatch):
    said = ladder.with_engine()

    def wrong(model, device, dtype):
        stream = said(model, device, dtype)

        def shifted(*args):
            for piece in stream(*args):
                yield replace(piece, token_ids=tuple((token + 1) % 512 for token in piece.token_ids))

        return shifted

    monkeypatch.setattr(ladder, "with_engine", lambda **room: wrong)
    with pytest.raises(RuntimeError, match="disagree from token 0"):
        decode.run(decode.Workload("toy", ("float32",), 8, 12), "cpu", shapes={"toy": TOY})


def test_the_random_model_says_many_things(toy):
    """If it said one token for ever, agreement would prove little."""
    run = ladder.record("", ladder.with_engine()(str(toy), CPU, torch.float32), [5, 6, 7], 48, ignore_eos=True)
    assert len(run.token_ids) == 48 and len(set(run.token_ids)) > 8


def test_bytes_a_token_are_the_weights_and_the_mean_context(toy):
    config = decode.load_config(toy)
    workload = decode.Workload("toy", ("float32",), prompt_tokens=10, output_tokens=4)
    matrices = 512 * 32 + 2 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 64)
    norms = (2 * 2 + 1) * 32
    assert decode.bytes_per_token(config, torch.float32, workload) == 4 * (matrices + norms) + 12 * (2 * 2 * 2 * 8 * 4)
    untied = replace(config, tie_word_embeddings=False)
    assert decode.bytes_per_token(untied, torch.float32, workload) == decode.bytes_per_token(
        config, torch.float32, workload
    )


def test_timed_methods_are_put_back(toy):
    before = ContiguousAttention.attend
    timed = timed_parts.timed_methods({"attention": (ContiguousAttention, "attend")}, CPU)
    with pytest.raises(KeyError), timed as seconds:
        assert ContiguousAttention.attend is not before and seconds == {"attention": 0.0}
        raise KeyError
    assert ContiguousAttention.attend is before


def test_an_unknown_shape_is_named():
    with pytest.raises(ValueError, match=r"'huge'.*smollm2-135m"):
        decode.run(decode.Workload("huge"))


# ladder


@pytest.fixture(scope="module")
def climbed(toy):
    prompt = ladder.prompt_ids(str(toy), "Once upon a time")
    return {rung.name: ladder.record(rung.name, rung.open(str(toy), "cpu"), prompt, 24) for rung in ladder.RUNGS}


def test_every_rung_says_the_same(climbed):
    assert len({tuple(climbed[rung.name].token_ids) for rung in ladder.RUNGS if rung.exact}) == 1
    assert len({climbed[rung.name].text for rung in ladder.RUNGS if rung.exact}) == 1
    assert sum(not rung.exact for rung in ladder.RUNGS) == 1
    assert all(run.complete and 1 <= len(run.token_ids) <= 24 for run in climbed.values())


def test_every_rung_can_be_told_to_go_on_after_the_end(toy, tmp_path):
    """A workload of a fixed length must not be cut short: the tenth token that it says is made the end of sequence."""
    said = ladder.record("", ladder.RUNGS[0].open(str(toy), "cpu"), [5, 6, 7], 20, ignore_eos=True).token_ids
    ends = said.index(said[9]) + 1
    shutil.copytree(toy, tmp_path / "ends")
    for name in ("config.json", "generation_config.json"):
        file = tmp_path / "ends" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": said[9]}))
    for rung in ladder.RUNGS:
        stream = rung.open(str(tmp_path / "ends"), "cpu")
        ended, went_on = (ladder.record(rung.name, stream, [5, 6, 7], 20, ignore_eos) for ignore_eos in (False, True))
        if rung.exact:
            assert ended.token_ids == said[:ends], rung.name
            assert went_on.token_ids == said, rung.name
        else:
            assert len(went_on.token_ids) == 20 and ended.token_ids == went_on.token_ids[: len(ended.token_ids)]


def test_times_only_rise(climbed):
    for run in climbed.values():
        times = [piece.seconds for piece in run.said]
        assert times == sorted(times) and run.ttft == times[0] > 0
        assert run.text_at(0.0) == "" and run.text_at(math.inf) == run.text


def test_a_rung_can_be_cut_off_and_leaves_no_thread(toy, monkeypatch):
    before, made, put = threading.active_count(), [], ladder.TokenClock.put
    monkeypatch.setattr(ladder.TokenClock, "put", lambda self, ids: made.append(1) or put(self, ids))
    stream = ladder.RUNGS[0].open(str(toy), "cpu")
    run = ladder.record("slow", stream, [5, 6, 7], 400, ignore_eos=True, seconds=0.0)
    assert not run.complete and len(run.said) == 1
    assert threading.active_count() == before
    assert len(made) < 400  # and the rest is not computed for nobody


def test_an_error_inside_a_rung_reaches_the_reader(toy):
    stream = ladder.RUNGS[1].open(str(toy), "cpu")
    with pytest.raises(Exception, match="index out of range"):
        list(stream([10**6], 4, False))


def test_rungs_that_disagree_are_found():
    said = [
        ladder.Recording(name, (ladder.TimedText("x", tokens, 0.1),), True)
        for name, tokens in [("a", (1, 2, 3)), ("b", (1, 2)), ("c", (1, 9))]
    ]
    tour.check_same(said[:2])
    with pytest.raises(RuntimeError, match="'c'"):
        tour.check_same(said)


def test_the_tour_shows_every_rung(toy):
    from rich.console import Console

    console = Console(width=140, record=True, file=io.StringIO())
    recordings = tour.watch(str(toy), "cpu", max_tokens=8, console=console)
    shown = console.export_text()
    assert [run.rung for run in recordings] == [rung.name for rung in ladder.RUNGS]
    assert all(rung.name in shown for rung in ladder.RUNGS)
    assert shown.index("GB/s") < shown.index("tokens/s") < shown.index(ladder.RUNGS[0].name)  # the limit comes first


def test_a_later_chapter_adds_a_rung(toy):
    extra = ladder.Rung("mine", "99", ladder.without_cache)
    measured = tour.bench(str(toy), "cpu", max_tokens=4, rungs=[ladder.RUNGS[1], extra])
    assert list(measured["figures"]) == ["transformers", "mine"]
    assert measured["workload"]["outputs_checked"] and measured["figures"]["transformers"]["times_first"] == 1.0
    assert {len(seconds) for seconds in measured["samples_seconds"].values()} == {5}
    assert tour.bench_table(measured).row_count == 2
