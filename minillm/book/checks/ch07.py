"""Checks of chapter 07: a vote, the hash chain, a cached pool, a repaired cache, an order of service.
Built in chapter 07.

The references, and the mistakes they can make on purpose, are in `ch07_oracle`.
"""

from __future__ import annotations

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch07_oracle import (
    CHAIN_MISTAKES,
    SERVE_MISTAKES,
    STORY,
    PoolDrive,
    chain,
    fewest_tokens,
    lives,
    serve,
    story_of,
)

__all__ = [
    "check_cached_pool",
    "check_prefix_hasher",
    "check_repair_cache",
    "check_serve_order",
    "check_vote",
    "story_of",
]

check_vote = Checker(
    "vote",
    hint="Count first. Log-probabilities decide between the answers with the most votes, and nowhere else.",
    forbid=("minillm.sampling.voting.self_consistency",),
)
check_prefix_hasher = Checker(
    "prefix_hasher",
    hint=(
        "hash of a block = SHA-256(its tokens, 4 bytes each, then the hash before); before the first one: "
        "SHA-256(salt)."
    ),
    forbid=(
        "minillm.kv_cache.prefix.hash_block",
        "minillm.kv_cache.prefix.root_hash",
        "minillm.kv_cache.prefix.extend_chain",
    ),
)
check_cached_pool = Checker(
    "cached_pool",
    hint=(
        "Out at the front; back from the last block of a table to the first, findable ones to the end, "
        "others to the front."
    ),
    forbid=("minillm.kv_cache.block_pool.BlockPool",),
)
check_repair_cache = Checker(
    "repair_cache",
    hint="A name may be found only while its block holds exactly the text that the name says.",
    forbid=("minillm.kv_cache.manager.KVCacheManager", "minillm.kv_cache.block_pool.BlockPool"),
)
check_serve_order = Checker(
    "serve_order", hint="Score of who waits: cached tokens + ageing · (clock - arrival); the greatest is served."
)


@check_vote.part("example")
def _vote_example(case: Case) -> None:
    case.equal(
        case.call([18, 20, 18, None], [-4.0, -1.0, -5.0, -0.5]),
        (18, 2),
        "the pair (answer, votes)",
        hint="18 has two votes, 20 has one.",
    )
    case.equal(
        case.call([18, 20, 18, 20], [-4.0, -2.0, -5.0, -6.0]),
        (20, 2),
        "the pair (answer, votes) of a tie",
        hint="Two votes each; 20 has -8 in total, 18 has -9, and -8 is more.",
    )


@check_vote.part("edges")
def _vote_edges(case: Case) -> None:
    case.equal(case.call([], []), (None, 0), "the pair (answer, votes) of no samples")
    case.equal(
        case.call([None, None], [-1.0, -2.0]),
        (None, 0),
        "the pair (answer, votes) where nothing could be read",
        hint="None is no answer.",
    )
    case.equal(
        case.call([None, None, None, 7], [-0.1, -0.1, -0.1, -9.0]),
        (7, 1),
        "the pair (answer, votes) with three unreadable samples",
        hint="None does not vote, however often it stands there.",
    )
    case.equal(
        case.call([0, 0, 5], [-3.0, -3.0, -1.0]),
        (0, 2),
        "the pair (answer, votes) with the answer 0",
        hint="0 is an answer like any other; only None means that none could be read.",
    )
    case.equal(
        case.call([3, 4, 3, 4], [-1.0, -3.0, -9.0, -3.0]),
        (4, 2),
        "the pair (answer, votes) of a tie",
        hint="The totals are -10 and -6. The single best sample, -1, does not count by itself.",
    )
    case.equal(
        case.call([3, 4, 4], [-1.0, -30.0, -30.0]),
        (4, 2),
        "the pair (answer, votes) of two improbable samples against one probable",
    )
    case.equal(
        case.call([9, 2, 2, 9], [-2.0, -1.0, -2.0, -1.0]),
        (2, 2),
        "the pair (answer, votes) of a tie with equal totals",
        hint="Equal votes, equal totals: the smaller answer wins.",
    )
    case.equal(case.call([-5, 3], [-2.0, -2.0]), (-5, 1), "the pair (answer, votes) of a tie with a negative answer")


