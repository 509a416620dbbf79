"""The book as a static site: what Sphinx is given, and a small site that is built with it."""

from __future__ import annotations

import base64
import importlib.util
import re
from pathlib import Path

import nbformat
import pytest
from typer.testing import CliRunner

from minillm.book import colab, nbfile
from minillm.book.contents import PARTS
from minillm.book.paths import notebooks
from minillm.cli import app
from minillm.course import site, site_pages

needs_sphinx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in site.NEEDED),
    reason="needs Sphinx, myst-nb and sphinx-book-theme: pip install -e '.[site]'",
)
pytestmark = pytest.mark.filterwarnings("ignore:'(sphinx_book_theme|myst_parser)")  # what they call in Sphinx
PNG = base64.b64encode(
    base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
).decode()
README = """# small

A [chapter](chapters/01_first.ipynb), its [engine](minillm/engine.py), the [exercises](exercises).

## Chapters

| chapter |
|---|
| [01 First](chapters/01_first.ipynb) |

## Measured

Not on the landing page.
"""


def code(source, *outputs, **metadata):
    return nbformat.v4.new_code_cell(source, outputs=list(outputs), metadata=metadata)


def shown(data, **metadata):
    return nbformat.v4.new_output("display_data", data=data, metadata=metadata)


FORMULAS = r"""## Formulas

$\lfloor p / \text{block\_size} \rfloor$ and

$$o = \sum_b \operatorname{softmax}(s)_b\, V_b$$

`[not](a_link.md)`

```python
kernel[grid](x, out)
```

<details><summary>A nudge</summary>

Look *twice*.
</details>"""
OPENING = f"""# 01 · First

{colab.badge("chapters/01_first.ipynb")}

See [the second](02_second.ipynb#Keys-and-values) and [its exercises](../exercises/01_first.ipynb). **Blocks** and a
second **block** lie in a pool."""
LINKED = '<table style="background:#fff"><tr><td><a href="02_second.ipynb#Keys-and-values">02</a></td></tr></table>'
FIRST = [
    OPENING,
    code("set_up()", jupyter={"source_hidden": True}),
    FORMULAS,
    code("draw()", shown({"image/png": PNG}, **{"image/png": {"alt": 'A "line" & a dot', "width": 70}})),
    code("table()", shown({"text/html": LINKED}), shown({"text/html": '<p style="background:#0072B2">a token</p>'})),
]
SECOND = [
    "# 02 · Second\n\nBack to [the first](01_first.ipynb) or [down](#Keys-and-values).",
    "## Keys and values\n\nHere.",
]
GLOSSARY = ["# 91 · Glossary", code("show_glossary()", shown({"text/html": "<table></table>"}))]


def write(path: Path, cells) -> None:
    cells = [nbformat.v4.new_markdown_cell(cell) if isinstance(cell, str) else cell for cell in cells]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nbfile.dumps(nbformat.v4.new_notebook(cells=cells)), encoding="utf-8")


@pytest.fixture(scope="module")
def small_book(tmp_path_factory) -> Path:
    """A book of two chapters, a glossary and a notebook of exercises, in a folder with a space and an umlaut."""
    root = tmp_path_factory.mktemp("small") / "mein Bücherregal"
    for name, cells in (("01_first", FIRST), ("02_second", SECOND), ("91_glossary", GLOSSARY)):
        write(root / "chapters" / f"{name}.ipynb", cells)
    write(root / "exercises" / "01_first.ipynb", ["# 01 · First: exercises", code("raise NotImplementedError()")])
    (root / "README.md").write_text(README, encoding="utf-8")
    (root.parent / "secret.md").touch()
    (root / "minillm").mkdir()
    (root / "minillm" / "engine.py").touch()
    return root


@pytest.fixture(scope="module")
def sources(tmp_path_factory, small_book) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    assert site.write_sources(folder, small_book).broken == []
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory, small_book) -> Path:
    folder = tmp_path_factory.mktemp("site") / "new folder"
    made = site.build(folder, root=small_book, processes=1)
    assert made.figures == 1 and made.pages >= 6
    return folder


def page(sources: Path, name: str) -> str:
    cells = nbfile.read(sources / name).cells
    return "\n".join(cell.source + str(cell.get("outputs", "")) for cell in cells)


def test_every_chapter_is_in_the_table_of_contents_once(root):
    parts = site.table_of_contents(root)
    assert [name for _, names in parts for name in names] == [f"chapters/{p.stem}" for p in notebooks("chapters", root)]
    assert parts[0][0] == "Part I · One request" and parts[-1][0] == "Appendix"


