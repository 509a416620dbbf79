"""Compiling without a GPU: what the compiler made of a kernel, and how many of its programs an SM holds."""

from __future__ import annotations

import pytest
import torch

from minillm.kernels import build as module
from minillm.kernels.build import Job, Report, build, build_all, occupancy
from minillm.kernels.gpus import GPUS
from minillm.kernels.language import MODE, tl, triton
from minillm.kernels.shipping import literal, pack, plain, unpack

needs_triton = pytest.mark.skipif(MODE == "absent", reason="Triton is not installed")
FACTOR = tl.constexpr(3)
ADD = {"x": "*fp32", "out": "*fp32", "n": "i32"}
DOT = {"a": "*fp16", "b": "*fp16", "out": "*fp32"}


@triton.jit
def tripled(x):
    return x * FACTOR


@triton.jit
def add_kernel(x, out, n, BLOCK: tl.constexpr, TYPE: tl.constexpr = tl.float32):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tripled(tl.load(x + i, i < n)).to(TYPE), i < n)


@triton.jit
def dot_kernel(a, b, out, k, BLOCK: tl.constexpr, INNER: tl.constexpr):
    i, j = tl.arange(0, BLOCK), tl.arange(0, INNER)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for _ in range(0, k, INNER):
        acc = tl.dot(tl.load(a + i[:, None] * k + j[None, :]), tl.load(b + j[:, None] * BLOCK + i[None, :]), acc)
        j += INNER
    tl.store(out + i[:, None] * BLOCK + i[None, :], acc)


@triton.jit
def integer_dot_kernel(a, b, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    square = i[:, None] * BLOCK + i[None, :]
    tl.store(out + square, tl.dot(tl.load(a + square), tl.load(b + square)))


@triton.jit
def wrong_kernel(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), no_such_function(1))  # noqa: F821


@pytest.fixture(scope="module")
def reports():
    """One process for all: kernels for several GPUs, one that does not compile among them."""
    if MODE == "absent":
        pytest.skip("Triton is not installed")
    jobs = [
        Job(add_kernel, ADD, {"BLOCK": 1024}, 80, name="add"),
        Job(add_kernel, ADD | {"n": "i32:16"}, {"BLOCK": 1024}, 80, name="add, divisible"),
        Job(add_kernel, ADD | {"x": "*fp32:1", "n": "i32:16"}, {"BLOCK": 1024}, 80, name="add, misaligned"),
        Job(wrong_kernel, {"x": "*fp32"}, {"BLOCK": 16}, name="wrong"),
        *(Job(dot_kernel, DOT | {"k": "i32:16"}, {"BLOCK": 64, "INNER": 64}, capability, 4, 3, name=f"dot {capability}")
          for capability in (75, 80, 90)),
        Job(dot_kernel, DOT | {"k": "i32:16"}, {"BLOCK": 128, "INNER": 32}, 75, 4, 1, name="dot, too large"),
        Job(integer_dot_kernel, {"a": "*i8", "b": "*i8", "out": "*i32"}, {"BLOCK": 64}, 75, name="integers 75"),
        Job(integer_dot_kernel, {"a": "*i8", "b": "*i8", "out": "*i32"}, {"BLOCK": 64}, 80, name="integers 80"),
    ]  # fmt: skip
    found = build_all(jobs)
    assert [report.name for report in found] == [job.name for job in jobs]
    return {report.name: report for report in found}


def test_alignment_decides_what_one_load_moves(reports):
    plain_, divisible, misaligned = reports["add"], reports["add, divisible"], reports["add, misaligned"]
    assert not (plain_.error or divisible.error or misaligned.error)
    # 1024 elements on 128 threads are 8 each: two loads of four where the mask, too, is known to change every 16.
    assert divisible.count("ld.global.v4") == divisible.count("ld.global") == 2
    assert divisible.count("st.global") == 2
    assert plain_.count("ld.global.v4") == 0 and plain_.count("ld.global") == 8
    assert misaligned.count("ld.global.v4") == 0
    assert misaligned.count("st.global.v4") == 2  # the other pointer still is aligned
    assert (divisible.num_warps, divisible.num_stages, divisible.capability) == (4, 3, 80)
    assert 8 <= divisible.registers <= 64 and divisible.shared_bytes == 0
    assert ".target sm_80" in divisible.ptx


