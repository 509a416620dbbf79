"""`minillm bench fleet` at toy size: its figures are there, and a wrong token is an error."""

from __future__ import annotations

import json

import pytest

from minillm.bench.replicas import Workload, check, run
from minillm.bench.replicas_report import CASES, NAMES, tables
from minillm.book.measured import RESULTS

ONE_TABLE = ("cold start", "failover")

SMALL = dict(model="tinyworld-draft", kills=2, streams=2, moves=1, contexts=(48,), transports=("shm",))


def test_kills_and_moves_are_measured_and_told():
    measured = run(Workload(**SMALL, parts=("failover", "migration")))
    failover, moves = measured["figures"]["failover"], measured["figures"]["migration"]
    assert failover["kills"] >= 2 and failover["failovers"] >= 1  # where streams end before their kill, one more comes
    assert failover["tokens_checked"] == 256 * failover["streams"]
    assert set(moves) == {"shm, 48 tokens", "recomputed, 48 tokens"}
    assert moves["shm, 48 tokens"]["bytes"] > 0 == moves["recomputed, 48 tokens"]["bytes"]
    assert (moves["shm, 48 tokens"]["took_in"], moves["recomputed, 48 tokens"]["took_in"]) == (1, 0)
    told, moved = tables(measured)
    assert (told.row_count, moved.row_count) == (len(failover), 2) and set(failover) <= set(NAMES)
    assert list(moved.columns[3].cells) == ["1", "1"] and list(moved.columns[4].cells) == ["1 of 1", "0 of 1"]


def test_every_figure_of_the_committed_result_has_a_name():
    [path] = RESULTS.glob("fleet-tinyworld-*.json")
    figures = json.loads(path.read_text())["figures"]
    assert set(figures) == {*ONE_TABLE, *CASES} and all(set(figures[part]) <= set(NAMES) for part in ONE_TABLE)


def test_a_part_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="'speed' is no part of this benchmark; parts: cold start, failover"):
        Workload(parts=("speed",))


def test_a_lost_token_is_an_error(llm_like):
    heard = llm_like([1, 2, 3])
    check(heard.llm, heard)
    heard.token_ids.pop(1)
    with pytest.raises(RuntimeError, match="2 tokens of the fleet are not those of one engine"):
        check(heard.llm, heard)


@pytest.fixture
def llm_like():
    """A stream that was heard, and an engine that generates the same."""
    from types import SimpleNamespace as Made

    from minillm import SamplingParams

    def make(token_ids):
        output = Made(outputs=[Made(token_ids=list(token_ids))])
        request = Made(params=SamplingParams(), seed=1, prompt_token_ids=[5])
        return Made(
            token_ids=list(token_ids), join=lambda timeout: None, is_alive=lambda: False,
            stream=Made(sink=Made(request=request)), llm=Made(generate=lambda *_, **__: [output]),
        )  # fmt: skip

    return make
