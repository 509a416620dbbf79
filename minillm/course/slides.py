"""Slides: one deck a chapter, from the chapter's own title, objectives, figures, code and takeaways.

A rule chooses what is shown, so a deck follows its chapter: every figure is a slide under its section's heading, a
prediction is a question before the figure that answers it, an idea without a figure is a few sentences, and a section
that builds something shows one piece of code of at most 12 lines. The chapter's text is in the speaker's notes. The tag
`slide` on a cell adds it, `no-slide` leaves it out.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import nbformat

MOST_LINES, MOST_COLUMNS = 12, 76  # of code on a slide
WIDTH, HEIGHT = 1280, 720
SIZES = (40, 34, 28, 25)  # pixels of text, from the largest
_TEXT_WIDTH, _TEXT_HEIGHT = 1130, 545
_HEADING = re.compile(r"^(#{1,4}) +(.+)$", re.MULTILINE)
_LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?:[^()]|\([^)]*\))*\)")
_ITEM = re.compile(r"^(?:[*-]|\d+\.) +(.+(?:\n(?![*-] |\d+\. |\n).+)*)", re.MULTILINE)
_PREDICT = re.compile(r"""predict\(\s*(?:f?"([^"]+)"|f?'([^']+)')""")
_FOLDED = re.compile(r'<details>.*?<img [^>]*alt="([^"]*)" src="data:image/png;base64,([^"]+)"', re.DOTALL)
_REVEALED = re.compile(r"Predicted: .+; [\w ]+: ")
_DISPLAY_MATH = re.compile(r"\$\$.+?\$\$", re.DOTALL)
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z*`$\"])")
_SAME_THING = ("Predict", "Build", "Verify", "Measure", "Swap", "Serve", "Count")  # as a heading below another one
_LAST = ("Claims checked", "In the wild", "Reading", "Exercises", "Takeaways")


@dataclass(frozen=True)
class Slide:
    """One page of a deck: `body` is Markdown, `image` a PNG in base64 with its `alt` text, `notes` for the speaker."""

    title: str
    body: str = ""
    image: str = ""
    alt: str = ""
    notes: str = ""
    size: int = 0  # pixels of the body's text; 0 for what has a size of its own


@dataclass(frozen=True)
class Section:
    """A heading of a chapter and what stands below it, up to the next heading."""

    title: str
    level: int
    text: str
    cells: tuple[nbformat.NotebookNode, ...]

    @property
    def kind(self) -> str:
        """The part of a chapter that it is: "Need", "Idea", "Build" ...; "" for others."""
        return re.split(r"[\s:]", self.title, maxsplit=1)[0].strip()


def slides_of(chapter: nbformat.NotebookNode) -> list[Slide]:
    """The deck of a chapter: title, objectives, what each section shows, takeaways, exercises."""
    sections = sections_of(chapter)
    name = _plain(sections[0].title) if sections else "Chapter"
    objectives = [f"{text[0].upper()}{text[1:]}" for text in chapter.metadata.get("book", {}).get("objectives", [])]
    minutes = chapter.metadata.get("book", {}).get("minutes")
    deck = [Slide(name, f'<p class="aside">{minutes} minutes</p>' if minutes else "", notes=_opening(sections))]
    deck += _pages("By the end you can", objectives)
    title = name
    for section in sections:
        if section.level < 3 or section.title not in _SAME_THING:
            title = _plain(section.title)
        if not section.title.startswith(_LAST):
            deck += _of_section(section, title)
    takeaways = [item for one in sections if one.title == "Takeaways" for item in _items(one.text)]
    deck += _pages("Takeaways", takeaways) if takeaways else _pages("You can now", objectives)
    for section in sections:
        if section.title == "Exercises" and (items := _items(section.text) or _exercises(section.text)):
            deck += _pages("Exercises", items)
    return deck


def sections_of(chapter: nbformat.NotebookNode) -> list[Section]:
    """A chapter cut at its headings."""
    found: list[Section] = []
    for cell in chapter.cells:
        if cell.cell_type != "markdown":
            if found:
                found[-1] = replace(found[-1], cells=(*found[-1].cells, cell))
            continue
        matches = list(_HEADING.finditer(_without_code(cell.source)))
        before = cell.source[: matches[0].start()] if matches else cell.source
        if found:
            told = nbformat.v4.new_markdown_cell(before.strip(), metadata=cell.metadata)
            cells = (*found[-1].cells, told) if before.strip() else found[-1].cells
            found[-1] = replace(found[-1], text=f"{found[-1].text}\n\n{before}".strip(), cells=cells)
        for match, after in zip(matches, [*matches[1:], None]):
            text = cell.source[match.end() : after.start() if after else len(cell.source)].strip()
            told = nbformat.v4.new_markdown_cell(text, metadata=cell.metadata)
            found.append(Section(match[2].strip(), len(match[1]), text, (told,) if text else ()))
    return found


def _of_section(section: Section, title: str) -> Iterator[Slide]:
    """The slides of one section, in the order of its cells."""
    told, shown, code = "", False, section.kind == "Build"
    pages: list[Slide] = []
    for cell in section.cells:
        tags = cell.metadata.get("tags", [])
        if "no-slide" in tags:
            continue
        if cell.cell_type == "markdown":
            told = cell.source
            if "slide" in tags:
                pages += _pages(title, _items(told) or _sentences(told, 3), notes=told)
            continue
        if asked := _PREDICT.search(cell.source):
            pages.append(
                Slide("Predict", f'<p class="ask">{html.escape(asked[1] or asked[2])}</p>', notes=_notes(told))
            )
        if "slide" in tags or (code and _defines(cell)):
            if _fits_a_slide(cell.source):
                pages.append(Slide(title, f"```python\n{cell.source.strip()}\n```", notes=_notes(told)))
                code = False
        for image, alt in figures_of(cell):
            heading = (
                "Predicted, and found"
                if _REVEALED.search(alt)
                else "You are here"
                if "Map of the engine" in alt
                else title
            )
            pages.append(Slide(heading, image=image, alt=alt, notes=_notes(told)))
            shown = shown or heading == title
    if not shown and section.kind in ("Idea", "Need"):
        pages = [*_pages(title, _idea(section.text), notes=_notes(section.text)), *pages]
    yield from pages


def figures_of(cell: nbformat.NotebookNode) -> Iterator[tuple[str, str]]:
    """(PNG in base64, alt text) of every picture that a cell has left."""
    for output in cell.get("outputs", []):
        if image := output.get("data", {}).get("image/png"):
            alt = output.get("metadata", {}).get("image/png", {}).get("alt", "")
            yield "".join(image).replace("\n", ""), alt
        elif folded := _FOLDED.search("".join(output.get("data", {}).get("text/html", ""))):
            yield folded[2], html.unescape(folded[1])


def _pages(title: str, items: list[str], notes: str = "") -> list[Slide]:
    """A list as one slide in the largest type that fits, or as two where none does."""
    items = [_plain(item) for item in items if item.strip()]
    if not items:
        return []
    for size in SIZES:
        if _height(items, size) <= _TEXT_HEIGHT:
            return [Slide(title, _listed(items), notes=notes, size=size)]
    if len(items) == 1:
        items = _sentences(items[0], 99)
        if len(items) == 1:
            return [Slide(title, items[0][:700], notes=notes, size=SIZES[-1])]
    half = (len(items) + 1) // 2
    return _pages(title, items[:half], notes) + _pages(title, items[half:], notes)


def _listed(items: list[str]) -> str:
    """Markdown: a list, or the one sentence that there is; formulas below it."""
    formulas = [item for item in items if item.startswith("$$")]
    told = [item.rstrip(" ;") for item in items if item not in formulas]
    text = "\n".join(f"* {item}" for item in told) if len(told) > 1 else "".join(told)
    return "\n\n".join([text, *formulas])


def _height(items: Iterable[str], size: int) -> float:
    """Pixels that a list takes in type of this size, estimated on the safe side."""
    columns = _TEXT_WIDTH / (0.5 * size)
    lines = [2.6 if item.startswith("$$") else -(-len(item) // columns) for item in items]
    return sum(size * (1.35 * count + 0.35) for count in lines)


def _idea(text: str) -> list[str]:
    """What a section says in a few lines: its first sentences, its list, its formula."""
    prose = _DISPLAY_MATH.sub("", _ITEM.sub("", text))
    listed = [first for item in _items(text) for first in _sentences(item, 1)][:4]
    return [*_sentences(prose, 1 if listed else 3), *listed, *(found[0] for found in _DISPLAY_MATH.finditer(text))][:6]


def _items(text: str) -> list[str]:
    """The items of the lists in a text, each as one line."""
    return [" ".join(found[1].split()) for found in _ITEM.finditer(text)]


def _sentences(text: str, most: int) -> list[str]:
    paragraph = next(
        (part for part in text.split("\n\n") if part.strip() and not part.lstrip().startswith(("|", "<", ">"))), ""
    )
    found = _SENTENCE.split(" ".join(_plain(paragraph).split()))
    return [one for one in found[:most] if one and not one.endswith(":")]


def _exercises(text: str) -> list[str]:
    """The exercises that a sentence names after its colon, one an item; the rows of a table likewise."""
    rows = [line.split("|")[2].strip() for line in text.splitlines() if re.match(r"\| *\d", line)]
    if rows:
        return rows
    _, _, listed = " ".join(_plain(text.split("\n\n")[0]).split()).partition(": ")
    parts = [re.sub(r"^and,? ", "", part.strip(" .\n")) for part in listed.split(";")]
    return [f"{part[0].upper()}{part[1:]}" for part in parts if part]


def _opening(sections: list[Section]) -> str:
    return _notes(sections[0].text) if sections else ""


def _notes(text: str) -> str:
    """A text for the speaker: no links, no folded parts."""
    return _plain(re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)).strip()


def _plain(text: str) -> str:
    """Markdown without links, of which the text is kept; badges go."""
    return _LINK.sub(lambda found: "" if found[0].startswith("!") else found[1], _LINK.sub(_inner, text)).strip()


def _inner(found: re.Match) -> str:
    return "" if found[0].startswith(("!", "[![")) else found[1]


def _without_code(source: str) -> str:
    """A source of the same length in which comments of fenced code are no headings."""
    return re.sub(r"```.*?```", lambda found: "." * len(found[0]), source, flags=re.DOTALL)


def _defines(cell: nbformat.NotebookNode) -> bool:
    hidden = cell.metadata.get("jupyter", {}).get("source_hidden")
    return (
        not hidden
        and _fits_a_slide(cell.source)
        and re.search(r"^(?:def|class) ", cell.source, re.MULTILINE) is not None
    )


def _fits_a_slide(source: str) -> bool:
    lines = source.strip().splitlines()
    return 0 < len(lines) <= MOST_LINES and max(map(len, lines)) <= MOST_COLUMNS
