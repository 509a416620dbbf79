"""How pytest-xdist shares the tests out: file by file, which keeps what a file's fixtures built,
and notebooks one by one.

A notebook takes up to 45 s and shares nothing with another. As one file they would be a third of all the time;
one by one they are what is left at the end, when the files are done, so that both workers finish together.
"""

from __future__ import annotations

ONE_BY_ONE = ("book/test_notebooks.py", "book/test_exercises.py")


def scope_of(nodeid: str) -> str:
    """What a worker runs at once: a file, or one test of those that share nothing."""
    file = nodeid.split("::", 1)[0]
    return nodeid if file.endswith(ONE_BY_ONE) else file


def file_scheduler(config, log):
    """The scheduler of `--dist loadfile`, with these scopes."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return Scheduling(config, log)
