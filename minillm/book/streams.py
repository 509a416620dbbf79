"""Two generators side by side, each on its own clock. Built in chapter 00."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from minillm.book.chips import Html


@dataclass
class Lane:
    """One stream: its text so far, the tokens counted, and the seconds spent inside it."""

    label: str
    source: Iterator[str]
    pieces: list[str] = field(default_factory=list)
    seconds: float = 0.0
    done: bool = False

    def advance(self, clock=time.perf_counter) -> None:
        start = clock()
        piece = next(self.source, None)
        self.seconds += clock() - start
        if piece is None:
            self.done = True
        else:
            self.pieces.append(piece)

    @property
    def rate(self) -> float:
        """Pieces (tokens) a second so far."""
        return len(self.pieces) / self.seconds if self.seconds else 0.0


def side_by_side_stream(
    generators: Sequence[Iterable[str]],
    labels: Sequence[str],
    *,
    stop_with_first: bool = False,
    frames_per_second: float = 12,
    clock=time.perf_counter,
) -> list[Lane]:
    """Stream generators of text pieces (one piece a token) in columns, and return what was measured.

    They take turns in one thread, so that none slows another down: each lane has its own clock, which runs only
    while that lane works, and the lane whose clock is furthest behind goes next. What a column shows at any moment
    is what it would show alone after the same time. stop_with_first ends the race when one lane is done.
    """
    if len(generators) != len(labels):
        raise ValueError(f"{len(generators)} generators but {len(labels)} labels")
    from IPython.display import display

    lanes = [Lane(label, iter(generator)) for label, generator in zip(labels, generators, strict=True)]
    handle = display(frame(lanes), display_id=True)
    drawn = clock()
    while running := [lane for lane in lanes if not lane.done]:
        if stop_with_first and len(running) < len(lanes):
            break
        min(running, key=lambda lane: lane.seconds).advance(clock)
        if handle and clock() - drawn >= 1 / frames_per_second:
            handle.update(frame(lanes))
            drawn = clock()
    if handle:
        handle.update(frame(lanes))
    return lanes


def frame(lanes: Sequence[Lane]) -> Html:
    """The lanes as they are now, as columns."""
    share = 100 // len(lanes)
    cells, plain = [], []
    for lane in lanes:
        text = "".join(lane.pieces)
        state = f"{len(lane.pieces)} tokens · {lane.seconds:.2f} s · {lane.rate:.0f} tokens/s" + (
            " · done" if lane.done else ""
        )
        cells.append(
            f'<td style="width:{share}%;vertical-align:top;text-align:left;padding:8px 12px;border:1px solid #d0d7de">'
            f'<b>{html.escape(lane.label)}</b><br><small style="color:#57606a">{state}</small>'
            f'<div style="white-space:pre-wrap;margin-top:6px">{html.escape(text)}</div></td>'
        )
        plain.append(f"{lane.label} ({state})\n{text}")
    table = (
        "width:100%;table-layout:fixed;border-collapse:collapse;font:13px/1.5 sans-serif;background:#fff;color:#24292f"
    )
    return Html(f'<table style="{table}"><tr style="background:#fff">{"".join(cells)}</tr></table>', "\n\n".join(plain))
