"""Checks of chapter 07: a vote, the hash chain, a cached pool, a repaired cache, an order of service, a bill.
Built in chapter 07.

`ch07_pool` has the pool, `ch07_repaired` the repaired cache, `ch07_serving` the order of service, `ch07_bill` the bill.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

from minillm.book.checks import Case, Checker, Draw, FunctionChecker
from minillm.book.checks.ch07_bill import check_agent_bill
from minillm.book.checks.ch07_pool import check_cached_pool
from minillm.book.checks.ch07_repaired import check_repair_cache, story_of
from minillm.book.checks.ch07_serving import check_serve_order

__all__ = [
    "check_agent_bill",
    "check_cached_pool",
    "check_prefix_hasher",
    "check_repair_cache",
    "check_serve_order",
    "check_vote",
    "story_of",
]

# 1 · a vote


def elected(
    answers, logprobs, *, rank=lambda votes, total, answer: (votes, total, -answer), total=sum,
    readable=lambda answer: answer is not None,
) -> tuple[int | None, int]:  # fmt: skip
    read = [answer for answer in answers if readable(answer)]
    totals = {one: total([p for answer, p in zip(answers, logprobs) if answer == one]) for one in dict.fromkeys(read)}
    best = max(totals, key=lambda one: rank(read.count(one), totals[one], one or 0), default=None)
    return best, read.count(best)


def _explain_vote(got, expected, answers, logprobs) -> str:
    read = sorted({answer for answer in answers if answer is not None})
    totals = {one: sum(p for answer, p in zip(answers, logprobs) if answer == one) for one in read}
    return f"{', '.join(f'{one}: {answers.count(one)} votes, {totals[one]:g}' for one in read) or 'No sample votes'}."


def _random_samples(draw: Draw) -> tuple:
    count = draw.randint(1, 13)
    answers = [draw.rng.choice((None, 0, 1, 2, 12, -3)) for _ in range(count)]
    return answers, [-draw.randint(1, 40) / 4 for _ in range(count)]  # quarters: sums are exact


check_vote = FunctionChecker(
    "vote",
    elected,
    hint="Count first. Log-probabilities decide only between the answers with the most votes.",
    examples=[
        ([18, 20, 18, None], [-4.0, -1.0, -5.0, -0.5]),
        ([18, 20, 18, 20], [-4.0, -2.0, -5.0, -6.0]),  # 18 has -9 in total, 20 has -8
    ],
    edges=[
        # Seven answers have two votes: each mistake in the tie-break chooses another one.
        (
            [7, 3, 9, 5, 1, 12, -2, 2, 7, 3, 9, 5, 1, -2, 12],
            [-5.0, -2.0, -9.0, -3.125, -20.0, -6.0, -7.0, -0.5, -5.0, -2.0, -1.0, -1.125, -20.0, -7.0, -6.0],
        ),
        ([4, -5, 6, 3], [-2.0, -2.0, -2.0, -2.0]),
        ([], []),
        ([None, None], [-1.0, -2.0]),
        ([None, None, None, 7], [-0.1, -0.1, -0.1, -9.0]),
        ([0, 0, 5], [-3.0, -3.0, -1.0]),
        ([3, 4, 3, 4], [-1.0, -3.0, -9.0, -3.0]),
        ([3, 4, 4], [-1.0, -30.0, -30.0]),
        ([9, 2, 2, 9], [-2.0, -1.0, -2.0, -1.0]),  # equal votes, equal totals
        ([-5, 3], [-2.0, -2.0]),
        ([3, 5], [-2.0 - 2**-30, -2.0]),  # near is not equal
        ([1, 2, 1, 2], [-400.0, -900.0, -800.0, -300.0]),  # no probability is greater than 0 in floating point
    ],
    random=_random_samples,
    trials=60,
    returns=("the answer", "its votes"),
    misconceptions={
        "None is no answer, however often it occurs.": dict(readable=lambda answer: True),
        "0 is an answer like any other.": dict(readable=bool),
        "The answer with the most votes wins, however improbable.": dict(
            rank=lambda votes, total, answer: (total, votes, -answer)
        ),
        "Ties: first the greater sum of log-probabilities (-8 is greater than -9), then the smaller answer.": dict(
            rank=lambda votes, total, answer: votes
        ),
        "The sum of the log-probabilities counts, not the best single sample.": dict(total=max),
        "Log-probabilities are added as they are; their exponentials are not.": dict(
            total=lambda logprobs: sum(2.718281828459045**p for p in logprobs)
        ),
        "Of two sums of log-probabilities the greater one wins: the more probable answer.": dict(
            rank=lambda votes, total, answer: (votes, -total, -answer)
        ),
        "Equal votes, equal sums: the smaller answer wins.": dict(
            rank=lambda votes, total, answer: (votes, total, answer)
        ),
        "Equal votes, equal sums: the smaller answer wins, and -5 is smaller than 3.": dict(
            rank=lambda votes, total, answer: (votes, total, -abs(answer), -answer)
        ),
    },
    explain=_explain_vote,
    forbid=("minillm.sampling.voting.self_consistency",),
)

# 2 · the chain of hashes


class Hasher:
    """The hasher of the statement; `mistake` is one of _MISTAKES."""

    def __init__(self, block_size: int, salt: str = "", mistake: str = "") -> None:
        self.size, self.mistake = block_size, mistake
        self.salt = salt.encode() if mistake != "no salt" else b""
        self.root = self.salt if mistake == "salt for root" else hashlib.sha256(self.salt).digest()

    def hashes(self, token_ids: Sequence[int]) -> list[bytes]:
        width, order = (8 if self.mistake == "8 bytes" else 4), ("big" if self.mistake == "big-endian" else "little")
        hashes, parent = [], self.root
        for start in range(0, len(token_ids), self.size):
            own = token_ids[0 if self.mistake == "whole prefix" else start : start + self.size]
            if start + self.size > len(token_ids) and self.mistake != "partial":
                break
            tokens = b"".join(token.to_bytes(width, order) for token in own)
            if self.mistake == "salt in every block" and start:
                tokens += self.salt
            before = {"no parent": b"", "root": self.root}.get(self.mistake, parent)
            both = before + tokens if self.mistake == "parent first" else tokens + before
            parent = hashlib.sha256(both).digest()
            hashes.append(parent)
        return hashes

    def cached_tokens(self, token_ids: Sequence[int], known: set[bytes]) -> int:
        held = [block_hash in known for block_hash in self.hashes(token_ids)]
        hits = sum(held) if self.mistake == "hole" else [*held, False].index(False)
        if self.mistake in ("full hit", "cap"):
            return min(hits * self.size, max(0, len(token_ids) - (self.mistake == "cap")))
        return min(hits, max(0, len(token_ids) - 1) // self.size) * self.size


_MISTAKES = {
    "A hash covers only the tokens of its own block. Without the hash before, the same block after another beginning "
    "is a hit, and these keys and values belong to another beginning.": "no parent",
    "Every block is hashed with the root; hash it with the hash of the block before.": "root",
    "The salt is missing: two users with the same text share their blocks.": "no salt",
    "The salt is hashed in every block; it belongs in the root only.": "salt in every block",
    "There is a hash for the last block although it is not full.": "partial",
    "The hash before comes first in your bytes; here the tokens come first, then the hash before.": "parent first",
    "Your tokens take 8 bytes each, here they take 4.": "8 bytes",
    "Your tokens are written with the highest byte first (big-endian), here the lowest comes first.": "big-endian",
    "Each hash covers the tokens of the whole text so far; here it covers those of its block.": "whole prefix",
    "The first block is hashed with the salt itself, not with the SHA-256 of the salt.": "salt for root",
    "All tokens are hits, and no token is left to compute: then there are no logits for the next token.": "full hit",
    "Only whole blocks are reused: if the last token must be computed, its whole block is.": "cap",
    "A hit ends at the first hash that is not known: blocks behind it do not count.": "hole",
}
check_prefix_hasher = Checker(
    "prefix_hasher",
    hint="The hash of a block is SHA-256(its tokens, 4 bytes each, then the hash before); the first is SHA-256(salt).",
    misconceptions={hint: partial(Hasher, mistake=mistake) for hint, mistake in _MISTAKES.items()},
    forbid=tuple(f"minillm.kv_cache.prefix.{name}" for name in ("hash_block", "root_hash", "extend_chain")),
)


def _hashes(case: Case, hasher: object, token_ids: list[int], size: int, salt: str) -> list[bytes]:
    got, expected = case.run(hasher.hashes, token_ids), Hasher(size, salt).hashes(token_ids)
    what = f"the list of hashes of {token_ids}, block_size={size}, salt={salt!r},"
    if type(got) is list and all(type(block_hash) is bytes for block_hash in got):
        case.equal([h.hex() for h in got], [h.hex() for h in expected], f"{what} in hexadecimal,")
    case.equal(got, expected, what)
    return expected


def _cached(case: Case, hasher: object, token_ids: list[int], size: int, salt: str, known: Sequence[bytes]) -> None:
    right = Hasher(size, salt)
    held = [block_hash in known for block_hash in right.hashes(token_ids)]
    case.equal(
        case.run(hasher.cached_tokens, token_ids, set(known)),
        right.cached_tokens(token_ids, set(known)),
        f"cached_tokens of {token_ids}, block_size={size}, salt={salt!r}, its full blocks known: {held},",
    )


@check_prefix_hasher.part("example")
def _hasher_example(case: Case) -> None:
    hasher, text = case.run(case.student, 2), [1, 2, 3, 4, 5]
    hashes = _hashes(case, hasher, text, 2, "")
    for known in (hashes, hashes[:1], []):
        _cached(case, hasher, text, 2, "", known)


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
    text, other, names = [1, 2, 3, 4, 5, 6], [9, 9, 3, 4, 5, 6], Hasher(2).hashes([1, 2, 3, 4, 5, 6])
    _cached(case, plain, text, 2, "", names)
    _cached(case, plain, [*text, 7], 2, "", names)
    _cached(case, plain, [*text[:5], 8], 2, "", names)
    _cached(case, plain, [*text, 7], 2, "", [names[0], names[2]])
    _cached(case, plain, [*text, 7], 2, "", names[1:])
    _cached(case, plain, other, 2, "", names)
    _cached(case, ana, [*text, 7], 2, "Ana", names)
    _cached(case, ana, [*text, 7], 2, "Ana", Hasher(2, "Ana").hashes(text))
    _cached(case, plain, text, 2, "", names)  # the same object again: nothing of the last call may remain
    _hashes(case, plain, [1, 2, 9, 9, 5, 6], 2, "")  # as long as the text before, and with the same first block
    one = case.run(case.student, 1)
    for token_ids in ([], [4], [4, 4]):
        _cached(case, one, token_ids, 1, "", Hasher(1).hashes([4, 4]))
    _hashes(case, plain, other, 2, "")  # another hasher has another block size, this one keeps its own


@check_prefix_hasher.part("random")
def _hasher_random(case: Case) -> None:
    for _ in range(25):
        size, salt = case.randint(1, 6), case.rng.choice(("", "Ana", "user 7"))
        hasher = case.run(case.student, size, salt)
        for _ in range(2):  # one object serves any number of texts
            token_ids = [case.randint(0, 3) for _ in range(case.randint(0, 25))]
            names = _hashes(case, hasher, token_ids, size, salt)
            others = Hasher(size, salt).hashes([case.randint(0, 3) for _ in range(12)])
            known = names[: case.randint(0, len(names) + 1)] + [h for h in names + others if case.rng.random() < 0.4]
            _cached(case, hasher, token_ids, size, salt, known)
