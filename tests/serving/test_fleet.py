"""A fleet of real processes: its tokens are those of one engine, whatever dies, moves, joins or leaves."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from minillm import SamplingParams
from minillm.serving.config import ServerConfig
from minillm.serving.replicas.config import FleetConfig
from minillm.serving.replicas.fleet import Fleet
from minillm.serving.run import RunningServer
from tests.serving.conftest import MODEL, PATIENCE, wait_until

ARGUMENTS = {"model": MODEL, "dtype": "float32", "device": "cpu", "num_kv_blocks": 600, "max_num_seqs": 64}
STORY = "Once upon a time there was a dog"


def make_fleet(**config) -> Fleet:
    return Fleet(ARGUMENTS, FleetConfig(num_threads=1, **config))


@pytest.fixture(scope="module")
def fleet():
    """Two replicas that stay for the whole module, whatever a test does to them."""
    with make_fleet(replicas=2) as fleet:
        pids = [member.process.pid for member in fleet.members]
        yield fleet
        pids += [member.process.pid for member in fleet.members]
    assert_gone(pids)
    assert not list(Path("/dev/shm").glob(f"minillm-{fleet.fleet_id}*"))


@pytest.fixture
def whole(fleet):
    """The fleet with both replicas up; afterwards nothing is under way."""
    fleet.wait_until_ready(timeout=PATIENCE)
    yield fleet
    wait_until(lambda: not fleet.thread.streams)
    wait_until(lambda: not fleet.router.flights and not fleet.router.by_request)
    wait_until(lambda: all(view.num_tokens == 0 for view in fleet.router.takers))


def assert_gone(pids) -> None:
    def is_there(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
        except FileNotFoundError:
            return False

    wait_until(lambda: not any(map(is_there, pids)))


class Reader(threading.Thread):
    """Reads a stream beside the others, and keeps its history."""

    def __init__(self, stream):
        super().__init__(daemon=True)
        self.stream, self.deltas, self.error = stream, [], None
        self.start()

    def run(self) -> None:
        try:
            for delta in self.stream:
                self.deltas.append(delta)
        except Exception as error:
            self.error = error

    def check(self, llm) -> None:
        """Each token came once, in order, and the text is that of one engine."""
        self.join(PATIENCE)
        assert not self.is_alive() and self.error is None, self.error
        request = self.stream.sink.request
        params = request.params.clone()
        params.seed = request.seed
        [wanted] = llm.generate({"prompt_token_ids": request.prompt_token_ids}, params, use_tqdm=False)
        for sample in wanted.outputs:
            mine = [delta for delta in self.deltas if delta.index == sample.index]
            assert [token_id for delta in mine for token_id in delta.token_ids] == sample.token_ids
            assert "".join(delta.text for delta in mine) == sample.text
            assert [delta.finish_reason for delta in mine if delta.finish_reason] == [sample.finish_reason]


def test_what_is_asked_is_answered_as_by_one_engine(whole, llm):
    asked = [
        ("greedy", SamplingParams(temperature=0, max_tokens=24)),
        ("seeded", SamplingParams(temperature=0.9, seed=5, max_tokens=24)),
        ("three samples", SamplingParams(temperature=1.0, seed=6, n=3, max_tokens=16)),
        ("a stop string", SamplingParams(temperature=0, stop=["the", "and"], max_tokens=64)),
        ("penalties", SamplingParams(temperature=0, repetition_penalty=1.3, min_tokens=10, max_tokens=24)),
        ("json", SamplingParams(temperature=0, max_tokens=40, structured_outputs={"regex": "[a-z]{3} = [0-9]{2}"})),
    ]
    readers = [Reader(whole.submit(f"{name}: {STORY}", params)) for name, params in asked]
    for reader in readers:
        reader.check(llm)


def test_log_probabilities_and_counts_come_along(whole, llm):
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1)
    prompt = f"{STORY}. " * 6
    for _ in range(2):
        mine, [wanted] = whole.submit(prompt, params).output(PATIENCE), llm.generate(prompt, params, use_tqdm=False)
        for name in ("token_ids", "text", "finish_reason"):
            assert getattr(mine.outputs[0], name) == getattr(wanted.outputs[0], name)
        for found, plain in ((mine.outputs[0].logprobs, wanted.outputs[0].logprobs),
                             (mine.prompt_logprobs, wanted.prompt_logprobs)):  # fmt: skip
            assert len(found) == len(plain)
            for row, other in zip(found, plain):
                assert (row is None) == (other is None)
                for token_id in row or ():
                    assert row[token_id].logprob == pytest.approx(other[token_id].logprob, abs=1e-3)
    cached = SamplingParams(temperature=0, max_tokens=2)
    whole.submit(prompt, cached).output(PATIENCE)
    assert whole.submit(prompt, cached).output(PATIENCE).num_cached_tokens >= 32  # prefix_aware found the replica
    with pytest.raises(ValueError, match="max_model_len"):
        whole.submit([5] * 100_000, cached)
    with pytest.raises(NotImplementedError, match="generate is not served by a fleet"):
        whole.llm.generate(prompt)


def test_ten_replicas_are_killed_while_they_stream(whole, llm):
    rng = random.Random(1)
    params = {
        "greedy": SamplingParams(temperature=0, ignore_eos=True, max_tokens=160),
        "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=3, ignore_eos=True, max_tokens=160),
        "not seeded": SamplingParams(temperature=0.8, ignore_eos=True, max_tokens=160),
    }
    before, kills, readers = whole.router.num_failovers, 0, []
    while whole.router.num_failovers - before < 10 and kills < 30:  # a stream may end before its replica does
        readers += [Reader(whole.submit(f"{name} {kills} {STORY}", one)) for name, one in params.items()]
        wait_until(lambda: any(len(one.deltas) > rng.randrange(3, 40) for one in readers[-3:]))
        victim = whole.where(readers[-1].stream) or whole.where(readers[-2].stream)
        if victim is not None:
            os.kill(whole.members.by_id[victim].process.pid, signal.SIGKILL)
            kills += 1
        if kills % 2:  # every other time the next one is killed while this one is being replaced
            whole.wait_until_ready(timeout=PATIENCE)
        else:
            whole.wait_until_ready(1, timeout=PATIENCE)
    for reader in readers:
        reader.check(llm)
    assert whole.router.num_failovers - before >= 10
    whole.wait_until_ready(timeout=PATIENCE)
    assert set(whole.replicas.values()) == {"ready"}


def test_a_running_request_moves_with_its_keys_and_values(whole, llm):
    params = SamplingParams(temperature=0.7, seed=8, ignore_eos=True, max_tokens=900)
    [wanted] = llm.generate(STORY * 9, params, use_tqdm=False)
    moved, before = 0, len(whole.migrations.moves)
    for _ in range(10):  # on a busy machine a replica may be at the end before this thread asks for a move
        stream, heard = whole.submit(STORY * 9, params), []
        for delta in stream:
            heard += delta.token_ids
            if len(heard) % 50 == 0 and (here := whole.where(stream)) is not None:  # there and back
                moved += whole.migrate(stream, "r1" if here == "r0" else "r0")
        assert heard == wanted.outputs[0].token_ids
        assert not whole.migrate(stream, "r0")  # it has ended
        if moved >= 2:
            break
    moves = list(whole.migrations.moves)[before:]
    assert moved >= 2 and len(moves) == moved
    for move in moves:
        assert move.took_in and move.num_steps <= 2 and move.num_tokens > 50 and move.num_bytes > 0, move


def test_an_abort_reaches_the_replica(whole):
    reasons = []
    for _ in range(10):  # on a busy machine a replica may be at the end before this thread aborts
        reader = Reader(whole.submit(STORY, SamplingParams(ignore_eos=True, max_tokens=900)))
        wait_until(lambda reader=reader: reader.deltas)
        reader.stream.abort()
        reader.join(PATIENCE)
        reasons.append(reader.deltas[-1].finish_reason)
        if reasons[-1] == "abort":
            break
    assert reasons[-1] == "abort", reasons
    wait_until(lambda: all(one.report and one.report.num_running == 0 for one in whole.members))


def test_http_over_a_fleet_survives_a_kill_in_mid_stream(whole, llm):
    body = {"prompt": STORY, "max_tokens": 900, "temperature": 0, "stream": True, "ignore_eos": True}
    params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
    [wanted] = llm.generate(STORY, params, use_tqdm=False)
    with RunningServer(whole, ServerConfig(port=0)) as server, httpx.Client(timeout=PATIENCE) as http:
        text, killed = "", False
        with http.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    text += httpx.Response(200, text=line[6:]).json()["choices"][0]["text"]
                flights = list(whole.router.by_request.values())
                if len(text) > 40 and flights and not killed:
                    whole.kill(flights[0].replica_id)
                    killed = True
        assert text == wanted.outputs[0].text and killed
        assert http.get(f"{server.url}/health").status_code == http.get(f"{server.url}/ready").status_code == 200
        told = http.post(f"{server.url}/tokenize", json={"prompt": STORY}).json()
        assert told["tokens"] == llm.get_tokenizer().encode(STORY)
        whole.wait_until_ready(timeout=PATIENCE)
        wait_until(lambda: all(one.report for one in whole.members))
        metrics = http.get(f"{server.url}/metrics").text
        for replica_id in ("r0", "r1"):
            assert f'minillm:replica_up{{engine="{replica_id}",model_name="{MODEL}",role="both"}} 1.0' in metrics
            assert f'vllm:num_requests_running{{engine="{replica_id}",model_name="{MODEL}"}}' in metrics
        assert "minillm:failovers_total" in metrics and "vllm:time_to_first_token_seconds_count" in metrics
        with http.stream("GET", f"{server.url}/page/room") as room:
            assert room.status_code in (200, 404)


def test_replicas_join_and_leave_under_load(whole, llm):
    whole.scale(3)
    whole.wait_until_ready(timeout=PATIENCE)
    assert set(whole.replicas) == {"r0", "r1", "r2"}
    params = SamplingParams(temperature=0.9, seed=2, ignore_eos=True, max_tokens=200)
    readers = [Reader(whole.submit(f"{number} {STORY}", params)) for number in range(9)]
    wait_until(lambda: all(len(reader.deltas) > 10 for reader in readers))
    whole.scale(2)
    for reader in readers:
        reader.check(llm)
    wait_until(lambda: len(whole.replicas) == 2)


def test_the_autoscaler_starts_and_ends_replicas(llm):
    class Wish:
        replicas, loads = 1, []

        def desired(self, load):
            self.loads.append(load)
            return self.replicas

    with make_fleet(replicas=1, autoscaler=Wish(), min_replicas=1, max_replicas=2) as fleet:
        Wish.replicas = 9  # more than there may be
        wait_until(lambda: list(fleet.replicas.values()) == ["ready", "ready"])
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=400)
        readers = [Reader(fleet.submit(f"{number} {STORY}", params)) for number in range(4)]
        Wish.replicas = 0  # fewer than there may be
        wait_until(lambda: list(fleet.replicas.values()) == ["ready"])
        for reader in readers:
            reader.check(llm)
        assert [load.now for load in Wish.loads] == sorted(load.now for load in Wish.loads)


def test_prefill_and_decode_apart_over_tcp(llm):
    with make_fleet(replicas=2, prefill_replicas=1, kv_transport="tcp") as fleet:
        params = SamplingParams(temperature=0.8, seed=1, ignore_eos=True, max_tokens=400)
        for attempt in range(10):  # on a busy machine a request may have ended before it is handed over
            prompts = [f"{attempt} {number} {STORY * 8}" for number in range(3)]
            for reader in [Reader(fleet.submit(prompt, params)) for prompt in prompts]:
                reader.check(llm)
            if moves := list(fleet.migrations.moves):
                break
        assert {(move.source, move.destination) for move in moves} == {("r0", "r1")}
        assert any(move.took_in and move.num_bytes for move in moves)
        os.kill(fleet.members.by_id["r0"].process.pid, signal.SIGKILL)  # prompts go to the other one meanwhile
        Reader(fleet.submit(STORY, params)).check(llm)


def test_a_fleet_whose_model_cannot_be_loaded_says_why_and_leaves_nothing():
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"no replica serves: .*no-such-model"):
        Fleet({"model": "/no-such-model"}, FleetConfig(replicas=2, max_failed_starts=1))
    assert time.monotonic() - start < PATIENCE


@pytest.mark.parametrize(
    "config, said",
    [
        (dict(replicas=0), "replicas=0 is not allowed; allowed: 1 or more"),
        (dict(replicas=2, prefill_replicas=2), "prefill_replicas=2 leaves none of replicas=2 to decode"),
        (dict(router_policy="best"), "router_policy='best' is not known"),
        (dict(max_replicas=4), "min_replicas and max_replicas need an autoscaler"),
        (dict(autoscaler="queue", min_replicas=3), "replicas=2 is not between min_replicas=3 and max_replicas=2"),
        (dict(autoscaler="queue", prefill_replicas=1), "leave out prefill_replicas"),
        (dict(backend="slurm"), "backend='slurm' is not allowed; allowed: local, ray"),
        (dict(ray_address="auto"), "ray_address='auto' needs backend='ray'"),
        (dict(hang_seconds=0), "hang_seconds=0 is not allowed; allowed: over 0"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(config, said):
    with pytest.raises(ValueError, match=said):
        FleetConfig(**config)


def test_adapters_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="enable_lora=True is not served by replicas"):
        Fleet(ARGUMENTS | {"enable_lora": True})
