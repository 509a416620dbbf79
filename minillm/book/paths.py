"""Where the book's folders are. Built in chapter 00."""

from __future__ import annotations

from pathlib import Path

FOLDERS = ("chapters", "solutions", "exercises")


def repository_root() -> Path:
    """The folder that holds `chapters/`: this checkout, or the nearest one above the working folder."""
    candidates = [Path(__file__).resolve().parents[2], Path.cwd(), *Path.cwd().parents]
    for folder in candidates:
        if (folder / "pyproject.toml").is_file() and (folder / "minillm").is_dir():
            return folder
    raise FileNotFoundError(
        f"no checkout of the book at or above {Path.cwd()}: the notebooks are not part of the installed package; "
        "clone the repository and run this inside it"
    )


def notebooks(folder: str, root: Path | None = None) -> list[Path]:
    """The notebooks of one folder ("chapters", "solutions" or "exercises"), in reading order."""
    if folder not in FOLDERS:
        raise ValueError(f"folder={folder!r}: the book's notebooks are in {', '.join(FOLDERS)}")
    return sorted((root or repository_root()).joinpath(folder).glob("[0-9][0-9]_*.ipynb"))


def chapter_number(path: Path) -> int:
    """`chapters/03_kv_cache.ipynb` -> 3."""
    digits = Path(path).name[:2]
    if not digits.isdigit():
        raise ValueError(f"{Path(path).name}: a notebook's name starts with its chapter's two digits")
    return int(digits)
