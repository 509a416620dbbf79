"""Small wrongs, each of which the rehearsal must see: what would wait, crash or read garbage on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .device import Device


def item(gpu: Device) -> None:
    torch.zeros(3, device="cuda").sum().item()


def branch(gpu: Device) -> None:
    if (torch.zeros(3, device="cuda") > 1).any():
        return


def blocking_copy(gpu: Device) -> None:
    torch.tensor([1, 2, 3], device="cuda")


def pageable_copy(gpu: Device) -> None:
    torch.zeros(3).to("cuda", non_blocking=True)


def host_list_as_index(gpu: Device) -> None:
    torch.zeros(3, device="cuda")[[0, 2]]


def places_of_what_is_true(gpu: Device) -> None:
    torch.zeros(3, device="cuda").nonzero()


def two_devices(gpu: Device) -> None:
    torch.zeros(3, device="cuda") + torch.zeros(3)


def host_tensor_in_a_capture(gpu: Device) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.tensor(2.0, device="cuda")


def pinned_in_a_capture(gpu: Device) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.empty(3, pin_memory=True)


def compiled_in_a_capture(gpu: Device) -> None:
    from minillm.kernels.activation import silu_mul

    x = torch.empty(4, 64, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        silu_mul(x)


def misaligned_slice(gpu: Device) -> None:
    from minillm.kernels.activation import silu_mul

    x = torch.empty(5 * 64, dtype=torch.float16, device="cuda")
    silu_mul(x[:256].view(4, 64))
    silu_mul(x[1:257].view(4, 64))


def replay_without_its_memory(gpu: Device) -> None:
    x, graph = torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1  # noqa: F841  (what a graph returns is kept)
    del x
    graph.replay()


def overwritten_on_its_way(gpu: Device) -> None:
    host = torch.zeros(3, pin_memory=True)
    torch.empty(3, device="cuda").copy_(host, non_blocking=True)
    host.numpy()[0] = 1.0
    torch.cuda.synchronize()


def read_before_it_arrives(gpu: Device) -> None:
    host = torch.empty(3, dtype=torch.int64, pin_memory=True)
    host.copy_(torch.zeros(3, dtype=torch.int64, device="cuda"), non_blocking=True)
    if host.tolist()[0] < 0:
        raise RuntimeError("the host reads poison")


def two_streams(gpu: Device) -> None:
    host = torch.empty(3, pin_memory=True)
    host.copy_(torch.zeros(3, device="cuda"), non_blocking=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.empty(3, device="cuda").copy_(host, non_blocking=True)


def too_much(gpu: Device) -> None:
    torch.empty(gpu.memory.total, dtype=torch.uint8, device="cuda")


def kept_by_a_graph(gpu: Device) -> None:
    """What a graph's pool holds stays taken while the graph lives, and no longer."""
    free, graph = torch.cuda.mem_get_info()[0], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.empty(2**30, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    kept = free - torch.cuda.mem_get_info()[0]
    del graph
    torch.cuda.empty_cache()
    raise RuntimeError(f"{kept} bytes kept, {free - torch.cuda.mem_get_info()[0]} in the end")


TOYS: dict[Callable[[Device], None], str] = {  # and what the report must have, in an error, a fault or a wait
    item: "item",
    branch: "item",
    blocking_copy: "blocking copy host to device, 24 bytes",
    pageable_copy: "copy host to device of pageable memory",
    host_list_as_index: "16 bytes",
    places_of_what_is_true: "nonzero",
    two_devices: "Expected all tensors to be on the same device",
    host_tensor_in_a_capture: "a copy host to device in a capture",
    pinned_in_a_capture: "host memory is pinned in a capture",
    compiled_in_a_capture: "is compiled in a capture",
    misaligned_slice: "2 variants",
    replay_without_its_memory: "uses memory that was freed",
    overwritten_on_its_way: "host memory was overwritten",
    read_before_it_arrives: "the host reads poison",
    two_streams: "share host memory",
    too_much: "out of memory",
    kept_by_a_graph: "1073741824 bytes kept, 0 in the end",
}


def seen(report) -> list[str]:
    """All that a report says of a toy."""
    waits = [line for lines in report.waits.values() for line in lines]
    variants = [f"{count} variants of {kernel}" for kernel, count in report.variants.items()]
    return [report.error or "", *report.faults, *waits, *variants]
