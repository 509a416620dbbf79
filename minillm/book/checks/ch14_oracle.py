"""References of chapter 14: buckets by trying all, a step's input, a trace read tick by tick, serving ahead.
Built in chapter 14."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

HOST_WORK = {
    "launch": "launch",
    "wait": "wait",
    "schedule": "schedule",
    "build batch": "schedule",
    "update": "schedule",
}


class Row(NamedTuple):
    """A sequence that decodes: the token to compute, its position, and its table, this step's block included."""

    token_id: int
    position: int
    blocks: list[int]


class Bar(NamedTuple):
    """What the host or the device does, from `start` to `end`, in microseconds."""

    lane: str  # "host" | "device"
    what: str
    step: int
    start: int
    end: int


class Ask(NamedTuple):
    """A request that wants at most `max_tokens` tokens, and ends with `stop`."""

    name: str
    max_tokens: int
    stop: int


def bill(counts: dict[int, int], sizes: Sequence[int]) -> tuple[int, int, int]:
    """(padded rows, graphs, steps without a graph) of these recorded sizes."""
    padded = alone = 0
    for rows, steps in counts.items():
        fitting = [size for size in sizes if size >= rows]
        padded, alone = (padded + steps * (min(fitting) - rows), alone) if fitting else (padded, alone + steps)
    return padded, len(sizes), alone


def bucket_cost(counts: dict[int, int], sizes: Sequence[int], graph: int, eager: int) -> int:
    padded, graphs, alone = bill(counts, sizes)
    return padded + graphs * graph + alone * eager


def buckets_of_all(counts: dict[int, int], graph: int, eager: int) -> list[int]:
    """Every set of sizes up to the largest that occurs."""
    most = max(counts, default=0)
    every = [list(sizes) for count in range(most + 1) for sizes in combinations(range(1, most + 1), count)]
    return min(every, key=lambda sizes: (bucket_cost(counts, sizes, graph, eager), len(sizes), sizes))


def buckets_forwards(counts: dict[int, int], graph: int, eager: int) -> list[int]:
    """The same for many sizes: the best way to come to each size, from the smallest up."""
    ways: dict[int, tuple] = {0: (0, 0, [])}
    for size in sorted(counts):
        ways[size] = min(
            (
                cost + graph + sum(steps * (size - rows) for rows, steps in counts.items() if last < rows <= size),
                graphs + 1,
                [*sizes, size],
            )
            for last, (cost, graphs, sizes) in ways.items()
        )
    return min(
        (cost + eager * sum(steps for rows, steps in counts.items() if rows > last), graphs, sizes)
        for last, (cost, graphs, sizes) in ways.items()
    )[2]


