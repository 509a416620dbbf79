"""The team of threads gets smaller while another process takes its cores, and a step's torch operations with it."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import sys

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.engine.request import Request
from minillm.kernels import native
from minillm.kernels.native_build import compile_shared, unit_flags
from minillm.kernels.native_structs import Layer, Matrix, Pages, Sequences
from minillm.kernels.native_threads import threads_of_team
from tests.helpers.speculating import NGRAM
from tests.helpers.tiny import save_tiny_llama

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler with OpenMP here: the twins serve")
# native_base.h with a clock that only the test moves.
HARNESS = """
#include <time.h>
static long test_time;
static int test_clock(clockid_t id, struct timespec *t) {
    *t = (struct timespec){test_time / 1000, test_time % 1000 * 1000000};
    return 0;
}
#define clock_gettime test_clock
#include "native_base.h"
void set_threads(int count) { omp_set_num_threads(count); }
void wait_at(long milliseconds, long waited) { test_time = milliseconds; note_wait(0, waited * MILLISECOND); }
int size_at(long milliseconds) { test_time = milliseconds; return team_size(); }
"""


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield 4
    torch.set_num_threads(before)


class Kernels:
    """A library whose team is as large as a test says."""

    def __init__(self, size: int):
        self.team_size = lambda: size


def compiled(folder) -> ctypes.CDLL:
    (folder / "harness.c").write_text(HARNESS)
    flags = (*native.FLAGS, f"-I{native.SOURCE.parent}", "-Wno-unused-function")
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang")
    compile_shared(compiler, flags, folder / "harness.c", folder / "harness.so")
    return ctypes.CDLL(str(folder / "harness.so"))


def test_a_limited_team_is_as_large_where_torch_uses_no_more_threads_than_it(tmp_path, threads):
    team = compiled(tmp_path)
    team.set_threads(threads)
    assert team.size_at(1000) == 4
    team.wait_at(1000, 1), team.wait_at(1100, 30)  # two waits, far apart
    assert team.size_at(1100) == 4
    team.wait_at(1111, 11)
    assert team.size_at(1120) == 3
    team.set_threads(3)
    assert team.size_at(1120) == 3
    team.wait_at(1145, 11), team.wait_at(1157, 11)
    assert team.size_at(1158) == 2
    team.set_threads(threads)
    assert team.size_at(1159) == 2 and team.size_at(5000) == 4  # and then it tries again


@pytest.mark.parametrize("size, apart", [(2, 9), (2, 20), (3, 12), (4, 30)])
def test_a_team_that_waits_for_less_than_a_thread_is_worth_stays_whole(tmp_path, threads, size, apart):
    """A hypervisor takes a core for a millisecond now and then."""
    team, chance, at, whole = compiled(tmp_path), random.Random(0), 1000, 0
    team.set_threads(size)
    for _ in range(2000):
        at += 1 + round(chance.expovariate(1 / apart))
        team.wait_at(at, 1)
        whole += team.size_at(at) == size
    assert whole > 1900


@pytest.mark.parametrize("size, slice", [(2, 3), (2, 12), (4, 4), (8, 25)])
def test_a_team_beside_a_process_that_takes_a_core_in_turns_gets_smaller(tmp_path, threads, size, slice):
    team = compiled(tmp_path)
    team.set_threads(size)
    for at in range(1000, 1000 + 12 * slice, 2 * slice if slice < 20 else slice + 3):
        team.wait_at(at, slice)
    assert team.size_at(at) < size


@pytest.mark.parametrize("size", [1, 3])
def test_torch_uses_as_many_threads_as_the_team_and_then_all(threads, size):
    with threads_of_team(Kernels(size)):
        assert torch.get_num_threads() == size
    assert torch.get_num_threads() == threads
    with pytest.raises(RuntimeError, match="a step failed"), threads_of_team(Kernels(size)):
        raise RuntimeError("a step failed")
    assert torch.get_num_threads() == threads


def test_a_step_of_many_tokens_keeps_all_threads(threads):
    kernels = Kernels(1)
    kernels.chunks_from = lambda: 32
    for num_tokens, expected in ((32 * threads - 1, 1), (32 * threads, threads)):
        with threads_of_team(kernels, num_tokens):
            assert torch.get_num_threads() == expected


LAYER_HARNESS = """
#include "native.c"
void set_threads(int count) { omp_set_num_threads(count); }
void limit_team(int size) { team.limit = size; team.until = now() + 1000L * 1000 * MILLISECOND; }
int threads_with_chunks(int size) {
    int count = 0;
#pragma omp parallel reduction(+ : count) num_threads(size)
    count += for_chunk.memory != NULL;
    return count;
}
"""


def test_all_threads_take_chunks_of_many_tokens_also_while_the_team_is_smaller(tmp_path, threads):
    """A process that once took a core would otherwise double the time of the next prompt."""
    (tmp_path / "harness.c").write_text(LAYER_HARNESS)
    flags = (*native.FLAGS, *unit_flags(), f"-I{native.SOURCE.parent}")
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang")
    compile_shared(compiler, flags, tmp_path / "harness.c", tmp_path / "harness.so")
    kernels = native._declare(ctypes.CDLL(str(tmp_path / "harness.so")))
    kernels.set_threads(threads)
    kernels.limit_team(1)
    shapes = dict(qkv=(96, 32), o=(32, 32), gate_up=(64, 32), down=(32, 32))
    packed = {name: native.pack(torch.randn(*shape)) for name, shape in shapes.items()}
    matrices = {name: Matrix.of(packed[name], shapes[name][0]) for name in shapes}
    norms = {"input_norm": torch.ones(32), "post_norm": torch.ones(32)}
    layer = Layer.of(matrices, norms, dict(hidden=32, heads=2, kv_heads=2, dim=16, intermediate=32), 1e-5)
    count = kernels.chunks_from() * threads
    keys, values = torch.zeros(2, count // 16, 2, 16, 16).unbind()
    pages, table = Pages.of(keys, values), torch.arange(count // 16)[None]
    x, cos, sin = torch.randn(count, 32), torch.ones(count, 16), torch.zeros(count, 16)
    assert kernels.team_size() == 1
    for num_tokens, expected in ((count - 1, 1), (count, threads)):
        index = torch.tensor([0, num_tokens]), torch.tensor([num_tokens]), table, torch.arange(num_tokens)
        sequences, places = Sequences.of(*index, num_tokens), [one.data_ptr() for one in (x, cos, sin)]
        assert kernels.decoder_layer(layer, *places, pages, sequences, None, num_tokens) == 0
        assert kernels.threads_with_chunks(threads) == expected


def test_nothing_is_set_while_the_team_has_all_its_threads(threads, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: pytest.fail(f"set to {count}"))
    for kernels in (None, Kernels(threads), Kernels(threads + 1)):
        with threads_of_team(kernels):
            assert torch.get_num_threads() == threads


@pytest.mark.parametrize("speculation", [None, NGRAM])
def test_every_step_of_the_engine_runs_with_the_threads_of_the_team(tmp_path, threads, monkeypatch, speculation):
    """The forward pass, the draw, and a drafter's work."""
    save_tiny_llama(tmp_path)
    llm = LLM(tmp_path, device="cpu", dtype="float32", speculative_config=speculation)
    engine, seen = llm.engine, {}
    monkeypatch.setattr(engine.runner.kernels, "team_size", lambda: 2)

    def watch(name, function):
        def watched(*args):
            seen.setdefault(name, set()).add(torch.get_num_threads())
            return function(*args)

        return watched

    runner = engine.runner
    parts = {"forward": (runner.model, "forward"), "sample": (runner.sampler, "sample")}
    if speculation:
        parts["draft"] = (runner.drafter, "propose")
    for name, (owner, attribute) in parts.items():
        monkeypatch.setattr(owner, attribute, watch(name, getattr(owner, attribute)))
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    engine.add_request(Request("a", [5, 6, 5, 6], params, 6))
    while engine.has_unfinished:
        engine.step()
        assert torch.get_num_threads() == threads
    assert seen == {name: {2} for name in parts}
    monkeypatch.setattr(runner.sampler, "sample", lambda *args: 1 / 0)
    engine.add_request(Request("b", [5, 6], params, 6))
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert torch.get_num_threads() == threads


