"""Questions of chapter 24, measure and pay."""

from __future__ import annotations

import math

from minillm.bench.load.intervals import Histogram
from minillm.course.questions.coding import CodeVariant
from minillm.course.questions.question import Bank, Draw, Variant, each_of, rows_of

BANK = Bank()


@BANK.computed(
    24,
    "merge those of several servers without averaging",
    title="P90 of two servers",
    minutes=6,
    unit="ms",
    tolerance=0.001,
    within=(150, 1200),
    rubric=(("merges the counts"), "the rank of the percentile", "the bucket's upper limit"),
)
def merged_percentile(draw: Draw) -> Variant:
    base = draw.number(40, 140, 10)
    limits = [base * 2**k for k in range(5)]

    def histogram(counts: list[int]) -> Histogram:
        made = Histogram(precision=1.0, least=float(base))
        for limit, count in zip(limits, counts):
            made.add(limit * 0.999, count)
        return made

    def answers(drawn: tuple[list[int], list[int]]) -> tuple[float, float]:
        one, two = map(histogram, drawn)
        return (one + two).percentile(90), (one.percentile(90) + two.percentile(90)) / 2

    def fits(drawn: tuple[list[int], list[int]]) -> bool:
        merged, mean = answers(drawn)
        return merged in (4.0 * base, 8.0 * base) and merged != mean and sum(map(sum, drawn)) % 10

    first, second = drawn = draw.until(lambda: ([draw.number(55, 99), draw.number(21, 49), *draw.numbers(3, 1, 9)],
                                                [draw.number(11, 29), *draw.numbers(4, 2, 9)]), fits)  # fmt: skip
    merged, mean = answers(drawn)
    total = sum(first) + sum(second)
    table = rows_of(["at most, ms", *limits], [["server A", *first], ["server B", *second]])
    return Variant(
        f"Two servers counted the latencies of their requests in buckets:\n\n{table}\n\nWhat is the P90 of all "
        "requests together, reported as the upper limit of its bucket?",
        float(merged),
        (
            f"Together: {each_of(a + b for a, b in zip(first, second))}, {total} requests.",
            f"Rank: 90% of {total}, rounded up: {math.ceil(0.9 * total)}.",
            f"It lies in the bucket that ends at {merged:g} ms.",
        ),
        {"percentiles cannot be averaged": mean},
    )


@BANK.computed(
    24,
    "price a million tokens",
    title="Cost per million tokens",
    minutes=5,
    unit="dollars",
    tolerance=0.01,
    within=(0.1, 1),
    rubric=("tokens of an hour", "utilization", "dollars for a million"),
)
def cost_per_million(draw: Draw) -> Variant:
    def cost(drawn: tuple[int, ...]) -> float:
        cents, rate, percent = drawn
        return cents / 100 / (rate * 3600 * percent / 100) * 1e6

    cents, rate, percent = drawn = draw.until(
        lambda: (draw.number(180, 490, 5), draw.number(2100, 5900, 100), draw.number(25, 75, 5)),
        lambda d: 0.13 < cost(d) < 0.9,
    )
    return Variant(
        f"A server costs {cents / 100:.2f} dollars an hour and generates {rate} tokens a second at its capacity. Over "
        f"a day its utilization is {percent}%. What does a million generated tokens cost?",
        cost(drawn),
        (
            f"At capacity: {rate} · 3600 = {rate * 3600:,} tokens an hour.",
            f"At {percent}%: {rate * 36 * percent:,} tokens.",
            f"{cents / 100:.2f} / {rate * 36 * percent:,} · $10^6$ = {cost(drawn):.4f} dollars.",
        ),
        {"the server is paid for when it idles, too": cost((cents, rate, 100))},
    )


@BANK.computed(
    24,
    "say from which utilization on renting beats an API",
    title="Break-even utilization",
    minutes=5,
    unit="%",
    tolerance=0.01,
    within=(10, 90),
    rubric=(("what the API asks for the capacity of an hour"), "the ratio", "in percent"),
)
def break_even(draw: Draw) -> Variant:
    def share(drawn: tuple[int, ...]) -> float:
        cents, rate, api = drawn
        return 100 * cents / 100 / (rate * 3600 / 1e6 * api / 100)

    cents, rate, api = drawn = draw.until(
        lambda: (draw.number(180, 490, 5), draw.number(2100, 5900, 100), draw.number(25, 95, 5)),
        lambda d: 15 < share(d) < 85,
    )
    return Variant(
        f"A rented server costs {cents / 100:.2f} dollars an hour and generates {rate} tokens a second at its "
        f"capacity. An API asks {api / 100:.2f} dollars for a million generated tokens. From which utilization, in "
        "percent, on is renting cheaper?",
        share(drawn),
        (
            f"At capacity: {rate * 3600 / 1e6:.2f} million tokens an hour.",
            f"The API asks {rate * 3600 / 1e6 * api / 100:.2f} dollars for them.",
            f"{cents / 100:.2f} / {rate * 3600 / 1e6 * api / 100:.2f} = {share(drawn):.1f}%.",
        ),
        {"the ratio is the other way round": 1e4 / share(drawn)},
    )


