"""Every Python file has the format of `ruff`, and no file or notebook has what its lint finds (see pyproject.toml)."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", ["format --check", "check --output-format=concise"])
def test_ruff_finds_nothing(command, root):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command.split(), "--no-cache", "."], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, f"`ruff {command}` in {root}:\n{done.stdout}{done.stderr}"
