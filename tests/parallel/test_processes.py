"""Ranks in processes: collectives and ring attention over gloo, and nothing left behind however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from minillm.model.attention import causal_attention
from minillm.parallel.collectives import (
    all_gather,
    direct_all_reduce,
    reduce_scatter,
    ring_all_reduce,
    ring_sent,
    tree_all_reduce,
)
from minillm.parallel.links import Sent
from minillm.parallel.measure import alpha_beta, ping_pong
from minillm.parallel.processes import RankFailed, run_processes
from minillm.parallel.ring_attention import positions_of, ring_attention, ring_attention_sent


def everything(link, tensor, q, k, v, num_tokens):
    """All that a link must carry, in one set of processes."""
    found = {
        reduce.__name__: reduce(link, tensor)
        for reduce in (ring_all_reduce, tree_all_reduce, direct_all_reduce, reduce_scatter, all_gather)
    }
    before = Sent(link.sent.messages, link.sent.bytes)
    found["attention"] = ring_attention(link, q, k, v, num_tokens)
    sent = Sent(link.sent.messages - before.messages, link.sent.bytes - before.bytes)
    empty = ring_all_reduce(link, torch.zeros(1))  # chunks without an element
    return found, sent, empty, ping_pong(link, (1, 1000, 100_000), repeats=2)


def test_processes_compute_what_threads_do_and_count_the_same_bytes():
    torch.manual_seed(1)
    n, tokens = 2, 21
    tensors = [torch.randn(3, 5) for _ in range(n)]
    q, k, v = torch.randn(tokens, 4, 16), torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 16)
    places = [positions_of(rank, n, tokens) for rank in range(n)]
    answers = run_processes(everything, [(t, q[p], k[p], v[p], tokens) for t, p in zip(tensors, places)])
    total, expected = sum(tensors), causal_attention(q, k, v)
    for rank, (found, sent, empty, seconds) in enumerate(answers):
        for name in ("ring_all_reduce", "tree_all_reduce", "direct_all_reduce"):
            torch.testing.assert_close(found[name], total)
        assert torch.equal(found["all_gather"], torch.stack(tensors))
        assert found["reduce_scatter"].numel() == (7, 8)[rank]
        torch.testing.assert_close(found["attention"], expected[places[rank]], atol=2e-6, rtol=1e-5)
        assert sent == ring_attention_sent(rank, n, tokens, 32, 4)
        assert empty.item() == 0 and ring_sent(1, 4, n, rank).messages == 2
        latency, bandwidth = alpha_beta(seconds)
        assert 0 < latency < 1 and bandwidth > 0
    assert multiprocessing.active_children() == []


def fails(link, how):
    if how == "raises":
        raise ValueError("no such layer")
    if link.rank == 1:
        os._exit(7)
    ring_all_reduce(link, torch.ones(2))  # waits for rank 1


@pytest.mark.parametrize(
    "how, ranks, said",
    [("raises", 1, "rank 0 raised an error:(?s:.*)no such layer"), ("dies", 2, "rank 1 died with exit code 7")],
)
def test_a_rank_that_fails_is_named_and_ends_the_others(how, ranks, said):
    start = time.monotonic()
    with pytest.raises(RankFailed, match=said):
        run_processes(fails, [(how,)] * ranks)
    assert time.monotonic() - start < 100  # it did not wait for the time-out
    assert multiprocessing.active_children() == []


def test_ranks_end_with_their_parent(tmp_path):
    """The parent is killed while its rank sleeps: the rank goes away by itself."""
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
        import os, time
        from minillm.parallel.processes import run_processes

        def sleep(link, path):
            open(path, "w").write(str(os.getpid()))
            time.sleep(600)

        if __name__ == "__main__":
            run_processes(sleep, [(os.environ["PID_FILE"],)])
        """)
    )
    pid_file = tmp_path / "pid"
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    environment = {**os.environ, "PID_FILE": str(pid_file), "PYTHONPATH": root}
    parent = subprocess.Popen([sys.executable, str(script)], env=environment)
    try:
        deadline = time.monotonic() + 120
        while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        rank = int(pid_file.read_text())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        while is_alive(rank) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_alive(rank)
    finally:
        parent.kill()
        parent.wait()


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
