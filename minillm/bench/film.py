"""What a terminal shows, kept as a moving picture: `minillm tour --gif FILE`. Built in chapter 00."""

from __future__ import annotations

import io
import time
from itertools import pairwise
from pathlib import Path

WIDTH = 92  # columns
FRAME_SECONDS = 0.12  # frames that follow sooner replace each other
LONGEST_SECONDS = 0.7  # of a frame: what takes longer, such as reading a model, is cut down to this
LAST_SECONDS = 4.0
PAPER, INK, BAR = "#FFFFFF", "#24292F", "#0072B2"


class Film:
    """Frames and their times; `keep` takes what is shown, `save` writes a GIF that plays as fast as it was shown."""

    def __init__(self, clock=time.monotonic):
        self.clock = clock
        self.frames: list[tuple[float, object]] = []

    def keep(self, renderable) -> None:
        """Add what is shown now (a rich renderable); it is drawn only later, since the rungs are being timed."""
        now = self.clock()
        if self.frames and now - self.frames[-1][0] < FRAME_SECONDS:
            self.frames[-1] = (self.frames[-1][0], renderable)
        else:
            self.frames.append((now, renderable))

    def durations(self) -> list[float]:
        """Seconds for which each frame is shown."""
        starts = [start for start, _ in self.frames]
        lasting = [min(later - start, LONGEST_SECONDS) for start, later in pairwise(starts)]
        return [*lasting, LAST_SECONDS]

    def save(self, path: Path) -> Path:
        """Write the frames as an animated GIF. Raises ValueError where there is none."""
        if not self.frames:
            raise ValueError(f"{path}: no frame was kept, so there is no picture to write")
        texts = [_lines(renderable) for _, renderable in self.frames]
        rows = max(len(lines) for lines in texts)
        images = [_draw(lines, rows) for lines in texts]
        images[0].save(
            path,
            save_all=True,
            append_images=images[1:],
            duration=[round(1000 * seconds) for seconds in self.durations()],
            loop=0,
            optimize=True,
        )
        return path


def _lines(renderable) -> list[str]:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, force_terminal=False)
    console.print(renderable)
    return console.file.getvalue().splitlines()


def _draw(lines: list[str], rows: int):
    from matplotlib.font_manager import findfont
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(findfont("DejaVu Sans Mono"), 14)
    width, height = round(font.getlength("0") * WIDTH) + 24, 19 * rows + 24
    image = Image.new("RGB", (width, height), PAPER)
    pen = ImageDraw.Draw(image)
    for row, line in enumerate(lines):
        at = (12, 12 + 19 * row)
        pen.text(at, line.replace("█", " "), font=font, fill=INK)
        pen.text(at, "".join(c if c == "█" else " " for c in line), font=font, fill=BAR)
    return image.quantize(16)
