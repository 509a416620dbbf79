"""A fleet leaves no process, file or port behind, however its front ends."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.serving.conftest import PATIENCE, wait_until
from tests.serving.test_process import Process


def processes_of(parent: int) -> set[int]:
    """All that descend from a process, it included."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1])
    found = {parent}
    while more := {pid for pid, of in parents.items() if of in found} - found:
        found |= more
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_front_ends(how):
    server = Process("--replicas", "2", "--num-kv-blocks", "200", "--no-access-log", "--drain-seconds", "0")
    try:
        answer = server.ask()
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
        pids = processes_of(server.process.pid)
        assert len(pids) == 4  # the front, the zygote, two replicas
        interrupted = []

        def interrupt() -> None:
            if not interrupted:
                interrupted.append(how)
                os.kill(server.process.pid, how)

        with suppress(httpx.HTTPError):  # with requests under way
            server.stream(interrupt, max_tokens=900, n=8, temperature=1)
        server.process.wait(PATIENCE)
        wait_until(lambda: not any(map(is_running, pids)))
        assert how is signal.SIGKILL or server.process.returncode == 0, server.log
        assert interrupted and "Traceback" not in server.log
    finally:
        server.process.kill()
        server.process.wait()
