"""A book of two small chapters, a course made from it, and what its students hand in."""

from __future__ import annotations

import copy
import datetime as dt
import json
from pathlib import Path

from minillm.book import colab, nbfile, workload
from minillm.course import releases, settings, setup
from minillm.course.settings import Course
from tests.conftest import sample_solution_notebook
from tests.helpers.submitted import with_answers

HELP = """\
<details><summary>A nudge</summary>

Sort.
</details>
<details><summary>What must hold</summary>

It is free.
</details>
<details><summary>In words</summary>

Sort, and take one end.
</details>
<details><summary>I see "no free id"</summary>

The list is empty.
</details>"""
ROSTER = """\
id,last_name,first_name,email,lms_user_id
jdoe,Doe,Jane,jdoe@uni.example,101
mueller,Müller-Lüdenscheidt,Käthe,k.mueller@uni.example,102
lee,Lee,Sam,lee@uni.example,103
"""


def solution(number: int) -> nbfile.nbformat.NotebookNode:
    """Chapter `number`: `lowest`, a warm-up, and `highest`, a stretch; in chapter 7 `smallest` and `largest`."""
    nb = sample_solution_notebook()
    nb.cells[0].source = f"# {number:02d} · Sample\n\n{colab.badge(f'solutions/{number:02d}_sample.ipynb')}"
    imports, second = nb.cells[2], copy.deepcopy(nb.cells[3:9])
    imports.source += "\n\n" + _high(imports.source.partition("\n\n")[2])
    for cell in second:
        cell.source = _high(cell.source)
        cell.metadata.nbgrader.grade_id = _high(cell.metadata.nbgrader.grade_id)
    second[0].source = "## 2 · Highest free id  ·  stretch, 60 minutes\n\nWrite `highest(free)`."
    nb.cells[4].source, second[1].source = HELP, HELP
    nb.cells[9:9] = second
    for cell in nb.cells if number == 7 else ():
        for old, new in (("lowest", "smallest"), ("highest", "largest")):
            cell.source = cell.source.replace(old, new)
            if "nbgrader" in cell.metadata:
                cell.metadata.nbgrader.grade_id = cell.metadata.nbgrader.grade_id.replace(old, new)
    workload.stamp(nb)
    return nbfile.normalise(nb)


def _high(source: str) -> str:
    return (
        source.replace("lowest", "highest")
        .replace("min(free)", "max(free)")
        .replace("[0]", "[-1]")
        .replace("case.call([3, 1, 2]), 1", "case.call([3, 1, 2]), 3")
    )


def make_book(root: Path) -> Path:
    """Chapters 06 and 07 under `root`."""
    for number, minutes, needs in ((6, 90, "05"), (7, 30, "06")):
        book = {"objectives": ["find a free id"], "needs": [needs], "minutes": minutes}
        title = nbfile.nbformat.v4.new_markdown_cell(f"# {number:02d} · Sample {number}")
        chapter = nbfile.nbformat.v4.new_notebook(cells=[title], metadata={"book": book})
        for kind, nb in (("chapters", chapter), ("solutions", solution(number))):
            (root / kind).mkdir(parents=True, exist_ok=True)
            nbfile.write(nbfile.normalise(nb), root / kind / f"{number:02d}_sample.ipynb")
    return root


def make_course(folder: Path, root: Path, *, release: bool = True, **options) -> Course:
    """A course over the small book, from Monday 2 February 2026, with three students; released with nbgrader."""
    options = {"chapters": "06-07", "weeks": 3, "start": dt.date(2026, 2, 2), **options}
    course = setup.init(folder, root=root, **options)
    (course.folder / "students.csv").write_text(ROSTER, encoding="utf-8")
    course = settings.load(folder)
    if release:
        releases.release(course, course.chosen(None))
    return course


def released(course: Course, name: str = "06") -> nbfile.nbformat.NotebookNode:
    return nbfile.read(course.notebook_in("release", course.assignments[name]))


def solved(course: Course, name: str = "06") -> nbfile.nbformat.NotebookNode:
    return with_answers(released(course, name), solution(int(name)))


def as_bytes(nb) -> bytes:
    """A notebook as a file, whatever an editor made of it."""
    return json.dumps(nb, ensure_ascii=False).encode()


def cell(nb, grade_id: str):
    return next(c for c in nb.cells if c.metadata.get("nbgrader", {}).get("grade_id") == grade_id)
