"""`minillm bench server` on a tiny model: its parts, its counts, and what it refuses to time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

from minillm.bench import measure
from minillm.bench.commands import bench
from minillm.bench.decode import Shape
from minillm.bench.llama_cpp import write_gguf
from minillm.bench.load.intervals import interval_over_rounds
from minillm.bench.load.plan import Prompts, load_vocabulary, text_of
from minillm.bench.load.target import Target, server_process
from minillm.bench.record import Record
from minillm.bench.server import one_process, peers, report, run
from minillm.bench.server.peers import ONLY_ITS_FIELDS, Programs, Server
from minillm.bench.server.run import Workload, percentile_of_buckets
from minillm.model.checkpoint import load_config

TINY = Shape(1200, 64, 128, 2, 4, 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return peers.write_checkpoint(TINY, tmp_path_factory.mktemp("models") / "tiny")


def rounds_of(measured: dict, part: str, names: tuple[str, str], size: int) -> list[tuple]:
    """The samples of a part, in rounds of `size` each."""
    samples = [measured["samples_seconds"][f"{part}/{name}"] for name in names]
    return list(zip(*(zip(*[iter(one)] * size) for one in samples)))


def test_each_part_measures_the_real_server(monkeypatch):
    monkeypatch.setattr(run, "HTTP_ROUNDS", 1)
    monkeypatch.setattr(run, "TTFT_ROUNDS", 1)
    workload = Workload("tiny", requests=4, prompt_tokens=20, output_tokens=6, overload_seconds=0.5, overload=20.0)
    workload = Workload(**vars(workload) | {"parts": ("http", "ttft", "overload"), "max_queued_requests": 2})
    kept = []
    measured = run.run(workload, shapes={"tiny": TINY}, keep=kept.append)
    assert measured.get("complete", True), measured
    figures, samples = measured["figures"], measured["samples_seconds"]
    http, ttft, overload = figures["http"], figures["ttft"], figures["overload"]
    ways = ("offline", "http")

    rounds = rounds_of(measured, "http", ways, 1)
    assert figures["outputs_checked"] and len(rounds) == 5
    assert http["http_cost"] == one_process.http_cost(rounds)
    assert http["http_cost_interval"] == interval_over_rounds(rounds, one_process.http_cost)
    assert http["tokens_per_second"] == {way: 24 / median(samples[f"http/{way}"]) for way in ways}

    rounds = rounds_of(measured, "ttft", ways, run.TTFT_REQUESTS)
    assert len(rounds) == 5
    assert ttft["ttft_difference_seconds"] == pytest.approx(
        ttft["p50_seconds"]["http"] - ttft["p50_seconds"]["offline"]
    )
    assert ttft["ttft_difference_interval"] == interval_over_rounds(rounds, one_process.added_by_http)

    offered = [one["overloaded"]["num_requests"] for one in overload["rounds"]]
    complete = {name: sum(one[name]["num_complete"] for one in overload["rounds"]) for name in overload["p99_seconds"]}
    assert overload["num_admitted"] + overload["num_refused"] == sum(offered) and overload["num_lost"] == 0
    assert overload["num_admitted"] == complete["overloaded"] and len(offered) == 5
    assert complete == {name: len(samples[f"overload/{name}"]) for name in complete}
    p99 = overload["p99_seconds"]
    assert overload["overload_times_slower"] == pytest.approx(p99["overloaded"] / p99["uncongested"])
    [goals] = report.tables(measured)
    assert goals.row_count == 8 and kept[-1] == measured


def test_figures_of_rounds():
    """The cost is the median of what the rounds say, not what the medians of both ways say."""
    assert one_process.http_cost([([1.0], [1.25]), ([9.0], [10.0]), ([2.0], [8.0])]) == pytest.approx(0.2)
    assert one_process.added_by_http([([1.0, 2.0], [3.0]), ([3.0], [5.0, 7.0])]) == pytest.approx(3.0)
    assert one_process.times_slower([([1.0], [6.0]), ([2.0, 3.0], [5.0, 1.0])], 100) == pytest.approx(2.0)


def test_an_offline_answer_is_that_of_generate_and_differs_from_a_wrong_server(checkpoint, monkeypatch):
    bench = run._Bench(Workload("tiny"), Programs(), checkpoint, Record("x", "x", run.CPU, {}), lambda what: None)
    with one_process.served_here(checkpoint, "float32") as here:
        bench._check(here)
        assert bench.record.figures["outputs_checked"]
        right = run.ask
        monkeypatch.setattr(run, "ask", lambda *asked: [one ^ 1 for one in right(*asked)])
        with pytest.raises(RuntimeError, match="disagree on greedy tokens"):
            bench._check(here)


POLLS = """
import sys, time
print("ready", flush=True)
while True:
    open(sys.argv[1], "a").write(".")
    time.sleep(0.001)