def test_a_chapter_that_no_part_holds_is_named(tmp_path):
    assert not any(first <= 60 <= last for _, first, last in PARTS)
    write(tmp_path / "chapters" / "60_lost.ipynb", ["# 60 · Lost"])
    with pytest.raises(ValueError, match=r"no part of the book holds 60_lost\.ipynb"):
        site.table_of_contents(tmp_path)
    with pytest.raises(ValueError, match="holds no chapter"):
        site.table_of_contents(tmp_path / "empty")


def test_the_whole_book_has_no_link_that_leads_nowhere(root, tmp_path):
    pages = site.write_sources(tmp_path, root)
    assert pages.broken == []
    index, exercises = (tmp_path / "index.md").read_text(), (tmp_path / "exercises" / "index.md").read_text()
    for path in notebooks("chapters", root):
        assert len(re.findall(rf"^chapters/{path.stem}$", index, re.MULTILINE)) == 1
    for path in notebooks("exercises", root):
        assert len(re.findall(rf"^{path.stem}$", exercises, re.MULTILINE)) == 1
    written = "".join(path.read_text() for path in tmp_path.rglob("*.ipynb"))
    assert not re.search(r'<img [^>]*alt=\\"\\"', written), "every figure keeps its alt text"
    assert len(pages.figures) == len(list((tmp_path / "_extra" / site.FIGURES).iterdir())) > 100
    assert "image/png" not in written and (tmp_path / "chapters" / "images" / "map.png").is_file()


def test_the_configuration_runs_nothing_and_knows_the_repository():
    values: dict = {}
    exec(site.configuration(), values)
    assert values["nb_execution_mode"] == "off" and values["html_theme"] == "sphinx_book_theme"
    assert values["html_theme_options"]["repository_url"].endswith(colab.REPOSITORY)
    assert site_pages.slug("Strides and gather") == "Strides-and-gather"
    assert values["myst_heading_slug_func"] == f"{site_pages.__name__}.slug"


def test_the_landing_page_is_the_start_of_the_readme(sources):
    index = (sources / "index.md").read_text()
    assert index.startswith("# small") and "| [01 First]" in index and "Measured" not in index
    assert f"[engine](https://github.com/{colab.REPOSITORY}/blob/main/minillm/engine.py)" in index
    assert "[exercises](exercises/index.md)" in index
    assert ":caption: Part I · One request\n:hidden:\n:maxdepth: 1\n\nchapters/01_first\nchapters/02_second\n" in index


def test_a_page_has_its_figures_as_files_and_its_links_resolved(sources):
    text = page(sources, "chapters/01_first.ipynb")
    (figure,) = (sources / "_extra" / site.FIGURES).iterdir()
    assert f'src="../{site.FIGURES}/{figure.name}" alt="A &quot;line&quot; &amp; a dot" width="70"' in text
    assert figure.read_bytes() == base64.b64decode(PNG)
    assert 'class="book-output book-plain"><table' in text and 'class="book-output"><p' in text
    assert 'href="02_second.html#keys-and-values"' in text
    assert "[Open in Colab](https://colab" in text and "badge.svg" not in text
    assert "`[not](a_link.md)`" in text and "kernel[grid](x, out)" in text
    assert "**{term}`Blocks <block>`** and a\nsecond **block** lie" in text, "a term is a reference once"
    cells = nbfile.read(sources / "chapters" / "01_first.ipynb").cells
    assert cells[1].metadata.tags == ["hide-input"]


def test_the_glossary_is_a_list_of_definitions(sources):
    text = page(sources, "chapters/91_glossary.ipynb")
    assert "```{glossary}\n" in text and "<table>" not in text
    assert "\ntop-k\n  Keeps the k most probable tokens.\n" in text
    assert "[chapter 01](01_first.ipynb)" in text and "\n  chapter 05" in text, "chapter 05 is no page of this book"
    assert r"bytes \* 2" in site_pages._plain_text("bytes * 2") and site_pages._plain_text("`a_b`") == "`a_b`"


@pytest.mark.parametrize(
    "target, complaint",
    [
        ("03_third.ipynb", "leads to chapters/03_third.ipynb, which does not exist in this repository"),
        ("02_second.ipynb#Values", "leads to chapters/02_second.ipynb, which has no heading 'Values'"),
        ("#Nowhere", "which has no heading 'Nowhere'"),
        ("../../secret.md", "leads to ../secret.md, which does not exist in this repository"),
        ("images/none.png", "which does not exist in this repository"),
    ],
)
def test_a_link_that_leads_nowhere_is_named_with_its_cell(small_book, target, complaint):
    pages = site_pages.Pages.of(small_book, ["chapters/01_first.ipynb", "chapters/02_second.ipynb"])
    assert pages.link(target, "chapters/01_first.ipynb", "chapters/01_first.ipynb cell 4") == target
    (found,) = pages.broken
    assert found.startswith(f"chapters/01_first.ipynb cell 4: {target} ") and found.endswith(complaint)


