"""Questions of chapter 09, policies and the simulator."""

from __future__ import annotations

from minillm.course.questions.question import Bank, Draw, Variant, each_of, rows_of
from minillm.engine.fleet.costs import ReplicaSpec
from minillm.engine.policies import Fair, sjf
from minillm.engine.request import Request
from minillm.engine.simulator import CostModel
from minillm.sampling.params import SamplingParams

BANK = Bank()


def _drain(queue) -> list[int]:
    names = []
    while queue.peek():
        names.append(int(queue.pop().request_id))
    return names


def _request(name: str, prompt: int, output: int, arrival: float = 0.0, user: str = "") -> Request:
    return Request(
        name, [5] * prompt, SamplingParams(max_tokens=output), max_tokens=output, arrival_time=arrival, user=user
    )


@BANK.computed(
    9,
    "order a queue by length so that no request starves",
    title="A key that ages",
    minutes=6,
    unit="order of service",
    within=(10, 10),
    rubric=("the keys", "smaller keys first", "the order"),
)
def ageing_order(draw: Draw) -> Variant:
    ageing = draw.number(11, 39)

    def orders(jobs: list[tuple[int, int]]) -> tuple[list[int], list[int], list[int]]:
        queue = sjf(ageing)
        for index, (arrival, length) in enumerate(jobs, 1):
            queue.add(_request(str(index), length - 10, 10, arrival))
        by_key = _drain(queue)
        by_length = sorted(range(1, 5), key=lambda i: jobs[i - 1][1])
        return by_key, by_length, [1, 2, 3, 4]

    def jobs() -> list[tuple[int, int]]:
        return list(zip(sorted(draw.numbers(4, 0, 9)), draw.numbers(4, 110, 590, 10)))

    drawn = draw.until(
        jobs, lambda j: len(set(map(tuple, orders(j)))) == 3 and len({n + ageing * t for t, n in j}) == 4
    )
    answer, by_length, _ = orders(drawn)
    keys = [length + ageing * arrival for arrival, length in drawn]
    table = rows_of(["job", 1, 2, 3, 4], [["arrival, s", *(a for a, _ in drawn)], ["tokens", *(n for _, n in drawn)]])
    return Variant(
        f"A queue serves the shortest job first, by tokens, and each second of waiting earns a job {ageing} tokens. "
        f"Four jobs wait when the server becomes free:\n\n{table}\n\nIn which order are they served?",
        answer,
        (
            f"Keys, tokens + {ageing} · arrival: {each_of(keys)}. They do not change while the jobs wait.",
            f"By key: {answer}.",
        ),
        {"waiting earns nothing here": by_length},
        "four jobs",
    )


@BANK.computed(
    9,
    "share a server between users with a counter",
    title="Counters of three users",
    minutes=6,
    unit="tokens",
    within=(300, 3000),
    rubric=("charges those who were served", "lifts the one who comes back", "the counters"),
)
def fair_counters(draw: Draw) -> Variant:
    def make() -> tuple[list[int], list[int]]:
        return draw.numbers(3, 110, 390, 10), draw.numbers(2, 110, 390, 10)

    def fits(drawn: tuple[list[int], list[int]]) -> bool:
        (a, b, c), (more_a, more_b) = drawn
        return c < min(a + more_a, b + more_b) - 50

    (a, b, c), (more_a, more_b) = draw.until(make, fits)
    policy = Fair()
    requests = {user: _request(user, 10, 10, user=user) for user in "ABC"}
    for request in requests.values():
        policy.add(request)
    for user, tokens in zip("ABC", (a, b, c)):
        policy.charge(requests[user], tokens)
    policy.leave(requests["C"])
    for user, tokens in (("A", more_a), ("B", more_b)):
        policy.charge(requests[user], tokens)
    policy.add(_request("C again", 10, 10, user="C"))
    answer = [int(policy.counters[user]) for user in "ABC"]
    return Variant(
        f"Users A, B and C share a server by counters of tokens, which start together at 0. A was served {a} tokens, "
        f"B {b} and C {c}. Then C left, and while it was away A was served {more_a} more tokens and B {more_b}. Now C "
        "comes back. What are the counters of A, B and C at this moment, before the next request is served?",
        answer,
        (
            f"A: {a} + {more_a} = {a + more_a}. B: {b} + {more_b} = {b + more_b}.",
            f"C had {c}, and is lifted to the smallest counter of those present: absence saves nothing up.",
            f"Counters: {answer}.",
        ),
        {
            "a user who returns is lifted to the smallest counter of those present": [a + more_a, b + more_b, c],
            "the return is no new beginning for all": [a + more_a, b + more_b, max(a + more_a, b + more_b)],
        },
    )


@BANK.computed(
    9,
    "fit what a step costs",
    title="Time of many decode steps",
    minutes=7,
    unit="ms",
    tolerance=0.01,
    within=(150, 1500),
    rubric=(
        "the fixed part of every step",
        "the rows",
        ("the context, which grows by a row's token each step"),
        "the time",
    ),
)
def predicted_steps(draw: Draw) -> Variant:
    def spec(drawn: tuple[int, ...]) -> float:
        per_step, per_row, per_context, rows, context, steps = drawn
        cost = CostModel(per_step * 1e-3, 0.0, per_row * 1e-6, per_context * 1e-9)
        return ReplicaSpec(cost, 10**9).decode_seconds(rows, rows * context, steps) * 1e3

    per_step, per_row, per_context, rows, context, steps = drawn = draw.until(
        lambda: (
            draw.number(5, 9),
            draw.number(11, 49),
            draw.number(31, 99),
            draw.number(16, 48),
            draw.number(500, 1900, 100),
            draw.number(20, 60, 10),
        ),
        lambda d: 160 < spec(d) < 900,
    )
    read = rows * (steps * context + steps * (steps - 1) // 2)
    return Variant(
        f"A simulator charges a decode step {per_step} ms, {per_row} µs for each row, and {per_context} ns for each "
        f"position that a row reads. {rows} requests, each with {context} positions to read in the first step and one "
        f"more in every step after it, decode {steps} tokens each. How many milliseconds does that take?",
        spec(drawn),
        (
            f"Steps: {steps} · {per_step} = {steps * per_step} ms.",
            f"Rows: {steps} · {rows} · {per_row} µs = {steps * rows * per_row / 1e3:.1f} ms.",
            (
                f"Positions: {rows} · ({steps} · {context} + {steps} · {steps - 1} / 2) = {read:,}, "
                f"{read * per_context / 1e6:.1f} ms."
            ),
            f"Together {spec(drawn):.1f} ms.",
        ),
        {
            "the context was left out": spec((per_step, per_row, 0, rows, context, steps)),
            "the rows share a step": steps * rows * per_step + spec((0, per_row, per_context, rows, context, steps)),
        },
    )


BANK.written(
    9,
    "share a server between users",
    "A counter that starts at zero",
    "A fair scheduler serves the user with the smallest counter of tokens. A user comes back after a night, with the "
    "counter as it was. What happens to the others if the counter is not lifted, and why is that unfair?",
    "The user is far behind and is served alone until the counter has caught up: the others starve for that time. "
    "Absence has saved up a claim to the server, although its capacity of the night cannot be stored. Lifting to the "
    "smallest active counter prevents it.",
    rubric=(
        "the user is served first until it has caught up",
        "the others starve meanwhile",
        "capacity that was not used is gone",
        "the remedy: lift",
    ),
)
