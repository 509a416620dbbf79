"""Traffic: what a kernel reads and writes is counted to the byte, named by parameter, and kept within its tensors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from minillm.book import traffic as module
from minillm.book.traffic import OutOfBounds, count_traffic, record_traffic
from minillm.kernels.language import MODE, tl, triton

pytestmark = pytest.mark.skipif(MODE == "absent", reason="Triton is not installed")
interpreted = pytest.mark.skipif(MODE != "interpreted", reason="kernels are compiled here")
TWICE = 2


@triton.jit
def double(x):
    return x * 2


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr, MASKED: tl.constexpr = True):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n if MASKED else i >= 0
    tl.store(out + i, tl.load(x + i, inside) + tl.load(y + i, inside), inside)


@triton.jit
def row_kernel(x, out, width, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    scale = tl.load(x + row * row_stride)
    tl.store(out + row * width + i, double(load_row(x, row, i, row_stride, width)) * scale, i < width)


@triton.jit
def load_row(x, row, i, row_stride, width):
    return tl.load(x + row * row_stride + i, i < width, 0.0)


@triton.jit
def masked_kernel(x, out, n, OTHER: tl.constexpr):
    i = tl.arange(0, 8)
    tl.store(out + i, tl.load(x + i, i < n, OTHER))


@triton.jit
def count_kernel(counts, table, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(counts + tl.load(table + i), 1, i < 3)


@triton.jit
def described_kernel(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [6, 16], [16, 1], [ROWS, COLUMNS])
    i = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + i, source.load([4, 0]))


def add(x, y):
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 256),)](x, y, out, x.numel(), BLOCK=256)
    return out


@interpreted
def test_every_access_is_counted_and_named():
    x, y = torch.randn(1000), torch.randn(1000)
    with record_traffic() as traffic:
        out = add(x, y)
    assert torch.equal(out, x + y)
    assert [(launch.name, launch.grid, launch.num_programs) for launch in traffic.launches] == [
        ("add_kernel", (4, 1, 1), 4)
    ]
    assert (traffic.bytes_loaded, traffic.bytes_stored, traffic.bytes) == (8000, 4000, 12000)
    assert [access.kind for access in traffic.accesses[:3]] == ["load", "load", "store"]
    assert len(traffic.accesses) == 12
    last = traffic.loads("y")[-1]
    assert (last.program, last.tensor, last.itemsize, last.num_bytes) == ((3, 0, 0), "y", 4, 232 * 4)
    assert last.elements.tolist() == list(range(768, 1000))  # lanes the mask kept out are not there
    assert traffic.loads("out") == [] and len(traffic.stores("out")) == 4


@interpreted
def test_what_is_read_twice_counts_twice_and_once_among_the_unique():
    x = torch.randn(4, 8, dtype=torch.float16)
    with record_traffic() as traffic:
        row_kernel[(4,)](x, torch.empty(4, 8, dtype=torch.float16), 8, 8, BLOCK=16)
    assert traffic.bytes_loaded == 4 * (8 + 1) * 2
    assert traffic.unique_bytes_loaded == 4 * 8 * 2
    assert traffic.unique_bytes_stored == traffic.bytes_stored == 64


@interpreted
def test_one_tensor_under_two_names_keeps_both_and_is_one_memory():
    x, out = torch.randn(256), torch.empty(256)
    with record_traffic() as traffic:
        add_kernel[(1,)](x, x, out, 256, BLOCK=256)
        add_kernel[(1,)](x, out, out, 256, BLOCK=256)  # and a second launch counts its own
    assert [access.tensor for access in traffic.accesses] == ["x", "y", "out", "x", "y", "out"]
    assert [access.launch_index for access in traffic.accesses] == [0, 0, 0, 1, 1, 1]
    assert traffic.bytes_loaded == 4096
    assert traffic.unique_bytes_loaded == 1024 + 2048


@interpreted
def test_a_view_counts_from_its_own_first_element():
    storage = torch.randn(4, 32)
    view, out = storage[:, 8:16], torch.empty(4, 8)
    with record_traffic() as traffic:
        row_kernel[(4,)](view, out, 8, 32, BLOCK=8)
    assert torch.equal(out, view * 2 * view[:, :1])
    assert traffic.loads("x")[3].elements.tolist() == list(range(32, 40))  # two loads a program: the scale, the row
    assert traffic.loads("x")[2].elements.tolist() == [32]


@interpreted
@pytest.mark.parametrize("launch, said", [
    (lambda: add_kernel[(4,)](torch.ones(1000), torch.ones(1024), torch.ones(1024), 1000, BLOCK=256, MASKED=False),
     r"add_kernel, program \(3, 0, 0\): load at element 1000 of 'x', which has 1000 elements, shape \(1000,\)"),
    (lambda: add_kernel[(1,)](torch.ones(16), torch.ones(16), torch.ones(15), 16, BLOCK=16),
     r"store at element 15 of 'out'"),
    (lambda: row_kernel[(2,)](torch.ones(2, 8), torch.ones(2, 8), 8, -8, BLOCK=8), r"load at element -8 of 'x'"),
    (lambda: row_kernel[(1,)](torch.ones(4, 16)[:, :8], torch.ones(4, 16), 9, 16, BLOCK=16),
     r"element 8 of 'x', between the elements of a view of shape \(4, 8\) with strides \(16, 1\)"),
    (lambda: row_kernel[(1,)](torch.ones(4, 16)[:, ::2], torch.ones(4, 8), 8, 16, BLOCK=8),
     r"element 1 of 'x', between .* strides \(16, 2\)"),
    (lambda: count_kernel[(1,)](torch.zeros(4, dtype=torch.int32), torch.tensor([0, 1, 4, 0]), BLOCK=4),
     r"element 4 of 'counts'"),
    (lambda: add_kernel[(1,)](torch.ones(0), torch.ones(4), torch.ones(4), 4, BLOCK=4),
     r"element 0 of 'x', which has 0 elements"),
])  # fmt: skip
def test_leaving_a_tensor_is_an_error_that_says_where(launch, said):
    with pytest.raises(OutOfBounds, match=said), record_traffic():
        launch()


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int32])
def test_masked_lanes_without_other_can_be_poisoned(dtype):
    import triton.runtime.interpreter as interpreter

    before, x = interpreter.InterpreterBuilder.create_masked_load, torch.ones(8, dtype=dtype)
    for poison, other, filled in [
        (False, None, 0),
        (True, 7, 7),
        (True, None, math.nan if dtype.is_floating_point else 0),
    ]:
        out = torch.full((8,), 2, dtype=dtype)
        with record_traffic(poison=poison) as traffic:
            masked_kernel[(1,)](x, out, 5, OTHER=other)
        assert torch.equal(out[:5], x[:5]) and traffic.loads("x")[0].elements.tolist() == [0, 1, 2, 3, 4]
        torch.testing.assert_close(out[5:], torch.full((3,), filled, dtype=dtype), equal_nan=True)
    assert interpreter.InterpreterBuilder.create_masked_load is before


@interpreted
def test_overlapping_and_repeated_rows_are_read_where_they_are():
    windows, repeated = torch.arange(10.0).unfold(0, 4, 2), torch.arange(4.0).expand(3, 4)
    for x, rows in ((windows, 4), (repeated, 3)):
        out = torch.empty(rows, 4)
        with record_traffic() as traffic:
            row_kernel[(rows,)](x, out, 4, x.stride(0), BLOCK=4)
        assert torch.equal(out, x * 2 * x[:, :1])
        assert traffic.bytes_loaded == rows * 5 * 4


@interpreted
def test_an_atomic_is_a_load_and_a_store():
    counts = torch.zeros(4, dtype=torch.int32)
    with record_traffic() as traffic:
        count_kernel[(1,)](counts, torch.tensor([2, 0, 2, 99]), BLOCK=4)
    assert counts.tolist() == [1, 0, 2, 0]
    assert traffic.loads("counts")[0].elements.tolist() == traffic.stores("counts")[0].elements.tolist() == [2, 0, 2]


@interpreted
@pytest.mark.skipif(not hasattr(tl, "make_tensor_descriptor"), reason="Triton before 3.4")
def test_a_descriptor_masks_what_lies_outside():
    x, out = torch.randn(6, 16), torch.empty(4, 16)
    with record_traffic() as traffic:
        described_kernel[(1,)](x, out, ROWS=4, COLUMNS=16)
    assert torch.equal(out, F.pad(x[4:], (0, 0, 0, 2)))
    assert traffic.loads("x")[0].elements.tolist() == list(range(64, 96))


@interpreted
def test_the_interpreter_is_left_as_it_was():
    import triton.runtime.interpreter as interpreter

    def hooks():
        executor = interpreter.GridExecutor
        return (interpreter._interpreter, interpreter._implicit_cvt, executor.__call__, executor._init_args_hst)

    before = hooks()
    with pytest.raises(OutOfBounds), record_traffic():
        assert hooks() != before
        add_kernel[(1,)](torch.ones(3), torch.ones(4), torch.ones(4), 4, BLOCK=4)
    assert hooks() == before
    with pytest.raises(ZeroDivisionError), record_traffic():
        raise ZeroDivisionError
    assert hooks() == before
    assert torch.equal(add(torch.ones(300), torch.ones(300)), torch.full((300,), 2.0))


@interpreted
def test_a_recording_within_a_recording_sees_its_part():
    x = torch.ones(256)
    with record_traffic() as outer:
        add(x, x)
        with record_traffic() as inner:
            add(x, x)
    assert (outer.bytes, inner.bytes) == (6144, 3072)
    assert {access.tensor for access in outer.accesses} == {"x", "y", "out"}


@interpreted
def test_other_errors_of_a_kernel_come_out_as_they_are():
    with pytest.raises(Exception) as caught, record_traffic():
        add_kernel[(1,)](torch.ones(4), "no tensor", torch.ones(4), 4, BLOCK=4)
    assert not isinstance(caught.value, OutOfBounds)


def test_recording_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr(module, "MODE", "compiled")
    with pytest.raises(RuntimeError, match="use count_traffic"), record_traffic():
        pass


def notebook_launcher(x, scale=1.0):
    out = torch.empty_like(x)
    for _ in range(TWICE):
        notebook_kernel[(math.ceil(x.numel() / 128),)](x, out, x.numel(), 128)
    return F.silu(out) * scale


@triton.jit
def notebook_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, double(tl.load(x + i, i < n)), i < n)


def as_in_a_notebook(monkeypatch, *functions):
    """Another process cannot import these: they have to travel as source."""
    for function in functions:
        monkeypatch.setattr(getattr(function, "fn", function), "__module__", "__main__")


@pytest.mark.parametrize("at_home", [True, False])
def test_counting_in_a_process_of_its_own_gives_the_same(monkeypatch, at_home):
    if not at_home:
        as_in_a_notebook(monkeypatch, notebook_launcher, notebook_kernel, double)
    x = torch.randn(2, 600)[:, :500]  # a view travels as a view
    monkeypatch.setattr(module, "MODE", "compiled")
    apart = count_traffic(notebook_launcher, x[0], scale=2.0)
    assert [(launch.name, launch.grid) for launch in apart.launches] == [("notebook_kernel", (4, 1, 1))] * 2
    assert (apart.bytes_loaded, apart.bytes_stored, apart.unique_bytes_loaded) == (4000, 4000, 4000)
    assert apart.loads("x")[3].elements.tolist() == list(range(384, 500))
    out = torch.zeros(500)
    kernel = count_traffic(notebook_kernel, x[1], out, n=500, BLOCK=128, grid=(4,))
    assert kernel.bytes == 4000 and not out.any()  # on copies


def test_what_goes_wrong_in_the_other_process_is_said_here(monkeypatch):
    monkeypatch.setattr(module, "MODE", "compiled")
    with pytest.raises(OutOfBounds, match="element 500 of 'x'"):
        count_traffic(notebook_kernel, torch.ones(500), torch.ones(512), n=512, BLOCK=512, grid=(1,))
    with pytest.raises(RuntimeError, match=r"notebook_kernel in a process of its own failed: .*TypeError"):
        count_traffic(notebook_kernel, torch.ones(4), grid=(1,))


@interpreted
def test_counting_in_place_leaves_the_results():
    x, out = torch.ones(500), torch.zeros(500)
    assert count_traffic(notebook_kernel, x, out, 500, 128, grid=(4,)).bytes == 4000
    assert torch.equal(out, 2 * x)
