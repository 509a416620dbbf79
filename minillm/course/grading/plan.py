"""What of a submission runs, and in which order: the student's cells, and graded lines that come from the lecturer."""

from __future__ import annotations

import ast
import contextlib
import symtable
import tokenize
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import nbformat

from minillm.book import nbfile
from minillm.book.exercises import exercises_in, restore_marks, stub_of

# What parsing a cell may raise; RuntimeError: IPython, of a cell with hundreds of magics.
UNREADABLE = (SyntaxError, ValueError, RuntimeError, MemoryError, tokenize.TokenError)
_MAGICS = 100  # lines of a cell that are magics: reading them takes the square of their number
SET_UP = "# Set-up: on Colab"
_EMPTY = "# YOUR CODE HERE"  # as nbgrader writes it into a stub


@dataclass(frozen=True)
class Exercise:
    """One graded exercise of the lecturer's notebook: its lines and points by part, its answer, and its empty stub."""

    id: str
    lines: dict[str, str]
    points: dict[str, float]
    solution: str
    stub: str
    needs_gpu: bool = False


@dataclass(frozen=True)
class Step:
    """One thing to run.

    kind: "given" is a locked cell of the lecturer's, "cell" one of the student's, "grade" the lines of an exercise.
    cell: its index in the submission, -1 where it is not in it. exercise: the one that a flag in this cell belongs to.
    """

    kind: Literal["given", "cell", "grade"]
    source: str = ""
    cell: int = -1
    exercise: str = ""
    answers: bool = False  # a solution cell, not one of prints or exploration


