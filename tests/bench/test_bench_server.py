"""`minillm bench server` on a tiny model: its parts, its counts, and what it refuses to time."""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minillm.bench.commands import bench
from minillm.bench.decode import Shape
from minillm.bench.llama_cpp import write_gguf
from minillm.bench.load.intervals import interval_of_difference
from minillm.bench.load.plan import Prompts, load_vocabulary, text_of
from minillm.bench.load.target import Target, server_process
from minillm.bench.server import peers, report, run
from minillm.bench.server.peers import ONLY_ITS_FIELDS, Programs, Server
from minillm.bench.server.run import Workload, percentile_of_buckets
from minillm.model.checkpoint import load_config

TINY = Shape(1200, 64, 128, 2, 4, 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return peers.write_checkpoint(TINY, tmp_path_factory.mktemp("models") / "tiny")


def test_each_part_measures_the_real_server(monkeypatch):
    monkeypatch.setattr(run, "TTFT_ROUNDS", 1)
    workload = Workload("tiny", requests=4, prompt_tokens=20, output_tokens=6, overload_seconds=0.5, overload=20.0)
    workload = Workload(**vars(workload) | {"parts": ("http", "ttft", "overload"), "max_queued_requests": 2})
    kept = []
    measured = run.run(workload, shapes={"tiny": TINY}, keep=kept.append)
    assert measured.get("complete", True), measured
    figures = measured["figures"]
    assert figures["outputs_checked"] and len(measured["samples_seconds"]["http/http"]) == 5
    http, overload = figures["http"], figures["overload"]
    rates = http["tokens_per_second"]
    assert http["http_cost"] == pytest.approx(1 - rates["http"] / rates["offline"])
    ttft, samples = figures["ttft"], [measured["samples_seconds"][f"ttft/{name}"] for name in ("offline", "http")]
    assert [len(one) for one in samples] == [5 * run.TTFT_REQUESTS] * 2
    rounds = list(zip(*(zip(*[iter(one)] * run.TTFT_REQUESTS) for one in samples)))
    assert ttft["ttft_difference_interval"] == interval_of_difference(rounds, 50)
    asked = overload["overloaded"]["num_requests"]
    assert overload["num_admitted"] + overload["num_refused"] == asked and overload["num_lost"] == 0
    assert overload["overloaded"]["num_complete"] == overload["num_admitted"]
    [goals] = report.tables(measured)
    assert goals.row_count == 6 and kept[-1] == measured


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
        (["--peer", "ollama"], "peer='ollama' is unknown; choose of 'transformers', "),
        (["--peer", "llama.cpp"], "peer='llama.cpp' has no program to run it; give --llama-server"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(options, told):
    answer = CliRunner().invoke(bench, ["server", *options])
    assert answer.exit_code == 1 and told in " ".join(answer.output.split())
