"""Checks of chapter 07: a vote, the hash chain, a cached pool, a repaired cache, an order of service.
Built in chapter 07.

The references, and the mistakes they can make on purpose, are in `ch07_oracle`. `ch07_serving` has the last two.
"""

from __future__ import annotations

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch07_mistakes import CHAIN_MISTAKES
from minillm.book.checks.ch07_oracle import (
    PoolDrive,
    chain,
    story_of,
)
from minillm.book.checks.ch07_serving import check_repair_cache, check_serve_order

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
