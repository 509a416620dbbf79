"""Decks as files: slides through nbconvert's reveal exporter, with reveal.js and KaTeX beside them.

Both are of the npm registry and under the MIT license, which is copied with them. They are fetched once by `npm pack`
and kept in the user's cache; a deck needs no network after that.
"""

from __future__ import annotations

import html
import os
import shutil
import struct
import subprocess
import tarfile
import tempfile
from base64 import b64decode
from collections.abc import Iterable, Sequence
from pathlib import Path

import nbformat
from nbformat.v4 import new_markdown_cell, new_notebook

from minillm.book import nbfile
from minillm.book.paths import chapter_number, notebooks
from minillm.course.slides import HEIGHT, WIDTH, Slide, slides_of

PACKAGES = {  # name on npm with its version -> what a deck needs of it
    "reveal.js@5.2.1": ("dist/reveal.js", "dist/reveal.css", "plugin/notes/notes.js", "LICENSE"),
    "katex@0.16.22": (
        "dist/katex.min.js",
        "dist/katex.min.css",
        "dist/contrib/auto-render.min.js",
        "dist/fonts/",
        "LICENSE",
    ),
}
_HERE = Path(__file__).parent / "deck"
_FIGURE = (1160, 570)  # pixels of a slide that a figure may fill


def write(folder: Path, chapters: Iterable[int] | None = None, reveal_url: str | None = None) -> list[Path]:
    """One deck a chapter in `folder`; returns them.

    reveal_url: where reveal.js already is, an address or a path beside the decks; by default it is put into
    `folder/reveal.js`. KaTeX, which sets formulas, comes from npm or the cache into `folder/katex`, and with an address
    for reveal.js from jsDelivr where it is in neither. Raises ValueError for chapters that there
    are not, and RuntimeError where npm cannot fetch a package.
    """
    paths = {chapter_number(path): path for path in notebooks("chapters") if chapter_number(path) < 90}
    wanted = sorted(set(chapters)) if chapters is not None else sorted(paths)
    if missing := [number for number in wanted if number not in paths]:
        raise ValueError(f"chapters={missing} do not exist; there are chapters {min(paths):02} to {max(paths):02}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    katex_url = "katex"
    for package in PACKAGES:
        if reveal_url is None or (_name(package) == katex_url and cached(package).is_dir()):
            _put(package, folder / _name(package))
        elif _name(package) == katex_url and not (folder / katex_url).is_dir() and reveal_url.startswith("http"):
            katex_url = f"https://cdn.jsdelivr.net/npm/{package}"  # an address is given where there is no npm
    decks = []
    for number in wanted:
        chapter = nbfile.read(paths[number])
        decks.append(folder / f"{paths[number].stem}.html")
        decks[-1].write_text(
            export(slides_of(chapter), paths[number].stem, reveal_url or "reveal.js", katex_url), encoding="utf-8"
        )
    return decks


def export(slides: Sequence[Slide], title: str, reveal_url: str = "reveal.js", katex_url: str = "katex") -> str:
    """A deck as one HTML page that loads reveal.js and KaTeX from there; without them its slides stand in a column."""
    from nbconvert import SlidesExporter
    from pygments.formatters import HtmlFormatter

    css = (_HERE / "deck.css").read_text(encoding="utf-8") + HtmlFormatter(style="default").get_style_defs(".highlight")
    exporter = SlidesExporter(
        extra_template_basedirs=[str(_HERE.parent)], template_name="deck", template_file="index.html.j2"
    )
    deck = {
        "title": title,
        "reveal_url": reveal_url.rstrip("/"),
        "katex_url": katex_url,
        "css": css,
        "width": WIDTH,
        "height": HEIGHT,
    }
    body, _ = exporter.from_notebook_node(notebook_of(slides), {"deck": deck, "metadata": {"name": title}})
    return body


def notebook_of(slides: Sequence[Slide]) -> nbformat.NotebookNode:
    """Slides as a notebook whose cells carry the slide types that nbconvert reads."""
    cells = []
    for place, slide in enumerate(slides):
        mark = "#" if place == 0 else "##"
        cell = new_markdown_cell(
            f"{mark} {slide.title}\n\n{_body(slide)}", metadata={"slideshow": {"slide_type": "slide"}}
        )
        cells.append(cell)
        if slide.notes:
            cells.append(new_markdown_cell(slide.notes, metadata={"slideshow": {"slide_type": "notes"}}))
    return new_notebook(cells=cells)


def _body(slide: Slide) -> str:
    if slide.image:
        width, height = _png_size(slide.image)
        shape = "wide" if width / height >= _FIGURE[0] / _FIGURE[1] else "tall"
        source = f"data:image/png;base64,{slide.image}"
        return f'<div class="figure"><img class="{shape}" alt="{html.escape(slide.alt)}" src="{source}"></div>'
    return f'<div class="s{slide.size}">\n\n{slide.body}\n\n</div>' if slide.size else slide.body


def _png_size(image: str) -> tuple[int, int]:
    """Width and height in pixels, from a PNG's first chunk."""
    return struct.unpack(">II", b64decode(image[:44])[16:24])


def cached(package: str) -> Path:
    """The folder in the user's cache in which a package is kept, whether it is there yet or not."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "minillm" / package


def _put(package: str, target: Path) -> None:
    """What a deck needs of a package, into `target`; from the cache, which `npm pack` fills."""
    kept = cached(package)
    if not kept.is_dir():
        _fetch(package, kept)
    shutil.copytree(kept, target, dirs_exist_ok=True)


def _fetch(package: str, into: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError(
            f"{package} is fetched with npm, which is not installed; install Node.js, or say where reveal.js already "
            "is: --reveal-url https://cdn.jsdelivr.net/npm/reveal.js@5.2.1"
        )
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            [npm, "pack", package, "--silent"], cwd=place, capture_output=True, text=True, timeout=300
        )
        tarballs = list(Path(place).glob("*.tgz"))
        if done.returncode or not tarballs:
            reason = (done.stderr.strip().splitlines() or ["no package came"])[-1]
            raise RuntimeError(f"npm could not fetch {package}: {reason}; --reveal-url says where reveal.js already is")
        unpacked = Path(place) / "unpacked"
        with tarfile.open(tarballs[0]) as tar:
            wanted = [one for one in tar.getmembers() if _is_needed(one.name.partition("/")[2], PACKAGES[package])]
            tar.extractall(unpacked, members=wanted, filter="data")
        into.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(into, ignore_errors=True)
        shutil.move(unpacked / "package", into)


def _is_needed(name: str, needed: tuple[str, ...]) -> bool:
    fits = any(name.startswith(one) if one.endswith("/") else name == one for one in needed)
    return fits and not name.endswith((".ttf", ".woff"))  # every browser reads woff2


def _name(package: str) -> str:
    return package.partition("@")[0]
