"""Whether the checks were written to while a student's code ran, also where it was put back before the check looked.

CPython gives a dictionary a new version number with each write (PEP 509), and never an old one again. The variables of
a module, the attributes of a class and those of an object are dictionaries. From Python 3.14 on there are no such
numbers; then `fingerprint` sees what was not put back, and nothing else does.
Loaded privately, as `zygote` does it, this module is in no table of modules.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from ctypes import c_uint64

_VERSION = 24  # bytes: after the reference count, the type and the number of entries


def watcher(spaces: Iterable[tuple[str, dict]], shared: Iterable[tuple[str, dict]]) -> Callable[[], list[str]]:
    """A function that returns the names of the dictionaries that were written to since it was called last.

    spaces: nothing may be written to these. shared: these a library may write to as it is used (a submodule that is
    imported late); it counts where nothing in them has changed afterwards.
    """
    if not _are_counted():
        return list
    kept = [(name, _version(space), space, None) for name, space in spaces]
    kept += [(name, _version(space), space, space.copy()) for name, space in shared]
    before = [version.value for _, version, _, _ in kept]

    def written() -> list[str]:
        names = []
        for index, (name, version, space, content) in enumerate(kept):
            if (now := version.value) == before[index]:
                continue
            before[index] = now
            if content is None or (len(space) == len(content) and all(space[k] is content.get(k) for k in space)):
                names.append(name)
            else:
                content.clear()
                content.update(space)
        return names

    return written


def dict_of(kind: type) -> dict:
    """The attributes of a class as they are kept, and not the view of them that `vars` gives."""
    return next(one for one in gc.get_referents(vars(kind)) if type(one) is dict)


def _version(space: dict) -> c_uint64:
    return c_uint64.from_address(id(space) + _VERSION)


def _are_counted() -> bool:
    """Whether a value that is put back leaves another version: of a variable, of a class, of an object."""

    class Sample:
        kept = 1

    sample = Sample()
    sample.kept = 2
    for space, owner in ((dict_of(Sample), Sample), (vars(sample), sample)):
        version, before = _version(space), 0
        for _ in range(3):
            if version.value == before:
                return False
            before, old = version.value, owner.kept
            if version.value != before:
                return False
            owner.kept = None
            owner.kept = old
    return True
