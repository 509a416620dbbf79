"""A GPU that is not there: its properties, streams, events and graphs, in the place of `torch.cuda`."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import types
import weakref
from contextlib import contextmanager
from pathlib import Path

import torch

from .host import PINNED, Queue, finish
from .memory import MIB, Memory
from .notes import NOTES, where

GPUS = {  # capability, SMs, bytes of memory as the driver reports them
    "H200": ((9, 0), 132, 150_754_820_096),
    "A100": ((8, 0), 108, 42_297_786_368),
    "L4": ((8, 9), 58, 23_670_685_696),
    "T4": ((7, 5), 40, 15_828_320_256),
}
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
struct Guard final : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
Guard guard;
}
extern "C" void register_guard() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
}
"""
STREAMS = 32  # torch hands out as many, in turns


def missing() -> str | None:
    """Why no device can be pretended here; None if one can."""
    if not hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
        return f"torch {torch.__version__} has no way to set a device guard; newer ones (2.11 was tried) have"
    if torch.version.cuda is not None:
        return None
    headers = Path(torch.__file__).parent / "include/c10/core/impl/DeviceGuardImplInterface.h"
    if shutil.which("g++") is None or not headers.exists():
        return "torch without CUDA has no device guard for it, and g++ or torch's headers, to build one, are missing"
    return None


def register_guard() -> None:
    """A device guard for CUDA that does nothing; a torch built with CUDA has one."""
    torch._C._ensureCUDADeviceGuardSet()
    if torch.version.cuda is not None:
        return
    folder = Path(tempfile.gettempdir()) / f"minillm-guard-{os.getuid()}-{torch.__version__}"
    folder.mkdir(exist_ok=True)
    library, home = folder / "guard.so", Path(torch.__file__).parent
    if not library.exists():
        built = folder / f"{os.getpid()}.so"
        standard = "c++20" if torch.__version__ >= "2.1" else "c++17"
        command = ["g++", f"-std={standard}", "-O0", "-shared", "-fPIC", f"-I{home}/include"]
        # After it: some linkers drop what nothing has asked for.
        source, libraries = folder / f"{os.getpid()}.cpp", [f"-L{home}/lib", "-lc10"]
        source.write_text(GUARD)
        subprocess.run([*command, "-o", built, source, *libraries], check=True)
        built.rename(library)
    ctypes.CDLL(str(library)).register_guard()


class Device:
    """The one GPU: its memory and its streams."""

    def __init__(self, name: str):
        self.name = name
        self.capability, self.num_sms, total = GPUS[name]
        workspace = 32 * MIB if self.capability >= (9, 0) else 8 * MIB + 128 * 1024
        self.memory = Memory(total, workspace)
        # The default one, the pool, the one of captures.
        self.streams = [Stream.numbered(number) for number in range(STREAMS + 2)]
        self.current = self.streams[0]
        self.num_streams = 0

    def next_stream(self) -> Stream:
        self.num_streams += 1
        return self.streams[1 + (self.num_streams - 1) % STREAMS]

    @contextmanager
    def on(self, stream: Stream | None):
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def start_copy(self, host: torch.Tensor, arriving: torch.Tensor | None) -> None:
        self.current.queue.start(host, arriving, [stream.queue for stream in self.streams if stream.queue.copies])

    def synchronize(self, device=None) -> None:
        NOTES.wait("synchronize")
        for stream in self.streams:
            stream.queue.finish()


class Stream:
    gpu: Device
    device_type, device_index, priority = 1, 0, 0
    device = torch.device("cuda", 0)

    def __new__(cls, *args, **kwargs):
        return cls.gpu.next_stream()

    @classmethod
    def numbered(cls, number: int) -> Stream:
        stream = object.__new__(cls)
        stream.cuda_stream, stream.queue, stream.asked = number, Queue(), 0
        return stream

    def wait_stream(self, other: Stream) -> None:
        self.queue.add(other.queue.copies)

    def wait_event(self, event: Event) -> None:
        self.queue.add(event.copies)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        NOTES.wait("stream.synchronize")
        self.queue.finish()

    def query(self) -> bool:
        """Every second time it is done."""
        self.asked += 1
        if self.asked % 2 == 0:
            self.queue.finish()
        return self.asked % 2 == 0


