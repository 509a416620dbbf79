"""An exam on paper, and its key: pages that print, complete in one file, without a script and without the network."""

from __future__ import annotations

import html
import math
import re
from itertools import groupby
from typing import TYPE_CHECKING

from minillm.course.exam_notebooks import answer_of
from minillm.course.questions import Question
from minillm.course.questions.question import rows_of, shown

if TYPE_CHECKING:
    from minillm.course.exam import Exam

_MATH = re.compile(r"\$([^$\n]+)\$")
_RAISED = re.compile(r"([\^_])(?:\{([^{}]*)\}|(\w))")
_STYLE = """
body { font: 11.5pt/1.45 Georgia, "Times New Roman", serif; max-width: 46em; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.1em; margin-top: 1.6em; break-after: avoid }
section { break-inside: avoid } table { border-collapse: collapse; margin: .6em 0 }
td, th { border: 1px solid #888; padding: .15em .6em; text-align: right }
td:first-child, th:first-child { text-align: left }
.points { float: right; font-weight: normal } .room { border-bottom: 1px solid #bbb; height: 1.9em }
pre { background: #f4f4f4; padding: .6em; overflow-x: auto; white-space: pre-wrap; font-size: .85em }
.slip { color: #8a1c1c } @page { margin: 18mm }
"""


def paper(exam: Exam, student: str | None = None) -> str:
    """The exam to print, with room for the answers."""
    parts = [f"<p>{exam.minutes} minutes, {exam.points} points.</p><p>Name: {html.escape(student or '_' * 40)}</p>"]
    for number, one in enumerate(exam.questions, 1):
        variant = exam.variant(one, student)
        unit = (
            f"<p>Answer{f' ({html.escape(one.unit)})' if one.unit else ''}: {'_' * 24}</p>"
            if one.kind == "computed"
            else ""
        )
        lines = math.ceil(one.minutes * {"computed": 0.7, "written": 1.4, "code": 1.3}[one.kind])
        stub = f"<pre>{html.escape(variant.stub)}</pre>" if one.kind == "code" else ""
        parts.append(_section(number, one, _html(variant.text) + stub + '<div class="room"></div>' * lines + unit))
    return _page(_title(exam), parts)


def key(exam: Exam, student: str | None = None) -> str:
    """Answers, workings, known mistakes and rubrics, and the points by chapter and objective."""
    whose = f", student {html.escape(student)}" if student else ""
    told = f"Seed {exam.seed}{whose}; {exam.minutes} minutes, {exam.points} points."
    parts = [f"<p><b>For lecturers only.</b> {told}</p>"]
    for number, one in enumerate(exam.questions, 1):
        variant = exam.variant(one, student)
        if one.kind == "code":
            body = f"<p>{_html(variant.text)}</p><pre>{html.escape(variant.solution.strip())}</pre>"
        elif one.kind == "written":
            body = _html(variant.text) + _html(f"**Answer.** {variant.answer}")
        else:
            slips = "".join(
                f'<li class="slip">{shown(value)}: {html.escape(why)}</li>' for why, value in variant.slips.items()
            )
            working = "".join(f"<li>{_html(line, inline=True)}</li>" for line in variant.working)
            body = (
                _html(variant.text)
                + f"<p><b>Answer: {html.escape(answer_of(exam, one, student))}</b>{_tolerance(one)}</p>"
            )
            body += f"<ol>{working}</ol>" + (
                f"<p>Known mistakes, and what to say of them:</p><ul>{slips}</ul>" if slips else ""
            )
        rubric = "".join(f"<li>{points}: {_html(item, inline=True)}</li>" for points, item in one.graded_rubric)
        parts.append(_section(number, one, f"{body}<p>Points for:</p><ul>{rubric}</ul>"))
    parts.append("<h2>Points by chapter and objective</h2>" + _html(_by_objective(exam)))
    return _page(f"Key: {_title(exam)}", parts)


def _title(exam: Exam) -> str:
    chapters = sorted({one.chapter for one in exam.questions})
    span = f"chapter {chapters[0]:02}" if len(chapters) == 1 else f"chapters {chapters[0]:02} to {chapters[-1]:02}"
    return f"{exam.name[0].upper()}{exam.name[1:]}, {span}"


def _by_objective(exam: Exam) -> str:
    named = sorted((one.chapter, exam.objectives.get(one.id, one.objective), one.points) for one in exam.questions)
    rows = []
    for chapter, own in groupby(named, key=lambda row: row[0]):
        own = list(own)
        for objective, same in groupby(own, key=lambda row: row[1]):
            rows.append((f"{chapter:02}", objective, sum(points for *_, points in same)))
        rows.append((f"{chapter:02}", "**together**", f"**{sum(points for *_, points in own)}**"))
    return rows_of(["chapter", "objective", "points"], [*rows, ["all", "", f"**{exam.points}**"]])


def _tolerance(one: Question) -> str:
    return f", to within {100 * one.tolerance:g}%" if one.tolerance else ", exactly"


def _section(number: int, one: Question, body: str) -> str:
    points = f'<span class="points">chapter {one.chapter:02} · {one.points} points</span>'
    return f"<section><h2>{number} · {html.escape(one.title)} {points}</h2>{body}</section>"


def _html(text: str, inline: bool = False) -> str:
    """Markdown as HTML, formulas in italics with raised and lowered parts: none here needs more."""
    from nbconvert.filters import markdown2html

    made = markdown2html(_MATH.sub(lambda found: f"<i>{_raised(found[1])}</i>", text)).strip()
    return re.sub(r"^<p>(.*)</p>$", r"\1", made, flags=re.DOTALL) if inline else made


def _raised(formula: str) -> str:
    tags = {"^": "sup", "_": "sub"}
    plain = html.escape(formula).replace(r"\\", " ")
    return _RAISED.sub(lambda found: f"<{tags[found[1]]}>{found[2] or found[3]}</{tags[found[1]]}>", plain)


def _page(title: str, parts: list[str]) -> str:
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return (
        "<!DOCTYPE html><html "
        f'lang="en"><head>{head}</head><body><h1>{html.escape(title)}</h1>{"".join(parts)}</body></html>\n'
    )
