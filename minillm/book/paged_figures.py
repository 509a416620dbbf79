"""The drawings of chapter 13: a walk through a block table, a stored token, SMs at work, a shared prefix, a page of
latents. Built in chapter 13."""

from __future__ import annotations

import numpy as np
from matplotlib.patches import FancyArrowPatch, Rectangle

from minillm.book.style import Picture, canvas, colour, picture
from minillm.kernels.gpus import GPUS
from minillm.kernels.paged_decode import choose_num_splits


def cut_and_merge() -> Picture:
    """One query, a sequence whose blocks lie all over memory, two programs that walk half of it each, one merge."""
    table, split_of = (5, 2, 9, 4, 7, 11), ("ours", "other")
    fig, ax = canvas(width=6.4, height=5.4)
    ax.set(xlim=(-0.1, 12.1), ylim=(-0.7, 10.4))
    ax.axis("off")
    roles = {block: split_of[place // 3] for place, block in enumerate(table)}
    ax.text(0, 9.9, "block table of one sequence", fontsize=12)
    ax.text(0, 6.6, "pool of blocks", fontsize=12)
    for place, block in enumerate(table):
        _cell(ax, 3 + place, 8.6, str(block), roles[block])
        _arrow(ax, (3.5 + place, 8.55), (block + 0.5, 6.25))
    for block in range(12):
        _cell(ax, block, 5.2, str(block), roles.get(block, "background"))
    for split, role in enumerate(split_of):
        left = 0.4 + 6.2 * split
        for block in table[3 * split : 3 * split + 3]:
            _arrow(ax, (block + 0.5, 5.15), (left + 2.5, 3.75))
        _box(ax, left, 2.5, 5.0, f"program {split}: the same query,\nits own three blocks", role)
        _arrow(ax, (left + 2.5, 2.45), (4.5 + 3 * split, 1.05))
    _box(ax, 2.6, -0.3, 6.8, "merge: weigh the two means by their sums", "good")
    return picture(
        fig,
        "The block table of one sequence names blocks 5, 2, 9, 4, 7 and 11, which lie all over a pool of twelve. "
        "Two programs hold the same query; each follows half of the table and reads its own three blocks. "
        "A merge weighs their two results.",
    )


def waves(programs: int, places: int) -> list[int]:
    """Programs of each wave: as many as there are places, until all have run."""
    return [min(places, programs - first) for first in range(0, programs, places)]


def lights(gpu: str, num_seqs: int, kv_heads: int, length: int, num_splits: int | str) -> Picture:
    """The SMs that work in the first wave, and all places over time: unsplit above, split below."""
    chip = GPUS[gpu]
    chosen = choose_num_splits(num_seqs, kv_heads, length, chip.num_sms)
    fig, axes = canvas(width=9.6, height=4.4, rows=2, cols=2, width_ratios=[1, 1.7])
    told, places, longest = [], 2 * chip.num_sms, 0
    for row, splits in enumerate((1, chosen if num_splits == "chosen" else int(num_splits))):
        programs, positions = num_seqs * kv_heads * splits, -(-length // splits)
        lit = waves(programs, places)
        longest = longest or len(lit) * positions  # the unsplit row sets the scale of time
        cut = f"{splits} split{'s' * (splits > 1)}"
        told.append(f"{cut}: {programs:,} programs, {min(lit[0], chip.num_sms)} of {chip.num_sms} SMs lit")
        _draw_sms(axes[row, 0], chip.num_sms, lit[0])
        dark = _draw_time(axes[row, 1], lit, positions, longest, places)
        axes[row, 0].set_title(told[-1], fontsize=9.5)
        done = f"done after {len(lit) * positions:,} positions, {len(lit)} wave{'s' * (len(lit) > 1)}"
        axes[row, 1].set_title(f"{done}, {dark:.0%} dark", fontsize=9.5)
    axes[1, 1].set_xlabel("positions walked, one after another")
    alt = f"{chip.name}, {num_seqs} x {length:,} tokens, {kv_heads} KV heads. "
    return picture(fig, alt + f"{told[0]}. {told[1]}. Chosen: {chosen}.")


def latent_page() -> Picture:
    """One page of latents, which serves scores and sums."""
    fig, ax = canvas(width=8.8, height=2.9)
    ax.set(xlim=(-9, 13), ylim=(-3.2, 5.4))
    ax.axis("off")
    for left, width, shade, label in ((0, 8, "sky", "latent: 512 columns"), (8, 1.6, "orange", "rotary key: 64")):
        ax.add_patch(Rectangle((left, 0), width, 4, fc=colour(shade), alpha=0.55))
        ax.text(left + width / 2, 4.3, label, ha="center", fontsize=9)
    ax.text(4, 2, "a page: 16 rows, one per token", ha="center", va="center", fontsize=9)
    line = dict(color=colour("limit"), lw=1.3)
    for y, arrowstyle in ((3.2, "-|>"), (0.8, "<|-")):
        ax.annotate("", (-0.1, y), (-2.6, y), arrowprops=dict(line, arrowstyle=arrowstyle))
    ax.text(-2.8, 3.2, "128 queries of 576 numbers\nmeet all columns: scores", ha="right", va="center", fontsize=9)
    ax.text(-2.8, 0.8, "128 weighted sums\nof the first 512 columns", ha="right", va="center", fontsize=9)
    ax.annotate("", (0, -0.5), (8, -0.5), arrowprops=dict(line, arrowstyle="|-|"))
    ax.text(4, -1.6, "keys and values at once: there is no page of values", ha="center", fontsize=9)
    return picture(
        fig,
        "A page of 16 tokens with 512 latent and 64 rotary columns: 128 queries meet all columns for their scores, and "
        "the first 512 columns of the same page are summed as values",
    )


def stored_block(keys: np.ndarray, values: np.ndarray) -> Picture:
    """Which of a block's 16 x 16 numbers of 2 bytes one token's key and value went to; a row is 32 bytes."""
    pieces = [len(np.unique(elements * 2 // 32)) for elements in (keys, values)]
    fig, axes = canvas(width=8.4, height=3.3, cols=2)
    for ax, name, elements, touched in zip(axes, ("keys", "values"), (keys, values), pieces):
        down, across = ("dimension", "token") if name == "keys" else ("token", "dimension")
        shade = np.zeros(256)
        shade[elements] = 1
        ax.pcolormesh(shade.reshape(16, 16), cmap="Blues", vmin=0, vmax=1.4, edgecolors="white", lw=1)
        ax.hlines(range(17), 0, 16, color=colour("limit"), lw=0.8)
        ax.set(ylim=(16, 0), aspect="equal", xlabel=across, ylabel=f"{down} (a piece of 32 bytes)")
        ax.set_xticks([0, 5, 15]), ax.set_yticks([0, 5, 15]), ax.grid(visible=False)
        ax.set_title(f"{name}: {touched} piece{'s' * (touched > 1)} touched")
    return picture(
        fig,
        "One block of keys and one of values, a row for each piece of 32 bytes. Token 5's key is a column, "
        f"touching {pieces[0]} pieces; its value is a row, touching {pieces[1]}.",
    )


def shared_prefix(batch_sizes, traffic_of, shared: int, own: int, token_bytes: int) -> Picture:
    """Bytes loaded in a step, counted ("separate" and "cascade") and by formula, against the number of sequences."""
    fewer = traffic_of["separate"][-1] / traffic_of["cascade"][-1]
    fig, ax = canvas(width=7.6, height=3.4)
    for once, each, label in ((0, shared + own, "keys and values alone, by formula"), (shared, own, None)):
        line = [(once + count * each) * token_bytes / 1e3 for count in (1, 16)]
        ax.plot((1, 16), line, "--", color=colour("prediction"), lw=1.2, label=label)
    for (name, counts), role in zip(traffic_of.items(), ("wasted", "ours")):
        ax.plot(batch_sizes, [count / 1e3 for count in counts], "o", color=colour(role), label=f"{name}, counted")
    ax.set(xlabel="sequences", ylabel="kB loaded in a step", xticks=batch_sizes)
    ax.set_title(f"{shared} positions shared, {own} more for each sequence: {fewer:.1f} times less at 16")
    ax.legend(loc="upper left")
    return picture(
        fig,
        "Bytes loaded in one decode step against the number of sequences. Separate walks grow by the whole length for "
        f"each, cascade by its own part only: {fewer:.1f} times less at 16.",
    )


def _draw_sms(ax, num_sms: int, lit: int) -> None:
    across = 12 if num_sms % 12 == 0 else 10
    for sm in range(num_sms):
        ax.add_patch(Rectangle((sm % across + 0.06, sm // across + 0.08), 0.88, 0.84, color=colour("text")))
        for place in range(2):  # a program on each SM first, then the second ones
            if sm + place * num_sms < lit:
                corner = sm % across + 0.12 + 0.41 * place, sm // across + 0.18
                ax.add_patch(Rectangle(corner, 0.35, 0.64, color=colour("yellow")))
    ax.set(
        xlim=(0, across), ylim=(-(-num_sms // across), 0), xticks=[], yticks=[], xlabel=f"{num_sms} SMs, 2 places each"
    )
    ax.grid(visible=False), ax.spines[:].set_visible(False)


def _draw_time(ax, lit: list[int], positions: int, longest: int, places: int) -> float:
    ends = np.arange(len(lit) + 1) * positions
    ax.fill_between([0, ends[-1]], places, color=colour("text"))
    ax.stairs(lit, ends, fill=True, color=colour("yellow"))
    ax.set(xlim=(0, 1.04 * longest), ylim=(0, 1.04 * places), ylabel="places"), ax.grid(visible=False)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    return 1 - sum(lit) / (places * len(lit))


def _cell(ax, x: float, y: float, text: str, role: str) -> None:
    ax.add_patch(Rectangle((x + 0.04, y), 0.92, 1.0, fc=colour(role), alpha=0.85))
    ink = "white" if role == "ours" else colour("text")
    ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=12, color=ink)


def _box(ax, x: float, y: float, width: float, text: str, role: str) -> None:
    ax.add_patch(Rectangle((x, y), width, 1.25, fc=colour(role), alpha=0.85))
    ink = colour("text") if role == "other" else "white"
    ax.text(x + width / 2, y + 0.62, text, ha="center", va="center", fontsize=11, color=ink)


def _arrow(ax, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=colour("limit"), lw=1.1))
