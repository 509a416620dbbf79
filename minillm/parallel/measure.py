"""A link measured: the time of a message by its size, and the model's two numbers. Built in chapter 20."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from minillm.parallel.links import Link

SIZES = (1, 1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)  # bytes


def ping_pong(link: Link, sizes: Sequence[int] = SIZES, repeats: int = 15) -> dict[int, float]:
    """Bytes of a message -> seconds one way, between ranks 0 and 1: half of the fastest of `repeats` round trips."""
    seconds = {}
    for size in sizes:
        message, times = torch.zeros(size, dtype=torch.uint8, device=link.device), []
        for _ in range(repeats + 2):  # two to warm up
            start = time.perf_counter()
            if link.rank == 0:
                link.send(message, 1)
                link.recv(message, 1)
            elif link.rank == 1:
                link.recv(message, 0)
                link.send(message, 0)
            if link.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        seconds[size] = min(times[2:]) / 2
    return seconds


def alpha_beta(seconds: dict[int, float]) -> tuple[float, float]:
    """(latency in s, bandwidth in bytes/s) of measured messages: the smallest gives one, the two largest the other."""
    sizes = sorted(seconds)
    if len(sizes) < 3:
        raise ValueError(f"{len(sizes)} sizes: a latency and a bandwidth need three or more")
    small, large, largest = sizes[0], sizes[-2], sizes[-1]
    slope = (seconds[largest] - seconds[large]) / (largest - large)
    return seconds[small], 1 / slope if slope > 0 else float("inf")
