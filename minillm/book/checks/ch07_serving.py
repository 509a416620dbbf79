"""Checks of chapter 07: a repaired prefix cache, and an order of service. Built in chapter 07."""

from __future__ import annotations

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch07_mistakes import SERVE_MISTAKES
from minillm.book.checks.ch07_oracle import (
    STORY,
    fewest_tokens,
    lives,
    serve,
)

check_repair_cache = Checker(
    "repair_cache",
    hint="A name may be found only while its block holds exactly the text that the name says.",
    forbid=("minillm.kv_cache.manager.KVCacheManager", "minillm.kv_cache.block_pool.BlockPool"),
)
check_serve_order = Checker(
    "serve_order", hint="Score of who waits: cached tokens + ageing · (clock - arrival); the greatest is served."
)


@check_repair_cache.part("example")
def _repair_example(case: Case) -> None:
    lives(case, 7, STORY)


@check_repair_cache.part("edges")
def _repair_edges(case: Case) -> None:
    a, b = "0123456789", "01234567xyz"
    # A full hit.
    lives(case, 6, [("admit", "A", "01234567"), ("computed", "A", 8), ("release", "A"), ("admit", "B", "01234567")])
    lives(
        case,
        6,
        [
            ("admit", "A", a),
            ("admit", "B", b),
            ("computed", "A", 10),
            ("computed", "B", 11),
            ("release", "A"),
            ("release", "B"),
            ("admit", "C", a),
            ("release", "C"),
            ("admit", "D", "something else here"),
            ("release", "D"),
            ("admit", "E", b),
        ],
    )
    lives(
        case,
        9,
        [
            ("admit", "A", a),
            ("admit", "B", a),
            ("computed", "B", 10),
            ("computed", "A", 10),
            ("release", "B"),
            ("admit", "C", "p" * 12),
            ("computed", "C", 12),
            ("admit", "D", a),
            ("release", "A"),
            ("release", "C"),
            ("admit", "E", "q" * 15),
            ("admit", "F", a),
        ],
    )
    lives(
        case,
        4,
        [
            ("admit", "A", a),
            ("computed", "A", 3),
            ("computed", "A", 7),
            ("computed", "A", 9),
            ("release", "A"),
            ("admit", "A", a),
            ("computed", "A", 10),
            ("admit", "B", "0123"),
        ],
    )
    lives(
        case, 9, [("admit", "A", a), ("computed", "A", 3), ("admit", "B", a), ("computed", "A", 7), ("admit", "C", a)]
    )  # half a block
    lives(
        case,
        5,
        [
            ("admit", "A", a),
            ("computed", "A", 8),
            ("admit", "B", b),
            ("release", "A"),
            ("admit", "C", "zzzz"),
            ("computed", "C", 4),
            ("release", "B"),
            ("admit", "D", b),
        ],
    )


