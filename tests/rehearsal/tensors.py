"""Tensors of the pretended GPU: every torch operation is seen here, and what the host reads is made up.

What lies on the host is real and is computed. What lies on "cuda" is a `GpuTensor`: shape, strides and dtype come from
torch's own kernels for the meta device. The host reads token 5, or -1.0, or what it wrote itself where no operation has
touched it since.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .device import Capture, Device
from .host import is_pinned, pin
from .notes import NOTES
from .values import nbytes, recall, remember, remember_view, touch, value_of

CUDA = torch.device("cuda", 0)
VIEWS = frozenset(
    "view _unsafe_view slice select transpose t permute expand unsqueeze squeeze as_strided split "
    "split_with_sizes unbind alias detach detach_ _reshape_alias empty empty_strided empty_like new_empty "
    "new_empty_strided lift_fresh unfold view_as diagonal set_ resize_ is_same_size sym_size sym_stride "
    "sym_numel sym_storage_offset".split()
)
PRODUCTS = frozenset("linear mm addmm bmm baddbmm _int_mm _scaled_mm".split())
# One launch, however torch's CPU kernels are made.
KEPT = frozenset("linear scaled_dot_product_attention rms_norm".split())
# torch takes them from the host, and copies
HOST_INDICES = frozenset("index index_put index_put_ _index_put_impl_".split())
REMEMBERED = 2**16  # elements of what the host wrote, at most


class GpuTensor(Tensor):
    """A tensor on "cuda" without memory; `meta` has its shape, and shares its storage with its views."""

    meta: Tensor
    serial: int  # of the memory it lies in

    def __torch_dispatch__(self, *args, **kwargs):
        raise RuntimeError("a tensor of the pretended GPU was used outside of the rehearsal")

    __torch_dispatch__ = classmethod(__torch_dispatch__)
    __torch_function__ = torch._C._disabled_torch_function_impl

    def data_ptr(self) -> int:
        return 4096 + self.storage_offset() * self.element_size()

    def untyped_storage(self):
        return self.meta.untyped_storage()

    def record_stream(self, stream) -> None: ...

    def is_pinned(self, device=None) -> bool:
        return False

    def numpy(self, *args, **kwargs):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )

    def tolist(self):
        NOTES.wait(f"tolist of {tuple(self.shape)}")
        Capture.gpu.current.queue.finish()
        return value_of(self).tolist()

    def __repr__(self) -> str:
        return f"GpuTensor({tuple(self.shape)}, {self.dtype})"


class Watch(TorchDispatchMode):
    """Sees every operation before anything computes it."""

    def __init__(self, gpu: Device):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs) if kwargs else {}
        name = func.overloadpacket.__name__
        tensors = list(tensors_of(args, kwargs))
        ours = [tensor for tensor in tensors if type(tensor) is GpuTensor]
        target = kwargs.get("device")
        if not ours and (target is None or torch.device(target).type != "cuda"):
            return self.on_host(func, name, args, kwargs)
        if decomposes(func):
            with self:
                return func.decompose(*args, **kwargs)
        if NOTES.capture is not None:  # what the graph reads or writes
            for tensor in ours:
                Capture.current.read(tensor.serial)
        if (special := getattr(self, f"_op_{name}", None)) is not None:
            out = special(func, args, kwargs)
            if out is not NotImplemented:
                return out
        return self.on_device(func, name, args, kwargs, tensors, ours)

    def on_host(self, func, name: str, args, kwargs):
        """For real; a CPU's torch has no pinned memory, so that is pretended."""
        if name in ("pin_memory", "_pin_memory"):
            self.pins()
            return args[0] if is_pinned(args[0]) else pin(args[0].clone())
        if name == "is_pinned":
            return is_pinned(args[0])
        pinned = kwargs.pop("pin_memory", False)
        out = func(*args, **kwargs)
        if pinned:
            self.pins()
            pin(out)
        return out

    def pins(self) -> None:
        if NOTES.capture is not None:
            NOTES.fault("host memory is pinned in a capture")

    def on_device(self, func, name: str, args, kwargs, tensors: list[Tensor], ours: list[Tensor]):
        if name not in VIEWS:
            NOTES.operation(name)
            for tensor in tensors:
                if type(tensor) is not GpuTensor and tensor.dim():
                    if name not in HOST_INDICES:
                        raise RuntimeError(
                            "Expected all tensors to be on the same device, but found at least two devices, "
                            f"cuda:0 and cpu! ({name})"
                        )
                    NOTES.wait(f"{name} copies {nbytes(tensor)} bytes of host memory to the device")
            if func._schema.is_mutable:
                for tensor in ours[:1] if name.endswith("_") else ours:
                    touch(tensor)
            if name in PRODUCTS:
                self.gpu.memory.use_workspace(self.gpu.current.cuda_stream)
        there = {id(tensor.meta): tensor for tensor in ours}  # an operation in place returns what it was given
        if "device" in kwargs:
            kwargs["device"] = "meta"
        kwargs.pop("pin_memory", None)
        out = func(*to_meta(args), **{key: to_meta(value) for key, value in kwargs.items()})
        if isinstance(out, (tuple, list)):
            return type(out)(there[id(one)] if id(one) in there else self.wrap(one, name, ours) for one in out)
        return there[id(out)] if id(out) in there else self.wrap(out, name, ours)

    def wrap(self, meta, name: str = "", ours: list[Tensor] = ()):
        if not isinstance(meta, Tensor):
            return meta
        with torch._C._InferenceMode(False):  # else a view of a tensor from outside could not be one
            out = Tensor._make_wrapper_subclass(
                GpuTensor,
                meta.shape,
                strides=meta.stride(),
                storage_offset=meta.storage_offset(),
                dtype=meta.dtype,
                device=CUDA,
            )
        out.meta, out.serial = meta, self.gpu.memory.track(meta)
        if name in VIEWS and len(ours) == 1 and (value := recall(ours[0])) is not None:
            remember_view(out, ours[0], value)
        return out

    # ---- what crosses between host and device
    def _op__to_copy(self, func, args, kwargs):
        source, target = args[0], torch.device(kwargs.get("device") or args[0].device)
        if source.device.type == target.type:
            return NotImplemented
        if target.type == "cuda":
            out = self.wrap(
                torch.empty_strided(
                    source.shape, source.stride(), dtype=kwargs.get("dtype") or source.dtype, device="meta"
                )
            )
            self.upload(source, out, kwargs.get("non_blocking", False))
            return out
        out = torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        non_blocking = kwargs.get("non_blocking", False)
        if non_blocking:
            pin(out)  # torch does so too
        self.download(source, out, non_blocking)
        return out

    def _op_copy_(self, func, args, kwargs):
        target, source = args[:2]
        if target.device.type == source.device.type:
            return NotImplemented
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        if torch.broadcast_shapes(target.shape, source.shape) != target.shape:
            raise RuntimeError(f"{tuple(source.shape)} cannot be copied to {tuple(target.shape)}")
        (self.upload if type(target) is GpuTensor else self.download)(source, target, non_blocking)
        return target

    def upload(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        self.crosses("host to device", source, source, non_blocking)
        touch(target)
        if source.numel() <= REMEMBERED:
            remember(target, source.to(target.dtype, copy=True).expand(target.shape))
        if non_blocking and is_pinned(source):
            self.gpu.start_copy(source, None)

    def download(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        self.crosses("device to host", source, target, non_blocking)
        self.gpu.start_copy(target, value_of(source).to(target.dtype).expand(target.shape))
        if not (non_blocking and is_pinned(target)):
            self.gpu.current.queue.finish()

    def crosses(self, way: str, tensor: Tensor, host: Tensor, non_blocking: bool) -> None:
        NOTES.operation(f"copy {way}")
        if NOTES.capture is not None:
            NOTES.fault(f"a copy {way} in a capture")
        if not non_blocking:
            NOTES.wait(f"blocking copy {way}, {nbytes(tensor)} bytes")
        elif not is_pinned(host):
            NOTES.wait(f"copy {way} of pageable memory, {nbytes(tensor)} bytes")

    # ---- what waits for a value
    def _op__local_scalar_dense(self, func, args, kwargs):
        NOTES.wait("item")
        return self.read(args[0]).item()

    def _op_is_nonzero(self, func, args, kwargs):
        NOTES.wait("item")
        return bool(self.read(args[0]).item())

    def _op_equal(self, func, args, kwargs):
        NOTES.wait("equal")
        return True

    def _op_nonzero(self, func, args, kwargs):
        """Says: the first place, and no other."""
        NOTES.wait("nonzero")
        out = self.new((1, args[0].dim()))
        remember(out, torch.zeros(out.shape, dtype=torch.int64))
        return out

    def _op_bincount(self, func, args, kwargs):
        NOTES.wait("bincount")
        return self.new((kwargs.get("minlength", args[2] if len(args) > 2 else 1),))

    def _op_repeat_interleave(self, func, args, kwargs):
        if kwargs.get("output_size") is not None:
            NOTES.operation("repeat_interleave")
            return self.new((kwargs["output_size"],))
        NOTES.wait("repeat_interleave without output_size")
        return self.new((int(value_of(args[0]).sum()),))

    def _op_index(self, func, args, kwargs):
        for index in args[1]:
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                NOTES.wait("indexing by a mask")
        return NotImplemented

    _op_index_put = _op_index_put_ = _op__index_put_impl_ = _op_index

    def read(self, tensor: Tensor) -> Tensor:
        self.gpu.current.queue.finish()
        return value_of(tensor)

    def new(self, shape: tuple[int, ...]) -> Tensor:
        return self.wrap(torch.empty(shape, dtype=torch.int64, device="meta"))


@cache
def decomposes(func) -> bool:
    """Whether it is made of other operations, which are seen one by one then."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return (
        func.namespace == "aten"
        and func.overloadpacket.__name__ not in KEPT
        and func.has_kernel_for_dispatch_key(composite)
    )


def to_meta(value):
    if isinstance(value, Tensor):
        return value.meta if type(value) is GpuTensor else value.to("meta")
    if isinstance(value, (list, tuple)):
        return type(value)(map(to_meta, value))
    return value


def tensors_of(*values):
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(*value)
        elif isinstance(value, dict):
            yield from tensors_of(*value.values())


def pretend_tensors() -> None:
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is made on the host, then copied