"""


def test_a_paused_server_takes_no_time_from_the_others_and_ends_with_its_block(tmp_path):
    polls, started = tmp_path / "polls", []
    polls.touch()

    def polled_within(seconds: float) -> int:
        before = polls.stat().st_size
        time.sleep(seconds)
        return polls.stat().st_size - before

    command = [sys.executable, "-c", POLLS, str(polls)]
    with server_process(command, lambda log: "ready" in log and "http://x", on_start=started.append):
        server = Server(Target("http://x", "any"), None, *started)
        assert polled_within(0.2)
        server.pause()
        time.sleep(0.1)
        assert not polled_within(0.2)
        server.resume()
        assert polled_within(0.5)
        server.pause()
    with pytest.raises(ProcessLookupError):
        server.resume()


def state_of(pid: int) -> str:
    """T of a process that stands still."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


COMPUTES = """
import os, signal, threading, time
signal.signal(signal.SIGINT, lambda *received: os._exit(0))
for _ in range(3):
    threading.Thread(target=lambda: [sum(range(9999)) for _ in iter(int, 1)], daemon=True).start()
print("ready", flush=True)
time.sleep(60)
"""


def test_a_server_stands_still_as_soon_as_it_is_paused():
    """The signal alone takes a while where all cores are busy."""
    started = []
    command = [sys.executable, "-c", COMPUTES]
    with server_process(command, lambda log: "ready" in log and "http://x", on_start=started.append):
        server = Server(Target("http://x", "any"), None, *started)
        for _ in range(50):
            server.resume()
            time.sleep(0.005)
            server.pause()
            assert state_of(server.pid) == "T"


