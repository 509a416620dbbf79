"""The guided reading: every name that it cites is in the stored index, and the index is what a checkout gives."""

from __future__ import annotations

import json
import re
import sys
from itertools import pairwise

import pytest

from minillm.book import nbfile
from minillm.book.paths import notebooks
from minillm.book.reading import guide, index, own, scheduler, show
from minillm.book.reading.names import code_lines, names_of
from minillm.book.reading.pointers import links

PROJECTS = list(index.REPOSITORIES)


@pytest.mark.parametrize("project", PROJECTS)
def test_every_reference_of_the_guide_is_in_the_index(project):
    stored = index.load(project)
    assert re.fullmatch(index.COMMIT, stored.commit)
    lost = []
    for reference in guide.cited(project):
        try:
            first, last = stored.find(reference)
            assert 1 <= first <= last <= stored.files[reference.partition("::")[0]]["lines"]
        except LookupError as error:
            lost.append(str(error))
    assert lost == []


def test_every_reference_to_this_package_is_there():
    for reference in guide.ours():
        assert own.num_code_lines(reference) > 0, reference


def test_every_chapter_from_01_has_a_row():
    assert {row.chapter for row in guide.ROWS} == set(range(1, 26))


@pytest.mark.parametrize("project", PROJECTS)
def test_links_of_all_chapters_at_the_indexed_commit_lead_to_a_file_and_its_lines(project):
    stored, broken = index.load(project), []
    pattern = re.compile(
        rf"{re.escape(stored.repository)}/blob/{re.escape(stored.commit)}/([^)\s\"#]+)(?:#L(\d+)(?:-L(\d+))?)?"
    )
    for path in notebooks("chapters"):
        for file, first, last in pattern.findall(
            path.read_text(encoding="utf-8").replace("\\n", "\n").replace('\\"', '"')
        ):
            lines = stored.files.get(file, {"lines": 0})["lines"]
            if file not in stored.files or int(last or first or 1) > lines:
                broken.append(f"{path.name}: {file}#L{first}-L{last}")
    assert broken == []


def test_a_name_that_is_not_there_is_refused_with_what_comes_near():
    stored = index.load("vllm")
    with pytest.raises(LookupError, match=r"has no Scheduler\.preempt_request; near it: .*Scheduler\._preempt_request"):
        stored.find(f"{scheduler.FILE}::Scheduler.preempt_request")
    with pytest.raises(LookupError, match=r"no file vllm/v1/core/sched/schedule\.py in the index; near it: "):
        stored.find("vllm/v1/core/sched/schedule.py::Scheduler")
    with pytest.raises(ValueError, match="project='tgi' is unknown; choose one of vllm, sglang"):
        index.load("tgi")


def test_names_that_the_prose_of_chapter_25_quotes_are_known():
    """CamelCase names and names with an underscore in backticks: indexed, of the package, or in the chapter's code."""
    chapter = nbfile.read(next(path for path in notebooks("chapters") if path.name.startswith("25")))
    known = {part for project in PROJECTS for file in index.load(project).files.values()
             for name in file["names"] for part in name.split(".")}  # fmt: skip
    code = "\n".join(cell.source for cell in chapter.cells if cell.cell_type == "code")
    listed = json.dumps([cell.get("outputs", []) for cell in chapter.cells])
    lost = []
    for cell in chapter.cells:
        if cell.cell_type == "markdown":
            for quoted in re.findall(r"`([A-Za-z_][\w.]*)`", cell.source):
                names = [name for name in quoted.split(".") if "_" in name or re.search(r"[a-z][A-Z]", name)]
                lost += [name for name in names if name not in known | ALL_OUR_NAMES and name not in code + listed]
    assert lost == []


ALL_OUR_NAMES = {part for folder in ("engine", "kv_cache", "model") for path in (own.PACKAGE / folder).glob("*.py")
                 for name in names_of(path.read_text(encoding="utf-8")) for part in name.split(".")}  # fmt: skip


