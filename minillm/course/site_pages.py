"""A notebook as a page of the site: links, figures, tables and glossary terms as Sphinx can read them."""

from __future__ import annotations

import base64
import copy
import hashlib
import html
import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

import nbformat

from ..book import colab, nbfile
from ..book.glossary import TERMS
from ..book.glossary_terms import Term

GLOSSARY = "chapters/91_glossary.ipynb"
EXERCISES = "exercises/index.md"
FIGURES = "_figures"  # the folder of the site that holds every figure of an output, under the hash of its bytes
IMAGES = (".png", ".svg", ".jpg", ".jpeg", ".gif", ".webp")
_CODE = re.compile(r"(^(?:```|~~~).*?^(?:```|~~~)[ \t]*$|`+[^`\n]+`+)", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,6} +(.+?)[ #]*$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^()\s]+)(?=\))")
_HREF = re.compile(r'(?<=\bhref=")([^"]+)(?=")')
_EMBEDDED = re.compile(r'(?<=\bsrc=")data:image/png;base64,([^"]+)(?=")')  # a folded figure
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)
_BADGE = re.compile(r"\[!\[Open in Colab\]\([^)]*\)\]\(([^)]*)\)")
_BOLD = re.compile(r"\*\*([^*\n]+)\*\*")
_BACKGROUND = re.compile(r"background(?:-color)?:\s*#([0-9a-f]{6}|[0-9a-f]{3})\b", re.IGNORECASE)
_ANY_BACKGROUND = re.compile(r"background(?:-color)?:\s*(?!transparent|none|inherit)", re.IGNORECASE)


@dataclass
class Pages:
    """The notebooks that become pages, and what their preparation finds on the way.

    anchors: page -> the anchors of its headings, as Jupyter writes them (`Strides-and-gather`).
    figures: file name -> bytes, taken from the outputs. broken: one sentence for each link that leads nowhere.
    """

    root: Path
    anchors: dict[str, set[str]]
    figures: dict[str, bytes] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, root: Path, names: list[str]) -> Pages:
        """names: the notebooks, relative to `root`, with forward slashes."""
        return cls(root, {name: _anchors(nbfile.read(root / name)) for name in names})

    def prepare(self, name: str) -> nbformat.NotebookNode:
        """The notebook as the page is made from it; the file itself stays as it is."""
        nb, terms = copy.deepcopy(nbfile.read(self.root / name)), set()
        nb.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
        for number, cell in enumerate(nb.cells):
            where = f"{name} cell {number}"
            if cell.cell_type == "markdown":
                cell.source = self.markdown(cell.source, name, where, None if name == GLOSSARY else terms)
            elif cell.cell_type == "code":
                if cell.metadata.get("jupyter", {}).get("source_hidden"):
                    cell.metadata["tags"] = [*cell.metadata.get("tags", []), "hide-input"]
                cell.outputs = [self._output(output, name, where) for output in cell.outputs]
        if name == GLOSSARY:
            self._define_terms(nb)
        return nb

    def markdown(self, text: str, page: str, where: str, terms: set[str] | None = None) -> str:
        """Markdown with every link resolved; a term in bold becomes a reference the first time (`terms` holds those
        that were met). `page` is where the links start from, `where` names the cell in a complaint."""
        text = _BADGE.sub(r"[Open in Colab](\1)", text)

        def prose(piece: str) -> str:
            piece = _LINK.sub(lambda found: self.link(found[1], page, where), piece)
            return piece if terms is None or GLOSSARY not in self.anchors else _referenced(piece, terms)

        return _outside_code(text, prose)

    def link(self, target: str, page: str, where: str) -> str:
        """The target as it is on the site: a page, an image, or a file of the repository on GitHub.

        A target that does not exist is added to `broken`.
        """
        if _ELSEWHERE.match(target):
            return target
        path, _, anchor = target.partition("#")
        full = posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(path))) if path else page
        if full in self.anchors or full == page:
            if anchor and unquote(anchor) not in self.anchors.get(full, {unquote(anchor)}):
                self.broken.append(f"{where}: {target} leads to {full}, which has no heading {anchor!r}")
            return target
        if full.rstrip("/") in ("exercises", "README.md"):
            new = EXERCISES if full.startswith("exercises") else "index.md"
            return posixpath.relpath(new, posixpath.dirname(page) or ".")
        if full.startswith("..") or not (self.root / full).exists():
            self.broken.append(f"{where}: {target} leads to {full}, which does not exist in this repository")
            return target
        if full.lower().endswith(IMAGES):
            return target
        kind = "tree" if (self.root / full).is_dir() else "blob"
        return f"https://github.com/{colab.REPOSITORY}/{kind}/main/{full}{'#' * bool(anchor)}{anchor}"

    def _output(self, output, page: str, where: str):
        """A figure becomes a file with its alt text and width, HTML a box that scrolls and knows the dark mode."""
        data = output.get("data", {})
        if "text/html" in data:
            text = _HREF.sub(lambda found: _built(self.link(found[1], page, where)), data["text/html"])
            text = _EMBEDDED.sub(lambda found: self._file_of(found[1], page), text)
            kind = "book-output book-plain" if is_plain(text) else "book-output"
            text = f'<div class="{kind}">{text}</div>'
        elif "image/png" in data:
            shown = output.metadata.get("image/png", {})
            width = f' width="{shown["width"]}"' if "width" in shown else ""
            alt = html.escape(shown.get("alt", ""), quote=True)
            source = self._file_of(data["image/png"], page)
            text = f'<div class="book-figure"><img src="{source}" alt="{alt}"{width} loading="lazy"></div>'
        else:
            return output
        return nbformat.v4.new_output("display_data", data={"text/html": text})

    def _file_of(self, image: str, page: str) -> str:
        """Keep a PNG in base64 as a file of the site; where `page` finds it."""
        png = base64.b64decode(image)
        file = f"{hashlib.sha256(png).hexdigest()[:16]}.png"
        self.figures[file] = png
        return posixpath.relpath(f"{FIGURES}/{file}", posixpath.dirname(page))

    def _define_terms(self, nb) -> None:
        """The long table of all terms becomes a list of definitions, which references and the search can reach."""
        for number, cell in enumerate(nb.cells):
            if cell.cell_type == "code" and re.search(r"^show_glossary\(\)", cell.source, re.MULTILINE):
                nb.cells[number] = nbformat.v4.new_markdown_cell(glossary(set(self.anchors)))
                return


