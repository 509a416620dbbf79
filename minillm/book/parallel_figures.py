"""The pictures of chapter 20: a layer on two ranks, a ring, pipelines, who computes which scores. Built in
chapter 20."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, Rectangle

from minillm.book.style import Picture, canvas, colour, picture
from minillm.parallel.cost import LinkSpeed, all_reduce_seconds
from minillm.parallel.published import Row
from minillm.parallel.ring_attention import positions_of
from minillm.parallel.schedules import BACKWARD, Timeline

RANKS = ("blue", "orange", "green", "purple", "sky", "red", "yellow", "grey")
ALGORITHMS = {"ring": "ours", "tree": "good", "direct": "other"}


def layer_on_two_ranks() -> Picture:
    """A decoder layer: which half of each matrix is where, and the two sums."""
    fig, ax = canvas(width=9.4, height=3.2)
    ax.set(xlim=(0, 15.5), ylim=(-0.3, 4.9))
    ax.axis("off")
    steps = (
        (1.3, "columns", "q, k, v\n(heads)"),
        (3.6, "own heads", "attention"),
        (5.4, "rows", "o"),
        (8.6, "columns", "gate, up"),
        (10.6, "own columns", "SiLU, ×"),
        (12.3, "rows", "down"),
    )
    for rank, y in ((0, 2.9), (1, 0.5)):
        ax.text(0.1, y + 0.6, f"rank {rank}", va="center", fontsize=9.5, color=colour(RANKS[rank]), weight="bold")
        for x, cut, _ in steps:
            _matrix(ax, x, y, cut, rank)
        for left, right in ((2.75, 3.5), (4.65, 5.35), (9.95, 10.5), (11.65, 12.25)):
            _arrow(ax, (left, y + 0.6), (right, y + 0.6))
    for x, _, name in steps:
        ax.text(x + 0.6, 4.75, name, ha="center", va="top", fontsize=9)
    for x in (7.0, 13.9):
        ax.add_patch(Rectangle((x, 0.3), 1.0, 4.0, facecolor=colour("background"), edgecolor=colour("text"), lw=1))
        ax.text(x + 0.5, 2.3, "all-reduce", rotation=90, ha="center", va="center", fontsize=9.5, weight="bold")
        for y in (3.5, 1.1):
            _arrow(ax, (x - 0.4, y), (x, y))
            _arrow(ax, (x + 1.0, y), (x + 1.4, y))
    ax.text(0.1, -0.25, "filled: the half that the rank holds; attention and SiLU need no message", fontsize=8.5)
    return picture(
        fig,
        "A decoder layer on two ranks. Each rank holds half of the columns of q, k, v (its heads), computes attention "
        "for its heads, and holds the matching half of the rows of o; an all-reduce adds the two results. The same "
        "with gate and up by columns, SiLU, down by rows, and a second all-reduce.",
    )


def ring_states(states: Sequence[np.ndarray]) -> Picture:
    """Ranks as rows, chunks as columns; how many ranks' parts each chunk holds before and after each step."""
    n = len(states[0])
    fig, axes = canvas(width=9.4, height=2.1, cols=len(states))
    shades = [colour("background"), "#BFDDEF", "#7FBBDD", "#3F98C8", colour("ours")]
    for step, (ax, held) in enumerate(zip(axes, states)):
        for rank in range(n):
            for chunk in range(n):
                count = int(held[rank, chunk])
                shade = shades[round((len(shades) - 1) * (count - 1) / (n - 1))]
                ax.add_patch(Rectangle((chunk, n - 1 - rank), 0.94, 0.94, facecolor=shade))
                ink = colour("paper" if count > n / 2 else "text")
                ax.text(chunk + 0.47, n - 1 - rank + 0.47, count, ha="center", va="center", fontsize=8, color=ink)
        ax.set(xlim=(-0.1, n), ylim=(-0.2, n + 0.1), aspect="equal")
        ax.axis("off")
        half = "begin" if not step else "scatter" if step < n else "gather"
        ax.set_title(f"{half} {step or ''}".strip(), fontsize=8.5, loc="center", pad=2)
    return picture(
        fig,
        f"A ring all-reduce with {n} ranks, as {len(states)} grids of {n} ranks by {n} chunks. A number says how many "
        f"ranks' parts a chunk holds. After {n - 1} steps each rank holds one chunk with all {n} parts, after "
        f"{len(states) - 1} steps all chunks have them.",
    )