@check_vote.part("random")
def _vote_random(case: Case) -> None:
    for _ in range(60):
        count = case.randint(1, 13)
        answers = [case.rng.choice((None, 0, 1, 2, 12, -3)) for _ in range(count)]
        logprobs = [-case.randint(1, 40) / 4 for _ in range(count)]  # quarters: sums are exact
        read = [answer for answer in answers if answer is not None]
        totals = {a: sum(p for b, p in zip(answers, logprobs) if b == a) for a in read}
        best = min(totals, key=lambda a: (-read.count(a), -totals[a], a), default=None)
        told = ", ".join(f"{a}: {read.count(a)} votes, {totals[a]:g}" for a in sorted(totals))
        case.equal(
            case.call(answers, logprobs),
            (best, read.count(best)),
            "the pair (answer, votes)",
            hint=f"{told or 'nothing was read'}.",
        )


@check_prefix_hasher.part("example")
def _hasher_example(case: Case) -> None:
    hasher = case.run(case.student, 2)
    hashes = _hashes(case, hasher, [1, 2, 3, 4, 5], 2, "")
    for known, expected in ((hashes, 4), (hashes[:1], 2), ([], 0)):
        _cached(case, hasher, [1, 2, 3, 4, 5], 2, "", set(known), expected)


@check_prefix_hasher.part("edges")
def _hasher_edges(case: Case) -> None:
    for token_ids, size, salt in (
        ([7, 8, 9], 4, ""),
        ([7, 8, 9, 10], 4, ""),
        ([], 4, ""),
        ([0, 1023, 128_255, 2**32 - 1], 1, ""),
        ([5, 5, 5, 5, 5, 5], 2, "Ana"),
        ([5, 5, 5, 5, 5, 5], 2, "Zoë"),
    ):
        _hashes(case, case.run(case.student, size, salt), token_ids, size, salt)
    plain, ana = case.run(case.student, 2), case.run(case.student, 2, "Ana")
    text, other = [1, 2, 3, 4, 5, 6], [9, 9, 3, 4, 5, 6]
    names = chain(text, 2, "")
    _cached(case, plain, text, 2, "", set(names), 4)
    _cached(case, plain, [*text, 7], 2, "", set(names), 6)
    _cached(case, plain, [*text[:5], 8], 2, "", set(names), 4)
    _cached(case, plain, [*text, 7], 2, "", {names[0], names[2]}, 2)
    _cached(case, plain, [*text, 7], 2, "", set(names[1:]), 0)
    _cached(case, plain, other, 2, "", set(names), 0)
    _cached(case, ana, [*text, 7], 2, "Ana", set(names), 0)
    _cached(case, ana, [*text, 7], 2, "Ana", set(chain(text, 2, "Ana")), 6)
    _cached(case, plain, text, 2, "", set(names), 4)  # the same object again: nothing of the last call may remain
    one = case.run(case.student, 1)
    for token_ids, expected in (([], 0), ([4], 0), ([4, 4], 1)):
        _cached(case, one, token_ids, 1, "", set(chain([4, 4], 1, "")), expected)


