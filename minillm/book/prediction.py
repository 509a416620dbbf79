"""Predict first, then measure: the reader's number beside the result. Built in chapter 00."""

from __future__ import annotations

import base64
import html
import math
from dataclasses import dataclass

from minillm.book.chips import Html
from minillm.book.style import Picture, canvas, colour, picture


def predict(question: str, guess: float, *, book: float | None = None, unit: str = "") -> Prediction:
    """Commit a number before it is measured: `guess = predict("How often ...?", ..., book=100, unit="positions")`.

    guess: the reader's number. With `...` in its place, as the book is saved, the book's prediction stands in for it.
    book:  what the book's authors predicted before they measured.

    `reveal` and `line` draw the number beside the result later. Raises TypeError for what is no number.
    """
    mine = guess is not ...
    if not mine:
        if book is None:
            raise TypeError("guess=...: write your number in the place of the three dots")
        guess = book
    if isinstance(guess, bool) or not isinstance(guess, (int, float)) or not math.isfinite(guess):
        raise TypeError(f"guess={guess!r}: commit one number, even a rough one")
    from IPython.display import display

    made = Prediction(question, guess, unit, mine)
    if mine:
        told = f"Your prediction: {made.number(guess)}. Change the number above, if you like, and run the cell again."
    else:
        told = (
            "Write your prediction in the place of the three dots and run the cell again. Until then the book's own "
            "prediction stands in for it."
        )
    display(_box(f"{question}\n{told}"))
    return made


def _box(text: str) -> Html:
    style = (
        f"border-left:4px solid {colour('prediction')};background:#fbf3f7;color:#24292f;padding:6px 12px;margin:4px 0"
    )
    return Html(f'<div style="{style};font:14px sans-serif">{html.escape(text).replace(chr(10), "<br>")}</div>', text)


@dataclass(frozen=True)
class Prediction:
    """A number that was committed to: the reader's, or the book's as long as the reader has written none."""

    question: str
    guess: float
    unit: str = ""
    mine: bool = True  # the reader's own

    @property
    def whose(self) -> str:
        """The label of the number in figures."""
        return "your prediction" if self.mine else "the book's prediction"

    def number(self, value: float) -> str:
        shown = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
        return f"{shown} {self.unit}".strip()

    def reveal(self, result: float, *, how: str = "counted") -> None:
        """Two bars, the prediction over the result, and their distance; folded until the reader has answered."""
        from IPython.display import display

        fig, ax = canvas(width=7, height=1.5)
        ax.barh([0, 1], [self.guess, result], color=[colour("prediction"), colour("ours")], height=0.6)
        ax.set_yticks([0, 1], [self.whose, how])
        ax.set(
            ylim=(1.5, -0.5),
            xlim=(min(0, self.guess, result) * 1.2, max(self.guess, result, 1e-12) * 1.25),
            xlabel=self.unit,
        )
        for row, value in enumerate([self.guess, result]):
            ax.text(max(value, 0), row, f"  {self.number(value)}", va="center", fontsize=9.5)
        ax.grid(visible=False, axis="y")
        ax.tick_params(axis="y", length=0)
        ax.set_title(self.question, fontsize=10)
        told = (
            f"{self.question} Predicted: {self.number(self.guess)}; {how}: {self.number(result)}. "
            f"{self.verdict(result)}"
        )
        display(picture(fig, told) if self.mine else _folded(picture(fig, told)))

    def line(self, ax, *, vertical: bool = False) -> None:
        """The prediction as a dashed line across a chart of the result."""
        draw = ax.axvline if vertical else ax.axhline
        draw(
            self.guess,
            color=colour("prediction"),
            linestyle=(0, (4, 3)),
            linewidth=1.6,
            label=f"{self.whose}: {self.number(self.guess)}",
        )

    def verdict(self, result: float) -> str:
        """How far the result lies from the prediction, in words."""
        if result == self.guess:
            return "The prediction was exact."
        if result <= 0 or self.guess <= 0:
            return f"The result is {self.number(result - self.guess)} away from the prediction."
        ratio = result / self.guess
        if 0.9 <= ratio <= 1.1:
            return f"The result is within {abs(ratio - 1) * 100:.0f} % of the prediction."
        return f"The result is {ratio:.3g} times the prediction."


def _folded(shown: Picture) -> Html:
    """A picture behind a line to click on."""
    png = base64.b64encode(shown.png).decode("ascii")
    return Html(
        "<details><summary>The result, beside the book's prediction</summary>"
        f'<img width="{shown.width}" alt="{html.escape(shown.alt)}" src="data:image/png;base64,{png}"></details>',
        f"[figure, folded] {shown.alt}",
    )