@dataclass
class Source:
    """The lecturer's notebook, taken apart once for all submissions."""

    path: Path
    notebook: nbformat.NotebookNode
    exercises: dict[str, Exercise] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)  # grade id of a solution cell -> exercise
    given: dict[str, str] = field(default_factory=dict)  # grade id of a locked code cell -> its source
    order: list[str] = field(default_factory=list)  # grade ids of both, as they stand
    marked: set[str] = field(default_factory=set)  # all grade ids
    own: set[str] = field(default_factory=set)  # sources of the unmarked code cells: exploration of the book's

    @classmethod
    def read(cls, path: Path) -> Source:
        """Raises ValueError for a notebook without graded exercises, or with a broken layout."""
        notebook = nbfile.read(path)
        found = cls(Path(path), notebook)
        cells = {grade_id(cell): cell for cell in notebook.cells if grade_id(cell)}
        found.marked = set(cells)
        for exercise in exercises_in(notebook):
            for name in exercise.cells:
                found.owners[name] = exercise.id
            if exercise.lines:
                lines = {part: cells[f"{exercise.id}_{part}"] for part in exercise.lines}
                points = {part: float(line.metadata.nbgrader.get("points", 0)) for part, line in lines.items()}
                tagged = [cells[exercise.id], *lines.values()]
                gpu = any("gpu" in cell.metadata.get("tags", []) for cell in tagged)
                found.exercises[exercise.id] = Exercise(
                    exercise.id, dict(exercise.lines), points, exercise.solution, _stub(exercise), gpu
                )
        if not found.exercises:
            raise ValueError(f"{path}: no graded exercise in it")
        for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
            marks = cell.metadata.get("nbgrader", {})
            if not marks:
                found.own.add(cell.source.strip())
            elif marks.get("locked") and not marks.get("grade") and not marks.get("solution"):
                found.given[grade_id(cell)] = cell.source
                found.order.append(grade_id(cell))
            elif marks.get("solution"):
                found.order.append(grade_id(cell))
        return found

    @property
    def interprets_triton(self) -> bool:
        """Whether a locked cell asks for Triton's interpreter, which has to be known before Triton is imported."""
        return any('os.environ["TRITON_INTERPRET"] = "1"' in source for source in self.given.values())

    @property
    def imports(self) -> str:
        """The import statements of the locked cells, as one source."""
        trees = [ast.parse(source) for source in self.given.values()]
        found = [node for tree in trees for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        return "\n".join(map(ast.unparse, found))


def grade_id(cell) -> str:
    return cell.metadata.get("nbgrader", {}).get("grade_id", "")


def prepared(submission: nbformat.NotebookNode, source: Source) -> nbformat.NotebookNode:
    """The submission with the marks that an editor lost."""
    return restore_marks(submission, source.notebook)


def steps_of(submission: nbformat.NotebookNode, source: Source) -> list[Step]:
    """What to run of a submission (see `prepared`), in its own order.

    The locked cells are the lecturer's, each at its place, or before the first answer that needs it where it was
    deleted. The lines of an exercise come after its last solution cell and the unmarked cells that follow it, wherever
    the submission has the test cells. The book's own cells of exploration, unchanged, run only for their names.
    """
    steps: list[Step] = []
    last = {source.owners[grade_id(cell)]: i for i, cell in enumerate(submission.cells) if _answers(cell, source)}
    due, owner, given = "", "", set()
    for i, cell in enumerate(submission.cells):
        name = grade_id(cell) if grade_id(cell) in source.marked else ""
        if name and due:
            steps.append(Step("grade", exercise=due))
            due = ""
        if cell.cell_type != "code":
            continue
        if _answers(cell, source):
            owner = source.owners[name]
            before = source.order[: source.order.index(name)]
            steps += _given([g for g in before if g in source.given and g not in given], source)
            given.update(g for g in before if g in source.given)
            steps.append(Step("cell", cell.source, i, owner, answers=True))
            due = owner if last[owner] == i and owner in source.exercises else ""
        elif name in source.given and name not in given:
            steps += _given([name], source, i)
            given.add(name)
        elif not name and not cell.source.startswith(SET_UP):
            steps.append(Step("cell", cell.source, i, owner))
    if due:
        steps.append(Step("grade", exercise=due))
    return _without_exploration(steps, source)


def reference_steps(source: Source, exercises: Iterable[str] | None = None) -> list[Step]:
    """The lecturer's own answers to these exercises (all by default), as a submission of nothing else."""
    wanted = source.exercises if exercises is None else set(exercises)
    steps = steps_of(source.notebook, source)
    return [s for s in steps if s.kind == "given" or (s.exercise in wanted and (s.answers or s.kind == "grade"))]


def missing(submission: nbformat.NotebookNode, source: Source) -> list[str]:
    """The graded exercises of which no solution cell is left."""
    there = {source.owners[grade_id(cell)] for cell in submission.cells if _answers(cell, source)}
    return [name for name in source.exercises if name not in there]


def untouched(submission: nbformat.NotebookNode, source: Source) -> set[str]:
    """The graded exercises whose solution cells are still as they were released."""
    answers: dict[str, list[str]] = {}
    for cell in submission.cells:
        if _answers(cell, source):
            answers.setdefault(source.owners[grade_id(cell)], []).append(cell.source.strip())
    return {
        name
        for name, exercise in source.exercises.items()
        if (
            "\n".join(answers.get(name, [])).split() == exercise.stub.split()
            if exercise.stub
            else all(_EMPTY in cell for cell in answers.get(name, [""]))
        )
    }


def _stub(exercise) -> str:
    """Empty where nbgrader is not installed, as with a reader who does not run a course."""
    try:
        return stub_of(exercise)
    except ImportError:
        return ""


def _answers(cell, source: Source) -> bool:
    return cell.cell_type == "code" and grade_id(cell) in source.owners


def _given(names: list[str], source: Source, cell: int = -1) -> list[Step]:
    return [Step("given", source.given[name], cell) for name in names]


def _without_exploration(steps: list[Step], source: Source) -> list[Step]:
    """Without the book's own unmarked cells of which no later cell uses a name."""
    kept, wanted = [], set()
    given = {name for text in source.given.values() if (names := names_of(text)) for name in names.binds}
    for step in reversed(steps):
        text = step.source
        if step.kind == "grade":
            text = "\n".join(source.exercises[step.exercise].lines.values())
        names = names_of(text)
        if step.kind == "cell" and text.strip() in source.own and names and not (names.binds - given) & wanted:
            continue
        wanted |= names.uses if names else set()
        kept.append(step)
    return kept[::-1]


@dataclass(frozen=True)
class Names:
    """The global names that a cell binds and uses."""

    binds: frozenset[str]
    uses: frozenset[str]


def names_of(source: str) -> Names | None:
    """None for a cell that cannot be read, or that imports every name of a module."""
    text = python_of(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree, table = ast.parse(text), symtable.symtable(text, "<cell>", "exec")
    except UNREADABLE:
        return None
    if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(tree)):
        return None
    binds = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    uses, waiting = {s.get_name() for s in table.get_symbols() if s.is_referenced()}, [*table.get_children()]
    while waiting:
        inner = waiting.pop()
        waiting += inner.get_children()
        for symbol in inner.get_symbols():
            if symbol.is_global():
                uses.update([symbol.get_name()] if symbol.is_referenced() else [])
                binds.update([symbol.get_name()] if symbol.is_assigned() else [])
    return Names(frozenset(binds), frozenset(uses))


def many_magics(source: str) -> bool:
    return sum(line.lstrip()[:1] in ("%", "!") or line.rstrip()[-1:] == "?" for line in source.splitlines()) > _MAGICS


def python_of(source: str) -> str:
    """A cell as Python: magics become calls; the body of a cell magic that runs Python (`%%time`) stands as it is."""
    with warnings.catch_warnings(), contextlib.suppress(*UNREADABLE):
        warnings.simplefilter("ignore")
        compile(source, "<cell>", "exec", ast.PyCF_ONLY_AST)
        return source  # as it is most often
    first, _, rest = source.lstrip().partition("\n")
    if first.startswith("%%"):
        return (
            f"pass\n{python_of(rest)}" if first.split()[0] in ("%%time", "%%timeit", "%%capture", "%%prun") else "pass"
        )
    from IPython.core.inputtransformer2 import TransformerManager

    if many_magics(source):
        return source
    try:
        return TransformerManager().transform_cell(source)
    except UNREADABLE:
        return source
