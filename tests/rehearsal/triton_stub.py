"""Triton without a GPU: its own binder says which variant of a kernel a launch needs; none is compiled, none runs."""

from __future__ import annotations

import types

import torch

from .device import Capture, Device
from .notes import NOTES

KERNELS: set = set()  # all that were launched
MOST_Y = 65_535  # programs in a grid's second and third dimension


class Pointer:
    """A tensor for the binder: its dtype, and how well it is aligned."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.dtype = tensor, tensor.dtype

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()

    @staticmethod
    def ptr_range() -> int:
        return 0


class Variant:
    """Stands for a compiled kernel."""

    function = packed_metadata = None

    def __init__(self, name: str):
        self.name = name

    def launch_metadata(self, *args):
        return None

    def run(self, *args) -> None:
        NOTES.operation(f"triton {self.name}")


def pretend_triton(gpu: Device) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import jit

    major, minor = gpu.capability
    target = GPUTarget("cuda", 10 * major + minor, 32)
    active = types.SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
        get_active_torch_device=lambda: torch.device("cuda:0"),
    )
    jit.driver = triton.runtime.driver = types.SimpleNamespace(active=active)

    def do_compile(self, key, signature, device, *rest, **more):
        NOTES.compile(self.fn.__name__)
        self.device_caches[device][0][key] = variant = Variant(self.fn.__name__)
        return variant

    run = jit.JITFunction.run

    def launch(self, *args, grid, warmup=False, **kwargs):
        KERNELS.add(self)
        for name, value in [*zip((param.name for param in self.params), args), *kwargs.items()]:
            if isinstance(value, torch.Tensor):
                check(self.fn.__name__, name, value)
        if isinstance(grid, tuple) and any(int(size) > MOST_Y for size in grid[1:]):
            raise RuntimeError(f"{self.fn.__name__}: grid {grid} has more than {MOST_Y} programs in y or z")
        args = [Pointer(value) if isinstance(value, torch.Tensor) else value for value in args]
        kwargs = {name: Pointer(value) if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    jit.JITFunction.run, jit.JITFunction._do_compile = launch, do_compile


def check(kernel: str, name: str, value: torch.Tensor) -> None:
    if value.device.type != "cuda":
        raise ValueError(f"Pointer argument (at {name}) cannot be accessed from Triton (cpu tensor?), in {kernel}")
    if NOTES.capture is not None:
        Capture.current.read(value.serial)


def forget_kernels() -> None:
    """As in a new process: every variant has to be compiled."""
    for kernel in KERNELS:
        kernel.device_caches.clear()
