"""Keys and values that travel layer by layer between real replicas: tokens are those of one engine, and nothing is left
when either side dies half way."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from minillm import SamplingParams
from minillm.serving.replicas.config import FleetConfig
from minillm.serving.replicas.fleet import Fleet
from tests.serving.conftest import MODEL, PATIENCE, wait_until
from tests.serving.test_fleet import STORY, Reader, assert_gone

ARGUMENTS = {"model": MODEL, "dtype": "float32", "device": "cpu", "num_kv_blocks": 600, "max_num_seqs": 64}
PARAMS = SamplingParams(temperature=0.8, seed=1, ignore_eos=True, max_tokens=60)
LONG = f"{STORY}. " * 90  # hundreds of tokens


@pytest.fixture(scope="module", params=["shm", "tcp"])
def fleet(request):
    """One replica prefills in steps of 16 tokens, one decodes."""
    config = FleetConfig(replicas=2, prefill_replicas=1, num_threads=1, kv_transport=request.param)
    with Fleet(ARGUMENTS | {"max_num_batched_tokens": 16}, config) as fleet:
        pids = [member.process.pid for member in fleet.members]
        yield fleet
        pids += [member.process.pid for member in fleet.members]
    assert_gone(pids)
    assert_nothing_in_memory(fleet)


def assert_nothing_in_memory(fleet) -> None:
    wait_until(lambda: not list(Path("/dev/shm").glob(f"minillm-{fleet.fleet_id}*")))


def assert_idle(fleet) -> None:
    """No stream, no flight, no block and no file is left."""
    fleet.wait_until_ready(timeout=PATIENCE)
    wait_until(lambda: not fleet.router.flights and not fleet.migrations._streams)
    wait_until(lambda: all(one.report and one.report.kv_cache_usage == 0 for one in fleet.members))
    assert_nothing_in_memory(fleet)


def test_prompts_go_layer_by_layer_and_their_tokens_stay_the_same(fleet, llm):
    fleet.wait_until_ready(timeout=PATIENCE)
    before = len(fleet.migrations.moves)
    for attempt in range(3):  # the first prompts find no prefix, later ones do
        readers = [Reader(fleet.submit(f"{number} {LONG[:900]} {attempt}", PARAMS)) for number in range(4)]
        for reader in readers:
            reader.check(llm)
    moves = list(fleet.migrations.moves)[before:]
    by_layers = [move for move in moves if move.by_layers]
    assert len(by_layers) >= 6 and all(move.took_in and move.num_tokens > 100 for move in by_layers), moves
    assert all(move.num_rounds == 0 for move in by_layers)
    assert_idle(fleet)


@pytest.mark.parametrize("victim", ["r0", "r1"])
def test_either_side_dies_half_way(victim, fleet, llm):
    for attempt in range(3):
        assert_idle(fleet)
        reader = Reader(fleet.submit(f"{victim} {attempt} {LONG}", PARAMS))
        wait_until(lambda: fleet.migrations._streams)
        os.kill(fleet.members.by_id[victim].process.pid, signal.SIGKILL)
        reader.check(llm)
    assert_idle(fleet)


def test_an_abort_half_way_frees_both_sides(fleet):
    assert_idle(fleet)
    reader = Reader(fleet.submit(f"abort {LONG}", PARAMS))
    wait_until(lambda: fleet.migrations._streams)
    reader.stream.abort()
    reader.join(PATIENCE)
    assert reader.deltas[-1].finish_reason == "abort"
    assert_idle(fleet)


def test_one_token_goes_nowhere(fleet, llm):
    before = len(fleet.migrations.moves)
    Reader(fleet.submit(f"one {LONG[:300]}", SamplingParams(temperature=0, max_tokens=1))).check(llm)
    assert len(fleet.migrations.moves) == before
    assert_idle(fleet)