SOURCE = '''"""A module.

With two paragraphs."""
import sys
from itertools import pairwise

LIMIT: int = 3

if sys.platform == "linux":
    def only_here(): pass
else:
    try:
        LATE = 1
    except ImportError:
        def never(): pass


class Outer(object):
    """Doc."""

    kind = "outer"

    def __init__(self):
        # a comment
        self.size = 1
        self.free: int = (
            self.size
        )

    @property
    def half(self):
        return 1

    @half.setter
    def half(self, value):
        pass

    class Inner:
        async def run(self): ...
'''


def test_names_of_a_file():
    names = names_of(SOURCE)
    top = {"LIMIT", "only_here", "LATE", "never", "Outer"}
    inner = {f"Outer.{name}" for name in ("kind", "size", "free", "half", "Inner", "Inner.run")}
    assert top | inner <= set(names)
    lines = SOURCE.splitlines()
    assert lines[names["Outer.half"][0] - 1].strip() == "def half(self):"
    assert lines[names["Outer.half"][1] - 1].strip() == "pass", "the setter belongs to the property"
    assert names["Outer.free"] == (names["Outer.free"][0], names["Outer.free"][0] + 2)


def test_lines_of_code_leave_out_comments_docstrings_and_empty_lines():
    lines = SOURCE.splitlines()
    counted = set(code_lines(SOURCE))
    for number, line in enumerate(lines, start=1):
        quiet = not line.strip() or line.strip().startswith("#") or number <= 3 or line.strip() == '"""Doc."""'
        assert (number in counted) == (not quiet), line


def test_an_index_is_made_from_a_checkout(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "a checkout"
    folder.mkdir()
    (folder / "modül.py").write_text(SOURCE, encoding="utf-8")
    made = index.make(folder, "you/yours", "1.0", "c" * 40, ["modül.py", "modül.py"], ["modül.py"])
    again = index.Index(**json.loads(index.dumps(made)))
    assert again.find("modül.py::Outer.Inner.run") == made.find("modül.py::Outer.Inner.run")
    assert again.num_code_lines("modül.py") == len(code_lines(SOURCE))
    first, last = made.find("modül.py::Outer")
    assert again.url("modül.py::Outer") == f"https://github.com/you/yours/blob/{'c' * 40}/modül.py#L{first}-L{last}"
    with pytest.raises(LookupError, match=r"does not say which lines of modül\.py hold code"):
        index.make(folder, "you/yours", "1.0", "c" * 40, ["modül.py"]).num_code_lines("modül.py")
    with pytest.raises(FileNotFoundError):
        index.make(folder, "you/yours", "1.0", "c" * 40, ["other.py"])
    monkeypatch.setattr(sys, "argv", ["index", str(folder), "vllm", "--commit", "main"])
    with pytest.raises(SystemExit):
        index.main()
    assert "or the tag of a release" in capsys.readouterr().err


def test_the_reading_of_the_scheduler_covers_the_method_without_a_gap():
    parts = scheduler.stretches()
    stored = index.load("vllm")
    assert (parts[0].first, parts[-1].last) == stored.find(scheduler.METHOD)
    assert all(right.first == left.last + 1 for left, right in pairwise(parts))
    assert sum(part.code for part in parts) == stored.num_code_lines(scheduler.METHOD)
    assert set(scheduler.lines_by_chapter()) <= {0, *range(5, 26)}


def test_pointers_find_links_in_the_text(tmp_path):
    import nbformat

    folder = tmp_path / "chapters"
    folder.mkdir()
    text = " and ".join(
        f"[a](https://github.com/{repository}/blob/{letter * 40}/{file})"
        for repository, letter, file in (("vllm-project/vllm", "a", "vllm/x.py#L3"), ("o/r", "b", "y"))
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)])
    for name in ("07_a.ipynb", "25_b.ipynb"):
        nbfile.write(notebook, folder / name)
    assert list(links("vllm-project/vllm", tmp_path)) == [(7, "vllm/x.py", "a" * 40)]


def test_tables_and_figures_of_the_guide():
    html = show.guide(5, 6)
    assert "Scheduler.<wbr>schedule" in html.html and html.text.startswith("05 ")
    assert "#L" in html.html and "<script" not in html.html
    with pytest.raises(ValueError, match="chapters 90 to 99 have no row"):
        show.guide(90, 99)
    assert "EngineCore.step" in show.rooms().alt
