"""Checks of chapter 07: a repaired prefix cache, and an order of service. Built in chapter 07."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import partial
from itertools import permutations

from minillm.book.checks import Case, Checker, Draw, FunctionChecker
from minillm.book.chips import Html, table

# 4 · a repaired prefix cache

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
    """The repaired prefix cache; a block's name is the text up to its end."""

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
        free = num_blocks = case.randint(5, 11)
        events, live = [], {}
        texts = ["abcdabcdabcd", "abcdabcdxy", "pqrspqrs", "abcd", "pqrsabcdabcdabcd"]
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


# 5 · an order of service


def serve(
    prompts, arrivals, block_size, capacity, ageing, *, order: Iterable[int] | None = None, mistake: str = ""
) -> list[tuple[int, int, int]]:
    """(index, start, computed tokens) of each prompt, by the rule of the statement, or in a given order."""
    cache: list[tuple[int, ...]] = []  # prefixes that end at a block's end, the least recently used first
    left, served, clock, given = list(range(len(prompts))), [], 0, iter(order or ())
    ties, matters = (1 if mistake == "late ties" else -1), mistake != "only ageing"
    ageing = Fraction(0 if mistake == "no ageing" else int(ageing) if mistake == "whole ageing" else ageing)

    def cached(prompt: Sequence[int]) -> int:
        blocks, last = 0, len(prompt) - (mistake != "full hit")
        while (blocks + 1) * block_size <= last and tuple(prompt[: (blocks + 1) * block_size]) in cache:
            blocks += 1
        return blocks * block_size

    while left:
        clock = max(clock, min(arrivals[i] for i in left))
        waiting = [i for i in left if arrivals[i] <= clock or mistake == "not there yet"]
        if mistake == "too late":
            waiting = [i for i in left if arrivals[i] < clock] or waiting
        scores = {
            i: (matters * cached(prompts[i]) + ageing * (clock - arrivals[i]), ties * arrivals[i], ties * i)
            for i in waiting
        }
        index = max(waiting, key=scores.get) if order is None else next(given)
        prompt, computed = prompts[index], len(prompts[index]) - cached(prompts[index])
        ends = range(block_size, len(prompt) + (block_size if mistake == "partial" else 1), block_size)
        own = [tuple(prompt[:end]) for end in ends]
        kept = [key for key in cache if key not in own or mistake == "no touch"]
        new = [key for key in own if key not in kept]
        cache = kept + (new if mistake == "head first" else new[::-1])
        if mistake != "no eviction":
            cache = cache[:capacity] if mistake == "most recent" else cache[-capacity:]
        served.append((index, clock, computed))
        clock += computed
        left.remove(index)
    return served


def _against_all_orders(case: Case, got: list, prompts, arrivals, block_size, capacity, ageing) -> None:
    """Where the theorem holds, no order computes fewer tokens."""
    beginnings = any(a != b and b[: len(a)] == a for a in prompts for b in prompts)
    if ageing or any(arrivals) or beginnings or len(prompts) != 5:
        return
    orders = permutations(range(5))
    best = min(sum(row[2] for row in serve(prompts, arrivals, block_size, capacity, 0, order=one)) for one in orders)
    case.equal(sum(row[2] for row in got), best, "the sum of computed tokens, against the best of all 120 orders,")


def _explain_order(got, expected, prompts, arrivals, block_size, capacity, ageing) -> str | None:
    if sorted(row[0] for row in got) != list(range(len(prompts))):
        return "Every prompt is served once."
    place = next(place for place, (mine, right) in enumerate(zip(got, expected)) if mine != right)
    index = expected[place][0]
    return (
        f"Row {place} is prompt {index}, which is {prompts[index]}; arrivals {arrivals}, block_size={block_size}, "
        f"capacity={capacity}, ageing={ageing}; served before it: {[row[0] for row in expected[:place]]}."
    )