@check_repair_cache.part("random")
def _repair_random(case: Case) -> None:
    for _ in range(20):
        num_blocks, events, live, texts = (
            case.randint(5, 10),
            [],
            {},
            ["abcdabcdabcd", "abcdabcdxy", "pqrspqrs", "abcd", "pqrsabcdabcdabcd"],
        )
        free = num_blocks
        for number in range(30):
            text = case.rng.choice(texts)
            # Hits need fewer; this many suffice whatever is shared.
            if case.rng.random() < 0.45 and -(-len(text) // 4) <= free:
                events.append(("admit", f"r{number}", text))
                live[f"r{number}"] = (text, -(-len(text) // 4), 0)
                free -= live[f"r{number}"][1]
            elif live and case.rng.random() < 0.6:
                name = case.rng.choice(sorted(live))
                text, blocks, count = live[name]
                live[name] = (text, blocks, case.randint(count, len(text) + 1))
                events.append(("computed", name, live[name][2]))
            elif live:
                name = case.rng.choice(sorted(live))
                events.append(("release", name))
                free += live.pop(name)[1]
        lives(case, num_blocks, events)


@check_serve_order.part("example")
def _order_example(case: Case) -> None:
    chats = [[1, 2, 3, 4, 5], [7, 7, 7, 7, 7], [1, 2, 3, 4, 6]]
    _served(case, chats, [0, 0, 0], 2, 4, 0)  # the third one overtakes the second, whose prefix nobody has computed
    _served(case, chats, [0, 0, 4], 2, 4, 2)  # it came 4 later: 4 tokens cached, 2 a unit of time for the other


@check_serve_order.part("edges")
def _order_edges(case: Case) -> None:
    _served(case, [[1]], [0], 4, 1, 0)
    _served(case, [[1, 2, 3], [4]], [50, 7], 1, 3, 1)  # the clock jumps
    _served(case, [[1, 2, 3, 4], [9], [1, 2, 3, 4], [1, 2, 3, 4]], [0, 0, 0, 0], 2, 2, 0)  # a full hit still computes
    _served(case, [[1, 2], [1, 2, 3], [5, 6], [5, 6, 7]], [3, 0, 0, 1], 2, 1, 0)  # room for one block
    _served(case, [[1, 1, 9], [2, 2, 9], [2, 2, 8], [1, 1, 8]], [0, 1, 4, 5], 2, 1, 0)
    # Heads outlive tails.
    _served(case, [[1, 2, 3, 4, 5, 6, 7], [8, 8, 8], [1, 2, 9], [1, 2, 3, 4, 5, 6, 9]], [0] * 4, 2, 3, 0)
    # And tails go.
    _served(case, [[1, 2, 3, 4, 5, 6, 10], [8, 8, 11], [1, 2, 12], [1, 2, 3, 4, 5, 6, 13]], [0, 0, 9, 11], 2, 3, 0)
    # Used again, so kept.
    _served(case, [[1, 1, 9], [2, 2, 9], [1, 1, 8], [3, 3, 9], [1, 1, 7]], [0, 1, 5, 6, 9], 2, 2, 0)
    _served(case, [[3, 3, 3], [4, 4, 4], [3, 3, 5]], [2, 1, 0], 1, 3, 0)  # ties go to who came first
    _served(case, [[1] * 9, *([[1] * 8 + [2 + i] for i in range(6)]), [5, 5]], [0, *range(0, 12, 2), 1], 4, 4, 1)
    for _ in range(4):  # no prompt is the beginning of another: then no order at all computes fewer tokens
        prompts = [[*case.rng.choice(([1, 1, 1, 1], [1, 1, 2, 2], [3, 3], [3, 3, 1, 1], [])), 10 + i] for i in range(5)]
        got, best = _served(case, prompts, [0] * 5, 2, 2, 0), fewest_tokens(prompts, 2, 2)
        case.equal(sum(row[2] for row in got), best, "the sum of computed tokens, against the best of all 120 orders,")


@check_serve_order.part("random")
def _order_random(case: Case) -> None:
    for _ in range(25):
        size, prompts = case.randint(1, 4), []
        for _ in range(case.randint(1, 9)):
            base = case.rng.choice(prompts) if prompts and case.rng.random() < 0.7 else []
            prompts.append(
                [*base[: case.randint(0, len(base) + 1)], *(case.randint(0, 3) for _ in range(case.randint(1, 7)))]
            )
        arrivals = [case.randint(0, case.rng.choice((1, 40))) for _ in prompts]
        capacity = max(1, *(len(prompt) // size for prompt in prompts), 1) + case.randint(0, 4)
        _served(case, prompts, arrivals, size, capacity, case.rng.choice((0, 0.25, 0.5, 1, 4)))


def _served(
    case: Case, prompts: list[list[int]], arrivals: list[int], size: int, capacity: int, ageing: float
) -> list[tuple]:
    got, right = case.call(prompts, arrivals, size, capacity, ageing), serve(prompts, arrivals, size, capacity, ageing)
    case.true(
        isinstance(got, list) and all(len(row) == 3 for row in got),
        "the result must be a list of (index, start, computed tokens)",
    )
    case.equal(
        sorted(row[0] for row in got),
        list(range(len(prompts))),
        "the sorted list of indices served",
        hint="Everybody is served, once.",
    )
    hint = None
    for place, (mine, expected) in enumerate(zip(got, right)):
        told = (
            f"row {place} (index, start, computed tokens) of {len(right)}; "
            f"arrivals {arrivals}, block_size={size}, capacity={capacity}, ageing={ageing};"
        )
        if tuple(mine) != expected:
            same = (
                m
                for m, mistake in SERVE_MISTAKES.items()
                if got == serve(prompts, arrivals, size, capacity, ageing, mistake=mistake)
            )
            hint = (
                f"{next(same, check_serve_order.hint)} Here prompt {expected[0]} is {prompts[expected[0]]}; "
                f"served before it: {[row[0] for row in right[:place]]}."
            )
        case.equal(tuple(mine), expected, told, hint=hint)
    return got
