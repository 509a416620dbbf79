"""`minillm progress`: what passes, what comes next, and that only changed notebooks run again."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from minillm.book import nbfile
from minillm.book.exercises import generate
from minillm.course import progress
from tests.course.small_book import cell, solution
from tests.helpers.submitted import with_answers

pytest.importorskip("nbgrader", reason="needs nbgrader: pip install -e '.[test]'")


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A clone with two chapters, and a state folder of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    root = tmp_path / "clone"
    for number in (6, 7):
        for folder, nb in (("solutions", solution(number)), ("exercises", generate(solution(number)))):
            (root / folder).mkdir(parents=True, exist_ok=True)
            nbfile.write(nb, root / folder / f"{number:02d}_sample.ipynb")
    return root


def shown(standings):
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(progress.table(standings))
    return console.export_text()


def test_a_fresh_clone_has_begun_nothing_and_runs_nothing(clone):
    ran = []
    standings = progress.look(clone, advance=ran.append)
    assert ran == [] and not any(one.begun or one.passed for listed in standings.values() for one in listed)
    path, one = progress.next_of(standings)
    assert (path.name, one.id) == ("06_sample.ipynb", "lowest")
    assert "II · Many requests" in shown(standings) and "140" in shown(standings)


def test_what_passes_is_known_and_only_what_changed_runs_again(clone):
    path, ran = clone / "exercises" / "06_sample.ipynb", []
    nb = with_answers(nbfile.read(path), solution(6))
    cell(nb, "highest").source = "def highest(free):\n    return sorted(free)[0]\n"
    nbfile.write(nb, path)
    standings = progress.look(clone, advance=ran.append)
    assert ran == ["06_sample.ipynb"]
    lowest, highest = standings[path]
    assert lowest.passed and not highest.passed and highest.begun
    assert "highest: example" in highest.message
    assert progress.next_of(standings)[1] == highest
    assert progress.minutes_left(standings[path]) == 60
    assert "✓ ✗" in shown(standings)
    assert progress.look(clone, advance=ran.append) == standings and ran == ["06_sample.ipynb"]
    progress.state_file(clone).write_text("{ not JSON")  # is found again, not an error
    nbfile.write(generate(solution(6)), path)
    assert not progress.look(clone, advance=ran.append)[path][0].begun


def test_a_folder_without_exercises_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="no exercises in"):
        progress.look(tmp_path)
