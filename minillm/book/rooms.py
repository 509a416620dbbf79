"""The house of the package: rooms, floors, and the chapter that builds each module. Built in chapter 00."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FLOORS = {
    "rounding": 0,
    "device": 1, "staging": 1, "trace": 1, "zoo": 1,
    "kernels": 2,
    "quantization": 3,
    "model": 4, "kv_cache": 4, "sampling": 4,
    "speculative": 5, "parallel": 5,
    "engine": 6,
    "serving": 7, "quantizing": 7,
    "sampling_params": 7, "lora": 7, "outputs": 7, "inputs": 7, "pooling_params": 7,
    "book": 8, "bench": 8, "training": 8, "programs": 8,
    "course": 9,
    "cli": 10, "__main__": 10,
}  # fmt: skip
ENGINE_FLOORS = range(1, 8)  # their modules say which chapter builds them; the floors above may leave it out
MAX_LINES = 320
_BUILT_IN = re.compile(r"Built in chapters? (\d\d)")


@dataclass(frozen=True)
class Import:
    """One import of a module of the package, resolved to that module's file."""

    importer: str
    target: str
    line: int
    only_types: bool


def violations(package: Path) -> list[str]:
    """Everything in which the package at `package` breaks the rules of the house, one sentence each."""
    modules = find_modules(package)
    imports = [item for name, file in modules.items() for item in imports_of(name, file, set(modules), package.name)]
    found = [
        f"{name}: no room called {room_of(name)!r} in the house"
        for name in modules
        if name != package.name and floor_of(name) is None
    ]
    found += [said for item in imports if (said := _wrong_floor(item, package.name))]
    found += [f"circular import: {' -> '.join(circle)}" for circle in circles(imports)]
    for name, file in modules.items():
        lines = file.read_text(encoding="utf-8").splitlines()
        if len(lines) > MAX_LINES:
            found.append(f"{name}: {len(lines)} lines, the limit is {MAX_LINES}")
        if floor_of(name) in ENGINE_FLOORS and chapter_of(file) is None:
            found.append(f'{name}: the first paragraph of its docstring must say "Built in chapter NN."')
    return found


def module_chapters(package: Path) -> dict[str, int]:
    """Module name -> the chapter that builds it, from the docstrings; modules that do not say are left out."""
    return {name: chapter for name, file in find_modules(package).items() if (chapter := chapter_of(file)) is not None}


def chapter_of(file: Path) -> int | None:
    """The chapter named by "Built in chapter NN." in the first paragraph of a module's docstring."""
    docstring = ast.get_docstring(_parse(file)) or ""
    match = _BUILT_IN.search(" ".join(docstring.split("\n\n")[0].split()))
    return int(match[1]) if match else None


def find_modules(package: Path) -> dict[str, Path]:
    """Dotted name -> file of every module below `package`, packages by their own name."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = [package.name, *file.relative_to(package).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def room_of(module: str) -> str:
    """`minillm.kv_cache.block_pool` -> `kv_cache`; the package itself is the front door and no room."""
    return module.split(".")[1] if "." in module else ""


def floor_of(module: str) -> int | None:
    return FLOORS.get(room_of(module))


def imports_of(name: str, file: Path, modules: set[str], package: str) -> Iterator[Import]:
    """Every import that `file` makes of the package, also inside functions and under TYPE_CHECKING."""
    tree = _parse(file)
    types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for stmt in node.body
        for inner in ast.walk(stmt)
    }
    here = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        for target in import_targets(node, here, modules):
            if target.split(".")[0] == package and target != name:
                yield Import(name, target, node.lineno, id(node) in types)


def import_targets(node: ast.AST, here: str, modules: set[str]) -> list[str]:
    """The modules that one import statement in the package `here` reaches (`from a import b` may mean a or a.b)."""
    if isinstance(node, ast.Import):
        return [_nearest(alias.name, modules) for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    up = here.split(".")[: len(here.split(".")) - node.level + 1] if node.level else []
    base = ".".join([*up, *([node.module] if node.module else [])])
    inside = [f"{base}.{alias.name}" for alias in node.names]
    return [full if full in modules else _nearest(base, modules) for full in inside]


def circles(imports: list[Import]) -> list[list[str]]:
    """Circles among the run-time imports, each once, starting from its first name in the alphabet."""
    graph: dict[str, set[str]] = {}
    for item in imports:
        if not item.only_types:
            graph.setdefault(item.importer, set()).add(item.target)
    found: list[list[str]] = []
    finished: set[str] = set()

    def walk(node: str, path: list[str]) -> None:
        if node in path:
            loop = path[path.index(node) :]
            start = loop.index(min(loop))
            circle = [*loop[start:], *loop[:start], loop[start]]
            if circle not in found:
                found.append(circle)
        elif node not in finished:
            for target in sorted(graph.get(node, ())):
                walk(target, [*path, node])
            finished.add(node)

    for node in sorted(graph):
        walk(node, [])
    return found


def _wrong_floor(item: Import, package: str) -> str | None:
    own, other = floor_of(item.importer), floor_of(item.target)
    if item.importer == package or own is None:
        return None  # the front door hands out what is inside, lazily
    where = f"{item.importer} line {item.line}"
    if item.target == package:  # its names are the engine's
        return (
            None
            if own > FLOORS["engine"]
            else f"{where}: imports from the front door, whose names are built on floor {FLOORS['engine']}"
        )
    if other is None or room_of(item.importer) == room_of(item.target) or other < own:
        return None
    if other == own and item.only_types:
        return None
    direction = "sideways" if other == own else "upward"
    return f"{where}: imports {direction}, from {item.target} (floor {other}) into floor {own}"


def _nearest(name: str, modules: set[str]) -> str:
    """The longest leading part of a dotted name that is a module of the package; the name itself outside it."""
    parts = name.split(".")
    return next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in modules), name)


@cache
def _parse_text(text: str) -> ast.Module:
    return ast.parse(text)


def _parse(file: Path) -> ast.Module:
    return _parse_text(file.read_text(encoding="utf-8"))