def step_input(rows: Sequence[Row], size: int, columns: int, block_size: int) -> dict[str, list]:
    """What the parts of the buffer hold, in their order."""
    fill = size - len(rows)
    return {
        "block_table": [[*row.blocks, *[0] * (columns - len(row.blocks))] for row in rows] + [[0] * columns] * fill,
        "seq_lens": [row.position + 1 for row in rows] + [0] * fill,
        "positions": [row.position for row in rows] + [0] * fill,
        "token_ids": [row.token_id for row in rows] + [0] * fill,
        "slot_mapping": [
            row.blocks[row.position // block_size] * block_size + row.position % block_size for row in rows
        ]
        + [-1] * fill,
    }


def innermost(bars: Sequence[Bar], moment: int) -> Bar | None:
    """What the host does in the microsecond from `moment` on: of all that are open, the one that began last."""
    return max(
        (bar for bar in bars if bar.lane == "host" and bar.start <= moment < bar.end),
        key=lambda bar: (bar.start, -bar.end),
        default=None,
    )


class Reading(NamedTuple):
    """A trace, taken to pieces."""

    busy: int
    span: int  # from the device's first start to its last end
    elapsed: int
    gaps: dict[str, int]
    host: list[int]  # for each step, without waiting
    device: list[int]
    awake: list[int]  # `host`, with waiting

    @property
    def ahead(self) -> int:
        """How long it would take with the next step's host work behind the device's."""
        return one_ahead(self.host, self.device)


def one_ahead(host: Sequence[int], device: Sequence[int]) -> int:
    return host[0] + sum(max(computing, working) for computing, working in zip(device, [*host[1:], 0]))


def read_trace(bars: Sequence[Bar]) -> Reading:
    """Between two neighbouring edges nothing changes, so one look at each piece is enough."""
    device = [bar for bar in bars if bar.lane == "device"]
    first, last = min(bar.start for bar in device), max(bar.end for bar in device)
    steps = sorted({bar.step for bar in bars})
    gaps, host, work, busy = (
        dict.fromkeys(("launch", "wait", "schedule", "other"), 0),
        dict.fromkeys(steps, 0),
        dict.fromkeys(steps, 0),
        0,
    )
    awake = dict.fromkeys(steps, 0)
    edges = sorted({edge for bar in bars for edge in (bar.start, bar.end)})
    for left, right in pairwise(edges):
        running = {bar.step for bar in device if bar.start <= left < bar.end}
        open_bar, length = innermost(bars, left), right - left
        busy += length * bool(running)
        for step in running:
            work[step] += length
        if open_bar is not None:
            awake[open_bar.step] += length
            host[open_bar.step] += length * (open_bar.what != "wait")
        if not running and first <= left < last:
            gaps[HOST_WORK.get(open_bar.what if open_bar else "", "other")] += length
    return Reading(
        busy, last - first, edges[-1] - edges[0], gaps, list(host.values()), list(work.values()), list(awake.values())
    )


def made_up_trace(
    steps: int, kernels: int, kernel: int, ask: int, schedule: int, update: int = 0, graph: bool = False
) -> list[Bar]:
    """The bars of a loop that does one thing after the other.
    A kernel begins when it was asked for and the one before has ended."""
    bars, now, free = [], 0, 0
    for step in range(steps):
        begin = now
        bars.append(Bar("host", "schedule", step, now, now := now + schedule))
        for index in range(kernels):
            if not graph or not index:
                bars.append(Bar("host", "launch", step, now, now := now + ask))
            free = max(now, free) + kernel
            bars.append(Bar("device", "kernel", step, free - kernel, free))
        bars.append(Bar("host", "wait", step, now, now := max(now, free)))
        bars.append(Bar("host", "update", step, now, now := now + update))
        bars.append(Bar("host", "step", step, begin, now))
    return [bar for bar in bars if bar.end > bar.start]


class FakeRunner:
    """A device that computes steps, at most two at a time, and a log of what it was told.
    `tokens` are what each request will say."""

    def __init__(self, tokens: dict[str, list[int]]):
        self.tokens, self.made = tokens, dict.fromkeys(tokens, 0)
        self.log: list[tuple] = []
        self.steps: list[list[tuple[str, int]]] = []
        self.out: list[int] = []  # numbers of the steps that were launched and not waited for
        self.gone: set[str] = set()

    def __repr__(self) -> str:
        return "runner"

    def launch(self, names: Sequence[str]) -> int:
        """Start a step that makes one token for each of these; returns the number to wait for. Returns at once."""
        names = list(names)
        self.log.append(("launch", names))
        if not names or len(set(names)) < len(names):
            raise RuntimeError(f"launch({names}): a step has at least one row, and no request twice")
        if len(self.log) > 100_000:
            raise RuntimeError("100,000 calls, and no end: is every request served?")
        if len(self.out) == 2:
            raise RuntimeError(f"launch({names}): steps {self.out[0]} and {self.out[1]} are on their way already")
        if freed := [name for name in names if name in self.gone]:
            raise RuntimeError(f"launch({names}): the blocks of {freed[0]} were freed")
        self.steps.append([(name, self.tokens[name][self.made[name]]) for name in names])
        for name in names:
            self.made[name] += 1
        self.out.append(len(self.steps) - 1)
        return self.out[-1]

    def wait(self, step: int) -> list[int]:
        """The tokens of a step, in the order of its names; steps are waited for in the order in which they were
        launched."""
        self.log.append(("wait", step))
        if not self.out or self.out[0] != step:
            raise RuntimeError(f"wait({step!r}): on their way are the steps {self.out}, and the first comes first")
        return [token for _, token in self.steps[self.out.pop(0)]]

    def free(self, name: str) -> None:
        """Give a request's blocks back."""
        self.log.append(("free", name))
        if name in self.gone:
            raise RuntimeError(f"free({name!r}): its blocks were freed before")
        if held := [step for step in self.out if any(name == row for row, _ in self.steps[step])]:
            raise RuntimeError(
                f"free({name!r}): step {held[0]} is on its way and writes to its blocks, then another request's"
            )
        self.gone.add(name)


def serve_by_the_rules(asks: Sequence[Ask], runner: FakeRunner, places: int) -> dict[str, list[int]]:
    """The reference: one flag after the other."""
    said: dict[str, list[int]] = {ask.name: [] for ask in asks}
    coming, inside, done, before = list(asks), [], set(), None
    while coming or inside:
        while coming and len(inside) < places:
            inside.append(coming.pop(0))
        in_flight = set(before[1]) if before else set()
        names = [
            a.name for a in inside if a.name not in done and len(said[a.name]) + (a.name in in_flight) < a.max_tokens
        ]
        now = (runner.launch(names), names) if names else None
        if before:
            for name, token in zip(before[1], runner.wait(before[0])):
                ask = next(a for a in inside if a.name == name)
                if name not in done:
                    said[name].append(token)
                    if token == ask.stop or len(said[name]) == ask.max_tokens:
                        done.add(name)
        for ask in [a for a in inside if a.name in done and not (now and a.name in now[1])]:
            runner.free(ask.name)
            inside.remove(ask)
        before = now
    return said
