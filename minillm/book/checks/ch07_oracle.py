"""References and drives of chapter 07's checks; the references make the usual mistakes on purpose. Built in chapter 07.

A checker lets a reference with one mistake run beside the right one. Where the student's object does exactly what the
mistaken one does, the failure can name the mistake.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import permutations

from minillm.book.checks import Case
from minillm.book.checks.ch07_mistakes import POOL_MISTAKES
from minillm.book.chips import Html, table


def chain(token_ids: Sequence[int], block_size: int, salt: str, mistake: str = "") -> list[bytes]:
    """The hashes of the full blocks, in the layout of the statement."""
    width, order = (8 if mistake == "8 bytes" else 4), ("big" if mistake == "big-endian" else "little")
    salted = salt.encode() if mistake != "no salt" else b""
    root = salted if mistake == "salt for root" else hashlib.sha256(salted).digest()
    hashes, parent = [], root
    for start in range(0, len(token_ids), block_size):
        own = token_ids[0 if mistake == "whole prefix" else start : start + block_size]
        if start + block_size > len(token_ids) and mistake != "partial":
            break
        tokens = b"".join(token.to_bytes(width, order) for token in own)
        if mistake == "salt in every block" and start:
            tokens += salted
        before = {"no parent": b"", "root": root}.get(mistake, parent)
        parent = hashlib.sha256(before + tokens if mistake == "parent first" else tokens + before).digest()
        hashes.append(parent)
    return hashes


class Pool:
    """The pool of the statement on one plain list; `mistake` is one of POOL_MISTAKES."""

    def __init__(self, num_blocks: int, mistake: str = "") -> None:
        self.mistake, self.order, self.ref_cnt = mistake, list(range(num_blocks)), [0] * num_blocks
        self.found: dict[object, int] = {}
        self.half_forgotten: set[int] = set()

    def named(self, block: int) -> bool:
        return block in self.found.values() or block in self.half_forgotten

    def allocate(self, count: int) -> list[int]:
        blocks = [self.order.pop(-1 if self.mistake == "most recent" else 0) for _ in range(count)]
        for block in blocks:
            self.ref_cnt[block] = 1
            if self.mistake == "half forgotten" and self.named(block):
                self.half_forgotten.add(block)
            if self.mistake != "hash stays":
                self.forget(block)
        return blocks

    def cache(self, block: int, block_hash: object) -> None:
        known = block_hash in self.found and self.mistake != "second copy wins"
        if not known and (not self.named(block) or self.mistake == "two hashes"):
            self.found[block_hash] = block

    def lookup(self, block_hash: object) -> int | None:
        return self.found.get(block_hash)

    def hit(self, hashes: Sequence[object]) -> list[int]:
        blocks = []
        for block_hash in hashes:
            block = self.lookup(block_hash)
            if block is None and self.mistake != "over the hole":
                break
            blocks += [] if block is None else [block]
        for block in blocks:
            if block in self.order and self.mistake != "hit stays in the queue":
                self.order.remove(block)
            self.ref_cnt[block] += self.mistake != "no owner on hit"
        return blocks

    def free(self, table: Sequence[int]) -> None:
        for block in table if self.mistake == "head first" else reversed(table):
            self.ref_cnt[block] = 0 if self.mistake == "one owner frees" else self.ref_cnt[block] - 1
            if self.ref_cnt[block] > 0 or block in self.order:
                continue
            if self.mistake == "hash goes early":
                self.forget(block)
            at_the_end = self.named(block) or self.mistake == "all to the end"
            self.order.insert(len(self.order) if at_the_end else 0, block)

    def forget(self, block: int) -> None:
        self.found = {block_hash: other for block_hash, other in self.found.items() if other != block}


class PoolDrive:
    """A student's pool, the right one, and the mistaken ones that nothing has told apart from the student's so far."""

    def __init__(self, case: Case, num_blocks: int) -> None:
        self.case, self.right, self.names, self.done = case, Pool(num_blocks), [], []
        self.pool = case.run(case.student, num_blocks)
        self.suspects = {hint: Pool(num_blocks, mistake) for hint, mistake in POOL_MISTAKES.items()}
        self.case.run(self.pool.free_order)
        self.compare(f"in a new pool of {num_blocks}", None, None)

    def does(self, method: str, *args: object) -> list[int]:
        self.names += [
            h for h in (args[-1:] if method == "cache" else args[0] if method == "hit" else ()) if h not in self.names
        ]
        self.done.append(f"{method}({', '.join(map(repr, args))})")
        expected = getattr(self.right, method)(*args)
        got = self.case.run(getattr(self.pool, method), *args)
        for hint, suspect in list(self.suspects.items()):
            try:
                said = getattr(suspect, method)(*args)
            except IndexError:  # its mistakes have left it without a block to give: nobody to compare with
                del self.suspects[hint]
                continue
            if (said, *self.seen(suspect, suspect.order)) != (got, *self.seen(self.pool, self.pool.free_order())):
                del self.suspects[hint]
        self.compare(f"after {' · '.join(self.done[-6:])}", got, expected)
        return list(expected or [])

    def refuses(self, method: str, *args: object) -> None:
        self.done.append(f"{method}({', '.join(map(repr, args))}) raised")
        told = "fewer blocks are free" if method == "allocate" else "one of these blocks has no owner"
        self.case.raises(ValueError, getattr(self.pool, method), *args, hint=f"{told}.")
        self.compare(
            f"after {self.done[-1]}, which must change nothing,",
            None,
            None,
            "Check everything first; change something only then.",
        )

    def compare(self, when: str, got: object, expected: object, hint: str | None = None) -> None:
        hint = hint or (next(iter(self.suspects), None) if self.done else None)
        if got is not None or expected is not None:
            self.case.equal(got, expected, f"what {self.done[-1].split('(')[0]} returned {when},", hint=hint)
        parts = ("free_order()", "ref_cnt", f"lookup() of {self.names}")
        for name, mine, right in zip(
            parts, self.seen(self.pool, self.pool.free_order()), self.seen(self.right, self.right.order)
        ):
            self.case.equal(mine, right, f"{name} {when}", hint=hint)

    def seen(self, pool: object, order: object) -> tuple:
        return order, list(pool.ref_cnt), [pool.lookup(name) for name in self.names]


class Names:
    """The repaired prefix cache of the debugging exercise; a block's name is the text up to its end."""

    def __init__(self, num_blocks: int) -> None:
        self.pool, self.tables, self.texts = list(range(num_blocks)), {}, {}
        self.owners, self.index = [0] * num_blocks, {}

    def admit(self, request: str, text: str) -> int:
        hits = []
        while (key := text[: 4 * len(hits) + 4]) in self.index and len(key) < len(text):
            hits.append(self.index[key])
        self.pool = [block for block in self.pool if block not in hits]
        fresh = [self.pool.pop(0) for _ in range(-(-len(text) // 4) - len(hits))]
        self.index = {key: block for key, block in self.index.items() if block not in fresh}
        self.tables[request], self.texts[request] = hits + fresh, text
        for block in hits + fresh:
            self.owners[block] += 1
        return 4 * len(hits)

    def computed(self, request: str, count: int) -> None:
        for number, block in enumerate(self.tables[request][: count // 4], 1):
            if block not in self.index.values():
                self.index.setdefault(self.texts[request][: 4 * number], block)

    def release(self, request: str) -> None:
        for block in reversed(self.tables.pop(request)):
            self.owners[block] -= 1
            self.pool += [] if self.owners[block] else [block]


_TABLE = (
    "Hits first, each with one owner more, then blocks from the front of the free list; "
    "a table goes back with its last block first. Of two copies the one named first keeps the name."
)


def lives(case: Case, num_blocks: int, events: list[tuple]) -> None:
    """Runs the events; after each admit, what is passed off as cached is compared with what was written there."""
    cache, right, held, texts, cached = case.run(case.student, num_blocks), Names(num_blocks), {}, {}, {}
    for number, (event, request, *rest) in enumerate(events, 1):
        told = f"event {number}, {event} {request} {' '.join(map(repr, rest))}".rstrip()
        if event == "computed":
            rest = [max(rest[0], cached[request])]  # what was cached counts as computed
            write(held, cache.tables[request], texts[request], rest[0])
        got, expected = case.run(getattr(cache, event), request, *rest), getattr(right, event)(request, *rest)
        if event != "admit":
            continue
        case.true(type(got) is int, f"{told}: admit returned {got!r}; it returns a number of characters")
        texts[request], cached[request], blocks = rest[0], expected, cache.tables[request]
        for index, block in enumerate(blocks[: got // 4]):
            lies, wanted = held.get(block), rest[0][4 * index : 4 * index + 4]
            case.true(
                lies == wanted,
                f"{told}: block {block} is passed off as {wanted!r}, but "
                + (f"holds {lies!r}" if lies else "nothing was ever written there"),
                hint="Who wrote into that block last, and when did it get, or keep, a name that does not fit?",
            )
        hint = (
            "Everything is cached, and nothing is left to compute: the last character always is."
            if got == len(rest[0])
            else None
        )
        hint = hint or ("What was computed, and is still there, must be found." if got < expected else None)
        case.equal(got, expected, f"{told}: the number of cached characters", hint=hint)
        case.equal(list(blocks), right.tables[request], f"{told}: its table", hint=_TABLE)


def write(held: dict[int, str], blocks: list[int], text: str, count: int) -> None:
    for index, block in enumerate(blocks[: -(-count // 4)]):
        held[block] = text[4 * index : min(4 * index + 4, count)]


STORY = [
    ("admit", "Ana", "Ana: who am I?"),
    ("computed", "Ana", 14),
    ("release", "Ana"),
    ("admit", "Bo", "Bo: my PIN: now 4711, ok"),
    ("computed", "Bo", 24),
    ("release", "Bo"),
    ("admit", "Ana", "Ana: who am I? And where?"),
    ("computed", "Ana", 25),
    ("release", "Ana"),
    ("admit", "Cy", "Cy and I went out"),
    ("computed", "Cy", 4),
    ("release", "Cy"),
    ("admit", "Di", "Cy and I went out"),
]


def story_of(cache_class: Callable, num_blocks: int = 7) -> Html:
    """Run a prefix cache through STORY beside a memory of characters, and show what it passes off as computed."""
    rows, cache, held, texts = [], cache_class(num_blocks), {}, {}
    for number, (event, request, *rest) in enumerate(STORY, 1):
        text = cached = ""
        if event == "admit":
            texts[request], count = rest[0], cache.admit(request, *rest)
            text = "|".join(rest[0][start : start + 4] for start in range(0, count, 4))
            cached = "|".join(held.get(block, "····") for block in cache.tables[request][: count // 4])
        elif event == "computed":
            cache.computed(request, *rest)
            write(held, cache.tables[request], texts[request], rest[0])
        told = " ".join([event, request, *map(repr, rest)])
        blocks = str(cache.tables[request]) if event != "release" else ""
        rows.append([number, told, blocks, text, cached if event == "admit" else "", "WRONG" if cached != text else ""])
        if event == "release":
            cache.release(request)
    return table(rows, ["", "event", "its blocks", "said to be cached", "what lies there", ""])


def serve(
    prompts: Sequence[Sequence[int]],
    arrivals: Sequence[int],
    block_size: int,
    capacity: int,
    ageing: float,
    order: Iterable[int] | None = None,
    mistake: str = "",
) -> list[tuple[int, int, int]]:
    """(index, start, computed tokens) of each prompt, by the rule of the statement, or in a given order."""
    cache: list[tuple[int, ...]] = []  # prefixes that end at a block's end, the least recently used first
    left, served, clock, given = list(range(len(prompts))), [], 0, iter(order or ())
    ageing, ties, matters = (
        Fraction(0 if mistake == "no ageing" else ageing),
        -1 if mistake != "late ties" else 1,
        mistake != "only ageing",
    )

    def cached(prompt: Sequence[int]) -> int:
        blocks, last = 0, len(prompt) - (mistake != "full hit")
        while (blocks + 1) * block_size <= last and tuple(prompt[: (blocks + 1) * block_size]) in cache:
            blocks += 1
        return blocks * block_size

    while left:
        clock = max(clock, min(arrivals[i] for i in left))
        waiting = [i for i in left if arrivals[i] <= clock or mistake == "not there yet"]
        scores = {
            i: (matters * cached(prompts[i]) + ageing * (clock - arrivals[i]), ties * arrivals[i], ties * i)
            for i in waiting
        }
        index = max(waiting, key=scores.get) if order is None else next(given)
        computed = len(prompts[index]) - cached(prompts[index])
        own = [
            tuple(prompts[index][:end])
            for end in range(block_size, len(prompts[index]) + (block_size if mistake == "partial" else 1), block_size)
        ]
        kept = [key for key in cache if key not in own or mistake == "no touch"]
        new = [key for key in own if key not in kept]
        cache = kept + (new if mistake == "head first" else new[::-1])
        if mistake != "no eviction":
            cache = cache[:capacity] if mistake == "most recent" else cache[-capacity:]
        served.append((index, clock, computed))
        clock += computed
        left.remove(index)
    return served


def fewest_tokens(prompts: Sequence[Sequence[int]], block_size: int, capacity: int) -> int:
    """Computed tokens of the best of all orders, when every prompt is there from the start."""
    there = [0] * len(prompts)
    return min(
        sum(row[2] for row in serve(prompts, there, block_size, capacity, 0, order))
        for order in permutations(range(len(prompts)))
    )
