"""Tiles by timing, without a GPU: the timer is given, the file is real."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest
import torch

from minillm.kernels import tuning
from minillm.kernels.paged_prefill import prefill_tiles
from minillm.kernels.tiles import TUNED, Tiles, choose_tiles
from minillm.kernels.tuning import fastest, file_of, may_time, tune_attention
from tests.helpers.kernel_cases import device, needs_triton

A, B, C = Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 3), Tiles(16, 32, 4, 2)
KEY = {"gpu": "an H100", "torch": "2", "triton": "3", "shape": ["128"]}


class Clock:
    """A timer that runs what it times and takes its seconds from a table; an exception there is raised."""

    def __init__(self, seconds):
        self.seconds, self.ran = seconds, []

    def __call__(self, launch):
        tiles = launch()
        self.ran.append(tiles)
        if isinstance(self.seconds[tiles], Exception):
            raise self.seconds[tiles]
        return self.seconds[tiles]


def tuned(folder, seconds, key=KEY, candidates=(A, B, C)):
    clock = Clock(seconds)
    return fastest(key, candidates, lambda tiles: tiles, clock, folder), clock.ran


def test_the_fastest_is_timed_once_and_then_read(tmp_path):
    folder = tmp_path / "cache"
    assert tuned(folder, {A: 3.0, B: 2.0, C: 4.0}) == (B, [A, B, C])
    assert tuned(folder, {}) == (B, [])
    assert [path.name for path in folder.iterdir()] == [file_of(KEY, folder).name], "nothing unfinished is left"
    for changed in ({"gpu": "another"}, {"torch": "3"}, {"triton": "4"}, {"shape": ["64"]}):
        assert tuned(folder, {A: 1.0, B: 2.0, C: 4.0}, KEY | changed) == (A, [A, B, C])


def test_noise_changes_nothing_and_what_does_not_run_is_no_candidate(tmp_path):
    assert tuned(tmp_path, {A: 1.0, B: 0.98, C: 2.0})[0] == A
    assert (
        tuned(tmp_path, {A: ValueError("too large"), B: 5.0, C: RuntimeError("out of resources")}, KEY | {"gpu": "b"})[
            0
        ]
        == B
    )
    nothing = {tiles: RuntimeError("no kernel image") for tiles in (A, B, C)}
    assert tuned(tmp_path, nothing, KEY | {"gpu": "c"})[0] == A
    assert not file_of(KEY | {"gpu": "c"}, tmp_path).exists(), "what was not timed is not kept"
    with pytest.raises(RuntimeError, match="out of memory"):
        tuned(tmp_path, {A: RuntimeError("CUDA out of memory")}, KEY | {"gpu": "d"})


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", '{"tiles": [1, 2]}', "\xff", json.dumps({"key": KEY, "tiles": [1, 1, 1, 1]}),
    json.dumps({"key": KEY, "tiles": [64, 64, "4", 3]}), json.dumps({"key": KEY | {"gpu": "other"}, "tiles": list(B)}),
    json.dumps({"key": KEY, "tiles": [[128], 64, 8, 3]}), json.dumps({"key": KEY, "tiles": {"a": 1}}),
])  # fmt: skip
def test_a_broken_or_foreign_file_is_timed_anew(tmp_path, text):
    file_of(KEY, tmp_path).write_bytes(text.encode("latin-1"))
    assert tuned(tmp_path, {A: 1.0, B: 2.0, C: 3.0}) == (A, [A, B, C])
    assert json.loads(file_of(KEY, tmp_path).read_text())["tiles"] == list(A)


def test_a_folder_that_cannot_be_written_or_trusted_costs_a_timing(tmp_path):
    (tmp_path / "file").write_text("")
    assert tuned(tmp_path / "file", {A: 2.0, B: 1.0, C: 3.0}) == (B, [A, B, C])
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    assert tuned(tmp_path / "shared", {A: 2.0, B: 1.0, C: 3.0}) == (B, [A, B, C])
    assert not list((tmp_path / "shared").iterdir())


def test_two_processes_at_once_leave_a_whole_file(tmp_path):
    """Each reader finds nothing or a whole file, whatever the others write meanwhile."""
    file, seen = file_of(KEY, tmp_path), set()
    whole = [{"key": KEY, "tiles": list(tiles), "seconds": {"x" * 5000: 1.0}} for tiles in (A, B)]
    tuning.write(file, whole[0])
    writers = [
        threading.Thread(target=lambda found=found: [tuning.write(file, found) for _ in range(50)]) for found in whole
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        seen.add(tuning.read(file, KEY, [A, B]))
    assert seen <= {A, B} and seen
    assert list(tmp_path.iterdir()) == [file]


def test_the_winner_is_what_prompts_are_launched_with(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "prompts_like", lambda *shapes: lambda tiles: tiles)
    monkeypatch.setattr(tuning, "candidate_tiles", lambda *shape: [choose_tiles(*shape), B])
    keys, values, q = (
        torch.empty(3, 2, 128, 16),
        torch.empty(3, 2, 16, 128),
        torch.empty(9, 4, 128, dtype=torch.float16),
    )
    shape = 128, torch.float16, 80, False, False
    try:
        assert (
            tune_attention(
                keys.half(), values.half(), 4, torch.float16, Clock({choose_tiles(*shape): 2.0, B: 1.0}), tmp_path
            )
            == B
        )
        assert TUNED == {shape: B}
        assert prefill_tiles(q, keys.half(), 4096, None) == B
        assert prefill_tiles(q, keys.half(), 4096, 1024) == choose_tiles(128, torch.float16, 80, windowed=True), (
            "another kernel"
        )
        assert tune_attention(keys.half(), values.half(), 4, torch.float16, Clock({}), tmp_path) == B, (
            "timed once in a process"
        )
    finally:
        TUNED.clear()


def test_nothing_is_timed_without_a_gpu_in_a_capture_or_where_it_is_switched_off(monkeypatch):
    assert (
        tune_attention(torch.empty(3, 2, 128, 16), torch.empty(3, 2, 16, 128), 4, torch.float32) is None and not TUNED
    )

    gpu = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(tuning, "MODE", "compiled")
    monkeypatch.setattr(tuning, "Tensor", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv("MINILLM_TUNE", raising=False)
    assert may_time(gpu)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert not may_time(gpu)
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "MODE", "interpreted")
        assert not may_time(gpu)
    monkeypatch.setenv("MINILLM_TUNE", "0")
    assert not may_time(gpu)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn], ids=["float32", "int8", "fp8"])
def test_what_is_timed_are_prompts_over_pages_of_that_kind(dtype, monkeypatch):
    monkeypatch.setattr(tuning, "LENGTH", 9)
    keys, values = (
        torch.zeros(1, 2, 16, 4, device=device()).to(dtype),
        torch.zeros(1, 2, 4, 16, device=device()).to(dtype),
    )
    before = torch.get_rng_state()
    out = tuning.prompts_like(keys, values, 4, torch.float32)(Tiles(16, 16, 4, 1))
    assert out.shape == (2 * 9, 4, 16) and out.isfinite().all() and out.abs().max() > 0
    assert torch.equal(before, torch.get_rng_state()), "the user's random numbers are another's now"