def slug(heading: str) -> str:
    """The anchor that Jupyter gives a heading: "Strides and gather" -> "Strides-and-gather"."""
    return heading.strip().replace(" ", "-")


def is_plain(text: str) -> bool:
    """Whether all backgrounds of an output are white or grey, so that it may be inverted in dark mode."""
    colours = _BACKGROUND.findall(text)
    if len(colours) < len(_ANY_BACKGROUND.findall(text)):
        return False  # a gradient, or a name: it has a meaning
    channels = [[int(c[i : i + len(c) // 3], 16) for i in range(0, len(c), len(c) // 3)] for c in colours]
    return all(max(rgb) - min(rgb) <= (1 if len(c) == 3 else 12) for rgb, c in zip(channels, colours))


def glossary(pages: set[str]) -> str:
    """Every term of the book as a MyST glossary; the chapter is a link where it is one of the `pages`."""
    chapters = {int(posixpath.basename(page)[:2]): page for page in pages if page.startswith("chapters/")}
    return "```{glossary}\n" + "\n\n".join(_definition(term, chapters) for term in TERMS) + "\n```"


def _definition(term: Term, chapters: dict[int, str]) -> str:
    lines = [_plain_text(term.meaning)]
    names = {"vLLM": term.vllm, "SGLang": term.sglang, "papers": term.papers}
    lines += ["; ".join(f"*{who}*: {_plain_text(text)}" for who, text in names.items() if text)]
    chapter = f"chapter {term.chapter:02d}"
    page = chapters.get(term.chapter)
    lines += [f"[{chapter}]({posixpath.basename(page)})" if page else chapter]
    return _plain_text(term.name) + "\n" + "\n\n".join(f"  {line}" for line in lines if line)


def _plain_text(text: str) -> str:
    """Text whose marks, outside code, are letters and no markup."""
    return _outside_code(text, lambda piece: re.sub(r"([*_$<>\[\]|])", r"\\\1", piece))


def _referenced(prose: str, met: set[str]) -> str:
    names = {term.name.casefold(): term.name for term in TERMS}

    def reference(found: re.Match) -> str:
        key = found[1].casefold()
        name = names.get(key) or names.get(key.removesuffix("s"))
        if name is None or name in met or "`" in name:
            return found[0]
        met.add(name)
        return f"**{{term}}`{found[1]} <{name}>`**"

    return _BOLD.sub(reference, prose)


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """`change` applied to what is neither a fenced block nor code in the line."""
    return "".join(piece if i % 2 else change(piece) for i, piece in enumerate(_CODE.split(text)))


def _anchors(nb) -> set[str]:
    text = "\n\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    return {slug(heading) for heading in _HEADING.findall(_without_fences(text))}


def _without_fences(text: str) -> str:
    return "".join("" if piece.startswith(("```", "~~~")) else piece for piece in _CODE.split(text))


def _built(target: str) -> str:
    """A link inside HTML, which Sphinx does not read, as the built page has it."""
    if _ELSEWHERE.match(target):
        return target
    path, _, anchor = target.partition("#")
    path = re.sub(r"\.(?:ipynb|md)$", ".html", path)
    anchor = re.sub(r"[^a-z0-9]+", "-", unquote(anchor).lower()).strip("-")
    return f"{path}#{anchor}" if anchor else path
