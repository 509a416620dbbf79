"""The look of the book's figures: one style, one palette, an alt text on each. Built in chapter 00."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure

# Okabe and Ito (2008), told apart under every common kind of colour blindness; yellow is too pale for lines.
COLOURS = {
    "blue": "#0072B2", "orange": "#E69F00", "green": "#009E73", "red": "#D55E00",
    "purple": "#CC79A7", "sky": "#56B4E9", "yellow": "#F0E442",
    "ink": "#24292F", "grey": "#7A8088", "pale": "#E6E9ED", "paper": "#FFFFFF",
}  # fmt: skip
# What a colour means is the same in every chapter.
ROLES = {
    "ours": "blue", "other": "orange", "good": "green", "wasted": "red",
    "prediction": "purple", "limit": "grey", "text": "ink", "background": "pale",
}  # fmt: skip
STYLE = {
    "axes.prop_cycle": cycler(color=[COLOURS[c] for c in ("blue", "orange", "green", "red", "purple", "sky")]),
    "font.family": "DejaVu Sans", "font.size": 10, "text.color": COLOURS["ink"],
    "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 8,
    "axes.labelcolor": COLOURS["ink"], "axes.labelsize": 9.5, "axes.edgecolor": COLOURS["grey"],
    "axes.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": COLOURS["pale"], "grid.linewidth": 0.8,
    "xtick.color": COLOURS["grey"], "ytick.color": COLOURS["grey"],
    "xtick.labelcolor": COLOURS["ink"], "ytick.labelcolor": COLOURS["ink"],
    "xtick.labelsize": 9, "ytick.labelsize": 9,
    "lines.linewidth": 2.0, "lines.markersize": 5.5, "patch.linewidth": 0,
    "legend.frameon": False, "legend.fontsize": 9, "figure.facecolor": COLOURS["paper"],
}  # fmt: skip
_DOTS_PER_INCH = 160  # drawn fine, shown smaller, so that it stays sharp on dense screens
_SHOWN_PER_INCH = 100


def colour(name: str) -> str:
    """The hex code of a colour ("blue") or of a role ("ours", "wasted", "prediction", "limit", ...)."""
    try:
        return COLOURS[ROLES.get(name, name)]
    except KeyError:
        raise ValueError(f"colour {name!r}: one of {', '.join([*COLOURS, *ROLES])}") from None


@contextmanager
def figure(alt: str, *, width: float = 7.0, height: float = 3.2, rows: int = 1, cols: int = 1, **subplots) -> Iterator:
    """Draw in the book's style and show the result when the block ends.

        with figure(alt="Time per token grows with the length of the text.") as ax:
            ax.plot(lengths, times)

    `alt` says in words what the figure shows. Yields one axes, or an array of them when rows or cols exceed 1;
    `width` and `height` are inches; further arguments go to `Figure.subplots` (`sharey=True`, `width_ratios=...`).
    """
    from IPython.display import display

    fig, axes = canvas(width=width, height=height, rows=rows, cols=cols, **subplots)
    yield axes
    display(picture(fig, alt))


def canvas(*, width: float = 7.0, height: float = 3.2, rows: int = 1, cols: int = 1, **subplots):
    """`(fig, ax)` in the book's style, for functions that return `picture(fig, alt)`."""
    matplotlib.rcParams.update(STYLE)  # every figure of a notebook is the book's
    fig = Figure(figsize=(width, height), layout="constrained")
    return fig, fig.subplots(rows, cols, **subplots)


def picture(fig: Figure, alt: str) -> Picture:
    """Freeze a figure into a PNG that carries its alt text. Raises ValueError without one."""
    if not alt or not alt.strip():
        raise ValueError("a figure needs an alt text: one sentence that says what it shows")
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return Picture(
        _fewer_colours(buffer.getvalue()), " ".join(alt.split()), round(fig.get_figwidth() * _SHOWN_PER_INCH)
    )


@dataclass(frozen=True)
class Picture:
    """A finished figure: PNG bytes, what it shows in words, the width in pixels at which it is shown."""

    png: bytes = field(repr=False)
    alt: str
    width: int

    def _repr_mimebundle_(self, include=None, exclude=None):
        data = {"image/png": base64.b64encode(self.png).decode("ascii"), "text/plain": f"[figure] {self.alt}"}
        return data, {"image/png": {"alt": self.alt, "width": self.width}}


def _fewer_colours(png: bytes) -> bytes:
    """A palette of 128 colours: a third of the bytes, no difference that the eye can find in a line drawing."""
    from PIL import Image

    out = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(128, method=Image.Quantize.MEDIANCUT).save(
        out, "PNG", optimize=True
    )
    return out.getvalue()
