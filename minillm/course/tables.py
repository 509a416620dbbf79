"""Tables that people and systems save as CSV, read whatever program wrote them.

Excel writes semicolons and the code page of Windows, or UTF-16 with tabs; an LMS writes UTF-8 with commas.
"""

from __future__ import annotations

import codecs
import csv
import io
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_SEPARATORS = ",;\t"
_AS_CSV = "save it as “CSV UTF-8” and give that file"


@dataclass(frozen=True)
class Table:
    """columns: the cells of the header. rows: (line of the file, cells as many as columns), without empty lines."""

    path: Path
    columns: list[str]
    rows: list[tuple[int, list[str]]]

    def records(self) -> Iterator[tuple[int, dict[str, str]]]:
        """(line, column in lower case -> cell without spaces around it)."""
        names = [column.lower() for column in self.columns]
        for line, cells in self.rows:
            yield line, {name: cell.strip() for name, cell in zip(names, cells)}

    def has(self, *columns: str) -> bool:
        """Whether all of these columns are there, in upper or lower case."""
        return {column.lower() for column in columns} <= {column.lower() for column in self.columns}


def read(path: Path) -> Table:
    """The table in a file. Raises ValueError, with the line, for a file that is none, or a line with too many cells."""
    path = Path(path)
    text = text_of(path.read_bytes(), path)
    first, _, rest = text.partition("\n")
    separator, end, lines = max(_SEPARATORS, key=first.count), 0, []
    if first.lower().startswith("sep=") and len(first) <= 5:  # Excel's own first line
        separator, text, end = first[4:] or "\t", rest, 1
    reader, above = csv.reader(io.StringIO(text), delimiter=separator), end
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                lines.append((end + 1, cells))
            end = above + reader.line_num
    except csv.Error as error:
        raise ValueError(f"{path} line {end + 1}: {error}; {_AS_CSV}") from error
    if not lines:
        return Table(path, [], [])
    (_, header), *body = lines
    while header and not header[-1].strip():
        header.pop()
    rows = []
    for line, cells in body:
        if any(cell.strip() for cell in cells[len(header) :]):
            raise ValueError(
                f"{path} line {line}: {len(cells)} cells, and the header has {len(header)}; a cell with {separator!r} "
                "in it needs quotes around it"
            )
        rows.append((line, (cells + [""] * len(header))[: len(header)]))
    return Table(path, [column.strip() for column in header], rows)


def text_of(content: bytes, path: Path) -> str:
    """The text of a file in UTF-8, UTF-16 or the code page 1252, composed (NFC), without a byte order mark."""
    if content.startswith((b"PK\x03\x04", b"\xd0\xcf\x11\xe0")):
        raise ValueError(f"{path} is a workbook of Excel or LibreOffice, not a CSV: {_AS_CSV}")
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encodings = ["utf-16"]
    elif b"\0" in content[:4]:
        encodings = ["utf-16-be" if content[:1] == b"\0" else "utf-16-le"]
    else:
        encodings = ["utf-8-sig", "cp1252"]
    for encoding in encodings:
        try:
            return unicodedata.normalize("NFC", content.decode(encoding)).replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError as error:
            line, seen = content[: error.start].count(b"\n") + 1, error.object[error.start]
    raise ValueError(f"{path} line {line}: byte 0x{seen:02x} is neither UTF-8 nor Windows-1252; {_AS_CSV}")


def dumps(rows: Iterable[Iterable[object]]) -> str:
    """Rows as CSV with commas."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()
