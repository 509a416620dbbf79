"""What the source of a student's cell says before it runs: what is refused, and what a person should see."""

from __future__ import annotations

import ast
import contextlib
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from minillm.book.checks.origin import spelled
from minillm.course.grading.names import (
    ARRAY_NAMES,
    AUDITED,
    BY_NAME,
    ENUMS,
    LONGEST,
    OLD_NAMES,
    OPEN,
    PLAIN,
    PROCESS,
    REACH,
    REFUSED_MODULES,
    REFUSED_NAMES,
    REFUSED_OF,
    SETTINGS,
    SHOWS,
    TOLD_CALLS,
    TOLD_MODULES,
)
from minillm.course.grading.plan import UNREADABLE, many_magics, python_of
from minillm.course.grading.unspelled import is_built, unspelled


@dataclass(frozen=True)
class Finding:
    """One line of a cell. refused: the exercise earns nothing until a person accepts it."""

    line: int
    reason: str
    refused: bool


def look(
    source: str,
    answers: bool,
    checkers: Iterable[str],
    given: dict[str, set[str]],
    own: Collection[str] = (),
) -> list[Finding]:
    """What stands out in one cell, by line.

    answers: it is a solution cell; elsewhere only what is refused counts. checkers: the names of the checkers.
    given: module -> names that the notebook's locked cells import from it, which an answer may import again.
    own: names that the notebook gives to functions, classes and variables of its own, as `names_given` finds them.
    """
    if len(source) > LONGEST:
        return [Finding(1, f"is a cell of {len(source):,} characters, of which at most {LONGEST:,} are read", True)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(python_of(source))
        return _look(tree, answers, set(checkers), given, {*own, *_given_by(tree)})
    except RecursionError:
        return [Finding(1, "is nested more deeply than can be read before it runs", True)]
    except UNREADABLE:
        return [Finding(1, "has too many lines of magics to be read", True)] if many_magics(source) else []


def _look(
    tree: ast.Module, answers: bool, checkers: set[str], given: dict[str, set[str]], own: set[str]
) -> list[Finding]:
    asked = {  # "google.colab" in sys.modules
        id(comparator)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and all(isinstance(op, ast.In | ast.NotIn) for op in node.ops)
        for comparator in node.comparators
        if _dotted(comparator) == "sys.modules"
    }
    asked |= {  # the pieces of a string that is looked at as a whole
        id(side)
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
        for side in (node.left, node.right)
        if isinstance(side, ast.Constant | ast.BinOp)
    }
    asked |= {
        id(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
        and getattr(node, "id", getattr(node, "attr", "")) in own & AUDITED
    }
    found = {f for node in ast.walk(tree) if id(node) not in asked for f in _findings(node, checkers, given)}
    found |= {Finding(*one) for one in (*_patches(tree, own), *unspelled(tree))}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    if name := spelled((node.value for node in texts), ARRAY_NAMES):
        found.add(Finding(min(n.lineno for n in texts if n.value[1:] and n.value in name), REFUSED_NAMES[name], True))
    return sorted((f for f in found if f.refused or answers), key=lambda f: (f.line, not f.refused, f.reason))


def _findings(node: ast.AST, checkers: set[str], given: dict[str, set[str]]) -> Iterator[Finding]:
    for kind, judge in _JUDGES:
        if isinstance(node, kind):
            for reason, refused in judge(node, checkers, given):
                yield Finding(getattr(node, "lineno", 0), reason, refused)


Said = Iterator[tuple[str, bool]]


def _imports(node: ast.Import | ast.ImportFrom, checkers: set[str], given: dict[str, set[str]]) -> Said:
    if isinstance(node, ast.ImportFrom):
        module, names = node.module or "", {alias.name for alias in node.names}
        if names <= given.get(module, set()) or names <= OPEN.get(module, set()):
            return
        modules = {module, *(f"{module}.{name}" for name in names)}
        yield from ((REFUSED_NAMES[name], True) for name in names & REFUSED_NAMES.keys())
        yield from ((reason, True) for (of, name), reason in REFUSED_OF.items() if of == module and name in names)
    else:
        modules = {alias.name for alias in node.names} - given.keys() - {"minillm.book.checks"}
    yield from _of_modules(modules)


def _of_modules(modules: set[str]) -> Said:
    for known, refused in ((REFUSED_MODULES, True), (TOLD_MODULES, False)):
        yield from (
            (why, refused) for name, why in known.items() if any(f"{m}.".startswith(f"{name}.") for m in modules)
        )


def _attribute(node: ast.Attribute, checkers: set[str], given: dict[str, set[str]]) -> Said:
    if node.attr in REFUSED_NAMES:
        yield REFUSED_NAMES[node.attr], True
    if isinstance(node.value, ast.Name) and (reason := REFUSED_OF.get((node.value.id, node.attr))):
        yield reason, True
    if isinstance(node.value, ast.Name) and node.value.id == "checks" and node.attr != "last_call":
        yield REFUSED_MODULES["minillm.book.checks"], True
    if isinstance(node.value, ast.Name) and node.value.id in checkers:
        yield f"reads or changes the checker {node.value.id}", True
    if node.attr == "__code__":
        yield "looks at or replaces the code of a function", isinstance(node.ctx, ast.Store)
    if _dotted(node.value) == "minillm.book.checks" and node.attr not in OPEN["minillm.book.checks"]:
        yield REFUSED_MODULES["minillm.book.checks"], True


def _dotted(node: ast.expr) -> str:
    """`a.b.c` of names alone, as far as the longest that is refused; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute) and len(parts) < 3:
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _name(node: ast.Name, checkers: set[str], given: dict[str, set[str]]) -> Said:
    if node.id in REFUSED_NAMES:
        yield REFUSED_NAMES[node.id], True
    if node.id in checkers and not isinstance(node.ctx, ast.Load):
        yield f"puts something else in the place of the checker {node.id}", True
    if node.id == "__import__":
        yield "imports a module as a function does", False


def _call(node: ast.Call, checkers: set[str], given: dict[str, set[str]]) -> Said:
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    of_module = isinstance(node.func, ast.Attribute)
    if name in TOLD_CALLS and not (of_module and name in ("compile", "eval", "exec")):
        yield TOLD_CALLS[name], False
    if name in ("system", "popen", "_exit", "execv", "execve", "execvp", "spawnv", "posix_spawn") and of_module:
        yield PROCESS, False
    if name in BY_NAME and len(node.args) > 1 and is_built(node.args[1]):
        yield "looks up an attribute whose name is put together", False
    if name == "__import__":
        constant = node.args and isinstance(node.args[0], ast.Constant)
        if not constant:
            yield "imports a module under a name that is put together", True
        yield from _of_modules({str(node.args[0].value)} if constant else set())
    arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
    if name not in SHOWS and any(isinstance(a, ast.Name) and a.id in checkers for a in arguments):
        yield "hands a checker to another function", True


def _constant(node: ast.Constant | ast.BinOp, checkers: set[str], given: dict[str, set[str]]) -> Said:
    text = _text(node).strip("\n")
    if text in REFUSED_NAMES or text == "__code__":
        yield REFUSED_NAMES.get(text, REACH), True
    elif text and ("minillm.book.checks" in text or any(f".{name}" in text for name in REFUSED_NAMES)):
        yield f"has {text[:60]!r} in a string, which names what is refused as code", False


def _text(node: ast.expr) -> str:
    """A string that stands in the source, also in pieces: "_get" + "frame"."""
    pieces, waiting = [], [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            waiting += [node.right, node.left]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            pieces.append(node.value)
        else:
            pieces.append("\n")  # a part that is no constant
    return "".join(pieces)


def _class(node: ast.ClassDef, checkers: set[str], given: dict[str, set[str]]) -> Said:
    bases = {base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases}
    methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
    if bases & set(PLAIN) and not bases & set(ENUMS):
        yield f"makes a class of its own out of {', '.join(sorted(bases & set(PLAIN)))}", "__eq__" in methods
    for name, always in (
        ("__eq__", True),
        ("__ne__", False),
        ("__lt__", True),
        ("__le__", True),
        ("__contains__", True),
    ):
        if name in methods and _returns_only(methods[name], always):
            yield (
                f"compares in the same way with everything: {name} always returns {always}",
                name in ("__eq__", "__ne__"),
            )
    assigned = dict(filter(None, map(_assigned, node.body)))
    for name, value in assigned.items():
        if name in ("__eq__", "__ne__") and isinstance(value, ast.Lambda) and isinstance(value.body, ast.Constant):
            yield f"compares in the same way with everything: {name} always returns {value.body.value}", True
    if "__class__" in methods or "__class__" in assigned:
        yield "says that it is of another class", True


def _function(node: ast.FunctionDef, checkers: set[str], given: dict[str, set[str]]) -> Said:
    if node.name in checkers:
        yield f"puts something else in the place of the checker {node.name}", True
    if node.name in ("__reduce__", "__reduce_ex__", "__getattribute__"):
        yield f"defines {node.name}", False


def _pattern(node: ast.MatchClass, checkers: set[str], given: dict[str, set[str]]) -> Said:
    yield from ((REFUSED_NAMES[name], True) for name in node.kwd_attrs if name in REFUSED_NAMES)


def _returns_only(function: ast.FunctionDef, value: bool) -> bool:
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    return bool(returned) and all(isinstance(r, ast.Constant) and r.value is value for r in returned)


def _assigned(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id, statement.value
    return None


_JUDGES: tuple[tuple[type | tuple[type, ...], Callable[..., Said]], ...] = (
    ((ast.Import, ast.ImportFrom), _imports),
    (ast.Attribute, _attribute),
    (ast.Name, _name),
    (ast.Call, _call),
    ((ast.Constant, ast.BinOp), _constant),
    (ast.ClassDef, _class),
    ((ast.FunctionDef, ast.AsyncFunctionDef), _function),
    (ast.MatchClass, _pattern),
)


def names_given(sources: Iterable[str]) -> set[str]:
    """The names that cells give to functions, classes and variables of their own, none that they import."""
    found: set[str] = set()
    for source in sources:
        if len(source) <= LONGEST:
            with contextlib.suppress(*UNREADABLE), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.update(_given_by(ast.parse(python_of(source))))
    return found


def _given_by(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def _patches(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str, bool]]:
    """Assignments to the attributes of what is imported: `torch.allclose = ...`, `setattr(torch, "allclose", ...)`."""
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    } | ({"torch", "np", "numpy", "math", "random", "builtins", "minillm"} - own)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            root, path = node, []
            while isinstance(root, ast.Attribute):
                path.append(root.attr)
                root = root.value
            if isinstance(root, ast.Name) and root.id in imported and not SETTINGS & {*path}:
                old = len(path) == 1 and path[0] in OLD_NAMES and root.id in ("np", "numpy")
                name = ".".join([root.id, *reversed(path[:4])])
                yield node.lineno, f"replaces {name}, which the checks may call", not old
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            if node.args and isinstance(node.args[0], ast.Name) and node.args[0].id in imported:
                yield node.lineno, f"replaces an attribute of {node.args[0].id}, which the checks may call", True


def checkers_and_imports(given: Iterable[str]) -> tuple[set[str], dict[str, set[str]]]:
    """The checkers' names that the locked cells bind, and what these import: module -> names."""
    names: set[str] = set()
    imports: dict[str, set[str]] = {}
    for node in (node for source in given for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.ImportFrom):
            imports.setdefault(node.module or "", set()).update(alias.name for alias in node.names)
            names.update(alias.asname or alias.name for alias in node.names if alias.name.startswith("check_"))
        elif isinstance(node, ast.Import):
            imports.update({alias.name: set() for alias in node.names if alias.name not in imports})
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id.startswith("check_"):
            names.add(node.id)
    return names, imports
