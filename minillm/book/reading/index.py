"""The stored index of another project at one commit: path -> names with their lines. Built in chapter 25.

    python -m minillm.book.reading.index CHECKOUT vllm --commit SHA       writes vllm.json again, from a clone

The files are those that the guide cites, and those that the chapters point to and that are still there. A reference is
written `path::Class.method`; `Index.find` says on which lines it stands, and refuses a name that is not there.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from minillm.book.reading.names import Span, code_lines, names_of

FOLDER = Path(__file__).resolve().parent
COMMIT = r"[0-9a-f]{9,40}|v\d+(\.\w+)+"  # a commit, or the tag of a release, which names one
REPOSITORIES = {"vllm": "vllm-project/vllm", "sglang": "sgl-project/sglang"}


@dataclass(frozen=True)
class Index:
    """What is known of one project. `files`: path -> {"lines", "names"}, and of the files on a request's
    way {"code"}: ranges of lines that hold code."""

    repository: str
    version: str
    commit: str
    files: dict[str, dict]

    def find(self, reference: str) -> Span:
        """The first and the last line of `path::Name`, or of a whole file. Raises LookupError with what comes near."""
        path, _, name = reference.partition("::")
        if path not in self.files:
            raise LookupError(f"{self.repository}: no file {path} in the index{_near(path, self.files)}")
        file = self.files[path]
        if not name:
            return 1, file["lines"]
        if name not in file["names"]:
            raise LookupError(f"{self.repository}: {path} has no {name}{_near(name, file['names'])}")
        first, last = file["names"][name]
        return first, last

    def num_code_lines(self, reference: str) -> int:
        """How many lines of a reference hold code: no comment, docstring or empty line."""
        first, last = self.find(reference)
        return self.code_between(reference.partition("::")[0], first, last)

    def code_between(self, path: str, first: int, last: int) -> int:
        """How many of the lines `first` to `last` of a file hold code."""
        if "code" not in self.files[path]:
            raise LookupError(f"{self.repository}: the index does not say which lines of {path} hold code")
        ranges = self.files[path]["code"]
        return sum(max(0, min(last, end) - max(first, start) + 1) for start, end in ranges)

    def url(self, reference: str) -> str:
        """Where GitHub shows the reference, at the commit of the index."""
        first, last = self.find(reference)
        path, _, name = reference.partition("::")
        lines = f"#L{first}-L{last}" if name else ""
        return f"https://github.com/{self.repository}/blob/{self.commit}/{path}{lines}"


@cache
def load(project: str) -> Index:
    """The stored index of "vllm" or "sglang"."""
    if project not in REPOSITORIES:
        raise ValueError(f"project={project!r} is unknown; choose one of {', '.join(REPOSITORIES)}")
    return Index(**json.loads((FOLDER / f"{project}.json").read_text(encoding="utf-8")))


def make(
    checkout: Path, repository: str, version: str, commit: str, paths: Iterable[str], counted: Iterable[str] = ()
) -> Index:
    """Read `paths` in a checkout; of those in `counted`, store which lines hold code, too.

    Raises FileNotFoundError for a file that is not there.
    """
    files, counted = {}, set(counted)
    for path in sorted(set(paths)):
        source = (Path(checkout) / path).read_text(encoding="utf-8")
        files[path] = {"lines": len(source.splitlines()), "names": names_of(source)}
        if path in counted:
            files[path]["code"] = _ranges(code_lines(source))
    return Index(repository, version, commit, files)


def dumps(index: Index) -> str:
    """JSON with a line for each file, so that a change of one file is a change of one line."""
    head = {name: getattr(index, name) for name in ("repository", "version", "commit")}
    files = ",\n".join(f"{json.dumps(path)}: {json.dumps(file, separators=(',', ':'))}"
                       for path, file in index.files.items())  # fmt: skip
    return json.dumps(head)[:-1] + ', "files": {\n' + files + "\n}}\n"


def _ranges(lines: list[int]) -> list[Span]:
    """[1, 2, 3, 7] -> [(1, 3), (7, 7)]."""
    found: list[list[int]] = []
    for line in lines:
        if found and found[-1][1] == line - 1:
            found[-1][1] = line
        else:
            found.append([line, line])
    return [(first, last) for first, last in found]


def _near(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f"; near it: {', '.join(close)}" if close else ""


def main() -> None:
    from minillm.book.reading.guide import PATH, cited
    from minillm.book.reading.pointers import pointers

    parser = argparse.ArgumentParser(description="Index the files of a checkout that the guide cites.")
    parser.add_argument("checkout", type=Path, help="the folder of the clone")
    parser.add_argument("project", choices=list(REPOSITORIES))
    parser.add_argument("--commit", required=True, help="the commit of the clone, or its tag")
    parser.add_argument("--version", default="", help="the release that this commit is, if it is one")
    asked = parser.parse_args()
    if not re.fullmatch(COMMIT, asked.commit):
        parser.error(f"--commit {asked.commit!r}: a commit as `git rev-parse HEAD` prints it, or the tag of a release")
    paths = {reference.partition("::")[0] for reference in cited(asked.project)}
    pointed = {path for path, _ in pointers(REPOSITORIES[asked.project]) if path.endswith(".py")}
    paths |= {path for path in pointed if (asked.checkout / path).is_file()}  # those that have moved are left out
    counted = {reference.partition("::")[0] for *_, reference in PATH}
    index = make(asked.checkout, REPOSITORIES[asked.project], asked.version, asked.commit, paths, counted)
    (FOLDER / f"{asked.project}.json").write_text(dumps(index), encoding="utf-8")
    print(f"{asked.project}.json: {len(index.files)} files, {sum(len(f['names']) for f in index.files.values())} names")


if __name__ == "__main__":
    main()
