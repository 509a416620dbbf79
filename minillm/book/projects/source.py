"""A submission as source: read from a file, checked name by name, run with few builtins. Built in chapter 25.

What is refused would let an answer reach the harness that scores it: other modules, the interpreter's frames,
attributes named in strings. The list of what is allowed is short, so an honest answer sees at once what it may use.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import itertools
import linecache
import sys
import types
from collections.abc import Iterator
from pathlib import Path

from minillm.book import nbfile
from minillm.book.projects.scoring import Project, Refused

ALLOWED: dict[str, tuple[str, ...] | None] = {
    "__future__": None,
    "bisect": None,
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "collections.abc": None,
    "dataclasses": ("astuple", "dataclass", "field", "replace"),
    "enum": ("Enum", "IntEnum"),
    "functools": ("cache", "cached_property", "cmp_to_key", "lru_cache", "partial", "reduce", "total_ordering"),
    "heapq": None,
    "itertools": None,
    "math": None,
    "random": ("Random",),
    "statistics": ("fmean", "mean", "median"),
    "typing": ("Any", "NamedTuple", "Protocol"),
}
REFUSED_NAMES = frozenset(
    "__import__ __builtins__ __loader__ __spec__ breakpoint compile delattr dir eval exec exit getattr globals help "
    "input locals memoryview open quit setattr vars".split()
)
REFUSED_ATTRIBUTES = frozenset(
    "ag_code ag_frame cr_code cr_frame cr_origin f_back f_builtins f_code f_globals f_locals f_trace gi_code gi_frame "
    "gi_yieldfrom tb_frame tb_next mro handle data numpy data_ptr untyped_storage storage item tolist".split()
)
ALLOWED_DUNDERS = frozenset({"__init__", "__post_init__"})
MAX_BYTES = 100_000
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef)


def read_source(path: Path, project: Project) -> str:
    """The submission's source: a whole .py file, or of a notebook the last code cell that defines `project.defines`
    and the cells right behind it that hold nothing but definitions.

    Raises ValueError naming the file where there is none.
    """
    path = Path(path)
    if path.suffix == ".py":
        return path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        raise ValueError(f"{path.name}: a submission is a .py file or a notebook")
    cells = [cell.source for cell in nbfile.read(path).cells if cell.cell_type == "code"]
    first = max((place for place, source in enumerate(cells) if project.defines in _defined(source)), default=None)
    if first is None:
        raise ValueError(f"{path.name}: no code cell defines {project.defines}, which project {project.name} asks for")
    return "\n\n\n".join([cells[first], *itertools.takewhile(_only_defines, cells[first + 1 :])])


def source_hash(source: str) -> str:
    """SHA-256 of the source in UTF-8, by which a leaderboard knows it."""
    return hashlib.sha256(source.encode()).hexdigest()


def load(source: str, project: Project) -> object:
    """The class or function that the source defines. Raises Refused, with the line, for what a source may not do."""
    if len(source.encode()) > MAX_BYTES:
        raise Refused(f"the source has {len(source.encode()):,} bytes; the limit is {MAX_BYTES:,}")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise Refused(f"the source is no Python: {error}") from error
    allowed = ALLOWED | project.imports
    for line, problem in sorted(_problems(tree, allowed)):
        raise Refused(f"line {line}: {problem}")
    name = f"<submission {source_hash(source)[:12]}>"
    module = types.ModuleType(f"submission_{source_hash(source)[:12]}")
    module.__dict__["__builtins__"] = _builtins(allowed)
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # where Triton reads a kernel
    sys.modules[module.__name__] = module  # where dataclasses look their module up
    try:
        exec(compile(tree, name, "exec"), module.__dict__)
    except Exception as error:
        raise Refused(f"the source raised {type(error).__name__}: {error}") from error
    if project.defines not in module.__dict__:
        raise Refused(f"the source does not define {project.defines}")
    return module.__dict__[project.defines]


def _defined(source: str) -> set[str]:
    """The functions and classes that a cell defines at its top."""
    return {node.name for node in _body(source) if isinstance(node, _DEFINITIONS)}


def _only_defines(source: str) -> bool:
    """Whether a cell holds definitions and imports, and at least one definition."""
    only = all(isinstance(node, (*_DEFINITIONS, ast.Import, ast.ImportFrom)) for node in _body(source))
    return only and bool(_defined(source))


def _body(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except SyntaxError:  # a cell with a magic, for example
        return []


def _problems(tree: ast.AST, allowed: dict[str, tuple[str, ...] | None]) -> Iterator[tuple[int, str]]:
    """(line, what is refused there)."""
    modules = _modules(tree, allowed)
    through = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name not in allowed or ("." in alias.name and not alias.asname):
                    yield line, f"import {alias.name} is not allowed; allowed: {', '.join(sorted(allowed))}"
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if node.level or not _may_take(node.module or "", alias.name, allowed):
                    yield line, f"from {node.module} import {alias.name} is not allowed"
        elif isinstance(node, ast.Name):
            if node.id in REFUSED_NAMES:
                yield line, f"{node.id} is not allowed"
            elif node.id in modules and (id(node) not in through or not isinstance(node.ctx, ast.Load)):
                yield line, f"the module {node.id} may only be used as {node.id}.name"
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in modules:
                if not isinstance(node.ctx, ast.Load):
                    yield line, f"{node.value.id}.{node.attr} may not be changed"
                elif not _may_take(modules[node.value.id], node.attr, allowed):
                    yield line, f"{modules[node.value.id]}.{node.attr} is not allowed"
            elif _is_inner(node.attr):
                yield line, f"the attribute {node.attr} is not allowed"
        elif isinstance(node, ast.MatchClass):
            for attribute in filter(_is_inner, node.kwd_attrs):
                yield line, f"the attribute {attribute} is not allowed"


def _modules(tree: ast.AST, allowed: dict[str, tuple[str, ...] | None]) -> dict[str, str]:
    """Name in the source -> the module that it stands for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module in allowed:
            home = importlib.import_module(node.module)
            for alias in node.names:
                if isinstance(taken := getattr(home, alias.name, None), types.ModuleType):
                    found[alias.asname or alias.name] = taken.__name__
    return found


def _is_inner(name: str) -> bool:
    dunder = name.startswith("__") and name.endswith("__") and name not in ALLOWED_DUNDERS
    return dunder or name in REFUSED_ATTRIBUTES


def _may_take(module: str, name: str, allowed: dict[str, tuple[str, ...] | None]) -> bool:
    """Whether a source may use `name` of `module`: a listed one, or any public one that is no module itself."""
    if module not in allowed or name.startswith("_") or name == "*":
        return False
    if allowed[module] is not None:
        return name in allowed[module]
    home = importlib.import_module(module)
    return hasattr(home, name) and not isinstance(getattr(home, name), types.ModuleType)


def _builtins(allowed: dict[str, tuple[str, ...] | None]) -> dict[str, object]:
    """Python's, less what was refused; imports reach the allowed modules only."""

    def guarded_import(name: str, globals=None, locals=None, fromlist=(), level=0):
        if name not in allowed or level:
            raise ImportError(f"import {name} is not allowed")
        return builtins.__import__(name, globals, locals, fromlist, level)

    kept = {name: value for name, value in vars(builtins).items() if name not in REFUSED_NAMES}
    return kept | {"__import__": guarded_import}
