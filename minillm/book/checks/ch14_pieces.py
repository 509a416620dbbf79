"""Judges a list of operations that is cut into graphs and launches. Built in chapter 14."""

from __future__ import annotations

from minillm.book.checks import Draw, FunctionChecker

Run = tuple[str, int, int]  # ("graph" or "launched", first, the one after the last)


def pieces_of(
    ops: list[str],
    eager: set[str],
    views: set[str],
    least: int,
    *,
    counts_views: bool = False,
    merges: bool = True,
    more_than: bool = False,
    one_call: bool = False,
    views_call: bool = False,
    opens: bool = False,
    no_least: bool = False,
) -> tuple[list[Run], int]:
    """(runs, calls of the host); the switches are mistakes."""
    runs: list[Run] = []

    def launches(begin: int, end: int) -> int:
        return sum(counts_views or op not in views for op in ops[begin:end])

    def add(begin: int, end: int, recordable: bool) -> None:
        if begin == end:
            return
        count = launches(begin, end)
        kind = "graph" if recordable and (no_least or (count > least if more_than else count >= least)) else "launched"
        if merges and runs and runs[-1][0] == kind == "launched":
            runs[-1] = (kind, runs[-1][1], end)
        else:
            runs.append((kind, begin, end))

    begin = 0
    for at, op in enumerate(ops):
        if op in eager:
            add(begin, at, True)
            if opens:  # the mistake: what cannot be recorded opens the next graph
                begin = at
                continue
            add(at, at + 1, False)
            begin = at + 1
    add(begin, len(ops), True)
    calls = sum(
        1 if kind == "graph" or one_call else sum(views_call or op not in views for op in ops[begin:end])
        for kind, begin, end in runs
    )
    return runs, calls


def _some_ops(draw: Draw) -> tuple:
    names = ["mm", "add", "view", "attend", "norm", "item", "split"]
    ops = [draw.rng.choice(names) for _ in range(draw.randint(0, draw.rng.choice((6, 25))))]
    return ops, set(draw.rng.choice((["attend"], ["attend", "item"], []))), {"view", "split"}, draw.randint(1, 5)


_LAYER = ["norm", "mm", "view", "rotate", "attend", "mm", "add"]
check_cut_pieces = FunctionChecker(
    "cut_pieces",
    pieces_of,
    returns=("runs", "calls"),
    examples=[(_LAYER * 2, {"attend"}, {"view"}, 2), (["item", "mm", "attend", "add"], {"attend", "item"}, set(), 2)],
    edges={
        "there is no operation": ([], {"attend"}, {"view"}, 1),
        "everything can be recorded": (["mm", "add", "mm"], set(), set(), 1),
        "nothing can be recorded": (["attend", "attend"], {"attend"}, set(), 1),
        "a run has exactly `least` launches": (["mm", "view", "mm", "attend", "mm"], {"attend"}, {"view"}, 2),
        "a run has views only": (["attend", "view", "view", "attend", "mm"], {"attend"}, {"view"}, 1),
        "views stand at the ends of a run": (["view", "mm", "mm", "view", "attend"], {"attend"}, {"view"}, 3),
        "short runs stand between launches": (["mm", "attend", "mm", "attend", "mm", "mm"], {"attend"}, set(), 2),
        "a view cannot be recorded": (["mm", "item", "mm"], {"item"}, {"item"}, 1),
        "the list ends with a launch": (["mm", "mm", "attend"], {"attend"}, set(), 2),
    },
    random=_some_ops,
    trials=80,
    hint="Cut at every operation that cannot be recorded, count launches in each run between, merge neighbours.",
    misconceptions={
        "A view launches nothing: it does not count towards `least`.": dict(counts_views=True),
        "Neighbouring runs of launches are one run.": dict(merges=False),
        "A run with exactly `least` launches is worth a graph.": dict(more_than=True),
        "The host calls once for each launch outside of a graph.": dict(one_call=True),
        "A view outside of a graph costs no call.": dict(views_call=True),
        "What cannot be recorded is in no graph, the one that follows included.": dict(opens=True),
        "A run of fewer than `least` launches is not worth a graph.": dict(no_least=True),
    },
)
