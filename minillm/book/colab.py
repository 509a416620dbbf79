"""Colab: the badge, the set-up cell, and the address of the repository in one place. Built in chapter 00."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = "minillm-book/minillm"  # `minillm check --badges --repository owner/name` rewrites it for a fork
DISTRIBUTION = "minillm-book"
# Colab's builds fit its GPUs; replacing one costs minutes and breaks the rest
NEVER_TOUCHED = ("torch", "triton", "numpy")
SET_UP_TAGS = ["setup", "measured"]
_REPOSITORY_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]*)/[A-Za-z0-9._-]+")


def badge(path: str, repository: str | None = None, branch: str = "main") -> str:
    """Markdown of the "Open in Colab" badge for a notebook such as `chapters/01_one_token_at_a_time.ipynb`."""
    image = "https://colab.research.google.com/assets/colab-badge.svg"
    page = f"https://colab.research.google.com/github/{repository or REPOSITORY}/blob/{branch}/{path}"
    return f"[![Open in Colab]({image})]({page})"


def set_up_cell(repository: str | None = None, tag: str = "") -> str:
    """Source of the set-up cell that stands near the top of every notebook."""
    return f'''\
# Set-up: on Colab this installs what is missing, never torch, triton or numpy; elsewhere it does nothing.
import importlib.util, os, subprocess, sys

KEEP_WORK_ON_DRIVE = False  # True: on Colab, work inside a folder of your Google Drive

if "COLAB_RELEASE_TAG" in os.environ and importlib.util.find_spec("minillm") is None:
    source = "{DISTRIBUTION} @ git+https://github.com/{repository or REPOSITORY}{f"@{tag}" if tag else ""}"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", source], check=True)

from minillm.book import colab
colab.set_up(keep_work_on_drive=KEEP_WORK_ON_DRIVE)'''


def set_up_nbcell():
    """The set-up cell as a notebook cell, folded away in JupyterLab."""
    import nbformat

    return nbformat.v4.new_code_cell(
        set_up_cell(), metadata={"tags": list(SET_UP_TAGS), "jupyter": {"source_hidden": True}}
    )


def on_colab() -> bool:
    """Whether this runs on Google Colab."""
    return "COLAB_RELEASE_TAG" in os.environ


def set_up(*, keep_work_on_drive: bool = False) -> None:
    """On Colab: install the light packages that are missing, say which versions run, optionally work on Drive."""
    if not on_colab():
        return
    wanted = missing_requirements()
    if wanted:
        install(wanted)
    print(versions())
    if keep_work_on_drive:
        print(f"working in {work_on_drive()}; choose File > Save a copy in Drive to keep this notebook as well")


def need(extra: str, *packages: str) -> None:
    """What a chapter needs beside the package's own requirements: one of its extras, and further packages.

    On Colab they are installed where they are missing. Elsewhere, raises ModuleNotFoundError with the command that
    installs them.
    """
    missing = missing_requirements(extra) + [name for name in packages if not _installed(name)]
    if missing and not on_colab():
        names = " ".join(["-e", f"'.[{extra}]'", *packages])
        raise ModuleNotFoundError(f"this chapter needs {', '.join(missing)}; in the clone, run: pip install {names}")
    if missing:
        install(missing)


def missing_requirements(extra: str = "") -> list[str]:
    """The package's requirements that are not installed, with one extra at most, without what is never touched."""
    from packaging.requirements import Requirement

    missing = []
    for requirement in map(Requirement, importlib.metadata.requires(DISTRIBUTION) or []):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if applies and requirement.name.lower() not in NEVER_TOUCHED and not _installed(requirement.name):
            missing.append(f"{requirement.name}{requirement.specifier}")
    return missing


def install(requirements: list[str]) -> None:
    """pip install, with the heavy packages held at the versions that are there."""
    held = [f"{name}=={importlib.metadata.version(name)}" for name in NEVER_TOUCHED if _installed(name)]
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("\n".join(held))
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "-c", str(constraints), *requirements], check=True
        )


def versions() -> str:
    """One line with what was found: Python, torch, triton, transformers, and the GPU."""
    found = [f"Python {sys.version.split()[0]}"]
    found += [
        f"{name} {importlib.metadata.version(name)}" if _installed(name) else f"{name} absent"
        for name in ("torch", "triton", "numpy", "transformers", DISTRIBUTION)
    ]
    import torch

    found.append(torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU")
    return " · ".join(found)


def work_on_drive(mount: Path = Path("/") / "content" / "drive") -> Path:
    """Mount Google Drive, make a folder there and change into it."""
    from google.colab import drive

    drive.mount(str(mount))
    folder = mount / "MyDrive" / "minillm"
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    return folder


def rewrite_badges(repository: str, root: Path | None = None) -> list[Path]:
    """Point every badge and set-up cell, and this module, at a fork; returns the files that changed.

    Raises ValueError when `repository` is not "owner/name".
    """
    from minillm.book.paths import FOLDERS, repository_root

    check_repository(repository)
    root = root or repository_root()
    files = [file for folder in FOLDERS for file in sorted((root / folder).glob("*.ipynb"))]
    files += [root / "README.md", root / "pyproject.toml", root / "minillm" / "book" / "colab.py"]
    files += [root / ".github" / "ISSUE_TEMPLATE" / "config.yml"]
    changed = []
    for file in (f for f in files if f.is_file()):
        old = file.read_text(encoding="utf-8")
        new = re.sub(rf"((?:github(?:\.com)?|v2/gh)/){re.escape(REPOSITORY)}(?![\w.-])", rf"\g<1>{repository}", old)
        new = new.replace(f'REPOSITORY = "{REPOSITORY}"', f'REPOSITORY = "{repository}"')
        if new != old:
            file.write_text(new, encoding="utf-8")
            changed.append(file)
    return changed


def check_repository(repository: str) -> None:
    """Raises ValueError for what is not the owner/name of a repository on GitHub."""
    if not _REPOSITORY_NAME.fullmatch(repository):
        raise ValueError(f"repository={repository!r}: must be owner/name, as in {REPOSITORY}")


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
