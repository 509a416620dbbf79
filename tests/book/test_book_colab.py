"""Colab: nothing happens elsewhere, nothing heavy is replaced there, and a fork finds its own address everywhere."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from minillm.book import colab, nbfile


def test_the_badge_and_the_set_up_cell_name_the_repository():
    assert colab.badge("chapters/01_x.ipynb").endswith(
        f"(https://colab.research.google.com/github/{colab.REPOSITORY}/blob/main/chapters/01_x.ipynb)"
    )
    assert (
        f"git+https://github.com/{colab.REPOSITORY}" in colab.set_up_cell()
        and len(colab.set_up_cell().splitlines()) <= 12
    )
    assert "setup" in colab.set_up_nbcell().metadata.tags


def test_elsewhere_the_set_up_cell_does_nothing(monkeypatch, capsys):
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: pytest.fail("something was started"))
    exec(colab.set_up_cell(), {})
    assert capsys.readouterr().out == ""


@pytest.fixture
def on_colab(monkeypatch):
    """A Colab without a GPU on which triton, safetensors and rich are missing; collects the commands that would run."""
    ran = []
    real = importlib.metadata.version

    def version(name):
        if name in ("triton", "safetensors", "rich"):
            raise importlib.metadata.PackageNotFoundError(name)
        return {"torch": "2.8.0+cu126", "numpy": "2.0.2"}.get(name) or real(name)

    wanted = [
        "torch>=2.8",
        "numpy>=1.26",
        "triton>=3; sys_platform == 'linux'",
        "safetensors>=0.5",
        "rich>=13",
        "matplotlib>=3.8",
        "pywin32>=300; sys_platform == 'win32'",
        "nbgrader>=0.9; extra == 'course'",
    ]
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab_2025")
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(
        "subprocess.run",
        lambda command, **kwargs: ran.append((command, Path(command[command.index("-c") + 1]).read_text())),
    )
    return ran


def test_on_colab_only_what_is_missing_is_installed_and_the_heavy_is_held(on_colab, capsys):
    colab.set_up()
    [(command, constraints)] = on_colab
    assert command[-2:] == ["safetensors>=0.5", "rich>=13"]
    assert not any(heavy in word for word in command for heavy in ("torch", "triton", "numpy"))
    assert constraints.splitlines() == ["torch==2.8.0+cu126", "numpy==2.0.2"]
    assert "torch 2.8.0+cu126 · triton absent · numpy 2.0.2" in capsys.readouterr().out


def test_an_extra_is_installed_on_colab_and_named_elsewhere(on_colab, monkeypatch):
    colab.need("course", "rich")
    [(command, _)] = on_colab
    assert command[-1] == "rich" and "safetensors>=0.5" in command
    monkeypatch.delenv("COLAB_RELEASE_TAG")
    with pytest.raises(
        ModuleNotFoundError, match=r"needs .*rich; in the clone, run: pip install -e '.\[course\]' rich"
    ):
        colab.need("course", "rich")


def test_work_is_kept_on_drive(tmp_path, monkeypatch):
    import sys
    import types

    mounted = []
    google = types.ModuleType("google.colab")
    google.drive = types.SimpleNamespace(mount=mounted.append)
    monkeypatch.setitem(sys.modules, "google.colab", google)
    monkeypatch.chdir(tmp_path)
    folder = colab.work_on_drive(tmp_path)
    assert mounted == [str(tmp_path)] and folder == Path.cwd() == tmp_path / "MyDrive" / "minillm"


def test_a_fork_is_named_everywhere(tmp_path, sample_solution):
    for folder in ("chapters", "solutions", "minillm/book"):
        (tmp_path / folder).mkdir(parents=True)
    notebook, module, readme = (
        tmp_path / "solutions" / "06_sample.ipynb",
        tmp_path / "minillm/book/colab.py",
        tmp_path / "README.md",
    )
    nbfile.write(sample_solution, notebook)
    module.write_text(Path(colab.__file__).read_text())
    readme.write_text(
        f"[code](https://github.com/{colab.REPOSITORY}) and [theirs](https://github.com/{colab.REPOSITORY}-extras)"
    )
    assert set(colab.rewrite_badges("reader/my.fork", tmp_path)) == {notebook, module, readme}
    assert colab.REPOSITORY not in notebook.read_text() and json.loads(notebook.read_text())
    assert "github/reader/my.fork/blob/main/solutions/06_sample.ipynb" in notebook.read_text()
    assert 'REPOSITORY = "reader/my.fork"' in module.read_text()
    assert (
        readme.read_text()
        == f"[code](https://github.com/reader/my.fork) and [theirs](https://github.com/{colab.REPOSITORY}-extras)"
    )


@pytest.mark.parametrize("wrong", ["nobody", "a/b/c", "https://github.com/a/b", "", "a b/c"])
def test_a_repository_is_owner_and_name(tmp_path, wrong):
    with pytest.raises(ValueError, match="must be owner/name"):
        colab.rewrite_badges(wrong, tmp_path)
