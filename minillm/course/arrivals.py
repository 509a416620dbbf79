"""What came from the students: files of a folder or of a zip, and what their names say of author and lateness.

The names are those that the systems write themselves:
    Canvas      doejane_LATE_1234_56789_06_the_paged_kv_cache.ipynb      user 1234, attachment 56789
                anon_Ab1cD_56789_06_the_paged_kv_cache.ipynb             an anonymous assignment
    Moodle      Jane Doe_1234_assignsubmission_file/06_the_paged_kv_cache.ipynb, one folder a student, in older
                versions with a last underscore; or the same in one name; participant 1234 of this assignment
    folders     jdoe/06_the_paged_kv_cache.ipynb, also jdoe/06/..., as nbgrader has it
"""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import re
import unicodedata
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

MAX_BYTES = 50_000_000  # of one submitted file
_CANVAS = re.compile(r"(?P<name>[^\s/.()-]*?)_(?:(?P<late>LATE)_)?(?P<user>\d+)_(?P<attachment>\d+)_(?P<file>.+)")
_CANVAS_ANONYMOUS = re.compile(r"anon_(?:(?P<late>LATE)_)?(?P<user>\w+?)_(?P<attachment>\d+)_(?P<file>.+)")
_MOODLE = re.compile(r"(?P<name>.+)_(?P<participant>\d+)_assignsubmission_(?P<plugin>[a-z]+)(?:_(?P<file>.*))?")
_RUBBISH = ("__MACOSX", ".DS_Store", "Thumbs.db", ".ipynb_checkpoints")


@dataclass(frozen=True)
class Arrival:
    """One file as it came.

    path: its name in the folder or zip. file: the name that the student gave it. keys: what names the author, for
    `Roster.find`. author: the same for a reader, and for a course without a roster. submitted: with its time zone, or
    None where the system does not tell. late: None where it does not tell. turn: orders the files of one author.
    problem: why the file could not be read, else empty.
    """

    path: str
    file: str
    content: bytes
    keys: dict[str, str] = field(default_factory=dict)
    author: str = ""
    submitted: dt.datetime | None = None
    late: bool | None = None
    turn: tuple[int, ...] = ()
    problem: str = ""


def arrivals(
    source: Path, is_student: Callable[[str], bool] = lambda name: False, zone: dt.tzinfo | None = None
) -> list[Arrival]:
    """All files of a folder or a zip, in the order of their names. A zip inside counts as a folder of the same name.

    is_student: whether a folder's name is a student's; a single other folder around everything is left out.
    zone: of the times in a zip, which have none of their own; that of this machine by default.
    Raises FileNotFoundError where there is nothing, ValueError for a file that is no zip.
    """
    source = Path(source).expanduser()
    if source.is_dir():
        files = list(_in_folder(source, zone))
    elif not source.is_file():
        raise FileNotFoundError(f"{source}: neither a folder of submissions nor a zip")
    else:
        try:
            files = list(_in_zip(source.read_bytes(), zone))
        except zipfile.BadZipFile as error:
            raise ValueError(f"{source}: {error}; it must be a folder or a zip") from error
    return [_described(*file) for file in _without_wrapper(_with_timestamps(files), is_student)]


def is_from_lms(path: str) -> bool:
    """Whether Canvas or Moodle wrote this name; then the times of the files in a zip are those of the download."""
    first = unicodedata.normalize("NFC", PurePosixPath(path).parts[0])
    return any(pattern.fullmatch(first) for pattern in (_CANVAS, _CANVAS_ANONYMOUS, _MOODLE))


def participant_of(path: str) -> str:
    """The number of a participant in a name that Moodle wrote; empty for other names."""
    match = _MOODLE.fullmatch(PurePosixPath(path).parts[0])
    return match["participant"] if match else ""


def is_notebook(file: str) -> bool:
    """Whether a file has a notebook's name, also one that a browser or a copy has changed: "06 (1).ipynb.txt"."""
    return re.search(r"\.ipynb(?: ?\(\d+\))?(?:\.(?:txt|json))?$", file.strip(), re.IGNORECASE) is not None


_File = tuple[str, bytes, dt.datetime | None, str]  # path, content, modified, problem


def _in_folder(folder: Path, zone: dt.tzinfo | None) -> Iterator[_File]:
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()):
        name = path.relative_to(folder).as_posix()
        if _is_rubbish(name):
            continue
        modified = dt.datetime.fromtimestamp(path.stat().st_mtime).astimezone()
        if path.stat().st_size > MAX_BYTES:
            yield name, b"", modified, _too_large(path.stat().st_size)
        else:
            yield from _opened(name, path.read_bytes(), modified, zone)


def _in_zip(content: bytes, zone: dt.tzinfo | None) -> Iterator[_File]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for info in sorted(archive.infolist(), key=_name_in_zip):
            name = _name_in_zip(info)
            if info.is_dir() or _is_rubbish(name):
                continue
            modified = _modified(info, zone)
            if info.file_size > MAX_BYTES:
                yield name, b"", modified, _too_large(info.file_size)
                continue
            try:
                found = archive.read(info)
            except (RuntimeError, zipfile.BadZipFile, NotImplementedError) as error:  # encrypted, damaged, unknown
                yield name, b"", modified, f"it cannot be unpacked: {error}"
                continue
            yield from _opened(name, found, modified, zone)