def test_each_generation_multiplies_in_its_own_way(reports):
    ampere, hopper = reports["dot 80"], reports["dot 90"]
    assert ampere.count("mma.sync") > 0 and ampere.count("wgmma") == 0
    assert hopper.count("wgmma") == hopper.count("wgmma.mma_async") > 0 and hopper.count("mma.sync") == 0
    assert hopper.count("wgmma.fence") > 0  # counted when asked for
    assert ampere.uses_tensor_cores and hopper.uses_tensor_cores and not reports["add"].uses_tensor_cores
    for report in (ampere, hopper):  # three stages of two 64 x 64 tiles in fp16, one or two of them on their way
        assert report.count("cp.async") > 0 and report.count("ld.global") == 0
        assert report.shared_bytes >= 2 * 2 * 64 * 64 * 2
        assert 32 < report.registers <= 255 and report.spill_store_bytes == 0


def test_a_kernel_of_tritons_cache_has_the_same_registers_and_spills(tmp_path, monkeypatch):
    """Where it compiles a kernel, Triton prints what ptxas said;
    where it finds it in its cache, ptxas is asked again."""
    if MODE == "absent":
        pytest.skip("Triton is not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    spilling = Job(dot_kernel, DOT | {"k": "i32:16"}, {"BLOCK": 64, "INNER": 16}, 75, 1, 1)
    jobs = [Job(add_kernel, ADD, {"BLOCK": 1024}, 80), spilling]
    compiled, found = build_all(jobs), build_all(jobs)
    assert compiled == found
    assert any(tmp_path.rglob("add_kernel.cubin"))
    assert compiled[0].registers != compiled[1].registers > 0
    assert compiled[1].spill_store_bytes > 0 or compiled[1].uses_tensor_cores


def test_without_tensor_cores_a_product_is_many_multiplications(reports):
    turing, large = reports["dot 75"], reports["dot, too large"]
    if turing.uses_tensor_cores:
        pytest.skip("this Triton still compiles for a T4's tensor cores, as 3.2 did")
    assert turing.count("fma.rn") >= 64 * 64 * 64 / 128  # of the inner loop, for each of 128 threads
    assert turing.count("cp.async") == 0 and turing.count("ld.global") > 0
    assert large.spill_store_bytes > 0 and large.spill_load_bytes > 0 and large.stack_bytes > 0


def test_what_does_not_compile_says_why(reports):
    wrong = reports["wrong"]
    assert "no_such_function is not defined" in wrong.error and "\n" not in wrong.error
    assert (wrong.registers, wrong.ptx, wrong.uses_tensor_cores) == (0, "", False)
    assert reports["integers 80"].uses_tensor_cores
    if not reports["integers 75"].uses_tensor_cores:
        assert "i8" in reports["integers 75"].error
    with pytest.raises(ValueError, match="wrong did not compile for 80: "):
        occupancy(wrong, GPUS["A100"])


@needs_triton
def test_a_kernel_of_a_notebook_is_shipped_by_source(monkeypatch):
    for kernel in (add_kernel, tripled):
        monkeypatch.setattr(kernel.fn, "__module__", "__main__")
    packed = pack(add_kernel)
    assert packed["name"] == "add_kernel" and "FACTOR = " in packed["source"]
    assert packed["source"].index("def tripled") < packed["source"].index("def add_kernel")
    report = build(add_kernel, ADD | {"out": "*fp16"}, {"BLOCK": 128, "TYPE": tl.float16}, capability=89, num_warps=1)
    assert report.error == "" and report.num_warps == 1
    assert report.count("st.global.b16") == report.count("st.global") > 0


@needs_triton
def test_what_a_function_names_travels_along_and_what_it_hides_when_given(monkeypatch, tmp_path):
    length = 2

    def longer(x):
        return eval("hidden(x)") + length + LONG  # noqa: F821

    def hidden(x):
        return 10 * x

    for function in (longer, hidden):
        monkeypatch.setattr(function, "__module__", "__main__")
    monkeypatch.setitem(globals(), "LONG", 0.5)
    with pytest.raises(NameError, match="hidden"):
        unpack(pack(longer), tmp_path)(1)
    assert unpack(pack(longer, helpers=[hidden]), tmp_path)(1) == 12.5


@needs_triton
def test_a_function_of_a_module_travels_as_its_name(tmp_path):
    packed = pack(build)
    assert packed == {"module": "minillm.kernels.build", "name": "build"}
    assert unpack(packed, tmp_path) is build
    assert pack(add_kernel)["name"] == "add_kernel" and "module" in pack(add_kernel)
    assert plain(add_kernel).__name__ == "add_kernel"
    with pytest.raises(TypeError, match="neither a Python function nor a kernel"):
        plain(3)


@needs_triton
def test_constants_are_written_as_text_that_gives_them_back():
    values = [1, -2.5, True, None, "ieee", float("-inf"), torch.float16, tl.float32, (1, (2.0, None)), ()]
    assert [eval(literal(value)) for value in values] == values
    assert eval(literal(tl.constexpr(4))).value == 4
    assert literal(torch.ones(1)) is None and literal((1, object())) is None


@needs_triton
@pytest.mark.parametrize(
    "signature, constants, said",
    [
        ({"x": "*fp32", "n": "i32"}, {"BLOCK": 1}, "'out' has neither a type in signature nor a value"),
        (ADD | {"y": "i32"}, {"BLOCK": 1}, "add_kernel has no parameter 'y'; it has x, out, n, BLOCK, TYPE"),
        (ADD, {"BLOCK": 1, "n": 1}, "'n' is in signature and in constants"),
        (ADD, {"BLOCK": torch.ones(1)}, "BLOCK=.* cannot be compiled in"),
    ],
)
def test_a_forgotten_parameter_is_an_error_at_the_call(signature, constants, said):
    with pytest.raises(ValueError, match=said):
        build(add_kernel, signature, constants)


@needs_triton
def test_a_compiler_that_breaks_down_costs_one_report(monkeypatch):
    from subprocess import CompletedProcess

    calls = []

    def run(name, interpret, text):
        calls.append(text.count('"capability"'))
        return CompletedProcess([], -6, "", "loading\nAssertion `false' failed.\n")

    monkeypatch.setattr(module, "run_module", run)
    found = build_all(
        [Job(add_kernel, ADD, {"BLOCK": 16}, 100), Job(add_kernel, ADD, {"BLOCK": 16}, 80, name="second")]
    )
    assert calls == [2, 1, 1]
    assert [(report.name, report.capability) for report in found] == [("add_kernel", 100), ("second", 80)]
    assert found[0].error == "the compiler ended with -6: Assertion `false' failed."
    assert build_all([]) == []


def test_instructions_are_counted_by_whole_words():
    ptx = """
.visible .entry fma_kernel(.param .u64 fma_kernel_param_0) // fma.rn in a comment
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    @!%p2 ld.global.b32 { %r5 }, [ %rd2 + 0 ];
    ld.param.u64 %rd1, [fma_kernel_param_0];
    fma.rn.f32 %f3, %f1, %f2, %f3; fma.rn.f32 %f4, %f1, %f2, %f4;
    cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, 0x10;
    cp.async.commit_group;
    cp.async.wait_group 0x2;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%f1}, %rd1, %rd2, p, 1, 1, 0, 1;
    .file 1 "ld.global.py"
"""
    report = Report("made up", 90, 4, 3, ptx=ptx)
    counts = {"ld.global": 2, "ld.global.v4": 1, "ld": 3, "fma.rn": 2, "fma": 2, "cp.async": 1,
              "cp.async.commit_group": 1, "wgmma": 1, "wgmma.fence": 1, "mma.sync": 0, "mma_async": 0,
              "global": 0}  # fmt: skip
    assert {name: report.count(name) for name in counts} == counts
    assert report.uses_tensor_cores


@pytest.mark.parametrize("gpu, registers, num_warps, shared, blocks, limited_by", [
    ("A100", 32, 4, 0, 16, "threads"),  # 64 warps / 4
    ("A100", 16, 1, 0, 32, "blocks"),
    ("A100", 128, 4, 0, 4, "registers"),  # 4096 a warp: 4 in each quarter of 16384, 16 warps
    ("A100", 168, 4, 0, 3, "registers"),  # 5376 a warp: 3 in each quarter, 12 warps
    ("A100", 168, 8, 0, 1, "registers"),  # those 12 warps hold one program of 8
    ("A100", 65, 4, 0, 7, "registers"),  # 2080 become 2304: 7 in each quarter, 28 warps
    ("A100", 96, 1, 0, 20, "registers"),  # 3072 a warp: 5 in each quarter; undivided it would be 21
    ("A100", 255, 16, 0, 0, "registers"),
    ("A100", 32, 4, 80 * 1024, 2, "shared memory"),  # 81 KB of 164
    ("A100", 32, 4, 82 * 1024, 1, "shared memory"),  # 83 KB would be 166
    ("A100", 32, 4, 81 * 1024, 2, "shared memory"),  # 82 KB, to the last byte
    ("A100", 32, 4, 81 * 1024 + 1, 1, "shared memory"),
    ("A100", 32, 4, 163 * 1024, 1, "shared memory"),
    ("A100", 32, 4, 163 * 1024 + 1, 0, "shared memory"),
    ("A100", 32, 4, 54_954, 2, "shared memory"),  # with the reserved 1024 just under a third; in units of 128 above it
    ("H100", 32, 4, 227 * 1024, 1, "shared memory"),
    ("H200", 168, 12, 64 * 1024, 1, "registers"),
    ("L4", 32, 4, 0, 12, "threads"),
    ("L4", 32, 1, 0, 24, "blocks"),
    ("L4", 32, 4, 99 * 1024, 1, "shared memory"),
    ("T4", 64, 4, 0, 8, "threads"),  # as many as registers allow
    ("T4", 32, 4, 32 * 1024, 2, "shared memory"),  # nothing is reserved before 8.0
    ("T4", 32, 4, 64 * 1024, 1, "shared memory"),
    ("T4", 32, 2, 9_216, 7, "shared memory"),
    ("T4", 32, 2, 9_217, 6, "shared memory"),  # units of 256: 9472; in units of 128 a seventh would fit
    ("T4", 32, 1, 1, 16, "blocks"),
])  # fmt: skip
def test_occupancy_by_hand(gpu, registers, num_warps, shared, blocks, limited_by):
    found = occupancy(Report("made up", 80, num_warps, 1, registers=registers, shared_bytes=shared), GPUS[gpu])
    assert (found.blocks_per_sm, found.limited_by) == (blocks, limited_by)
    assert found.warps_per_sm == blocks * num_warps
    assert found.share == found.warps_per_sm * 32 / GPUS[gpu].max_threads_per_sm


def test_the_gpus_are_consistent_with_themselves():
    assert list(GPUS) == ["T4", "A100", "L4", "H100", "H200", "B200", "RTX 5090"]
    for name, gpu in GPUS.items():
        assert gpu.name == name and gpu.source
        reserved = 1024 if gpu.capability >= 80 else 0
        assert gpu.max_shared_per_block + reserved == gpu.shared_per_sm
        assert gpu.registers_per_sm == 65_536 and gpu.max_warps_per_sm * 32 == gpu.max_threads_per_sm
        assert gpu.fp16_tensor_flops / gpu.memory_bandwidth > 100  # FLOP a byte: all of them wait for memory first
    assert GPUS["H200"].memory_bandwidth > GPUS["H100"].memory_bandwidth > GPUS["A100"].memory_bandwidth
