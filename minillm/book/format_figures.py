"""The drawings of chapter 15 for formats and files: levels of scales, bytes, gains, layouts. Built in chapter 15."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minillm.book.style import Picture, canvas, colour, picture


def levels() -> Picture:
    """64 weights of 4 bits with the stored scales of MXFP4 and NVFP4 above them, a box each."""
    fig, (top, bottom) = canvas(width=7.6, height=3.2, rows=2, height_ratios=(2, 3))
    _draw_levels(top, "MXFP4: 4 + 8/32 = 4.25 bits a weight", 32, "e8m0: a power of two", has_tensor_scale=False)
    _draw_levels(bottom, "NVFP4: 4 + 8/16 = 4.5 bits a weight", 16, "e4m3", has_tensor_scale=True)
    return picture(
        fig,
        "64 weights of 4 bits. MXFP4: a box of 8 bits over each 32. NVFP4: a box of 8 bits over each 16, and one box "
        "of 32 bits over all of them.",
    )


def packed_bytes(packed: Sequence[int], codes: Sequence[int]) -> Picture:
    """Two codes of 4 bits in each byte, bit by bit."""
    fig, ax = canvas(width=7.8, height=1.8)
    for place, byte in enumerate(packed):
        for bit in range(8):
            owner, x = 2 * place + (bit > 3), place * 8.6 + (7 - bit)
            ink = colour("ours" if bit < 4 else "other")
            ax.bar(x + 0.47, 1, width=0.94, color=ink, alpha=0.55 if byte >> bit & 1 else 0.2)
            ax.text(x + 0.47, 0.5, byte >> bit & 1, ha="center", va="center", fontsize=11)
            if bit % 4 == 3:
                ax.text(x + 1.9, 1.25, f"input {owner}: {codes[owner]}", ha="center", fontsize=10)
        ax.text(place * 8.6 + 3.97, -0.5, f"byte {place} = {byte}", ha="center", fontsize=10)
    ax.set(xlim=(-0.3, 8.6 * len(packed) - 0.3), ylim=(-0.75, 1.7))
    ax.axis("off")
    bits = ", ".join(f"{byte:08b}" for byte in packed)
    return picture(fig, f"{len(codes)} codes in {len(packed)} bytes, highest bit first: {bits}.")


def gain_limits(rows, gains: Mapping[str, Sequence[float]], ridge: float, inks: Mapping[str, str]) -> Picture:
    """The largest possible gain over 16 bits against the rows of a product, which reach to where there is none left."""
    level = next(row for row, *values in zip(rows, *gains.values()) if max(values) <= 1)
    fig, ax = canvas(width=7.4, height=3.3)
    for name, values in gains.items():
        ax.plot(rows, values, color=colour(inks[name]), label=name)
    ax.axvline(ridge, color=colour("limit"), ls="--", lw=1)
    ax.axhline(1, color=colour("limit"), lw=1)
    ax.text(ridge, 3.9, f" {ridge:.0f} rows: ridge point\n of 16 bits", fontsize=9, va="center")
    ax.set(xscale="log", ylim=(0, 4.3), xlabel="rows (tokens in the step)", ylabel="times faster, at most")
    ax.set_title("A100, 4096 × 4096: the limit, by arithmetic")
    ax.legend(loc="lower left")
    ax.set_xticks([1, 4, 16, 64, 256, 1024], [1, 4, 16, 64, 256, 1024])
    flat = ", ".join(f"{name} {values[0]:.2f} times" for name, values in gains.items())
    return picture(
        fig,
        f"The largest possible gain over 16 bits by rows, A100: flat at first ({flat}), then falling to 1 at "
        f"{level:.0f} rows.",
    )


def layouts(placed: Mapping[str, tuple[Sequence[tuple[int, int]], str]]) -> Picture:
    """Which weight (output, input) lies in which four bits, the lowest first, and what follows."""
    fig, ax = canvas(width=8.2, height=2.7)
    for y, (places, after) in enumerate(placed.values()):
        runs_over_outputs = len({output for output, _ in places}) > 1
        for x, (output, source) in enumerate(places):
            ink = colour("other" if runs_over_outputs else "ours")
            ax.barh(y, 0.94, left=x, height=0.75, color=ink, alpha=0.4)
            ax.text(x + 0.47, y, f"{output}, {source}", ha="center", va="center", fontsize=10)
        ax.text(8.15, y, f"then {after}", va="center", fontsize=9.5)
    ax.set(ylim=(len(placed) - 0.4, -0.6), xlim=(-0.1, 11.4))
    ax.set_title("four bits each (output, input), the lowest at the left")
    ax.set_yticks(range(len(placed)), list(placed))
    ax.set_xticks([])
    ax.grid(visible=False)
    told = "; ".join(f"{name} {list(places)}" for name, (places, _) in placed.items())
    return picture(fig, f"Which weight lies in which four bits, the lowest first: {told}.")


def _draw_levels(ax, title: str, block: int, scale_name: str, *, has_tensor_scale: bool) -> None:
    ax.set(title=title, xlim=(-0.5, 64.5), ylim=(0, 3.0 if has_tensor_scale else 2.0))
    ax.axis("off")
    ax.bar([i + 0.5 for i in range(64)], 0.8, width=0.8, color=colour("ours"), alpha=0.5)
    for start in range(0, 64, block):
        ax.bar(start + block / 2, 0.8, bottom=1.0, width=block - 0.6, color=colour("other"), alpha=0.5)
        ax.text(start + block / 2, 1.4, scale_name, ha="center", va="center", fontsize=10)
    if has_tensor_scale:
        ax.bar(32, 0.8, bottom=2.0, width=63.4, color=colour("good"), alpha=0.5)
        ax.text(32, 2.4, "float32, one for the whole tensor", ha="center", va="center", fontsize=10)