@BANK.computed(
    24,
    "show what a late tester leaves out",
    title="Requests in a pause",
    minutes=6,
    unit="requests",
    within=(50, 500),
    rubric=("how long before its end a request must be due", "requests due until then", "the number"),
)
def late_requests(draw: Draw) -> Variant:
    rate, pause, promise = draw.until(
        lambda: (draw.number(15, 45), draw.number(5, 14), draw.number(1, 3)), lambda d: 70 < d[0] * (d[1] - d[2]) < 450
    )
    return Variant(
        f"An open loop sends {rate} requests a second, evenly. The server stops for {pause} s, then answers "
        "everything that has waited at once. Latency counts from the intended send time. How many requests take "
        f"longer than {promise} s? (A tester that waits for each answer before it sends the next one reports a single "
        "one.)",
        rate * (pause - promise),
        (
            "A request that is due t seconds before the end of the pause waits t seconds.",
            f"Longer than {promise} s wait those due in its first {pause} − {promise} = {pause - promise} s.",
            f"{rate} · {pause - promise} = {rate * (pause - promise)}.",
        ),
        {"those due at the end of the pause wait less": rate * pause},
    )


@BANK.code(24, "merge those of several servers without averaging", title="A percentile of counts", minutes=15)
def percentile_of_counts(draw: Draw) -> CodeVariant:
    limit = draw.of("the upper limit of its bucket", "the lower limit of its bucket")
    rank = draw.of("rounded up", "rounded down")
    body = '''
def percentile(limits: list[int], servers: list[list[int]], q: int) -> int | None:
    """The bucket limit at which percentile q of all servers' values lies; None without a value."""
    counts = [sum(column) for column in zip(*servers)]
    total = sum(counts)
    rank = max(1, RANK)
    for place, count in enumerate(counts):
        rank -= count
        if rank <= 0 and total:
            return LIMIT
    return None
'''
    ranks = {"rounded up": "-(-total * q // 100)", "rounded down": "total * q // 100"}
    picks = {"the upper limit of its bucket": "limits[place]",
             "the lower limit of its bucket": "limits[place - 1] if place else 0"}  # fmt: skip
    make = lambda a, b: body.replace("RANK", ranks[a]).replace("LIMIT", picks[b])
    other_rank, other_limit = ({*ranks} - {rank}).pop(), ({*picks} - {limit}).pop()
    solution = make(rank, limit)

    def call(rng):
        size = rng.randint(1, 4)
        counts = [[rng.choice((0, 1, 2, 5)) for _ in range(size)] for _ in range(rng.randint(0, 3))]
        return sorted(rng.sample(range(1, 90), size)), counts, rng.choice((1, 25, 50, 90, 99, 100))

    return CodeVariant(
        "Each server counted its latencies in buckets: `servers[s][b]` values lie above `limits[b - 1]` (0 for the "
        "first bucket) and up to `limits[b]`. Write `percentile(limits, servers, q)` for `0 < q <= 100`: of all "
        f"values together take the one whose rank is q percent of their number, **{rank}**, and at least 1; return "
        f"**{limit}**. None if there is no value.",
        solution,
        (([10, 20, 40], [[3, 1, 0], [2, 2, 2]], 90), ([10, 20], [[4, 1], [0, 0]], 50)),
        (
            ([10], [], 50),
            ([10], [[0]], 50),
            ([10, 20], [[1, 1]], 50),
            ([10, 20, 30], [[1, 0, 2]], 34),
            ([10, 20], [[0, 3]], 1),
        ),
        call,
        f"the rank {rank}, {limit}",
        {
            make(other_rank, limit): ("the rank is rounded the other way"),
            make(rank, other_limit): "this is the bucket's other limit",
            solution.replace(
                ("counts = [sum(column) for column in zip(*servers)]"), "counts = servers[0] if servers else []"
            ): "one server was counted",
        },
    )


BANK.written(
    24,
    "tell a closed loop from an open one",
    "A test that passes",
    "A load test with 16 users, each of which sends its next request when its answer has come, reports a P99 of 0.4 "
    "s. In production the P99 is 9 s at the same mean rate. Explain how both can be true, and say how you would test "
    "instead.",
    "A closed loop slows down with the server: while it is slow, few requests are sent, and those that would have "
    "waited are never made. Users of a service do not wait for each other. Send at intended times from an arrival "
    "process (an open loop), and count latency from the intended time.",
    rubric=(
        "a closed loop sends less when the server is slow",
        "requests that would have waited are missing",
        "an open loop",
        "latency from the intended send time",
    ),
)