def _opened(name: str, content: bytes, modified: dt.datetime | None, zone: dt.tzinfo | None) -> Iterator[_File]:
    """A file, or the files in it where a student handed in a zip."""
    if not name.lower().endswith(".zip"):
        yield name, content, modified, ""
        return
    try:
        inner = list(_in_zip(content, zone))
    except zipfile.BadZipFile as error:
        yield name, content, modified, f"it cannot be unpacked: {error}"
        return
    # A Canvas name describes the zip: the file inside takes the place of the zip's own name.
    composed = unicodedata.normalize("NFC", name)
    stem = _CANVAS.fullmatch(composed) or _CANVAS_ANONYMOUS.fullmatch(composed)
    for path, found, _, problem in inner:
        own = (
            f"{composed[: stem.start('file')]}{PurePosixPath(path).name}"
            if stem
            else f"{PurePosixPath(name).parent}/{path}"
        )
        yield own, found, modified, problem


def _with_timestamps(files: list[_File]) -> list[_File]:
    """nbgrader's `timestamp.txt` tells when the files beside it were handed in."""
    from nbgrader.utils import parse_utc

    times = {}
    for name, content, _, _ in files:
        if PurePosixPath(name).name == "timestamp.txt":
            with contextlib.suppress(ValueError):  # then the time of the file counts
                times[PurePosixPath(name).parent] = parse_utc(content.decode().strip()).replace(tzinfo=dt.UTC)
    others = [file for file in files if PurePosixPath(file[0]).name != "timestamp.txt"]
    return [(name, content, times.get(PurePosixPath(name).parent, when), bad) for name, content, when, bad in others]


def _name_in_zip(info: zipfile.ZipInfo) -> str:
    """The name; where its encoding is not stated, UTF-8 is tried before the old code page."""
    name = info.filename
    if not info.flag_bits & 0x800:
        with contextlib.suppress(UnicodeError):
            name = name.encode("cp437").decode("utf-8")
    return "/".join(part for part in name.replace("\\", "/").split("/") if part not in ("", ".", ".."))


def _modified(info: zipfile.ZipInfo, zone: dt.tzinfo | None) -> dt.datetime | None:
    try:
        when = dt.datetime(*info.date_time)
        return when.replace(tzinfo=zone) if zone else when.astimezone()
    except ValueError:  # a month of 0, as some programs write it
        return None


def _is_rubbish(name: str) -> bool:
    return any(part in _RUBBISH or part.startswith("._") for part in PurePosixPath(name).parts)


def _too_large(size: int) -> str:
    return f"it has {size:,} bytes, the limit is {MAX_BYTES:,}"


def _without_wrapper(files: list[_File], is_student: Callable[[str], bool]) -> list[_File]:
    """The files without one folder around all of them, where the names below it are those of students."""
    tops = {PurePosixPath(name).parts[0] for name, *_ in files}
    if len(tops) != 1 or is_from_lms(top := next(iter(tops))) or is_student(top):
        return files
    inner = [(name.partition("/")[2], *rest) for name, *rest in files]
    below = {PurePosixPath(name).parts[0] for name, *_ in inner if "/" in name}
    is_wrapper = all(name and is_from_lms(name) for name, *_ in inner) or (
        all("/" in name for name, *_ in inner) and not all(re.fullmatch(r"\d\d", folder) for folder in below)
    )
    return inner if is_wrapper else files


def _described(path: str, content: bytes, modified: dt.datetime | None, problem: str) -> Arrival:
    parts = PurePosixPath(unicodedata.normalize("NFC", path)).parts
    found = {"path": path, "content": content, "problem": problem}
    again = tuple(int(n) for n in re.findall(r"(?:-|\()(\d{1,2})\)?(?:\.\w+){1,2}$", parts[-1]))
    if match := _MOODLE.fullmatch(parts[0]):
        file = parts[-1] if len(parts) > 1 else match["file"] or ""
        keys = {"full_name": match["name"], "participant": match["participant"]}
        return Arrival(**found, file=file, keys=keys, author=match["name"], turn=again)
    if len(parts) == 1 and (match := _CANVAS_ANONYMOUS.fullmatch(parts[0])):
        turn = (int(match["attachment"]),)
        return Arrival(**found, file=match["file"], author=f"anon_{match['user']}", late=bool(match["late"]), turn=turn)
    if len(parts) == 1 and (match := _CANVAS.fullmatch(parts[0])):
        keys, turn = {"canvas_id": match["user"], "sortable": match["name"]}, (int(match["attachment"]),)
        return Arrival(
            **found, file=match["file"], keys=keys, author=match["name"], late=bool(match["late"]), turn=turn
        )
    author = parts[0] if len(parts) > 1 else ""
    keys = {"exact": author, "any_key": author, "full_name": author}
    return Arrival(**found, file=parts[-1], keys=keys, author=author, submitted=modified, turn=again)
