"""Chapter 18's clock, and its picture of drafts that are verified step by step. Built in chapter 18."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from minillm.book.chips import Html, token_strip


def processor_clock(device: torch.device) -> Callable[[], float]:
    """A clock in seconds. On a CPU it counts the time for which this program ran, whatever else the machine does."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            return time.perf_counter()
        return time.process_time() / torch.get_num_threads()

    return now


def draft_strip(
    log: Sequence[tuple[Sequence[int], Sequence[int]]], moment: int, decode: Callable[[list[int]], str], name: str
) -> Html:
    """The tokens of some steps, each (drafted, generated); at an odd moment the last draft is not verified yet.

    Accepted tokens are blue, the target's own token of each step is green, what was rejected or discarded is struck
    out, and a draft that is not yet verified is pale.
    """
    tokens: list[int] = []
    marks: dict[int, str] = {}
    struck: list[int] = []
    verified = log[: moment // 2]
    for drafted, generated in verified:
        start = len(tokens)
        tokens += [*drafted, generated[-1]]
        marks |= dict.fromkeys(range(start, len(tokens)), "ours") | {len(tokens) - 1: "good"}
        struck += range(start + len(generated) - 1, len(tokens) - 1)
    for drafted, _ in log[moment // 2 : (moment + 1) // 2]:
        marks |= dict.fromkeys(range(len(tokens), len(tokens) + len(drafted)), "background")
        tokens += drafted
    marks |= dict.fromkeys(struck, "wasted")
    caption = f"{name}: {sum(len(generated) for _, generated in verified)} tokens in {len(verified)} steps"
    return token_strip([decode([token]) for token in tokens], marks=marks, struck=struck, caption=caption)
