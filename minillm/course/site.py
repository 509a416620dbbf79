"""The book as a static site: its notebooks laid out for Sphinx, built without running them, every link looked up."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from ..book import colab, nbfile
from ..book.contents import PARTS
from ..book.paths import chapter_number, notebooks, repository_root
from .site_pages import EXERCISES, FIGURES, IMAGES, Pages

ASSETS = {"book.css": Path(__file__).with_name("site.css"), "book.js": Path(__file__).with_name("site.js")}
MARK = ".minillm-site"  # a folder that holds it was built here, and may be built again
NEEDED = ("sphinx", "myst_nb", "sphinx_book_theme")
_TARGET = re.compile(r'<[^>]*?\s(?:href|src)="([^"]*)"')
_ID = re.compile(r'\s(?:id|name)="([^"]*)"')
# Sphinx reads its configuration from a Python file; this one holds values only.
CONFIGURATION = {
    "project": "minillm",
    "author": "The minillm authors",
    "copyright": "The minillm authors, Apache License 2.0",
    "extensions": ["myst_nb", "sphinx.ext.githubpages", "minillm.course.site_sphinx"],
    "exclude_patterns": [],
    "nb_execution_mode": "off",  # the page shows the outputs that the notebook holds
    "nb_merge_streams": True,
    "nb_code_prompt_show": "Show the code",
    "nb_code_prompt_hide": "Hide the code",
    "nb_ipywidgets_js": {},
    "myst_enable_extensions": ["dollarmath", "amsmath"],
    "myst_heading_anchors": 4,
    "myst_heading_slug_func": "minillm.course.site_pages.slug",
    "myst_update_mathjax": False,
    "html_math_renderer": "mathml",
    "html_theme": "sphinx_book_theme",
    "html_title": "minillm",
    "html_static_path": ["_static"],
    "html_css_files": ["book.css"],
    "html_js_files": ["book.js"],
    "html_extra_path": ["_extra"],
    "html_copy_source": False,  # the notebooks are in the repository, without the changes made for this site
    "html_show_sourcelink": False,
    "html_last_updated_fmt": "",
    "suppress_warnings": ["misc.highlighting_failure"],  # an excerpt of JSON with dots in it is still worth its colours
}


class Problems(ValueError):
    """The book cannot be built as it is; `lines` says what is wrong, one sentence each."""

    def __init__(self, what: str, lines: list[str]) -> None:
        super().__init__(f"{len(lines)} {what}: " + "; ".join(lines[:5]) + "; ..." * (len(lines) > 5))
        self.lines = lines


@dataclass(frozen=True)
class Site:
    """What was built."""

    folder: Path
    pages: int
    figures: int


def build(to: Path, *, root: Path | None = None, processes: int | None = None) -> Site:
    """Build the site of the book at `root` (this checkout by default) into the folder `to`.

    `to` is new, empty, or a site that was built before; it changes only when the whole build has succeeded.
    processes: how many read and write pages at a time, one for each core by default.
    Raises RuntimeError when the `site` extra is missing, FileExistsError for a folder with other
    files in it, and Problems for links that lead nowhere and for whatever Sphinx complains of.
    """
    require()
    root, to = root or repository_root(), Path(to)
    if to.exists() and not to.is_dir():
        raise FileExistsError(f"--to {to}: is a file; give a folder")
    if to.is_dir() and any(to.iterdir()) and not (to / MARK).is_file():
        raise FileExistsError(f"--to {to}: holds files that are no site of this book; give a new or an empty folder")
    with tempfile.TemporaryDirectory(prefix="minillm-site-") as folder:
        sources, built = Path(folder, "sources"), Path(folder, "built")
        pages = write_sources(sources, root)
        _refuse(pages.broken, "links that lead nowhere")
        _run_sphinx(sources, built, processes or os.cpu_count() or 1)
        _refuse(broken_links(built), "links of the built pages that lead nowhere")
        (built / MARK).write_text("Built by `minillm course site`, which may replace this folder.\n", encoding="utf-8")
        if to.is_dir():
            shutil.rmtree(to)
        shutil.copytree(built, to)
    return Site(to, len(list(to.rglob("*.html"))), len(pages.figures))


def require() -> None:
    """Raises RuntimeError unless the packages of the `site` extra are installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(f"building the site needs {', '.join(missing)}; in the clone, run: pip install -e '.[site]'")