def _edges(draw: Draw) -> Iterable[tuple]:
    yield [[1]], [0], 4, 1, 0
    # At 9 the scores are 4, 4.5 and 2.
    yield [[1, 1, 1, 1, 9, 9, 9, 9, 9], [1, 1, 1, 1, 2], [5, 5], [1, 1, 3]], [0, 9, 6, 9], 2, 8, 1.5
    yield [[1, 2, 3], [4]], [50, 7], 1, 3, 1  # the clock jumps
    yield [[1, 2, 3, 4], [9], [1, 2, 3, 4], [1, 2, 3, 4]], [0, 0, 0, 0], 2, 2, 0  # the last token is computed
    yield [[1, 2], [1, 2, 3], [5, 6], [5, 6, 7]], [3, 0, 0, 1], 2, 1, 0  # room for one block
    yield [[1, 1, 9], [2, 2, 9], [2, 2, 8], [1, 1, 8]], [0, 1, 4, 5], 2, 1, 0
    # The first block of a prompt stays longer than its last one,
    yield [[1, 2, 3, 4, 5, 6, 7], [8, 8, 8], [1, 2, 9], [1, 2, 3, 4, 5, 6, 9]], [0] * 4, 2, 3, 0
    # and the last one is evicted.
    yield [[1, 2, 3, 4, 5, 6, 10], [8, 8, 11], [1, 2, 12], [1, 2, 3, 4, 5, 6, 13]], [0, 0, 9, 11], 2, 3, 0
    # Used again, so kept.
    yield [[1, 1, 9], [2, 2, 9], [1, 1, 8], [3, 3, 9], [1, 1, 7]], [0, 1, 5, 6, 9], 2, 2, 0
    yield [[3, 3, 3], [4, 4, 4], [3, 3, 5]], [2, 1, 0], 1, 3, 0
    yield [[1] * 9, *([[1] * 8 + [2 + i] for i in range(6)]), [5, 5]], [0, *range(0, 12, 2), 1], 4, 4, 1
    yield [[1, 1, 1, 9], [5, 5], [1, 1, 1, 8]], [0, 1, 4], 1, 8, 0  # the third arrives when the first has been served
    for _ in range(4):
        heads = ([1, 1, 1, 1], [1, 1, 2, 2], [3, 3], [3, 3, 1, 1], [])
        yield [[*draw.rng.choice(heads), 10 + i] for i in range(5)], [0] * 5, 2, 2, 0


def _random_prompts(draw: Draw) -> tuple:
    size, prompts = draw.randint(1, 4), []
    for _ in range(draw.randint(1, 9)):
        base = draw.rng.choice(prompts) if prompts and draw.rng.random() < 0.7 else []
        shared = base[: draw.randint(0, len(base) + 1)]
        prompts.append([*shared, *(draw.randint(0, 3) for _ in range(draw.randint(1, 7)))])
    latest = draw.rng.choice((1, 40))
    arrivals = [draw.randint(0, latest) for _ in prompts]
    capacity = max(1, *(len(prompt) // size for prompt in prompts), 1) + draw.randint(0, 4)
    return prompts, arrivals, size, capacity, draw.rng.choice((0, 0.25, 0.5, 1, 4))


_SERVE_MISTAKES = {
    "The last token is always computed, and with it its block, also of a prompt that is cached.": "full hit",
    "The last block of a prompt becomes the least recent of its blocks, the first one the most recent.": "head first",
    "A block that is used again becomes the most recently used; yours keeps its old place.": "no touch",
    "The least recently used blocks are evicted; yours evicts the most recent.": "most recent",
    "The cache holds at most `capacity` blocks; yours goes on growing.": "no eviction",
    "Only full blocks are cached; yours keeps the last one although it is not full.": "partial",
    "A prompt whose arrival is later than the clock does not wait yet.": "not there yet",
    "A prompt whose arrival equals the clock waits already.": "too late",
    "Ties go to the earlier arrival, then to the smaller index.": "late ties",
    "The score has the waiting time, too: `ageing` for each unit of time.": "no ageing",
    "The score has the cached tokens, too, not only the waiting time.": "only ageing",
    "`ageing` may be a fraction.": "whole ageing",
}
check_serve_order = FunctionChecker(
    "serve_order",
    serve,
    hint="The score of a waiting prompt: cached tokens + ageing · (clock - arrival); the greatest is served.",
    examples=[
        # The third overtakes the second, whose prefix is not cached;
        ([[1, 2, 3, 4, 5], [7, 7, 7, 7, 7], [1, 2, 3, 4, 6]], [0, 0, 0], 2, 4, 0),
        # here it came 4 later: 4 cached tokens against 2 for each unit of waiting.
        ([[1, 2, 3, 4, 5], [7, 7, 7, 7, 7], [1, 2, 3, 4, 6]], [0, 0, 4], 2, 4, 2),
    ],
    edges=_edges,
    random=_random_prompts,
    trials=30,
    returns="the list of (index, start, computed)",
    misconceptions={hint: partial(serve, mistake=mistake) for hint, mistake in _SERVE_MISTAKES.items()},
    explain=_explain_order,
    also=_against_all_orders,
)
