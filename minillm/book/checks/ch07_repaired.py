"""Checks of chapter 07: a repaired prefix cache. Built in chapter 07."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from minillm.book.checks import Case, Checker, Draw
from minillm.book.chips import Html, table

check_repair_cache = Checker(
    "repair_cache",
    hint="A name may be found only while its block holds exactly the text that the name says.",
    forbid=("minillm.kv_cache.manager.KVCacheManager", "minillm.kv_cache.block_pool.BlockPool"),
)
_TABLE = (
    "Hits come first, and each gets one more owner; then blocks from the front of the free list; "
    "a table is released with its last block first. Of two copies the one named first keeps the name."
)


class Names:
    """The repaired prefix cache; a block's name is the text up to its end.

    copies: when a copy takes the name of a block that is allocated again: "later", when its request computes on, "at
    once", or "never". The statement leaves it open.
    """

    def __init__(self, num_blocks: int, copies: str = "later") -> None:
        self.pool, self.tables, self.texts = list(range(num_blocks)), {}, {}
        self.owners, self.index, self.copies = [0] * num_blocks, {}, copies
        self.holds: dict[int, str] = {}  # the text up to its end of each block that is computed

    def admit(self, request: str, text: str) -> int:
        hits = []
        while (key := text[: 4 * len(hits) + 4]) in self.index and len(key) < len(text):
            hits.append(self.index[key])
        self.pool = [block for block in self.pool if block not in hits]
        fresh = [self.pool.pop(0) for _ in range(-(-len(text) // 4) - len(hits))]
        self.holds = {block: key for block, key in self.holds.items() if block not in fresh}
        self.index = {key: block for key, block in self.index.items() if block not in fresh}
        for block, key in self.holds.items() if self.copies == "at once" else ():
            self.index.setdefault(key, block)
        self.tables[request], self.texts[request] = hits + fresh, text
        for block in hits + fresh:
            self.owners[block] += 1
        return 4 * len(hits)

    def computed(self, request: str, count: int) -> None:
        for number, block in enumerate(self.tables[request][: count // 4], 1):
            is_new, self.holds[block] = block not in self.holds, self.texts[request][: 4 * number]
            if (is_new or self.copies == "later") and block not in self.index.values():
                self.index.setdefault(self.holds[block], block)

    def release(self, request: str) -> None:
        for block in reversed(self.tables.pop(request)):
            self.owners[block] -= 1
            self.pool += [] if self.owners[block] else [block]


def left_open(num_blocks: int, events: list[tuple]) -> bool:
    """Whether it shows in these events when a copy takes a name."""

    def tables(copies: str) -> Iterator[tuple]:
        cache, cached = Names(num_blocks, copies), {}
        for event, request, *rest in events:
            if event == "computed":
                rest = [max(rest[0], cached[request])]
            got = getattr(cache, event)(request, *rest)
            if event == "admit":
                cached[request] = got
                yield got, cache.tables[request]

    first, *others = (list(tables(copies)) for copies in ("later", "at once", "never"))
    return any(other != first for other in others)


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
        case.is_a(got, int, f"{told}: the number of cached characters")
        texts[request], cached[request], blocks = rest[0], expected, cache.tables[request]
        for index, block in enumerate(blocks[: got // 4]):
            lies, wanted = held.get(block), rest[0][4 * index : 4 * index + 4]
            case.true(
                lies == wanted,
                f"{told}: block {block} is said to hold {wanted!r}, but "
                + (f"holds {lies!r}" if lies else "nothing was ever written into it"),
                hint="Which request wrote into that block last? And when did the block get a wrong name, or keep one?",
            )
        hint = None
        if got == len(rest[0]):
            hint = "The last character is always computed, even if everything is cached."
        elif got < expected:
            hint = "A block that was computed and not allocated again must be found."
        case.equal(got, expected, f"{told}: the number of cached characters", hint=hint)
        case.equal(blocks, right.tables[request], f"{told}: its table", hint=_TABLE)


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


@check_repair_cache.part("example")
def _repair_example(case: Case) -> None:
    lives(case, 7, STORY)


def _events(text: str) -> list[tuple]:
    """`A+0123 A=4 A-` for a request A with the text 0123 that is admitted, computed up to 4, and released."""
    events = []
    for word in text.split():
        event, rest = {"+": "admit", "=": "computed", "-": "release"}[word[1]], word[2:].replace("_", " ")
        events.append((event, word[0], *([int(rest)] if event == "computed" else [rest] if rest else [])))
    return events


@check_repair_cache.part("edges")
def _repair_edges(case: Case) -> None:
    a, b = "0123456789", "01234567xyz"
    for num_blocks, text in (
        (6, "A+01234567 A=8 A- B+01234567"),  # all of it is cached
        (6, f"A+{a} B+{b} A=10 B=11 A- B- C+{a} C- D+something_else_here D- E+{b}"),
        (9, f"A+{a} B+{a} B=10 A=10 B- C+{'p' * 12} C=12 D+{a} A- C- E+{'q' * 15} F+{a}"),
        (4, f"A+{a} A=3 A=7 A=9 A- A+{a} A=10 B+0123"),
        (9, f"A+{a} A=3 B+{a} A=7 C+{a}"),  # half a block
        (5, f"A+{a} A=8 B+{b} A- C+zzzz C=4 B- D+{b}"),
    ):
        lives(case, num_blocks, _events(text))


@check_repair_cache.part("random")
def _repair_random(case: Case) -> None:
    for _ in range(20):
        num_blocks, events = _random_events(case)
        while left_open(num_blocks, events):
            num_blocks, events = _random_events(case)
        lives(case, num_blocks, events)


def _random_events(draw: Draw) -> tuple[int, list[tuple]]:
    free = num_blocks = draw.randint(5, 11)
    events, live = [], {}
    texts = ["abcdabcdabcd", "abcdabcdxy", "pqrspqrs", "abcd", "pqrsabcdabcdabcd"]
    for number in range(30):
        text = draw.rng.choice(texts)
        # Hits need fewer; this many suffice whatever is shared.
        if draw.rng.random() < 0.45 and -(-len(text) // 4) <= free:
            events.append(("admit", f"r{number}", text))
            live[f"r{number}"] = (text, -(-len(text) // 4), 0)
            free -= live[f"r{number}"][1]
        elif live and draw.rng.random() < 0.6:
            name = draw.rng.choice(sorted(live))
            text, blocks, count = live[name]
            live[name] = (text, blocks, draw.randint(count, len(text) + 1))
            events.append(("computed", name, live[name][2]))
        elif live:
            name = draw.rng.choice(sorted(live))
            events.append(("release", name))
            free += live.pop(name)[1]
    return num_blocks, events