@pytest.mark.parametrize(
    "text, plain",
    [
        ("<table><tr><td>1</td></tr></table>", True),
        ('<p style="background:#fff;color:#0072B2">', True),
        ('<p style="background:#f8f9fa"><b style="background:transparent">', True),
        ('<p style="background:#fbf3f7">', True),
        ('<p style="background:#56B4E9">', False),
        ('<p style="background:linear-gradient(90deg,#fff,#000)">', False),
        ('<p style="background-color:#fa0">', False),
    ],
)
def test_only_outputs_on_white_and_grey_are_inverted_in_dark_mode(text, plain):
    assert site_pages.is_plain(text) is plain


def test_links_of_built_pages_are_looked_up(tmp_path):
    (tmp_path / "a b.html").write_text('<a href="c.html#x">1</a><a id="top" href="#top">2</a><img src="d.png?v=1">')
    (tmp_path / "c.html").write_text(
        '<h1 id="y">y</h1><a href="a%20b.html#top">3</a><a href="https://x.org/z.html">4</a>'
    )
    assert site.broken_links(tmp_path) == [
        "a b.html: c.html#x leads to no element of that page",
        "a b.html: d.png?v=1 leads to no file",
    ]


def test_a_missing_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(site, "NEEDED", ("nbformat", "no_such_package"))
    done = CliRunner().invoke(app, ["course", "site", "--to", str(tmp_path / "x")])
    assert done.exit_code == 1 and not (tmp_path / "x").exists()
    assert "building the site needs no_such_package; in the clone, run: pip install -e '.[site]'" in done.output


def test_a_folder_with_other_files_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(site, "NEEDED", ())
    (tmp_path / "thesis.txt").write_text("two years")
    with pytest.raises(FileExistsError, match="holds files that are no site of this book"):
        site.build(tmp_path)
    with pytest.raises(FileExistsError, match="is a file"):
        site.build(tmp_path / "thesis.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_command_prints_every_problem(monkeypatch, tmp_path):
    monkeypatch.setattr(site, "NEEDED", ())
    monkeypatch.setattr(
        site, "build", lambda to: site._refuse([f"page {i}: wrong" for i in range(9)], "links that lead nowhere")
    )
    done = CliRunner().invoke(app, ["course", "site", "--to", str(tmp_path)])
    assert done.exit_code == 1 and done.output.splitlines() == [f"page {i}: wrong" for i in range(9)]


@needs_sphinx
def test_a_built_page_has_outputs_formulas_and_links(built):
    text = (built / "chapters" / "01_first.html").read_text(encoding="utf-8")
    assert 'href="02_second.html#keys-and-values"' in text and 'href="../exercises/01_first.html"' in text
    assert text.count("<math") == 2 and "⌊" in text, "formulas are MathML"
    assert 'alt="A &quot;line&quot; &amp; a dot"' in text and "<summary>A nudge</summary>" in text
    assert re.search(r'<a[^>]*href="91_glossary\.html#term-block"', text), "a term leads to the glossary"
    assert not re.search(r'<(?:script|link)[^>]*(?:src|href)="(?:https?:)?//', text.replace('rel="canonical"', "")), (
        "a page needs nothing of another host"
    )


@needs_sphinx
def test_a_built_site_has_search_and_a_dark_mode(built):
    index = (built / "searchindex.js").read_text(encoding="utf-8")
    assert "chapters/02_second" in index and "keys" in index.lower() and "chunked prefill" in index
    assert (built / "search.html").is_file() and (built / ".nojekyll").is_file()
    text = (built / "index.html").read_text(encoding="utf-8")
    assert "theme-switch" in text and "book.css" in text and "book.js" in text
    style = (built / "_static" / "book.css").read_text(encoding="utf-8")
    assert 'html[data-theme="dark"] .book-output' in style and "@media print" in style
    assert "Part I · One request" in text and "chapters/02_second.html" in text


@needs_sphinx
def test_a_build_that_fails_leaves_the_old_site(built, small_book, tmp_path):
    before = (built / "index.html").read_bytes()
    write(tmp_path / "chapters" / "01_first.ipynb", ["# 01 · First\n\n{no-such-role}`x` and $\\nosuchcommand{x}$"])
    (tmp_path / "README.md").write_text("# small\n\n## Chapters\n", encoding="utf-8")
    with pytest.raises(site.Problems) as caught:
        site.build(built, root=tmp_path, processes=1)
    said = "\n".join(caught.value.lines)
    assert "no-such-role" in said and "nosuchcommand" in said and str(tmp_path.parent) not in said
    assert (built / "index.html").read_bytes() == before