MEASURES = """
import sys, time
from minillm.bench.load.target import Target, server_process
from minillm.bench.server.peers import Server
with server_process([sys.executable, "-c", sys.argv[1]], lambda log: "ready" in log and "http://x",
                    on_start=lambda pid: globals().update(pid=pid)):
    Server(Target("http://x", "any"), None, pid).pause()
    print(pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_paused_server_ends_with_a_benchmark_that_is_killed():
    killed = subprocess.Popen([sys.executable, "-c", MEASURES, COMPUTES], stdout=subprocess.PIPE, text=True)
    pid = int(killed.stdout.readline())
    assert state_of(pid) == "T"
    killed.kill()
    killed.communicate()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and state_of(pid) != "Z":
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def test_peers_are_measured_one_at_a_time(checkpoint, monkeypatch):
    """While one answers, all others stand still."""
    loads, states = run._Bench._load, []

    def load(bench, server, *rest):
        states.append([state_of(pid) for pid in pids])
        return loads(bench, server, *rest)

    pids = []

    @contextmanager
    def running(name, path, config, dtype, programs, options=()):
        with peers.running("minillm", path, config, dtype, programs, options) as server:
            pids.append(server.pid)
            yield server

    monkeypatch.setattr(run, "running", running)
    monkeypatch.setattr(run._Bench, "_load", load)
    workload = Workload("tiny", requests=2, prompt_tokens=8, output_tokens=3, parts=("peers",))
    measured = run.run(workload, Programs(sys.executable, only=("transformers",)), shapes={"tiny": TINY})
    assert [sorted(measured["figures"]["peers"]), len(pids)] == [["1", "2"], 2]
    assert states and all(state.count("T") == 1 for state in states), states
    for at_once, servers in measured["figures"]["peers"].items():
        samples = (measured["samples_seconds"][f"{at_once}/{name}"] for name in ("minillm", "transformers"))
        own, its = (measure.Samples(tuple(one)) for one in samples)
        assert servers["transformers"] | run._over(own, its) == servers["transformers"]


def test_the_throughput_over_a_peer_is_the_ratio_of_medians_and_its_interval_keeps_turns_together():
    """Both servers are slower in the same turns; drawn apart, the bounds would lie further out."""
    own, its = (measure.Samples(tuple(factor * pace for pace in (1.0, 4.0, 2.0, 3.0, 5.0))) for factor in (1, 2))
    assert run._over(own, its) == {"minillm_over_it": 2.0, "minillm_over_it_interval": (2.0, 2.0)}
    its = measure.Samples((3.0, 3.0, 4.0, 5.0, 3.0))
    told = run._over(measure.Samples((1.0,) * 5), its)
    assert told == {"minillm_over_it": 3.0, "minillm_over_it_interval": (3.0, 5.0)}


def test_answers_of_another_length_are_not_timed(checkpoint, monkeypatch):
    bench = run._Bench(Workload("tiny"), Programs(), checkpoint, None, lambda what: None)
    server = Server(Target("http://127.0.0.1:9", "tiny"), Prompts("tiny", range(9)), pid=0)
    with pytest.raises(RuntimeError, match=r"answered 0 of 3 tokens, status 0: .*Connect"):
        bench._load(server, 2, 1, 4, 3)


def test_every_token_of_the_checkpoint_has_a_text_and_prompts_have_their_length(checkpoint):
    tokenizer, token_ids = load_vocabulary(str(checkpoint))
    texts = [tokenizer.decode([token_id]) for token_id in token_ids]
    assert len(tokenizer) == TINY.vocab_size and all(texts) and "\N{REPLACEMENT CHARACTER}" not in "".join(texts)
    assert not set(tokenizer.all_special_ids) & set(token_ids) and len(token_ids) > TINY.vocab_size - 200
    words = [one for one in token_ids if not tokenizer.convert_ids_to_tokens(one).startswith(peers.FILLER)]
    for place in range(20):
        text = text_of(tokenizer, words[place * 30 : place * 30 + 25])
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 25


def test_the_gguf_file_has_the_same_vocabulary(checkpoint, tmp_path):
    gguf = pytest.importorskip("gguf")
    path = write_gguf(checkpoint, load_config(checkpoint), "F32", tmp_path / "tiny.gguf", with_vocabulary=True)
    fields = gguf.GGUFReader(path).fields
    told = json.loads((checkpoint / "tokenizer.json").read_text())
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert {token: index for index, token in enumerate(tokens)} == told["model"]["vocab"]
    assert fields["tokenizer.ggml.model"].contents() == "gpt2"
    assert fields["tokenizer.ggml.merges"].contents()[0].split(" ") == list(told["model"]["merges"][0])
    assert fields["tokenizer.ggml.token_type"].contents()[:5] == [3, 3, 3, 3, 1]  # four special tokens first


def test_a_field_that_a_peer_does_not_know_is_left_out(checkpoint):
    tokenizer, token_ids = load_vocabulary(str(checkpoint))
    [one] = run.trace_of(run.Profile(run.Lengths("fixed", 8), run.Lengths("fixed", 3)), [0.0])
    body = json.loads(Prompts("m", token_ids, tokenizer, True, extra_body=ONLY_ITS_FIELDS).body_of(one))
    assert set(body) == {"model", "prompt", "max_tokens", "temperature", "stream"} and isinstance(body["prompt"], str)


def test_the_peers_are_those_that_have_a_program_or_those_of_them_that_are_asked_for():
    continuous = "transformers, continuous batching"
    assert Programs("python").peers == ["transformers", continuous]
    assert Programs("python", "server").peers == ["transformers", continuous, "llama.cpp"]
    assert Programs("python", "server", ("llama.cpp", continuous)).peers == [continuous, "llama.cpp"]
    with pytest.raises(ValueError, match="give --transformers"):
        Programs(None, sys.executable, (continuous,)).check()


def test_the_percentile_of_buckets_is_the_upper_limit_of_the_right_one():
    buckets = {0.001: 90.0, 0.01: 98.0, 0.1: 99.0, float("inf"): 100.0}
    assert [percentile_of_buckets(buckets, q) for q in (50, 90, 91, 99, 99.5)] == [
        0.001,
        0.001,
        0.01,
        0.1,
        float("inf"),
    ]


@pytest.mark.parametrize(
    "options, told",
    [
        (["--only", "http,speed"], "only='speed' is unknown; choose of http, ttft"),
        (["--shape", "huge"], "shape='huge' is unknown"),
        (["--transformers", "/no/python"], "transformers='/no/python' is no program"),
        (["--llama-server", "/no/server"], "llama_server='/no/server' is no program"),
        (["--only", "http", "--repeats", "4"], "repeats=4 is too few"),
        (["--peer", "ollama"], "peer='ollama' is unknown; choose of 'transformers', "),
        (["--peer", "llama.cpp"], "peer='llama.cpp' has no program to run it; give --llama-server"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(options, told):
    answer = CliRunner().invoke(bench, ["server", *options])
    assert answer.exit_code == 1 and told in " ".join(answer.output.split())
