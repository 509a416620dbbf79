"""Keys and values that were offered to a replica which dies before it has read them: nothing of them is left."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from minillm import SamplingParams
from minillm.kv_cache.connector import KVHandle
from minillm.serving.replicas.config import FleetConfig
from minillm.serving.replicas.fleet import Fleet
from minillm.serving.replicas.migration import Move
from tests.serving.conftest import PATIENCE, wait_until
from tests.serving.test_fleet import ARGUMENTS, STORY, Reader

PARAMS = SamplingParams(temperature=0.7, seed=8, ignore_eos=True, max_tokens=700)


@pytest.fixture(scope="module")
def fleet():
    """Two replicas whose keys and values go through files."""
    with Fleet(ARGUMENTS, FleetConfig(replicas=2, num_threads=1, kv_transport="shm")) as fleet:
        yield fleet


@pytest.fixture
def under_way(fleet):
    """A request on one replica, the other of which is stopped; afterwards that one is killed, which leaves no file."""

    def files() -> list[Path]:
        return list(Path("/dev/shm").glob(f"minillm-{fleet.fleet_id}*"))

    fleet.wait_until_ready(timeout=PATIENCE)
    assert files() == []
    reader = Reader(fleet.submit(STORY * 9, PARAMS))
    wait_until(lambda: reader.deltas)
    here = fleet.where(reader.stream)
    there = "r1" if here == "r0" else "r0"
    pid = fleet.members.by_id[there].process.pid
    os.kill(pid, signal.SIGSTOP)
    yield reader, here, there, files
    with suppress(ProcessLookupError):  # else the test has ended before it killed it
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: files() == [])


def test_full_blocks_whose_reader_dies(fleet, under_way, llm):
    reader, here, there, files = under_way
    moving = threading.Thread(target=fleet.migrate, args=(reader.stream, there))
    moving.start()
    wait_until(lambda: any(f"-{here}-" in path.name for path in files()))
    os.kill(fleet.members.by_id[there].process.pid, signal.SIGKILL)
    moving.join(PATIENCE)
    assert not moving.is_alive()
    reader.check(llm)
    fleet.wait_until_ready(timeout=PATIENCE)


def offer(fleet, reader, here, there, change=lambda path: None) -> None:
    """Take the request out of its replica, change the file of its blocks, and submit it at the other one."""
    migrations, request_id = fleet.migrations, reader.stream.sink.request.request_id
    source, flight = fleet.members.by_id[here], fleet.router.by_request[request_id]
    taken = migrations._call(source, "take_out", flight.flight_id, 0, True)
    assert isinstance(taken[2], KVHandle) and Path(taken[2].place).exists()
    change(Path(taken[2].place))
    move = Move(request_id, here, there)
    assert migrations._in_engine_thread(lambda: migrations._go(flight, flight.flight_id, source, move, taken))


def test_the_last_blocks_whose_reader_dies(fleet, under_way, llm):
    reader, here, there, files = under_way
    migrations = fleet.migrations
    offer(fleet, reader, here, there)
    assert len(files()) == 1
    os.kill(fleet.members.by_id[there].process.pid, signal.SIGKILL)
    reader.check(llm)
    assert not migrations._awaited and not migrations._offered
    fleet.wait_until_ready(timeout=PATIENCE)


def test_blocks_that_cannot_be_read(fleet, under_way, llm):
    """The request computes its tokens again, and the source removes what is left of the file."""
    reader, here, there, files = under_way
    offer(fleet, reader, here, there, change=lambda path: path.write_bytes(b"too short"))
    os.kill(fleet.members.by_id[there].process.pid, signal.SIGCONT)
    reader.check(llm)
    wait_until(lambda: files() == [])
    assert not fleet.migrations.moves[-1].took_in
