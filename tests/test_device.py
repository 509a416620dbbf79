"""Device, dtype and Triton are told as they are; the two measured rates count what they say."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from minillm import device


@pytest.fixture
def gpu(monkeypatch):
    """Pretend there is one GPU of a given compute capability, and a given Triton."""

    def pretend(capability: tuple[int, int], triton: str = "3.4.0") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "Tesla T4")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(importlib.metadata, "version", lambda name: triton)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    return pretend


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_auto_device_is_the_gpu_where_there_is_one(gpu, no_gpu):
    assert device.resolve_device("auto") == torch.device("cpu")
    gpu((9, 0))
    assert device.resolve_device("auto") == torch.device("cuda")
    assert device.resolve_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("name, message", [("gpu9", "use 'auto', 'cpu' or 'cuda'"), ("cuda", "sees 0")])
def test_a_device_that_is_not_here_is_refused(no_gpu, name, message):
    with pytest.raises(ValueError, match=message) as error:
        device.resolve_device(name)
    assert name in str(error.value)


def test_a_gpu_beyond_the_last_is_refused(gpu):
    gpu((9, 0))
    with pytest.raises(ValueError, match=r"cuda:1.*sees 1"):
        device.resolve_device("cuda:1")


@pytest.mark.parametrize(
    "capability, dtype", [((9, 0), torch.bfloat16), ((8, 0), torch.bfloat16), ((7, 5), torch.float16)]
)
def test_auto_dtype_on_gpus(gpu, capability, dtype):
    gpu(capability)
    assert device.resolve_dtype("auto", "cuda") is dtype
    assert device.resolve_dtype("auto", "cpu") is torch.float32


def test_dtypes_by_name_and_by_value():
    for name, dtype in [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)]:
        assert device.resolve_dtype(name, "cpu") is dtype
        assert device.resolve_dtype(dtype, "cpu") is dtype


@pytest.mark.parametrize("dtype", ["int8", "half", torch.float64])
def test_other_dtypes_are_refused_with_the_choice(dtype):
    with pytest.raises(ValueError, match="'float32', 'bfloat16', 'float16'"):
        device.resolve_dtype(dtype, "cpu")


def test_bfloat16_on_an_old_gpu_is_refused(gpu):
    gpu((7, 5))
    with pytest.raises(ValueError, match=r"Tesla T4.*float16"):
        device.resolve_dtype("bfloat16", "cuda")


def test_triton_mode(gpu, monkeypatch):
    gpu((8, 0))
    assert device.triton_mode() == "compiled"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert device.triton_mode() == "interpreted"
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.triton_mode() == "interpreted"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert device.triton_mode() == "absent"


@pytest.mark.parametrize(
    "capability, triton, expected",
    [
        ((9, 0), "3.4.0", True),
        ((8, 0), "3.2.0", True),
        ((7, 5), "3.4.0", False),
        ((7, 5), "3.2.0", True),
        ((6, 1), "3.2.0", False),
    ],
)
def test_triton_tensor_cores(gpu, capability, triton, expected):
    gpu(capability, triton)
    assert device.triton_has_tensor_cores("cuda") is expected
    assert device.triton_has_tensor_cores("cpu") is False


def test_describe_says_what_the_resolvers_say():
    info = device.describe("cpu")
    assert (info.device, info.dtype, info.triton) == ("cpu", "float32", device.triton_mode())
    assert info.threads == torch.get_num_threads() and info.torch == torch.__version__
    html = info._repr_html_()
    assert all(f"<td>{value}</td>" in html for _, value in info.rows())
    assert info.__rich__().row_count == len(info.rows())


@pytest.fixture
def one_second_each(monkeypatch):
    """A clock on which everything takes one second."""
    ticks = iter(range(1000))
    monkeypatch.setattr(device.time, "perf_counter", lambda: float(next(ticks)))


def test_copy_bandwidth_counts_read_and_written(one_second_each):
    assert device.measure_copy_bandwidth("cpu", num_bytes=1000, repeats=3) == 2000.0


def test_matmul_rate_counts_two_operations_a_multiply_add(one_second_each):
    assert device.measure_matmul_rate("cpu", "float32", size=10, repeats=3) == 2000.0