@check_prefix_hasher.part("random")
def _hasher_random(case: Case) -> None:
    for _ in range(40):
        size, salt = case.randint(1, 6), case.rng.choice(("", "Ana", "tenant 7"))
        token_ids = [case.randint(0, 3) for _ in range(case.randint(0, 25))]
        hasher, others = case.run(case.student, size, salt), chain([case.randint(0, 3) for _ in range(12)], size, salt)
        names = _hashes(case, hasher, token_ids, size, salt)
        known = set(names[: case.randint(0, len(names) + 1)]) | {h for h in names + others if case.rng.random() < 0.4}
        hits = next((i for i, h in enumerate(names) if h not in known), len(names))
        _cached(case, hasher, token_ids, size, salt, known, max(0, min(hits, (len(token_ids) - 1) // size)) * size)


def _hashes(case: Case, hasher: object, token_ids: list[int], size: int, salt: str) -> list[bytes]:
    got, expected = case.run(hasher.hashes, token_ids), chain(token_ids, size, salt)
    guesses = (
        told
        for told, mistake in CHAIN_MISTAKES.items()
        if got != expected and got == chain(token_ids, size, salt, mistake)
    )
    what, hint = f"the list of hashes of {token_ids}, block_size={size}, salt={salt!r}", next(guesses, None)
    if isinstance(got, list) and all(isinstance(block_hash, bytes) for block_hash in got):
        case.equal([h.hex() for h in got], [h.hex() for h in expected], f"{what}, in hexadecimal,", hint=hint)
    case.equal(got, expected, f"{what},", hint=hint)
    return expected


class Known(frozenset):
    """A set of hashes that is short to print."""

    def __repr__(self) -> str:
        return f"{{{', '.join(h.hex()[:4] + '…' for h in sorted(self)[:6])}}}"


def _cached(
    case: Case, hasher: object, token_ids: list[int], size: int, salt: str, known: set[bytes], expected: int
) -> None:
    got, names = case.run(hasher.cached_tokens, token_ids, Known(known)), chain(token_ids, size, salt)
    run = next((i for i, h in enumerate(names) if h not in known), len(names)) * size
    hint = None
    if got == len(token_ids) and got:
        hint = (
            "Everything is a hit, and no token is left to compute: then there are no logits to choose the "
            "next token from."
        )
    elif isinstance(got, int) and got % size:
        hint = "Only whole blocks are reused: if the last token must be computed, its whole block is."
    elif got == sum(h in known for h in names) * size and got > run:
        hint = "A hit ends at the first hash that is not known: keys and values behind a hole are of no use."
    elif any(
        got == sum(h in known for h in chain(token_ids, size, salt, m)) * size > run for m in ("no parent", "no salt")
    ):
        hint = (
            "These keys and values belong to another beginning, or to another salt: "
            "the hash before, and the salt, must be in the hash."
        )
    held = [h in known for h in names]
    case.equal(
        got,
        expected,
        f"cached_tokens of {token_ids}, block_size={size}, salt={salt!r}, its full blocks known: {held},",
        hint=hint,
    )


@check_cached_pool.part("example")
def _pool_example(case: Case) -> None:
    drive = PoolDrive(case, 4)
    drive.does("allocate", 3)
    drive.does("cache", 0, "a"), drive.does("cache", 1, "ab")
    drive.does("free", [0, 1, 2])  # 2 is not full: to the front; 1, then 0 to the end
    drive.does("hit", ["a", "ab", "abc"])
    drive.does("allocate", 1)


@check_cached_pool.part("edges")
def _pool_edges(case: Case) -> None:
    drive = PoolDrive(case, 5)
    drive.does("allocate", 0)
    drive.refuses("allocate", 6)
    drive.does("allocate", 5)
    for block, name in enumerate(("a", "ab", "abc", "x", "xy")):
        drive.does("cache", block, name)
    drive.does("free", [3, 4]), drive.does("free", [0, 1, 2])
    drive.does("hit", ["a", "ab"])  # out of the middle of the queue
    drive.does("hit", ["a"])  # block 0 has two owners now
    drive.does("free", [0, 1])  # it keeps one
    drive.refuses("free", [0, 1]), drive.refuses("free", [1, 0])  # 1 has none any more, and 0 keeps its own
    drive.does("hit", ["x", "?", "xy"])  # a hole
    drive.does("hit", [])
    drive.does("allocate", 2)
    drive.does("hit", ["xy"]), drive.does("hit", ["abc"])  # one of them was handed out, the other was not
    drive = PoolDrive(case, 4)
    drive.does("allocate", 4)
    # A second copy; a second hash.
    drive.does("cache", 0, "a"), drive.does("cache", 1, "a"), drive.does("cache", 0, "b")
    drive.does("free", [1, 2]), drive.does("free", [0]), drive.does("free", [3])
    drive.does("hit", ["a"]), drive.does("hit", ["b"]), drive.does("free", [0])
    drive.does("allocate", 4)
    drive.does("cache", 2, "a")  # free to take again: the block that had it was handed out
    drive.does("free", [0, 2])
    drive.does("hit", ["a"])


@check_cached_pool.part("random")
def _pool_random(case: Case) -> None:
    for _ in range(12):
        drive, tables = PoolDrive(case, case.randint(2, 9)), []
        for _ in range(30):
            text = case.rng.choice(("abcd", "abxy", "pqrs", "pq"))
            kind, names = case.rng.random(), [text[: i + 1] for i in range(len(text))]
            if kind < 0.3:
                hole = case.randint(0, 5) if case.rng.random() < 0.2 else 9
                tables.append(
                    drive.does("hit", [*names[:hole], "?", *names[hole:]] if hole < 9 else names[: case.randint(1, 5)])
                )
            elif kind < 0.6:
                tables.append(drive.does("allocate", case.randint(0, len(drive.right.order) + 1)))
            elif kind < 0.65:
                drive.refuses("allocate", len(drive.right.order) + case.randint(1, 4))
            elif kind < 0.85 and any(tables):
                owned = case.rng.choice([t for t in tables if t])
                for block, name in zip(owned[: case.randint(1, 5)], names):
                    drive.does("cache", block, name)
            elif tables:
                drive.does("free", tables.pop(case.randint(0, len(tables))))


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
