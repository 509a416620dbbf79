"""Questions of chapter 08, latency."""

from __future__ import annotations

from minillm.course.questions.coding import CodeVariant
from minillm.course.questions.question import Bank, Draw, Variant, each_of, rows_of
from minillm.engine.metrics import RequestRecord, Targets, goodput, percentile
from minillm.rounding import ceil_div

BANK = Bank()


def percentile_unsorted(values: list[int], place: float) -> float:
    low = int(place)
    return values[low] + (place - low) * (values[low + 1] - values[low])


@BANK.computed(
    8,
    "read TTFT, ITL, TPOT, E2E latency and goodput",
    title=("Goodput from a table"),
    minutes=5,
    unit="requests a second",
    tolerance=0.01,
    within=(0.2, 1.0),
    rubric=("checks both targets for each request", "counts those that meet both", "divides by the time"),
)
def goodput_of_a_table(draw: Draw) -> Variant:
    def rows() -> list[tuple[int, int]]:
        return list(zip(draw.numbers(8, 150, 690, 10), draw.numbers(8, 21, 79)))

    def good(drawn: tuple) -> tuple[int, int, int]:
        table, ttft, tpot = drawn
        return (sum(a <= ttft and b <= tpot for a, b in table), sum(a <= ttft for a, _ in table),
                sum(b <= tpot for _, b in table))  # fmt: skip

    table, ttft, tpot = drawn = draw.until(
        lambda: (rows(), draw.number(355, 555, 50), draw.number(405, 605, 50) / 10),
        lambda d: 3 <= good(d)[0] <= 5 and len(set(good(d))) == 3,
    )
    records = [RequestRecord(0.0, tuple((a + b * gap) / 1e3 for gap in range(11))) for a, b in table]
    seconds = draw.of(6, 8, 12)
    answer = goodput(records, Targets(ttft=ttft / 1e3, tpot=tpot / 1e3), seconds)
    both, first, per_token = good(drawn)
    header = ["request", *range(1, 9)]
    return Variant(
        f"Within {seconds} s a server finished eight requests:\n\n"
        f"{rows_of(header, [['TTFT, ms', *(a for a, _ in table)], ['TPOT, ms', *(b for _, b in table)]])}\n\nUsers "
        f"were promised a TTFT of at most {ttft} ms and a TPOT of at most {tpot} ms. What is the goodput?",
        answer,
        (f"Both promises are kept for {both} requests.", f"{both} / {seconds} s = {answer:.3f} requests a second."),
        {
            "TPOT has a target, too": first / seconds,
            "TTFT has a target, too": per_token / seconds,
            "this is the throughput": 8 / seconds,
        },
    )


@BANK.computed(
    8,
    "find the largest step that keeps a promise",
    title="The largest chunk",
    minutes=6,
    unit="tokens",
    within=(100, 999),
    rubric=("time left after the fixed part", "tokens in that time", "less those of the streams"),
)
def largest_chunk(draw: Draw) -> Variant:
    def room(drawn: tuple[int, ...]) -> int:
        target, fixed, each, streams = drawn
        return (target - fixed) * 1000 // each - streams

    target, fixed, each, streams = drawn = draw.until(
        lambda: (draw.number(45, 95, 5), draw.number(6, 14), draw.number(75, 145, 5), draw.number(21, 64)),
        lambda d: 200 < room(d) < 900,
    )
    tokens = room(drawn) + streams
    return Variant(
        f"A step takes {fixed} ms, and {each} µs more for each token in it. {streams} requests decode in every step, "
        f"and their ITL has to stay at or below {target} ms. How many tokens of a prompt may a step process beside "
        "them?",
        room(drawn),
        (
            f"Time for tokens: {target} − {fixed} = {target - fixed} ms.",
            f"Tokens: {target - fixed} ms / {each} µs, rounded down: {tokens}.",
            f"Beside the streams: {tokens} − {streams} = {room(drawn)}.",
        ),
        {
            "the streams' own tokens take time, too": tokens,
            "the fixed part of a step takes time, too": target * 1000 // each - streams,
        },
    )


@BANK.computed(
    8,
    "choose a chunk size",
    title="First token of a cut prompt",
    minutes=5,
    unit="ms",
    within=(200, 2000),
    rubric=("room of a step", "steps, rounded up", "time of all steps"),
)
def ttft_of_chunks(draw: Draw) -> Variant:
    def steps(drawn: tuple[int, ...]) -> tuple[int, int]:
        prompt, budget, streams, _ = drawn
        return ceil_div(prompt, budget - streams), ceil_div(prompt, budget)

    prompt, budget, streams, ms = drawn = draw.until(
        lambda: (draw.number(2100, 5900, 100), draw.of(256, 384, 512), draw.number(31, 95), draw.number(25, 75)),
        lambda d: 8 <= steps(d)[0] <= 25 and steps(d)[0] != steps(d)[1] and 250 < steps(d)[0] * d[3] < 1900,
    )
    count, wrong = steps(drawn)
    return Variant(
        f"A prompt of {prompt} tokens arrives while {streams} requests decode and nothing else waits. The token "
        f"budget is {budget}, and every step takes {ms} ms. After how many milliseconds is its first token there?",
        count * ms,
        (
            f"Room: {budget} − {streams} = {budget - streams} tokens of the prompt in a step.",
            f"Steps: {prompt} / {budget - streams}, rounded up: {count}. The last one samples.",
            f"{count} · {ms} = {count * ms} ms.",
        ),
        {"the streams take a part of the budget": wrong * ms, "the last chunk's step samples": (count + 1) * ms},
    )