def ring_progress(n: int) -> list[np.ndarray]:
    """How many ranks' parts each chunk [rank, chunk] holds, before and after each step of a ring all-reduce."""
    states = [np.ones((n, n), int)]
    for step in range(2 * (n - 1)):
        held = states[-1].copy()
        for rank in range(n):
            chunk = (rank - 2 - step) % n if step < n - 1 else (rank - 1 - (step - n + 1)) % n
            from_left = states[-1][(rank - 1) % n, chunk]
            held[rank, chunk] = held[rank, chunk] + from_left if step < n - 1 else from_left
        states.append(held)
    return states


def all_reduce_curves(
    link: LinkSpeed, world_size: int, measured: Mapping[str, Mapping[float, float]], marks: Mapping[str, float]
) -> Picture:
    """Time of an all-reduce by its size. measured: algorithm -> bytes -> seconds; marks: name -> bytes."""
    fig, ax = canvas(width=8.4, height=3.5)
    sizes = np.logspace(2, 9, 80)
    for name, role in ALGORITHMS.items():
        ax.plot(sizes, [all_reduce_seconds(s, world_size, link, name) for s in sizes], "--", color=colour(role))
        points = measured.get(name, {})
        ax.plot(list(points), list(points.values()), "o", color=colour(role), label=f"{name}, measured" * bool(points))
        ax.plot([], [], "--", color=colour(role), label=f"{name}, by formula")
    for name, size in marks.items():
        ax.axvline(size, color=colour("limit"), lw=0.9, ls=":")
        ax.text(size, 1.2e-6, name, rotation=90, fontsize=8, va="bottom", ha="right", color=colour("limit"))
    ax.set(xscale="log", yscale="log", xlabel="bytes", ylabel="seconds", ylim=(1e-6, 1e-2),
           title=f"An all-reduce between {world_size} devices over {link.name}")  # fmt: skip
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(*zip(*[(h, text) for h, text in zip(handles, labels) if text]), loc="upper left", ncols=2)
    told = "; ".join(
        f"{name} at {size / 1024:,.0f} KiB {1e6 * seconds:.0f} µs"
        for name, points in measured.items() for size, seconds in points.items()
    )  # fmt: skip
    return picture(
        fig,
        f"Time of an all-reduce between {world_size} devices over {link.name} by size, on logarithmic axes: direct is "
        f"the fastest for small sizes, ring for large ones. Measured by others: {told}.",
    )


def crossed(formula: Mapping[str, int], counted: Mapping[str, int], what: str = "bytes") -> Picture:
    """Bars in pairs: what the formula says and what was counted."""
    fig, ax = canvas(width=8.4, height=0.75 + 0.55 * len(formula))
    for row, name in enumerate(formula):
        ax.barh(row - 0.19, formula[name], height=0.36, color=colour("prediction"))
        ax.barh(row + 0.19, counted[name], height=0.36, color=colour("ours"))
        ax.text(max(formula[name], counted[name]), row, f"  {counted[name]:,}", va="center", fontsize=9)
    ax.barh([0], [0], color=colour("prediction"), label="by formula")
    ax.barh([0], [0], color=colour("ours"), label="counted")
    ax.set_yticks(range(len(formula)), list(formula))
    ax.set(xlim=(0, 1.3 * max(*formula.values(), *counted.values(), 1)), ylim=(len(formula) - 0.4, -0.6))
    ax.set_xlabel(what)
    ax.grid(visible=False, axis="y")
    ax.legend(loc="lower right")
    told = "; ".join(f"{name}: formula {formula[name]:,}, counted {counted[name]:,}" for name in formula)
    return picture(fig, f"Bars of {what} that crossed between the ranks. {told}.")