COUNTED = """
import os
import time
import torch
from minillm import LLM, SamplingParams
from minillm.engine.thread import EngineThread
from minillm.kernels.native_threads import release_team

torch.set_num_threads(4)
llm = LLM("tinyworld", device="cpu", num_kv_blocks=64)
greedy = SamplingParams(temperature=0, max_tokens=4)
threads = lambda: len(os.listdir("/proc/self/task"))
prompt = "Lily went to the park. " * 40


def ended(before, expected):
    # A thread that has ended leaves /proc a moment later, so look again for a while.
    for _ in range(600):
        if before - threads() == expected:
            break
        time.sleep(0.05)
    return before - threads()


def whole_team():
    # The native kernels make the team smaller where other processes take the cores; torch's own loops do not.
    (torch.ones(1 << 22) * 2).sum()
    return threads()


first = llm.generate([prompt], greedy)[0].outputs[0].token_ids
before = whole_team()
release_team()
print(ended(before, 3))
before = whole_team()
with EngineThread(llm) as thread:
    print(ended(before, 3 - 2))
    list(thread.submit(prompt, greedy))
assert llm.generate([prompt], greedy)[0].outputs[0].token_ids == first
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_the_thread_that_loaded_a_model_gives_its_team_back_when_the_engine_gets_a_thread_of_its_own():
    told = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True, timeout=240)
    assert told.returncode == 0, told.stderr
    # The team of 4 has 3 threads beside its first. Where they end for an engine's thread, that and a text thread come.
    assert [int(line) for line in told.stdout.split()] == [3, 3 - 2]


FORK = """
import os, signal, sys, torch
from minillm.kernels import native