@BANK.computed(
    8,
    "read TTFT, ITL, TPOT, E2E latency and goodput",
    title="A percentile between two values",
    minutes=4,
    unit="ms",
    tolerance=0.005,
    within=(30, 150),
    rubric=("sorts", ("the place of the percentile"), "the value between two neighbours"),
)
def percentile_of_gaps(draw: Draw) -> Variant:
    gaps, q = draw.numbers(9, 21, 140), draw.of(65, 70, 80, 85)
    gaps = draw.until(lambda: draw.numbers(9, 21, 140), lambda g: 45 < percentile(g, q) < 140 and max(g) > 100)
    ordered, place = sorted(gaps), 8 * q / 100
    low = int(place)
    answer = percentile(gaps, q)
    return Variant(
        f"Nine gaps between tokens were measured, in ms: {each_of(gaps)}. What is their P{q}, between two neighbours "
        "on a straight line (the smallest is P0, the largest P100)?",
        answer,
        (
            f"Sorted: {each_of(ordered)}.",
            f"Place: {q}% of 8 steps = {place:g}.",
            f"{ordered[low]} + {place - low:.2f} · ({ordered[low + 1]} − {ordered[low]}) = {answer:.2f} ms.",
        ),
        {"the gaps were not sorted": percentile_unsorted(gaps, place), "the value was not interpolated": ordered[low]},
    )


@BANK.code(8, "read TTFT, ITL, TPOT, E2E latency and goodput", title="Goodput with a window", minutes=12)
def window_goodput(draw: Draw) -> CodeVariant:
    by, edge = draw.of("finished", "arrived"), draw.of("start <= t < end", "start < t <= end")
    gap = draw.of("the longest gap", "the mean gap")
    rule = {"the longest gap": "max(gaps, default=0)", "the mean gap": "sum(gaps) / len(gaps) if gaps else 0"}
    body = '''
def good_requests(requests: list[tuple[int, list[int]]], start: int, end: int, ttft: int, itl: int) -> int:
    """How many requests of the window kept both promises; a request: its arrival, its tokens' times, in ms."""
    good = 0
    for arrival, times in requests:
        gaps = [later - sooner for sooner, later in zip(times, times[1:])]
        t = MOMENT
        good += EDGE and times[0] - arrival <= ttft and (RULE) <= itl
    return int(good)
'''
    moments = {"finished": "times[-1]", "arrived": "arrival"}

    def make(by: str, edge: str, gap: str) -> str:
        return body.replace("MOMENT", moments[by]).replace("EDGE", edge).replace("RULE", rule[gap])

    def request(rng) -> tuple[int, list[int]]:
        arrival = rng.randrange(0, 60, 10)
        times = [arrival + rng.randint(1, 4) * 10]
        times += [times[-1] + 10 * total for total in sorted(rng.sample(range(1, 9), rng.randint(0, 3)))]
        return arrival, times

    swap = {"finished": "arrived", "arrived": "finished", "start <= t < end": "start < t <= end",
            "start < t <= end": "start <= t < end", ("the longest "
            "gap"): "the mean gap", "the mean gap": "the longest gap"}  # fmt: skip
    return CodeVariant(
        f"Write `good_requests(requests, start, end, ttft, itl)`: how many of the requests that **{by}** in the "
        "window kept both promises. A request is its arrival and the times of its tokens (at least one), in ms. A "
        f"moment `t` is in the window if **`{edge}`**. The first token came at most `ttft` after the arrival, and "
        f"**{gap}** between its tokens is at most `itl`. A single token has no gap, and keeps the second promise.",
        make(by, edge, gap),
        (([(0, [20, 30, 60]), (10, [20, 50]), (30, [90])], 0, 60, 30, 20), ([(0, [10, 20, 50])], 0, 60, 10, 20)),
        (
            ([], 0, 9, 5, 5),
            ([(0, [10])], 0, 10, 10, 0),
            ([(10, [20, 30])], 10, 30, 10, 10),
            ([(0, [20])], 0, 50, 10, 9),
            ([(5, [10, 20, 50])], 0, 50, 10, 20),
        ),
        lambda rng: (
            [request(rng) for _ in range(rng.randint(0, 6))],
            20,
            rng.randrange(50, 100, 10),
            rng.choice((20, 30)),
            rng.choice((10, 20)),
        ),
        f"requests that {by} in the window {edge}; {gap} counts",
        {
            make(swap[by], edge, gap): ("the window is over another moment"),
            make(by, swap[edge], gap): "the window's edges",
            make(by, edge, swap[gap]): "the promise is about another gap",
        },
    )


BANK.written(
    8,
    "show how one long prompt stops every stream",
    "The smallest chunk",
    "Chunked prefill with a small token budget keeps the ITL of the streams low. Why not use the smallest budget "
    "there is? Which latency grows, and why does the total work grow, too?",
    "The prompt needs more steps, so its TTFT grows. Each step reads the weights again and has a fixed cost, and each "
    "chunk reads the keys of the chunks before; with little arithmetic a step is memory-bound and the throughput "
    "falls.",
    rubric=(
        "the TTFT of the long prompt grows",
        "weights and fixed costs in every step",
        "earlier keys are read again",
        "throughput falls",
    ),
)
