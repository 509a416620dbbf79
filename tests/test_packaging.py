"""What stands around the package: the two commands of the README, `.ci/run`, and what goes into the wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.helpers.scheduling import ONE_BY_ONE, scope_of

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = [
    "python3 -m venv .venv && .venv/bin/pip install -e . && .venv/bin/minillm lab",
    "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/pytest -n 2 --dist loadfile",
]


def fenced_lines(text: str) -> list[str]:
    return [line for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]


def test_the_readme_gives_the_two_commands_first():
    assert fenced_lines((ROOT / "README.md").read_text())[:2] == COMMANDS


def test_workers_take_whole_files_and_notebooks_one_by_one():
    tests = (
        "engine/test_llm.py::a",
        "engine/test_llm.py::b[x::y]",
        "book/test_notebooks.py::a[1]",
        "book/test_notebooks.py::a[2]",
    )
    found = [scope_of(f"tests/{test}") for test in tests]
    assert found == [
        "tests/engine/test_llm.py",
        "tests/engine/test_llm.py",
        "tests/book/test_notebooks.py::a[1]",
        "tests/book/test_notebooks.py::a[2]",
    ]
    assert all((ROOT / "tests" / file).is_file() for file in ONE_BY_ONE)


@pytest.fixture
def ci(tmp_path):
    """Run `.ci/run` over a README with the given lines in a bash fence."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")

    def run(*lines):
        (tmp_path / "README.md").write_text("# x\n`.[test]` in prose\n```bash\n" + "\n".join(lines) + "\n```\n")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            [tmp_path / ".ci" / "run"], capture_output=True, text=True, env=os.environ | {"PATH": path}, cwd="/"
        )

    return run


def test_ci_runs_what_the_readme_says_in_the_clone_with_torch_pinned(ci, tmp_path):
    done = ci("echo hello", "pwd && cat $PIP_CONSTRAINT && echo 'installing .[test]'")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [str(tmp_path), "torch==2.13.0", "installing .[test]"]


def test_ci_fails_when_the_command_fails(ci):
    done = ci("echo '.[test]' && (exit 3)")
    assert done.returncode == 3 and "status 3" in done.stderr


@pytest.mark.parametrize("lines, found", [(["echo nothing"], 0), (["echo '.[test]'", "echo '.[test]' again"], 2)])
def test_ci_wants_one_command(ci, lines, found):
    done = ci(*lines)
    assert done.returncode == 1 and f"found {found}" in done.stderr


def test_ci_may_be_executed():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_dependencies_are_ranges_that_colab_satisfies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "minillm-book" and project["requires-python"] == ">=3.11"
    everything = project["dependencies"] + [
        line for extra in project["optional-dependencies"].values() for line in extra
    ]
    bounded = [line for line in everything if re.search(r"==(?! ')|<(?!=? ?')|~=", line.split(";")[0])]
    # The formatter alone has an upper bound: another release would format these files anew.
    assert bounded == [line for line in project["optional-dependencies"]["test"] if line.startswith("ruff ")]
    assert "torch >= 2.8" in project["dependencies"]
    assert {"test", "course"} <= project["optional-dependencies"].keys()


def test_the_licence_is_the_one_that_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]


def test_git_ignores_nothing_that_the_wheel_needs():
    """hatchling leaves out of the wheel what git ignores."""
    needed = [
        path
        for folder in ("zoo", "bench", "kernels", "serving")
        for path in (ROOT / "minillm" / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    ignored = subprocess.run(
        ["git", "check-ignore", *map(str, needed)], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    assert needed and not ignored


def test_the_readme_lists_every_chapter_with_its_minutes():
    from minillm.book.contents import chapters

    readme = (ROOT / "README.md").read_text()
    for chapter in chapters():
        row = next(line for line in readme.splitlines() if line.startswith(f"| [{chapter.number:02d} "))
        assert chapter.path.name in row and row.split("|")[-2].strip() == str(chapter.minutes), row
