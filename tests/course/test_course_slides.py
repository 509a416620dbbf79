"""Slides and the key: what the rule chooses of a chapter, and what a browser makes of the decks."""

from __future__ import annotations

import base64
import builtins
import shutil
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from minillm.book import nbfile
from minillm.book.paths import notebooks
from minillm.course import decks, key, slides
from minillm.course.grading import plan

CHAPTERS = [path for path in notebooks("chapters") if path.name < "90"]
PIXEL = base64.b64encode(bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360000000000500010d0a2db40000000049454e44ae426082"
)).decode()  # fmt: skip


def picture(alt: str, source: str = "draw()", tags=()) -> nbformat.NotebookNode:
    data = {"image/png": PIXEL}
    output = new_output("display_data", data=data, metadata={"image/png": {"alt": alt}})
    return new_code_cell(source, outputs=[output], metadata={"tags": list(tags)})


def test_the_rule_on_a_small_chapter():
    book = {"objectives": ["count blocks", "share them"], "minutes": 60}
    nb = new_notebook(metadata={"book": book}, cells=[
        new_markdown_cell("# 99 · A chapter\n\n[![badge](x)](y)\n\nIn the beginning."),
        picture("Map of the engine at chapter 99"),
        new_markdown_cell("## Need: room\n\nThe first [sentence](x.ipynb). The second one."),
        new_code_cell('guess = predict("How many blocks?", 3)'),
        picture("How many blocks? Predicted: 3; counted: 4. So.", "guess.reveal(4)"),
        new_markdown_cell("## Idea: so\n\nLook at this:\n\n### Verify"),
        picture("It holds."),
        new_markdown_cell("## Build: the pool\n\n```python\n# no heading\n```\nText."),
        new_code_cell("x = 1"),
        new_code_cell("def pool():\n    return []"),
        new_code_cell("def more():\n    return []"),
        picture("A pool."),
        picture("Left out.", tags=["no-slide"]),
        new_markdown_cell("## Exercises\n\nIn the notebook: first (10 min); second (20 min)."),
        new_markdown_cell("## Takeaways\n\n1. **One.** Yes.\n2. Two\n   goes on.\n"),
        new_markdown_cell("## Reading\n\n* A paper."),
    ])  # fmt: skip
    deck = slides.slides_of(nb)
    assert [(one.title, bool(one.image)) for one in deck] == [
        ("99 · A chapter", False), ("By the end you can", False), ("You are here", True), ("Need: room", False),
        ("Predict", False), ("Predicted, and found", True), ("Idea: so", True),
        ("Build: the pool", False), ("Build: the pool", True),
        ("Takeaways", False), ("Exercises", False),
    ]  # fmt: skip
    assert "In the beginning" in deck[0].notes and "badge" not in deck[0].notes
    assert deck[3].body.startswith("* The first sentence.")
    assert "How many blocks?" in deck[4].body
    assert "def pool" in deck[7].body and "def more" not in "".join(one.body for one in deck)
    assert deck[9].body == "* **One.** Yes.\n* Two goes on."
    assert "Second (20 min)" in deck[10].body


def test_a_folded_picture_is_unfolded_on_a_slide():
    tag = f'<details><summary>x</summary><img width="9" alt="a &lt; b" src="data:image/png;base64,{PIXEL}"></details>'
    folded = new_code_cell("guess.reveal(4)", outputs=[new_output("display_data", data={"text/html": tag})])
    assert list(slides.figures_of(folded)) == [(PIXEL, "a < b")]


def test_a_tag_adds_a_cell_and_code_that_is_too_long_stays_out():
    nb = new_notebook(cells=[
        new_markdown_cell("# 99 · A chapter"), new_markdown_cell("## Verify\n\nWords."),
        new_markdown_cell("Shown. Because.", metadata={"tags": ["slide"]}),
        new_code_cell("x = 1\ny = 2", metadata={"tags": ["slide"]}),
        new_code_cell("\n".join(f"x = {i}" for i in range(13)), metadata={"tags": ["slide"]}),
    ])  # fmt: skip
    deck = slides.slides_of(nb)
    assert [one.title for one in deck] == ["99 · A chapter", "Verify", "Verify"]
    assert "y = 2" in deck[2].body


@pytest.mark.parametrize("path", CHAPTERS, ids=[path.name[:2] for path in CHAPTERS])
def test_every_chapter_has_a_deck(path):
    nb = nbfile.read(path)
    deck = slides.slides_of(nb)
    figures = [one for one in deck if one.image]
    assert 8 <= len(deck) <= 60 and len(figures) >= 3, f"{len(deck)} slides, {len(figures)} figures"
    assert deck[0].title.startswith(path.name[:2])
    assert all(one.alt for one in figures), "a figure without an alternative text"
    assert deck[1].title == "By the end you can"
    assert any(one.title in ("Takeaways", "You can now") for one in deck)
    codes = [one.body for one in deck if one.body.startswith("```")]
    assert all(len(code.splitlines()) - 2 <= slides.MOST_LINES for code in codes)
    takeaways = [cell for cell in nb.cells if cell.cell_type == "markdown" and "## Takeaways" in cell.source]
    if takeaways:
        shown = "\n".join(one.body for one in deck if one.title == "Takeaways")
        assert shown.count("* ") >= 5, "five takeaways"