def pipelines(timelines: Mapping[str, Timeline], *, labels: bool = True) -> Picture:
    """Each timeline as rows of boxes, one row a device; white is bubble."""
    fig, axes = canvas(width=9.4, height=0.6 + sum(0.5 + 0.27 * t.num_devices for t in timelines.values()),
                       rows=len(timelines), squeeze=False,
                       height_ratios=[1 + t.num_devices for t in timelines.values()])  # fmt: skip
    longest = max(line.length for line in timelines.values())
    for ax, (name, line) in zip(axes[:, 0], timelines.items()):
        for device, task, start, end in line.runs:
            role = "other" if task.kind == BACKWARD else "ours"
            ax.add_patch(Rectangle((start, -device - 0.42), end - start, 0.84, facecolor=colour(role),
                                   alpha=0.4 if task.stage >= line.num_devices else 0.85, ec="white"))  # fmt: skip
            if labels and end - start >= longest / 60:
                ax.text(
                    (start + end) / 2, -device, task.micro_batch, ha="center", va="center", fontsize=7.5, color="white"
                )
        ax.set(xlim=(0, longest), ylim=(-line.num_devices + 0.5, 0.5))
        ax.set_yticks([-device for device in range(line.num_devices)], [str(d) for d in range(line.num_devices)])
        ax.set_title(f"{name}: {line.bubble:.0%} bubble", fontsize=9.5)
        ax.grid(visible=False)
    axes[-1, 0].set_xlabel("time")
    told = "; ".join(
        f"{name}: {line.num_devices} devices, {line.bubble:.0%} bubble" for name, line in timelines.items()
    )
    return picture(fig, f"Pipelines, a row for each device, a box for each micro-batch. {told}.")


def score_owners(
    world_size: int, num_tokens: int, placements: Sequence[str], shares: Mapping[str, list[float]]
) -> Picture:
    """The causal triangle of (query, key) pairs, coloured by the rank that computes them. shares: of the mean work."""
    fig, axes = canvas(width=9.4, height=3.5, cols=len(placements))
    for ax, placement in zip(axes, placements):
        image = np.ones((num_tokens, num_tokens, 3))
        for rank in range(world_size):
            for query in positions_of(rank, world_size, num_tokens, placement).tolist():
                image[query, : query + 1] = to_rgb(colour(RANKS[rank]))
        ax.imshow(image, interpolation="nearest")
        ax.set_title(f"{placement}: {' '.join(f'{share:.2f}' for share in shares[placement])}", fontsize=9)
        ax.set(xlabel="key", ylabel="query", xticks=[], yticks=[])
        ax.grid(visible=False)
    told = "; ".join(
        f"{name}: {', '.join(f'{share:.2f}' for share in shares[name])} of the mean" for name in placements
    )
    return picture(
        fig,
        f"The triangle of query and key pairs of {num_tokens} tokens, coloured by rank, for {world_size} ranks. "
        f"Work of the ranks: {told}.",
    )


def published_chart(rows: Sequence[Row]) -> Picture:
    """Predicted over reported, a dot for each row, by comparison."""
    groups = list(dict.fromkeys(row.group for row in rows))
    fig, ax = canvas(width=8.4, height=2.9)
    for line, group in enumerate(groups):
        ratios = [row.ratio for row in rows if row.group == group]
        ax.plot(ratios, [line] * len(ratios), "o", color=colour("ours"), alpha=0.6)
    ax.axvline(1, color=colour("text"), lw=1)
    ax.set_yticks(range(len(groups)), groups)
    ax.set(xscale="log", xlim=(0.3, 3.3), ylim=(len(groups) - 0.5, -0.5), xlabel="predicted / reported",
           title="The model beside published results")  # fmt: skip
    ax.set_xticks([0.33, 0.5, 1, 2, 3], ["1/3", "1/2", "1", "2", "3"])
    ax.minorticks_off()
    told = "; ".join(
        f"{group}: {min(r.ratio for r in rows if r.group == group):.2f} to "
        f"{max(r.ratio for r in rows if r.group == group):.2f}"
        for group in groups
    )
    return picture(fig, f"Predicted over reported for {len(rows)} published results, by comparison. {told}.")


def _matrix(ax, x: float, y: float, cut: str, rank: int) -> None:
    """A square with this rank's half filled: by columns (left or right) or rows (top or bottom)."""
    ax.add_patch(Rectangle((x, y), 1.2, 1.2, facecolor=colour("background")))
    ink = {"facecolor": colour(RANKS[rank]), "alpha": 0.8}
    if cut == "rows":
        ax.add_patch(Rectangle((x, y + (0.6 if rank == 0 else 0)), 1.2, 0.6, **ink))
    else:
        ax.add_patch(Rectangle((x + 0.6 * rank, y), 0.6, 1.2, **ink))
    ax.text(x + 0.6, y - 0.08, cut, ha="center", va="top", fontsize=7.5, color=colour("limit"))


def _arrow(ax, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=colour("limit"), lw=1))
