"""Checks of chapter 18: a tree of drafts verified in one pass, and acceptance by position. Built in chapter 18."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minillm.book.checks import Draw, FunctionChecker

# --- 5: a tree in one pass


def verify_tree(
    parents: Sequence[int],
    tokens: Sequence[int],
    own: Sequence[int],
    length: int,
    *,
    causal: bool = False,
    itself: bool = True,
    text: bool = True,
    children: bool = False,
    by_place: bool = False,
    first_only: bool = False,
    lowest: bool = True,
    shifted: int = 0,
    skips: bool = False,
) -> tuple[np.ndarray, list[int], list[int]]:
    """Mask, positions and the accepted path. The keywords are mistakes."""
    count = len(parents)
    mask = np.zeros((count, length + count), dtype=bool)
    depths = []
    for node, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        mask[node, :length] = text
        if parent >= 0:
            mask[node, length:] = mask[parent, length:]
            mask[node, length + parent] = True
        mask[node, length + node] = itself
    if causal:
        mask[:, length:] = np.tri(count, dtype=bool)
    if children:
        mask[:, length:] = mask[:, length:].T
    positions = [length + node if by_place else length + depth + shifted for node, depth in enumerate(depths)]
    path, at = [], -1
    while True:
        wanted = own[at + 1] if not skips else own[max(at, 0)]
        found = [node for node, parent in enumerate(parents) if parent == at]
        found = found[:1] if first_only else found
        found = [node for node in found if tokens[node] == wanted]
        if not found:
            return mask, positions, path
        at = found[0 if lowest else -1]
        path.append(at)


def _random_tree(draw: Draw) -> tuple:
    count, length = draw.randint(0, 10), draw.randint(1, 6)
    parents = [draw.randint(-1, node) for node in range(count)]
    words = draw.rng.choice((2, 3, 9))
    tokens = [draw.randint(0, words) for _ in range(count)]
    own = [draw.randint(0, words) for _ in range(count + 1)]
    at = -1
    for _ in range(draw.randint(0, 4)):  # a path that is accepted for some way
        children = [node for node, parent in enumerate(parents) if parent == at]
        if not children:
            break
        node = draw.rng.choice(children)
        own[at + 1], at = tokens[node], node
    return parents, tokens, own, length


check_verify_tree = FunctionChecker(
    "verify_tree",
    verify_tree,
    returns=("mask", "positions", "path"),
    examples=[
        ([-1, -1, 0, 0, 2], [7, 8, 5, 6, 9], [7, 6, 1, 1, 4, 1], 3),
        ([-1, 0, 1], [4, 5, 6], [4, 5, 6, 7], 2),  # a chain, all of it accepted
    ],
    edges={
        "there is no draft": ([], [], [3], 4),
        "nothing is accepted": ([-1, -1], [1, 2], [3, 1, 2], 1),
        "a grandchild's token is wanted first": ([-1, 0], [1, 2], [2, 2, 2], 2),
        "two siblings are the same token": ([-1, -1, 0, 1], [5, 5, 6, 7], [5, 7, 7, 1, 1], 2),
        "the second child is the one": ([-1, 0, 0, 2], [5, 6, 7, 8], [5, 7, 1, 8, 9], 1),
        "the tree is not written level by level": ([-1, 0, 1, -1, 3, 0], [1, 2, 3, 4, 5, 6], [4, 1, 1, 1, 5, 9, 1], 2),
        "a wide tree": ([-1] * 6, [0, 1, 2, 3, 4, 5], [4, 0, 0, 0, 0, 9, 0], 3),
    },
    random=_random_tree,
    trials=80,
    hint="A token of the tree sees the text, its ancestors and itself; its position is its depth.",
    misconceptions={
        "Siblings and cousins continue other texts: a token sees its ancestors, not all tokens before it.": dict(
            causal=True
        ),
        "A token sees itself, too.": dict(itself=False),
        "Every token of the tree sees the whole text before the tree.": dict(text=False),
        "mask[i, j]: whether i sees j. Here the ancestors see their descendants.": dict(children=True),
        "A token's position is the text's length plus its depth, not its index in the list.": dict(by_place=True),
        "Tokens with parent -1 stand directly after the text: their position is its length.": dict(shifted=1),
        "All children of a node are candidates, not only the first.": dict(first_only=True),
        "Of children with the same token, the lowest index wins.": dict(lowest=False),
        "own[0] is the target's token after the text, own[i + 1] the one after token i.": dict(skips=True),
    },
)


# --- 6: acceptance by position


def by_position(
    traces: Sequence[tuple[int, int]],
    *,
    all_drafts: bool = False,
    mean: bool = False,
    own: int = 1,
    whole: bool = False,
    drafted: bool = False,
    unconditional: bool = False,
) -> tuple[list[float | None], float, float]:
    """Rates, tokens per step, and the prediction of one rate for all positions. The keywords are mistakes."""
    longest = max((length for length, _ in traces), default=0)
    rates: list[float | None] = []
    for place in range(longest):
        reached = [pair for pair in traces if pair[0] > place and (unconditional or pair[1] >= place)]
        if all_drafts:
            reached = list(traces)
        hits = sum(accepted > place for _, accepted in traces)
        rates.append(hits / len(reached) if reached else None)
    accepted = sum(count for _, count in traces)
    looked_at = accepted + sum(count < length for length, count in traces)
    if drafted:
        looked_at = sum(length for length, _ in traces)
    alpha = accepted / looked_at if looked_at else 0.0
    if mean:
        known = [rate for rate in rates if rate is not None]
        alpha = sum(known) / len(known) if known else 0.0
    lengths = [longest] * len(traces) if whole else [length for length, _ in traces]
    predicted = sum(sum(alpha**place for place in range(1 - own, length + 1)) for length in lengths)
    return rates, own + accepted / len(traces), predicted / len(traces)


def _random_traces(draw: Draw) -> tuple:
    longest, traces = draw.randint(1, 7), []
    rate = draw.rng.choice((0.3, 0.7, 0.95))
    for _ in range(draw.randint(1, 25)):
        length = draw.rng.choice((longest, draw.randint(0, longest + 1)))
        accepted = 0
        while accepted < length and draw.rng.random() < rate:
            accepted += 1
        traces.append((length, accepted))
    return (traces,)


check_by_position = FunctionChecker(
    "by_position",
    by_position,
    returns=("rates", "tokens_per_step", "predicted"),
    examples=[([(4, 4), (4, 1), (4, 0), (2, 2)],), ([(3, 2), (3, 3), (1, 0)],)],
    edges={
        "nothing was drafted": ([(0, 0), (0, 0)],),
        "all is accepted": ([(3, 3), (3, 3)],),
        "nothing is accepted": ([(3, 0), (2, 0)],),
        "no draft came to the last position": ([(4, 1), (4, 1)],),
        "drafts have several lengths": ([(1, 1), (5, 2), (3, 3), (2, 0), (5, 5)],),
        "a draft ended before a position that others reached": ([(1, 1), (1, 1), (3, 2)],),
        "one step": ([(1, 0)],),
    },
    random=_random_traces,
    atol=1e-9,
    rtol=1e-9,
    hint="At a position, a draft counts if it has this position and all its tokens before it were accepted.",
    misconceptions={
        "A draft whose first token is rejected says nothing about the second: count only checked tokens.": dict(
            unconditional=True
        ),
        "Divide by the draft tokens that were checked at this position, not by all drafts.": dict(all_drafts=True),
        "The one rate for all positions is accepted over checked, not the mean of the rates.": dict(mean=True),
        "The target's own token comes in every step, and counts.": dict(own=0),
        "Each draft has a length of its own; the prediction uses it.": dict(whole=True),
        "Draft tokens after the first rejection were not checked: they belong to no rate.": dict(drafted=True),
    },
)