def test_missing_chapters_and_a_missing_npm_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"chapters=\[77\]"):
        decks.write(tmp_path, [77], reveal_url="x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="--reveal-url"):
        decks.write(tmp_path, [6])
    with pytest.raises(ValueError, match=r"chapters=\[0\] have no solutions"):
        key.write(tmp_path, [0])


def browser_of(playwright):
    system = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        return playwright.chromium.launch(executable_path=system, args=["--no-sandbox"])
    except Exception as error:
        pytest.skip(f"no browser to turn the pages: {str(error).splitlines()[0]}")


MEASURE = """() => [...document.querySelectorAll('.slides section > section')].map(page => {
    const shown = [...page.querySelectorAll('*')].filter(one => !one.closest('aside, .katex, sup, sub, .anchor-link')
        && [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim()));
    const figure = page.querySelector('img');
    return {
        text: page.innerText.slice(0, 60),
        high: page.scrollHeight - page.clientHeight, wide: page.scrollWidth - page.clientWidth,
        font: Math.min(...shown.map(one => parseFloat(getComputedStyle(one).fontSize))),
        figures: page.querySelectorAll('img').length, broken: figure ? !figure.naturalWidth : false,
        code: Math.max(0, ...[...page.querySelectorAll('pre')].map(one => one.scrollWidth - one.clientWidth)),
    };
})"""


def test_a_browser_turns_the_pages(tmp_path):
    """Every slide fits 1280 x 720 without scrolling, in type of at least 24 pixels, with one figure at most."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    kept = [decks.cached(package) for package in decks.PACKAGES]
    reveal = all(one.is_dir() for one in kept)
    path = next(path for path in CHAPTERS if path.name.startswith("06"))
    deck = slides.slides_of(nbfile.read(path))
    page_file = tmp_path / "deck.html"
    page_file.write_text(
        decks.export(deck, path.stem, *([one.as_uri() for one in kept] if reveal else ())), encoding="utf-8"
    )
    with sync_api.sync_playwright() as playwright:
        browser = browser_of(playwright)
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(page_file.as_uri(), wait_until="load", timeout=120_000)
        if reveal:
            page.wait_for_function("window.Reveal && Reveal.isReady()", timeout=120_000)
            visited = []
            for _ in deck:
                visited.append(page.evaluate("Reveal.getIndices().h"))
                page.evaluate("document.fonts.ready")
                found = page.evaluate("(" + MEASURE + ")().filter((_, i) => i === Reveal.getIndices().h)[0]")
                _check(found)
                page.evaluate("Reveal.next()")
            assert visited == list(range(len(deck)))
        else:
            found = page.evaluate(MEASURE)
            assert len(found) == len(deck)
            for one in found:
                _check(one)
        assert not [url for url in asked if url.startswith("http")], "the deck needs the network"
        browser.close()


def _check(found: dict) -> None:
    assert found["high"] <= 0 and found["wide"] <= 0 and found["code"] <= 0, f"a slide overflows: {found}"
    assert found["font"] >= 24, f"small type: {found}"
    assert found["figures"] <= 1 and not found["broken"], f"figures: {found}"


def test_the_key_runs_a_solution_and_says_what_fails(tmp_path, monkeypatch):
    folder = tmp_path / "lehr stuhl"
    (tmp_path / "solutions").mkdir()
    cells = [new_markdown_cell("# 42 · Solutions"), new_code_cell("print(6 * 7)"), new_code_cell("1 / 0"),
             new_code_cell("secret", metadata={"tags": ["setup"]})]  # fmt: skip
    source = tmp_path / "solutions" / "42_test.ipynb"
    nbfile.write(nbfile.normalise(new_notebook(cells=cells)), source)
    monkeypatch.setattr(key, "notebooks", lambda kind: [source])
    told: list[str] = []
    [page] = key.write(folder, None, told.append)
    text = page.read_text(encoding="utf-8")
    assert "For lecturers only" in text and "42\n" in text and "ZeroDivisionError" in text and "secret" not in text
    failed = "cell 2 raised ZeroDivisionError: division by zero; cell 3 raised NameError: name 'secret' is not defined"
    assert told == [f"42_test.html: {failed}"]
    assert "42_test.html" in (folder / "index.html").read_text(encoding="utf-8")
    assert isinstance(page, Path)


def test_a_deck_without_npm_still_sets_its_formulas(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    [deck] = decks.write(tmp_path, [6], reveal_url="https://cdn.example/reveal.js")
    assert 'src="https://cdn.jsdelivr.net/npm/katex@0.16.22/dist/katex.min.js"' in deck.read_text(encoding="utf-8")


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    """Of a solution: imports, answers and demonstrations; other tests run the graded lines."""
    return [
        cell
        for cell in nbfile.read(path).cells
        if cell.cell_type == "code"
        and not cell.metadata.get("nbgrader", {}).get("grade")
        and "setup" not in cell.metadata.get("tags", [])
    ]


@pytest.mark.parametrize("path", notebooks("solutions"), ids=lambda path: path.name[:2])
def test_a_demonstration_uses_names_that_its_notebook_has(path):
    cells = {cell.source: plan.names_of(cell.source) for cell in code_cells(path)}
    known = set(dir(builtins)).union({"__name__", "display"}, *(names.binds for names in cells.values()))
    missing = {source: names.uses - known for source, names in cells.items() if names.uses - known}
    assert not missing, "names that no cell of the notebook defines"


@pytest.mark.parametrize("chapter", ["06", "16", "17"])
def test_the_demonstrations_run_with_the_answers(chapter, capsys):
    """The quickest three (06 puts a student's KV cache in the engine's place); `minillm course key` runs them all."""
    space = {"__name__": "__main__", "display": print}
    for cell in code_cells(next(path for path in notebooks("solutions") if path.name.startswith(chapter))):
        exec(compile(cell.source, "<cell>", "exec"), space)
    assert capsys.readouterr().out
