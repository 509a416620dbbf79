"""Feedback: a page for each submission that its student understands, from the grades in `grades/`.

Each exercise has its points, what the failing line said, and the next step. Flags are for the lecturer's eyes: they
stand in `grades/` and in the overview, never on a student's page.
"""

from __future__ import annotations

import datetime as dt
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import jinja2

from minillm.course import gradebook, marking, marks, roster as rosters
from minillm.course.arrivals import is_from_lms
from minillm.course.gradebook import ExerciseGrade, Grade
from minillm.course.settings import Course

FOLDER = "reports"
PARTS = {
    "example": "the example",
    "edges": "the edge cases",
    "random": "the random trials",
    "answer": "the answer",
    marks.BY_HAND: "read by a person",
}
_NEXT = {
    "example": "Work the example of the statement by hand and compare each step with what your code does.",
    "edges": "The example passes. Read the statement's bullet points again: one of them is about this case.",
    "random": "Example and edge cases pass. Run this line in your notebook: it names the first value that differs.",
}

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }} · {{ who }}</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; }
h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
.points { float: right; font-variant-numeric: tabular-nums; }
.note { border-left: 4px solid #b36b00; padding: .3rem .8rem; margin: 1rem 0; }
ul { list-style: none; padding-left: 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #8888; border-radius: 4px;
  padding: .6rem .8rem; }
.next { font-weight: 600; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>{{ who }}{% if submitted %} · submitted {{ submitted }}{% endif %}</p>
{% if grade.late %}<p class="note">This submission came after the due date, {{ due }}.</p>{% endif %}
{% if grade.status == "blocked" %}
<p class="note">Not graded yet: {{ sentence(grade.reason) }} This is not a zero; it will be graded
on another machine.</p>
{% elif grade.status == "failed" %}
<p class="note">This file could not be graded. {{ sentence(grade.reason) }}{% if not course_is_exam %} Hand in the
notebook that you work in, whose name ends in <code>.ipynb</code>: in Colab <em>File, Download, Download .ipynb</em>,
in JupyterLab <em>File, Download</em>.{% endif %}</p>
{% endif %}
{% if grade.exercises %}
<p><strong>{{ number(grade.points) }} of {{ number(grade.max_points) }} points</strong>
{%- if bonus %}, with {{ number(bonus) }} of them bonus{% endif %}. {{ opening }}</p>
{% endif %}
{% for exercise in exercises %}
<section>
<h2>{{ exercise.title }} <span class="points">{{ number(exercise.points) }} of {{ number(exercise.max_points) }}
{%- if exercise.bonus %} bonus{% endif %}</span></h2>
<ul>
{% for part, message in shown(exercise) %}
<li>{{ mark(part) }}: {{ number(part.points) }} of {{ number(part.max_points) }}
{%- if message %}
<pre>{{ message }}</pre>{% endif %}</li>
{% endfor %}
</ul>
{% if exercise.correction %}<p class="note">{{ sentence(exercise.correction) }}</p>{% endif %}
{% if next_step(exercise) %}<p class="next">Next: {{ next_step(exercise) }}</p>{% endif %}
</section>
{% endfor %}
{% if not course_is_exam %}
<p><a href="{{ notebook }}">The exercises on Colab</a>. In your own copy,
<code>from minillm.book.checks import last_call; last_call().args</code> are the arguments of the call that failed.</p>
{% endif %}
</body>
</html>
"""

_OVERVIEW = """\
<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Overview</title>
<style>body { font: 15px/1.4 system-ui, sans-serif; margin: 2rem; } td, th { padding: .2rem .7rem; text-align: left; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } tr:nth-child(even) { background: #8882; }</style></head>
<body>
<h1>Overview</h1>
<table>
<tr><th>student</th><th>chapter</th><th>points</th><th>of</th><th>status</th><th>for you to look at</th></tr>
{% for grade in grades %}
<tr><td><a href="{{ link(grade) | urlencode }}">{{ grade.student }}</a></td><td>{{ grade.notebook }}</td>
<td class="n">{{ number(grade.points) }}</td><td class="n">{{ number(grade.max_points) }}</td>
<td>{{ grade.status }}{% if grade.late %}, late{% endif %}{% if grade.reason %}: {{ grade.reason }}{% endif %}</td>
<td>{% for flag in grade.flags %}{% if flag.refused and grade.is_withheld %}
<strong>points withheld</strong>, {% endif %}line {{ flag.line }} of cell {{ flag.cell + 1 }}: {{ flag.reason }}
<code>{{ flag.code }}</code><br>{% endfor %}
{% if waits(grade) %}to mark: {{ waits(grade) | join(", ", attribute="id") }}<br>{% endif %}
{% for exercise in grade.exercises if exercise.correction %}
{{ exercise.id }}: {{ exercise.correction }}<br>{% endfor %}</td></tr>
{% endfor %}
</table>
</body>
</html>
"""


def number(points: float) -> str:
    """Points as a student reads them: at most two decimals, none where they are whole."""
    return f"{points:.2f}".rstrip("0").rstrip(".")


def page(grade: Grade, course: Course, who: str) -> str:
    """The page of one submission. who: the student's name."""
    assignment = course.assignment(grade.notebook)
    return (
        _environment()
        .from_string(_PAGE)
        .render(
            title=f"{assignment.name} · {assignment.title}",
            who=who,
            grade=grade,
            due=course.shown(assignment.due),
            submitted=course.shown(dt.datetime.fromisoformat(grade.submitted)) if grade.submitted else "",
            course_is_exam=assignment.is_exam,
            exercises=[] if grade.status == "failed" and not _is_corrected(grade) else grade.exercises,
            bonus=sum(exercise.points for exercise in grade.exercises if exercise.bonus),
            opening=_opening(grade),
            mark=_mark,
            next_step=next_step,
            shown=_shown,
            sentence=_sentence,
            notebook=course.on_colab(assignment),
        )
    )


def next_step(exercise: ExerciseGrade) -> str:
    """What to do next about an exercise, one sentence; empty where all of it passed."""
    failed = [part.part for part in exercise.parts if not part.passed]
    if exercise.correction or not _NEXT.keys() >= {*failed}:
        return ""  # a person has looked at it, or will
    if not failed:
        withheld = any(part.points < part.max_points for part in exercise.parts)
        return "Nothing yet: your lecturer looks at this answer before its points count." if withheld else ""
    if any(part.message.startswith("not begun") for part in exercise.parts if not part.passed):
        return f"This one is not begun. The statement gives it {exercise.minutes} minutes; open its nudge first."
    return _NEXT[failed[0]]


def write(course: Course, notebook: str | None = None) -> list[Path]:
    """Write the page of each graded submission, `reports/STUDENT/NN.html`, and `reports/overview.html` for the
    lecturer; returns the students' pages. Raises ValueError where nothing has been graded."""
    everything = marks.current(course)
    grades = [grade for grade in everything if notebook in (None, grade.notebook)]
    if not grades:
        raise ValueError(f"no grades in {course.folder / 'grades'}: run `minillm course grade` first")
    roster, pages = rosters.load(course.folder), []
    for grade in grades:
        student = roster.students.get(grade.student) if roster else None
        path = course.folder / _link(grade, FOLDER)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(grade, course, student.name if student else grade.student), encoding="utf-8")
        pages.append(path)
    overview = _environment().from_string(_OVERVIEW).render(grades=everything, link=_link, waits=marks.waits)
    (course.folder / FOLDER / "overview.html").write_text(overview, encoding="utf-8")
    return pages


def to_mark(course: Course) -> list[Path]:
    """Lists of what a person has still to read of exams, beside a page with the answers (see `marking`)."""
    return marking.write(course, marks.current(course), course.folder / FOLDER)


def pack(course: Course, notebook: str, pages: Iterable[Path], to: Path) -> list[str]:
    """A zip of the pages of one assignment under the names that Canvas's "Upload submissions" and Moodle's "Upload
    multiple feedback files in a zip" know; returns the students whose submission did not come from either."""
    without = []
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in pages:
            student = path.parent.name
            receipt = gradebook.receipt_of(course.folder, student, notebook)
            if receipt is None or not is_from_lms(receipt.path):
                without.append(student)
                continue
            came = PurePosixPath(receipt.path)
            # Moodle knows the student's folder, Canvas the ids in front of the file's own name.
            name = came.parent / "feedback.html" if len(came.parts) > 1 else came.with_suffix(".html")
            archive.write(path, name.as_posix())
    return without


def _mark(part: gradebook.Part) -> str:
    """Whether a part passed; what a person reads does neither pass nor fail."""
    name = PARTS.get(part.part, part.part)
    if part.part == marks.BY_HAND:
        return name
    return f"✓ {name} passed" if part.passed else f"✗ {name} failed"


def _is_corrected(grade: Grade) -> bool:
    return any(exercise.correction for exercise in grade.exercises)


def _shown(exercise: ExerciseGrade) -> list[tuple[gradebook.Part, str]]:
    """Each part with its message; a message that several lines have stands once."""
    found, seen = [], set()
    for part in exercise.parts:
        is_whole = part.passed and part.points == part.max_points
        message = "" if is_whole or part.message in seen else part.message
        seen.add(message)
        found.append((part, message))
    return found


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _opening(grade: Grade) -> str:
    """What to look at first."""
    for exercise in grade.exercises:
        if not exercise.bonus and next_step(exercise):
            return f"Begin with “{exercise.title}”."
    passes = all(e.points == e.max_points or e.bonus or e.correction for e in grade.exercises)
    return "Everything that counts passes." if grade.exercises and passes else ""


def _link(grade: Grade, folder: str = "") -> str:
    return str(PurePosixPath(folder) / grade.student / f"{grade.notebook}.html")


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.globals["number"] = number
    return environment
