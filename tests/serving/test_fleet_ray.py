"""The same fleet on real Ray actors."""

from __future__ import annotations

import os
import signal

import pytest

from minillm import SamplingParams
from minillm.serving.replicas.config import FleetConfig
from minillm.serving.replicas.fleet import Fleet
from tests.serving.conftest import PATIENCE, wait_until
from tests.serving.test_fleet import ARGUMENTS, STORY, Reader, assert_gone

pytest.importorskip("ray", reason="Ray is not installed: pip install 'minillm-book[scale]'")


def test_a_ray_actor_is_killed_and_its_stream_goes_on(llm):
    with Fleet(ARGUMENTS, FleetConfig(replicas=2, backend="ray", num_threads=1)) as fleet:
        assert fleet.kv_transport == "tcp"
        params = SamplingParams(temperature=0.8, seed=3, ignore_eos=True, max_tokens=900)
        killed = moved = 0
        for _ in range(10):
            reader = Reader(fleet.submit(STORY, params))
            wait_until(lambda reader=reader: len(reader.deltas) > 20)
            here = fleet.where(reader.stream)
            if here is not None and not moved:
                moved = fleet.migrate(reader.stream, "r1" if here == "r0" else "r0")
            elif here is not None and not killed:
                os.kill(fleet.members.by_id[here].process.pid, signal.SIGKILL)
                killed = 1
            reader.check(llm)
            if killed and moved:
                break
        assert killed and moved and fleet.router.num_failovers >= 1
        fleet.wait_until_ready(timeout=PATIENCE)  # another actor has taken its place
        pids = [member.process.pid for member in fleet.members]
    assert_gone(pids)