class Event:
    gpu: Device

    def __init__(self, *args, **kwargs):
        self.copies, self.asked = [], 0

    def record(self, stream: Stream | None = None) -> None:
        self.copies = list((stream or self.gpu.current).queue.copies)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpu.current).wait_event(self)

    def query(self) -> bool:
        self.asked += 1
        if self.asked % 2 == 0:
            finish(self.copies)
        return self.asked % 2 == 0

    def synchronize(self) -> None:
        NOTES.wait("event.synchronize")
        finish(self.copies)

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class CUDAGraph:
    gpu: Device

    def __init__(self, *args, **kwargs):
        self._pool, self.reads, self.operations = None, {}, []

    def pool(self):
        return self._pool

    def capture(self, pool) -> None:
        self._pool = self.gpu.memory.graph_pool(pool)
        weakref.finalize(self, self.gpu.memory.drop_graph, self._pool).atexit = False

    def read(self, serial: int) -> None:
        """What is launched in the capture reads or writes this memory."""
        if serial not in self.reads:
            self.reads[serial] = where()

    def replay(self) -> None:
        NOTES.operation("graph replay")
        if NOTES.capture is not None:
            NOTES.fault("a graph is replayed in a capture")
        for serial, origin in self.reads.items():
            if serial not in self.gpu.memory.sizes:
                NOTES.fault(f"a replayed graph uses memory that was freed; it was captured at {origin}")

    def reset(self) -> None: ...


class Capture:
    """`torch.cuda.graph`: what is launched meanwhile is recorded."""

    gpu: Device
    current: CUDAGraph | None = None

    def __init__(self, graph: CUDAGraph, pool=None, stream=None, capture_error_mode="global"):
        self.graph, self.pool, self.stream = graph, pool, stream or self.gpu.streams[-1]

    def __enter__(self) -> None:
        memory = self.gpu.memory
        memory.empty_cache()
        self.graph.capture(self.pool)
        memory.current, Capture.current, NOTES.capture = self.graph.pool(), self.graph, []
        self.before, self.gpu.current = self.gpu.current, self.stream
        self.first = next(memory.serials)

    def __exit__(self, *exception) -> None:
        memory = self.gpu.memory
        NOTES.graphs.append(NOTES.capture)
        self.graph.reads = {serial: at for serial, at in self.graph.reads.items() if serial < self.first}
        memory.current = Capture.current = NOTES.capture = None
        self.gpu.current = self.before


def pretend(name: str) -> Device:
    """Put a GPU called `name` in the place of `torch.cuda`."""
    gpu = Device(name)
    Stream.gpu = Event.gpu = CUDAGraph.gpu = Capture.gpu = gpu
    major, minor = gpu.capability
    properties = types.SimpleNamespace(
        name=f"NVIDIA {name}", major=major, minor=minor, multi_processor_count=gpu.num_sms,
        total_memory=gpu.memory.total, L2_cache_size=50 * MIB, warp_size=32,
    )  # fmt: skip
    memory = gpu.memory
    stand_ins = dict(
        is_available=lambda: True, is_initialized=lambda: True, init=lambda: None, _lazy_init=lambda: None,
        device_count=lambda: 1, current_device=lambda: 0, set_device=lambda device: None,
        get_device_capability=lambda device=None: gpu.capability, get_device_name=lambda device=None: properties.name,
        get_device_properties=lambda device=None: properties,
        is_bf16_supported=lambda including_emulation=True: gpu.capability >= (8, 0),
        synchronize=gpu.synchronize, current_stream=lambda device=None: gpu.current, stream=gpu.on,
        default_stream=lambda device=None: gpu.streams[0], Stream=Stream, Event=Event,
        CUDAGraph=CUDAGraph, graph=Capture, graph_pool_handle=lambda: None,
        is_current_stream_capturing=lambda: NOTES.capture is not None,
        mem_get_info=lambda device=None: (memory.total - memory.used, memory.total),
        empty_cache=lambda: memory.empty_cache(), memory_allocated=lambda device=None: memory.allocated,
        max_memory_allocated=lambda device=None: memory.peak, memory_reserved=lambda device=None: memory.used,
        reset_peak_memory_stats=lambda device=None: reset_peak(memory),
        cudart=lambda: types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister),
    )  # fmt: skip
    for attribute, value in stand_ins.items():
        setattr(torch.cuda, attribute, value)
    torch._C._cuda_clearCublasWorkspaces = memory.clear_workspaces
    return gpu


def reset_peak(memory: Memory) -> None:
    memory.peak = memory.allocated


def register(place: int, size: int, flags: int) -> int:
    PINNED.add(place)
    return 0


def unregister(place: int) -> int:
    PINNED.discard(place)
    return 0