torch.set_num_threads(2)
packed, x = native.pack(torch.randn(1024, 1024)), torch.randn(64, 1024)

def compute():
    product = native.linear(x, packed, None, 1024)  # the kernels' own team
    return product, product.double().exp()  # a loop of torch's

before = compute()
child = os.fork()
signal.alarm(60)
same = all(map(torch.equal, compute(), before)) and len(os.listdir("/proc/self/task")) > 1
if not child and (grandchild := os.fork()):
    same = same and os.waitpid(grandchild, 0)[1] == 0
elif not child:
    same = same and all(map(torch.equal, compute(), before))
if child:
    print(same, os.waitpid(child, 0)[1])
sys.stdout.flush()
os._exit(not same)
"""


def test_a_forked_child_computes_with_threads_of_its_own(root):
    done = subprocess.run(
        [sys.executable, "-c", FORK], env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True, text=True, cwd=root, timeout=300,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "0"], done.stdout + done.stderr


ALONE = """
import torch
torch.set_num_threads(4)
from minillm.kernels import native
for out_features in (40, 576, 960, 5000):
    x, weight = torch.randn(9, 192), torch.randn(out_features, 192)
    out = native.linear(x, native.pack(weight), None, out_features)
    torch.testing.assert_close(out, x @ weight.T, rtol=1e-4, atol=1e-4)
"""


def test_the_shares_of_threads_that_never_come_are_computed_by_the_others():
    """The team has four, OpenMP gives one."""
    environment = os.environ | {"OMP_THREAD_LIMIT": "1"}
    subprocess.run([sys.executable, "-c", ALONE], env=environment, check=True, timeout=120)