def write_sources(folder: Path, root: Path) -> Pages:
    """Write what Sphinx reads: the configuration, the landing page, and every notebook as a page.

    Needs none of Sphinx's packages. Returns the pages, with the links that lead nowhere in `broken`.
    """
    parts = table_of_contents(root)
    exercises = [f"exercises/{path.name}" for path in notebooks("exercises", root)]
    pages = Pages.of(root, [f"{name}.ipynb" for _, names in parts for name in names] + exercises)
    for name in pages.anchors:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(nbfile.dumps(pages.prepare(name)), encoding="utf-8")
    landing = pages.markdown(opening(root.joinpath("README.md").read_text(encoding="utf-8")), "index.md", "README.md")
    trees = [_toctree(names, part) for part, names in parts]
    trees += [_toctree([EXERCISES.removesuffix(".md")], "Practice")] * bool(exercises)
    (folder / "index.md").write_text("\n\n".join([landing, *trees]) + "\n", encoding="utf-8")
    if exercises:
        names = [name.removeprefix("exercises/").removesuffix(".ipynb") for name in exercises]
        text = (
            "# Exercises\n\nEach chapter has a notebook of exercises. Open it in JupyterLab or on Colab to solve them: "
            "the checks say which element is wrong first. Help is folded, and ends with the solution."
        )
        (folder / EXERCISES).write_text(f"{text}\n\n{_toctree(names, hidden=False)}\n", encoding="utf-8")
    for image in (path for path in root.joinpath("chapters").rglob("*") if path.suffix.lower() in IMAGES):
        copied = folder / image.relative_to(root)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, copied)
    for name, png in pages.figures.items():
        file = folder / "_extra" / FIGURES / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png)
    (folder / "_extra").mkdir(exist_ok=True)
    (folder / "_static").mkdir(exist_ok=True)
    for name, file in ASSETS.items():
        shutil.copy(file, folder / "_static" / name)
    (folder / "conf.py").write_text(configuration(), encoding="utf-8")
    return pages


def table_of_contents(root: Path) -> list[tuple[str, list[str]]]:
    """Each part's name with its chapters in order, as page names: ("Part I · One request", ["chapters/00_start_here"]).

    Raises ValueError for a chapter that no part holds, and where there is no chapter at all.
    """
    found, placed = [], set()
    files = notebooks("chapters", root)
    for part, first, last in PARTS:
        names = [f"chapters/{path.stem}" for path in files if first <= chapter_number(path) <= last]
        placed |= set(names)
        numeral, _, title = part.partition("\n")
        if names:
            found.append((f"Part {numeral} · {title}" if title else part, names))
    left = [path.name for path in files if f"chapters/{path.stem}" not in placed]
    if left:
        raise ValueError(f"no part of the book holds {', '.join(left)}; the parts are in minillm/book/contents.py")
    if not files:
        raise ValueError(f"{root / 'chapters'}: holds no chapter, so there is no book to build")
    return found


def opening(readme: str) -> str:
    """The README from its title to the end of its section "Chapters"."""
    head, heading, rest = readme.partition("\n## Chapters\n")
    return (head + heading + rest.partition("\n## ")[0]).rstrip() + "\n"


def configuration() -> str:
    """The text of Sphinx's conf.py."""
    options = {
        "repository_url": f"https://github.com/{colab.REPOSITORY}",
        "repository_branch": "main",
        "path_to_docs": "",
        "use_repository_button": True,
        "use_download_button": True,  # prints the page, or saves it as a PDF
        "use_fullscreen_button": False,
        "launch_buttons": {"colab_url": "https://colab.research.google.com"},
        "home_page_in_toc": True,
        "show_toc_level": 2,
        "navbar_persistent": [],  # the search field is in the sidebar
        "show_navbar_depth": 1,
        "pygments_light_style": "a11y-high-contrast-light",
        "pygments_dark_style": "a11y-high-contrast-dark",
    }
    values = {**CONFIGURATION, "html_theme_options": options}
    head = '"""Written by `minillm course site`: change minillm/course/site.py instead."""\n\n'
    return head + "".join(f"{name} = {value!r}\n" for name, value in values.items())


def broken_links(folder: Path) -> list[str]:
    """One sentence for each link or image of the built pages that leads to no file, or to no element, of the site."""
    texts = {
        path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.html")) if "_static" not in path.parts
    }
    ids = {path.resolve(): set(_ID.findall(text)) for path, text in texts.items()}
    found = []
    for page, text in texts.items():
        for target in sorted(set(_TARGET.findall(text))):
            if re.match(r"[a-z][a-z0-9+.-]*:|//", target, re.IGNORECASE) or target in ("", "#"):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / unquote(path.partition("?")[0])).resolve() if path else page.resolve()
            where = f"{page.relative_to(folder).as_posix()}: {target}"
            if not file.exists():
                found.append(f"{where} leads to no file")
            elif anchor and file in ids and unquote(anchor) not in ids[file]:
                found.append(f"{where} leads to no element of that page")
    return found


def _toctree(names: list[str], caption: str = "", hidden: bool = True) -> str:
    head = [f":caption: {caption}"] * bool(caption) + [":hidden:"] * hidden + [":maxdepth: 1"]
    return "\n".join(["```{toctree}", *head, "", *names, "```"])


def _run_sphinx(sources: Path, built: Path, processes: int) -> None:
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace, patch_docutils

    warnings = io.StringIO()
    with patch_docutils(str(sources)), docutils_namespace():
        app = Sphinx(
            str(sources),
            str(sources),
            str(built),
            str(sources.parent / "doctrees"),
            "html",
            status=None,
            warning=warnings,
            freshenv=True,
            parallel=processes,
        )
        app.build()
    said = re.sub(r"\x1b\[[0-9;]*m", "", warnings.getvalue())
    _refuse(
        [line.replace(f"{sources}{os.sep}", "") for line in said.splitlines() if line.strip()], "complaints of Sphinx"
    )


def _refuse(lines: list[str], what: str) -> None:
    if lines:
        raise Problems(what, lines)
