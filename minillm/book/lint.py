"""What a machine can see in a notebook: saved outputs, tags, alt texts, chapter order. Built in chapter 00."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat

from minillm.book import colab, nbfile, rooms, workload
from minillm.book.paths import chapter_number

CHECKED, MEASURED = "nbval-check-output", "measured"
MAX_CELL_LINES = 25
MAX_NOTEBOOK_BYTES = 1_500_000
MAX_IMAGE_BYTES = 250_000
PACKAGE = Path(__file__).resolve().parents[1]
ALWAYS_ALLOWED = ("minillm.book",)
_FRONT_DOOR = ("LLM", "SamplingParams", "__version__")
_ABSOLUTE = re.compile(
    r"(?<![\w.:/])/(?:home|root|Users|tmp|work|opt|usr|var|content|mnt|private)/[\w.]|\b[A-Z]:\\\\?[A-Za-z]"
)
_NEEDS = re.compile(r"^\*Needs: (.+)\*$", re.MULTILINE)  # the line under the heading of an exercise
_SECTION = re.compile(r'"([^"]+)"(?! above)(?: (?:of|in) chapter (\d\d))?')
_HEADING = re.compile(r"^##+ (.+)$", re.MULTILINE)
_PROGRESS = re.compile(r"\d+%\||it/s\]|s/it\]|\r")
_BADGE = re.compile(
    r"colab-badge\.svg\)\]\(https://colab\.research\.google\.com/github/([\w.-]+/[\w.-]+)/blob/main/([\w./-]+)\)"
)


@dataclass(frozen=True)
class Problem:
    """One thing to mend: which notebook, which cell (counted from 0 over all cells, None for the whole file), what."""

    path: Path
    cell: int | None
    message: str

    def __str__(self) -> str:
        where = f"{self.path.parent.name}/{self.path.name}"
        return f"{where}: {self.message}" if self.cell is None else f"{where} cell {self.cell}: {self.message}"


def lint(path: Path) -> list[Problem]:
    """Everything that is wrong with one notebook, by the rules of the folder it lies in."""
    path = Path(path).resolve()
    nb = nbfile.read(path)
    folder = path.parent.name
    found = [*_opening(nb, path), *_size(nb, path), *_imports(nb, path)]
    if path.read_text(encoding="utf-8") != nbfile.dumps(nbfile.normalise(nb)):
        found.append((None, "is not normalised: `minillm check --execute` writes it in its stable form"))
    if folder == "chapters":
        found += [*_book_metadata(nb), *_execution(nb), *_outputs(nb)]
    else:
        found += [(i, "has saved outputs; exercises and solutions carry none") for i, cell in _code(nb) if cell.outputs]
        found += [(None, problem) for problem in workload.complaints(nb)]
        found += _sections(nb, path)
    return [Problem(path, cell, message) for cell, message in found]


def _code(nb) -> list[tuple[int, nbformat.NotebookNode]]:
    return [(i, cell) for i, cell in enumerate(nb.cells) if cell.cell_type == "code"]


def _opening(nb, path: Path) -> Iterator[tuple[int | None, str]]:
    """Title, badge, set-up cell."""
    first = nb.cells[0] if nb.cells else None
    if first is None or first.cell_type != "markdown" or not re.match(rf"# {path.name[:2]} · \S", first.source):
        yield 0, f"the first cell must be markdown and begin with the title `# {path.name[:2]} · Name`"
        return
    badge = _BADGE.search(first.source)
    if not badge:
        yield 0, "no Colab badge under the title"
    elif badge[1] != colab.REPOSITORY or badge[2] != f"{path.parent.name}/{path.name}":
        yield (
            0,
            (
                f"the Colab badge points to {badge[1]} {badge[2]}, not to {colab.REPOSITORY} "
                f"{path.parent.name}/{path.name}"
            ),
        )
    set_up = [(i, cell) for i, cell in _code(nb) if "setup" in cell.metadata.get("tags", [])]
    if not set_up or set_up[0][0] != _code(nb)[0][0]:
        yield None, "the first code cell must be the set-up cell (tag `setup`)"
    elif set_up[0][1].source != colab.set_up_cell():
        yield set_up[0][0], "the set-up cell is not the one of minillm.book.colab"


def _size(nb, path: Path) -> Iterator[tuple[int | None, str]]:
    if path.stat().st_size > MAX_NOTEBOOK_BYTES:
        yield None, f"{path.stat().st_size:,} bytes, the limit is {MAX_NOTEBOOK_BYTES:,}"
    for i, cell in _code(nb):
        lines = sum(1 for line in cell.source.splitlines() if line.strip())
        if lines > MAX_CELL_LINES:
            yield i, f"{lines} lines, the limit is {MAX_CELL_LINES}"


def _book_metadata(nb) -> Iterator[tuple[int | None, str]]:
    book = nb.metadata.get("book", {})
    checks = {
        "objectives": lambda v: isinstance(v, list) and v and all(isinstance(x, str) for x in v),
        "needs": lambda v: isinstance(v, list) and all(isinstance(x, str) and re.fullmatch(r"\d\d", x) for x in v),
        "minutes": lambda v: isinstance(v, int) and 0 < v <= 90,
    }
    for key, is_good in checks.items():
        if not is_good(book.get(key)):
            yield (
                None,
                f"metadata book.{key}={book.get(key)!r}: must be "
                + {
                    "objectives": "a list of sentences",
                    "needs": 'a list of chapters such as ["01", "02"]',
                    "minutes": "a whole number from 1 to 90",
                }[key],
            )


def _execution(nb) -> Iterator[tuple[int | None, str]]:
    for expected, (i, cell) in enumerate([item for item in _code(nb) if item[1].source.strip()], 1):
        if cell.execution_count != expected:
            yield i, f"execution count {cell.execution_count}, expected {expected}: run the notebook from top to bottom"
            return


def _outputs(nb) -> Iterator[tuple[int | None, str]]:
    for i, cell in _code(nb):
        tags = set(cell.metadata.get("tags", [])) & {CHECKED, MEASURED}
        if cell.outputs and len(tags) != 1:
            yield i, f"prints or displays something: tag it either {CHECKED} or {MEASURED}"
        if CHECKED in tags and not cell.outputs:
            yield i, f"is tagged {CHECKED} but has no output to compare"
        for output in cell.outputs:
            for message in _one_output(output):
                yield i, message
    for i, cell in enumerate(nb.cells):
        if _ABSOLUTE.search(cell.source):
            yield i, f"holds an absolute path: {_ABSOLUTE.search(cell.source)[0]}..."
        if cell.cell_type == "markdown" and re.search(r"!\[\s*\]\(|<img(?![^>]*\balt=\"[^\"]+\")", cell.source):
            yield i, "an image has no alt text"


def _one_output(output) -> Iterator[str]:
    if output.output_type == "error":
        yield f"holds an error output: {output.ename}"
        return
    if output.output_type == "stream":
        texts, images = {output.name: output.text}, []
        if output.name == "stderr":
            yield f"writes to stderr: {output.text.strip()[:60]!r}"
    else:
        texts = {mime: value for mime, value in output.data.items() if mime.startswith("text/")}
        images = [mime for mime in output.data if mime.startswith("image/")]
    for mime in images:
        if not output.metadata.get(mime, {}).get("alt"):
            yield "a figure has no alt text: draw it with minillm.book.figure or picture"
        if len(output.data[mime]) * 3 // 4 > MAX_IMAGE_BYTES:
            yield f"an image of {len(output.data[mime]) * 3 // 4:,} bytes, the limit is {MAX_IMAGE_BYTES:,}"
    for text in texts.values():
        if match := _ABSOLUTE.search(text):
            yield f"its output holds an absolute path: {match[0]}..."
        if _PROGRESS.search(text):
            yield "its output holds a progress bar: pass use_tqdm=False"
        if re.search(r"\bat 0x[0-9a-f]{6,}", text):
            yield "its output holds a memory address"


def _sections(nb, path: Path) -> Iterator[tuple[int | None, str]]:
    """Sections that an exercise needs, in quotation marks, and that neither the chapter nor the notebook has."""
    chapters = {file.name[:2]: file for file in (path.parents[1] / "chapters").glob("[0-9][0-9]_*.ipynb")}
    for i, cell in enumerate(nb.cells):
        for needs in _NEEDS.findall(cell.source if cell.cell_type == "markdown" else ""):
            for title, number in _SECTION.findall(needs):
                chapter = chapters.get(number or path.name[:2])
                if chapter and title not in _headings(nb) | _headings(nbfile.read(chapter)):
                    yield i, f'needs "{title}", which is no heading of chapter {chapter.name[:2]}'


def _headings(nb) -> set[str]:
    texts = [cell.source.replace("*", "") for cell in nb.cells if cell.cell_type == "markdown"]
    titles = {title.strip() for text in texts for title in _HEADING.findall(text)}
    return titles | {title.removeprefix("Optional: ") for title in titles}


def _imports(nb, path: Path) -> Iterator[tuple[int | None, str]]:
    """Imports of modules that a later chapter builds; chapter 00 may look ahead."""
    chapter = chapter_number(path)
    if chapter == 0:
        return
    for i, cell in _code(nb):
        for module in imported_modules(cell.source):
            built = chapter_that_builds(module)
            if built is not None and built > chapter:
                yield i, f"imports {module}, which chapter {built:02d} builds; this is chapter {chapter:02d}"


def imported_modules(source: str) -> list[str]:
    """The modules of the package that a cell imports directly; names the front door hands out are left out."""
    modules = rooms.find_modules(PACKAGE)
    found = []
    for node in ast.walk(ast.parse(_without_magics(source))):
        if isinstance(node, ast.ImportFrom) and node.module == "minillm":
            found += [f"minillm.{a.name}" for a in node.names if a.name not in _FRONT_DOOR]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minillm."):
            found += [_defining_module(node.module, alias.name, modules) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.startswith("minillm.")]
    return [m for m in found if not any(m == a or m.startswith(f"{a}.") for a in ALWAYS_ALLOWED)]


def chapter_that_builds(module: str) -> int | None:
    """The chapter in the docstring of a module, or of the nearest package above that names one."""
    file = rooms.find_modules(PACKAGE).get(module)
    return rooms.chapter_of(file) if file else None


def _defining_module(package: str, name: str, modules: dict[str, Path]) -> str:
    """Where `from package import name` gets the name: a submodule, or the one the package re-exports it from."""
    if f"{package}.{name}" in modules:
        return f"{package}.{name}"
    file = modules.get(package)
    if file is not None and file.name == "__init__.py":
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
                return rooms.import_targets(node, package, set(modules))[0]
    return package


def _without_magics(source: str) -> str:
    return "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())
