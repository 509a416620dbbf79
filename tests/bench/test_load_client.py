"""The load generator's client against a server whose behaviour is known; by counts and orders, never by the clock."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import TextIO

import pytest
from aiohttp import web
from typer.testing import CliRunner

from minillm.bench.commands import bench
from minillm.bench.load import run as runs, target
from minillm.bench.load.client import Job, Report, Send, run
from minillm.bench.load.lengths import Lengths, Profile, trace_of
from minillm.bench.load.plan import Prompts
from minillm.bench.load.report import result, tables
from minillm.bench.load.run import Generator, Point, Workload, drive
from minillm.bench.load.target import Target, find
from minillm.engine.metrics import Targets
from minillm.engine.workload import write_trace

PATIENCE = 60.0


class Fake:
    """Answers as its `behave` says, and remembers what was sent."""

    def __init__(self, behave: Callable[[Fake, web.Request, dict], Awaitable[web.StreamResponse]] | None = None):
        self.behave = behave or Fake.answer
        self.bodies: list[dict] = []
        self.now = self.most = 0  # under way, and the most there were at once

    async def serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await self.behave(self, request, body)
        finally:
            self.now -= 1

    async def answer(self, request: web.Request, body: dict, pieces: int | None = None) -> web.StreamResponse:
        """As many pieces as tokens were asked for, and the usage."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(pieces or body["max_tokens"]):
            await response.write(event({"choices": [{"index": 0, "text": "a", "finish_reason": None}]}))
            await asyncio.sleep(0)
        if pieces is None:
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
            await response.write(event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
            await response.write(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        return response

    async def models(self, request: web.Request) -> web.Response:
        card = {"id": "fake", "max_model_len": 500, "root": "tinyworld"}
        return web.json_response({"object": "list", "data": [card]})

    async def start(self) -> tuple[web.AppRunner, str]:
        app = web.Application()
        app.add_routes([web.post("/v1/completions", self.serve), web.get("/v1/models", self.models)])
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    def under(self, sends: list[Send], **job: object) -> Report:
        """What a client measures of it."""

        async def main() -> Report:
            runner, url = await self.start()
            try:
                return await run(Job(f"{url}/v1/completions", sends, **{"timeout": PATIENCE} | job))
            finally:
                await runner.cleanup()

        return asyncio.run(asyncio.wait_for(main(), PATIENCE))

    def beside(self, work: Callable[[str], object]) -> object:
        """Run `work` in a thread while it serves."""

        async def main() -> object:
            runner, url = await self.start()
            try:
                return await asyncio.to_thread(work, url)
            finally:
                await runner.cleanup()

        return asyncio.run(asyncio.wait_for(main(), 2 * PATIENCE))


def event(message: dict) -> bytes:
    return f"data: {json.dumps(message)}\n\n".encode()


def sends(*times: float | None, max_tokens: int = 3) -> list[Send]:
    prompts = Prompts("fake", range(50))
    trace = trace_of(Profile(Lengths.parse("4"), Lengths.parse(str(max_tokens))), [time or 0.0 for time in times])
    return [Send(prompts.body_of(one), time, max_tokens) for one, time in zip(trace, times)]


def test_every_request_is_answered_and_measured():
    fake = Fake()
    report = fake.under(sends(*[None] * 20, max_tokens=5), concurrency=4)
    assert len(fake.bodies) == len(report.outcomes) == 20 and fake.most <= 4
    for one in report.outcomes:
        assert one.is_complete and one.status == 200 and one.finish_reason == "length"
        assert (one.num_prompt_tokens, one.num_output_tokens, one.max_tokens) == (4, 5, 5)
        assert len(one.token_times) == 5 and one.intended == one.sent  # a closed loop has no other intention
        assert one.sent <= one.token_times[0] <= one.token_times[-1] <= one.ended
    assert report.lag["p50"] <= report.lag["p99"] <= report.lag["max"] and report.cpu_share > 0


def test_a_closed_loop_keeps_its_clients_busy():
    """An answer comes when as many requests are there as clients: with fewer it would never come."""
    gathered = asyncio.Condition()

    async def together(fake: Fake, request: web.Request, body: dict) -> web.StreamResponse:
        async with gathered:
            gathered.notify_all()
            await gathered.wait_for(lambda: len(fake.bodies) % 4 == 0)
        return await fake.answer(request, body)

    fake = Fake(together)
    report = fake.under(sends(*[None] * 12), concurrency=4)
    assert fake.most == 4 and all(one.is_complete for one in report.outcomes)


def test_an_open_loop_does_not_wait_for_answers():
    """No answer comes before the last request is there: a closed loop would hang."""
    all_there = asyncio.Event()

    async def wait(fake: Fake, request: web.Request, body: dict) -> web.StreamResponse:
        if len(fake.bodies) == 30:
            all_there.set()
        await all_there.wait()
        return await fake.answer(request, body)

    times = [0.001 * place for place in range(30)]
    report = Fake(wait).under(sends(*times))
    assert [one.intended for one in report.outcomes] == times and all(one.is_complete for one in report.outcomes)
    assert all(one.lateness >= 0 and one.ttft >= one.service_ttft for one in report.outcomes)


def test_requests_are_sent_in_the_order_of_their_times():
    fake = Fake()
    planned = sends(0.06, 0.0, 0.03)
    fake.under(planned)
    assert [body["prompt"] for body in fake.bodies] == [json.loads(planned[n].body)["prompt"] for n in (1, 2, 0)]


def test_with_a_limit_the_wait_for_a_place_counts():
    """One at a time, all due at once: each is sent after the one before has ended, and its latency has that wait."""
    report = Fake().under(sends(*[0.0] * 6), concurrency=1)
    ordered = sorted(report.outcomes, key=lambda one: one.sent)
    assert all(later.sent >= sooner.ended for sooner, later in pairwise(ordered))
    assert all(one.intended == 0.0 and one.ttft == one.token_times[0] for one in ordered)


def test_warm_ups_are_sent_first_and_not_measured():
    fake = Fake()
    report = fake.under(sends(None, None), warmups=sends(None, None, None, max_tokens=1), concurrency=1)
    assert [body["max_tokens"] for body in fake.bodies] == [1, 1, 1, 3, 3] and len(report.outcomes) == 2


def test_each_failure_is_told_and_disturbs_no_other():
    async def behave(fake: Fake, request: web.Request, body: dict) -> web.StreamResponse:
        kind = body["kind"]
        if kind == "refused":
            return web.json_response({"error": {"message": "later"}}, status=429, headers={"Retry-After": "1"})
        if kind == "cut":
            return await fake.answer(request, body, pieces=2)
        if kind == "dropped":
            request.transport.abort()
        if kind == "slow":
            await asyncio.sleep(PATIENCE)
        if kind == "failing":
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(event({"error": {"message": "the step failed"}}) + b"data: [DONE]\n\n")
            return response
        return await fake.answer(request, body)

    kinds = ["refused", "good", "cut", "dropped", "slow", "failing", "good"]
    planned = [
        Send(json.dumps(json.loads(send.body) | {"kind": kind}), send.at, 3)
        for kind, send in zip(kinds, sends(*[0.0] * len(kinds)))
    ]
    outcomes = dict(zip(kinds, Fake(behave).under(planned, timeout=1.0).outcomes))
    assert [kind for kind in kinds if outcomes[kind].is_complete] == ["good", "good"]
    assert outcomes["refused"].status == 429 and "later" in outcomes["refused"].error
    assert outcomes["cut"].error == "the stream broke off" and len(outcomes["cut"].token_times) == 2
    assert outcomes["dropped"].status == 0 and outcomes["dropped"].error
    assert outcomes["slow"].error == "no whole answer within 1 s"
    assert outcomes["failing"].error == "the step failed"


def test_a_server_that_is_not_there_is_a_failure_of_each_request():
    async def main() -> Report:
        return await run(Job("http://127.0.0.1:9/v1/completions", sends(0.0, 0.0)))

    assert all(one.status == 0 and "Connect" in one.error for one in asyncio.run(main()).outcomes)


# In a process of its own, and from the command line


def test_a_job_in_a_process_of_its_own():
    fake, told = Fake(), []
    report = fake.beside(
        lambda url: drive(Job(f"{url}/v1/completions", sends(*[None] * 9), concurrency=3), told.append)
    )
    assert len(report.outcomes) == 9 and all(one.is_complete for one in report.outcomes) and told == sorted(told)
    with pytest.raises(RuntimeError, match=r"the load generator failed: .*TypeError"):
        drive(Job("http://x", sends(None), concurrency="many"))


def test_no_two_runs_share_a_prompt():
    fake = Fake()

    def work(url: str) -> list[runs.Run]:
        generator = Generator(find(url), Prompts("fake", range(50)), Workload(num_prompts=6, num_warmups=2))
        return [generator.run(Point(concurrency=2)), generator.run(Point(rate=500.0))]

    closed, opened = fake.beside(work)
    prompts = [tuple(body["prompt"]) for body in fake.bodies]
    assert len(prompts) == 16 and len(set(prompts)) == 16
    assert closed.figures["num_complete"] == opened.figures["num_complete"] == 6
    assert len({one.intended for one in opened.outcomes}) == 6


def test_a_search_probes_the_server():
    """It serves four requests at once and refuses the others: the largest rate depends on the targets alone."""
    workload = Workload(num_prompts=30)
    generator = Generator(Target("http://x", "m"), Prompts("m", range(50)), workload, Targets(ttft=1.0))
    probed = []

    def pretend(point: Point, num_prompts: int) -> runs.Run:
        assert num_prompts >= 30 and num_prompts / point.rate >= 10  # a queue that grows takes time to show
        probed.append(point.rate)
        return runs.Run(point, None, {"attainment": 1.0 if point.rate <= 5 else 0.5}, [])

    generator.run = pretend
    found, every = generator.find(start=2.0, least_attainment=0.9, precision=0.1)
    assert found.rate <= 5 <= found.rate * 1.1 and [run.point.rate for run in every] == probed


def test_the_command_measures_a_url_and_writes_all(tmp_path):
    write_trace(tmp_path / "recorded.jsonl", trace_of(Profile(Lengths.parse("20"), Lengths.parse("4")), [0.0, 0.01]))
    common = ["serve", "--num-prompts", "4", "--num-warmups", "1", "--slo", "ttft:60", "--output-len", "4"]

    def work(url: str) -> list:
        loads = (["--concurrency", "1", "--concurrency", "2"], ["--request-rate", "inf"])
        loads += (["--trace", str(tmp_path / "recorded.jsonl")],)
        return [
            CliRunner().invoke(bench, [*common, "--url", url, *load, "--save", str(tmp_path / str(n))])
            for n, load in enumerate(loads)
        ]

    for number, answer in enumerate(Fake().beside(work)):
        assert answer.exit_code == 0, answer.output
        [path] = (tmp_path / str(number)).glob("*.json")
        measured = json.loads(path.read_text())
        assert path.with_suffix(".png").exists() and "127.0.0.1" not in json.dumps(measured | {"command": ""})
        for ran in measured["runs"]:
            assert ran["figures"]["attainment"] == 1.0 and all(len(one["token_times"]) == 4 for one in ran["outcomes"])
    assert len(measured["runs"][0]["outcomes"]) == 2 and measured["workload"]["trace"] == "recorded.jsonl"


def test_the_command_fails_where_every_request_failed(tmp_path):
    arguments = ["serve", "--num-prompts", "2", "--num-warmups", "0", "--concurrency", "1", "--save", str(tmp_path)]

    async def fail(fake: Fake, request: web.Request, body: dict) -> web.StreamResponse:
        return web.Response(status=500)

    answer = Fake(fail).beside(lambda url: CliRunner().invoke(bench, [*arguments, "--url", url]))
    assert answer.exit_code == 1 and "no request was answered" in answer.output
    assert list(tmp_path.glob("*.json"))  # and what was measured is there to look at


@pytest.mark.parametrize(
    "options, told",
    [
        (["--concurrency", "2", "--request-rate", "1"], "choose one of --concurrency"),
        (["--find-rate"], "--find-rate needs what has to hold"),
        (["--request-rate", "0"], "rate=0"),
        (["--slo", "tfft:1"], "slo='tfft:1'"),
        (["--input-len", "many"], "'many' is no distribution"),
        (["--profile", "talk"], "profile='talk'"),
        (["--url", "localhost:1"], "begins with http"),
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["--attainment", "0"], "attainment=0"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(options, told, monkeypatch):
    monkeypatch.setattr(target, "own_server", lambda *args: pytest.fail("a server was started"))
    answer = CliRunner().invoke(bench, ["serve", *options])
    assert answer.exit_code == 1 and told in " ".join(answer.output.split())


def test_sigterm_leaves_no_server_behind(tmp_path):
    """A server that says its own process id, under a parent that is told to end."""
    child = f"import os, time; print('pid', os.getpid(), flush=True); time.sleep({PATIENCE})"
    script = (
        "import re, sys, time\n"
        "from minillm.bench.load.target import server_process\n"
        "ready = lambda log: (found := re.search(r'pid (\\d+)', log)) and found[1]\n"
        f"with server_process([sys.executable, '-c', {child!r}], ready) as pid:\n"
        f"    print(pid, flush=True); time.sleep({PATIENCE})\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.terminate()
        assert parent.wait(PATIENCE) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def locks(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_nothing_of_a_stubborn_server_is_left_behind_where_waiting_for_its_end_is_interrupted(tmp_path, monkeypatch):
    """Neither it nor its child listens to SIGINT; each holds the same lock as long as it lives."""
    lock = tmp_path / "lock"
    script = (
        "import fcntl, os, signal, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"held = open({str(lock)!r}, 'w'); fcntl.flock(held, fcntl.LOCK_EX)\n"
        f"os.fork(); print('ready', flush=True); time.sleep({PATIENCE})\n"
    )
    waits = subprocess.Popen.wait

    def wait(process: subprocess.Popen, timeout: float | None = None) -> int:
        if timeout == target.STOP_SECONDS:
            raise KeyboardInterrupt  # a second Ctrl-C
        return waits(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    with (
        pytest.raises(KeyboardInterrupt),
        target.server_process([sys.executable, "-c", script], lambda log: log.count("ready") == 2 or None),
    ):
        raise KeyboardInterrupt
    with lock.open() as mine:
        deadline = time.monotonic() + PATIENCE / 2
        while not locks(mine):
            assert time.monotonic() < deadline, "a process of the server still lives"
            time.sleep(0.01)


def test_a_server_that_ends_at_once_is_told_with_its_last_words():
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with (
        pytest.raises(RuntimeError, match="did not start: no such model"),
        target.server_process(command, lambda log: None),
    ):
        pass


def test_a_single_run_has_every_latency_with_its_error():
    fake = Fake()

    def work(url: str) -> runs.Run:
        return Generator(find(url), Prompts("fake", range(50)), Workload(num_prompts=8)).run(Point(concurrency=2))

    measured = result("x", "minillm bench serve", {"title": "fake"}, [fake.beside(work)])
    every, latencies = tables(measured)
    assert every.row_count == 1 and latencies.row_count == 4
    [figures] = measured["figures"]["runs"].values()
    value, low, high = figures["ttft_seconds"]["p50"]
    assert low <= value <= high and figures["ttft_seconds"]["p99"][2] is None  # 8 requests give the p99 no upper bound
