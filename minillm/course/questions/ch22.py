"""Questions of chapter 22, many replicas."""

from __future__ import annotations

from minillm.course.questions.coding import CodeVariant
from minillm.course.questions.question import Bank, Draw, Variant, each_of, rows_of
from minillm.engine.fleet.costs import Link
from minillm.engine.fleet.migration import stages
from minillm.engine.routing import PrefixAware, ReplicaView, RequestView

BANK = Bank()


@BANK.computed(
    22,
    "route by load and by cached blocks",
    title="Costs of three replicas",
    minutes=6,
    unit="tokens",
    within=(1000, 9900),
    rubric=("tokens to compute at each replica", "the weighted load", "the costs"),
)
def router_costs(draw: Draw) -> Variant:
    hits, loads = draw.numbers(3, 10, 60, 5), draw.numbers(3, 1100, 3900, 100)
    prompt = draw.number(1010, 1390)
    request = RequestView("exam", prompt, tuple(range(prompt // 16)), 16)
    views = [ReplicaView(str(i), 1, load, set(range(hit))) for i, (hit, load) in enumerate(zip(hits, loads))]
    policy = PrefixAware(0.25)
    costs = [int(policy.cost(request, view)[0]) for view in views]
    table = rows_of(
        ["replica", 0, 1, 2], [["blocks of the prompt in its cache", *hits], ["tokens of its requests", *loads]]
    )
    return Variant(
        f"A prompt has {prompt} tokens; blocks hold 16. Three replicas report:\n\n{table}\n\nThe router's cost of a "
        "replica is the tokens of the prompt that it has to compute, plus a quarter of the tokens of its other "
        "requests. What are the three costs?",
        costs,
        (
            f"To compute: {each_of(f'{prompt} − 16 · {hit} = {prompt - 16 * hit}' for hit in hits)}.",
            f"A quarter of the loads: {each_of(load // 4 for load in loads)}.",
            f"Costs: {costs}.",
        ),
        {
            "a block holds 16 tokens": [prompt - hit + load // 4 for hit, load in zip(hits, loads)],
            "what is cached need not be computed": [16 * hit + load // 4 for hit, load in zip(hits, loads)],
        },
    )


@BANK.computed(
    22,
    "plan a live migration",
    title="Stages of a live migration",
    minutes=8,
    unit="tokens",
    within=(1000, 9900),
    rubric=(
        "the first stage copies all",
        ("each next stage copies what was written meanwhile"),
        "the last one stops the request",
        "the list",
    ),
)
def migration_stages(draw: Draw) -> Variant:
    def plan(drawn: tuple[int, ...]) -> list[int]:
        tokens, kv, bandwidth, step = drawn
        return stages(tokens, kv * 1000, Link(bandwidth * 1e9, latency=1e-3), step / 1e3)

    tokens, kv, bandwidth, step = drawn = draw.until(
        lambda: (draw.number(1500, 8500, 500), draw.number(100, 390, 10), draw.of(1, 2, 3), draw.number(11, 29)),
        lambda d: len(plan(d)) == 2 and plan(d)[1] > 12 and 0.1 < (1e3 + d[0] * d[1] / d[2]) / (d[3] * 1e3) % 1 < 0.9,
    )
    planned = plan(drawn)
    seconds = 1e-3 + tokens * kv * 1e3 / (bandwidth * 1e9)
    return Variant(
        f"A request with {tokens} tokens moves to another replica while it decodes a token every {step} ms. A token's "
        f"keys and values have {kv} kB ($10^3$ bytes), the link has a latency of 1 ms and carries {bandwidth} GB/s. A "
        "stage copies what was written during the one before (whole tokens); the first one that takes no longer than "
        "a decode step is the last, and stops the request. How many tokens does each stage copy?",
        planned,
        (
            f"Stage 1 copies {tokens} tokens in {seconds * 1e3:.1f} ms.",
            f"Meanwhile {seconds * 1e3:.1f} / {step}, rounded down: {planned[1]} tokens are written.",
            (
                f"Stage 2 copies them in {1 + planned[1] * kv / bandwidth / 1e3:.2f} ms, no longer than a step, so "
                f"it is the last: {planned}."
            ),
        ),
        {"whole tokens are counted": [tokens, planned[1] + 1], "the request goes on while it is copied": [tokens]},
        "two stages",
    )


@BANK.computed(
    22,
    "decide between moving keys and values and computing them again",
    title="Move or compute again",
    minutes=5,
    tolerance=0.01,
    within=(2, 20),
    rubric=("time to move", "time to compute", "the ratio"),
)
def move_or_compute(draw: Draw) -> Variant:
    def times(drawn: tuple[int, ...]) -> tuple[float, float]:
        tokens, kv, gigabytes, rate = drawn
        return Link(gigabytes * 1e9, latency=0.0).seconds(tokens * kv * 1e3) * 1e3, tokens / rate

    tokens, kv, gigabytes, rate = drawn = draw.until(
        lambda: (draw.number(2100, 8900, 100), draw.number(110, 290, 10), draw.number(12, 48), draw.number(11, 49)),
        lambda d: 2.4 < times(d)[1] / times(d)[0] < 18,
    )
    moved, again = times(drawn)
    return Variant(
        f"The keys and values of a prompt of {tokens} tokens, {kv} kB ($10^3$ bytes) each, lie on another replica. "
        f"The link carries {gigabytes} GB/s, and this replica computes {rate} prompt tokens a millisecond. How many "
        "times as fast is moving them as computing them again?",
        again / moved,
        (
            f"Moving: {tokens} · {kv} kB / {gigabytes} GB/s = {moved:.2f} ms.",
            f"Computing: {tokens} / {rate} = {again:.2f} ms.",
            f"{again:.2f} / {moved:.2f} = {again / moved:.2f}. The length cancels.",
        ),
        {"a byte is not a bit": again / moved / 8},
    )


@BANK.code(22, "route by load and by cached blocks", title="Pick a replica", minutes=12)
def pick_replica(draw: Draw) -> CodeVariant:
    tie = draw.of("fewer tokens to compute", "the smaller load", "the smaller index")
    keys = {"fewer tokens to compute": "(cost(i), prompt - cached[i], i)", "the smaller load": "(cost(i), loads[i], i)",
            "the smaller index": "(cost(i), i)"}  # fmt: skip
    weight = draw.of(1, 2)
    body = '''
def pick(prompt: int, cached: list[int], loads: list[int], room: list[int]) -> int:
    """The replica that takes the prompt; -1 where none has room."""
    def cost(i):
        return WEIGHT * (prompt - cached[i]) + loads[i]
    fitting = [i for i in range(len(loads)) if room[i] >= prompt - cached[i]]
    return min(fitting, key=lambda i: KEY, default=-1)
'''
    make = lambda key, times: body.replace("KEY", key).replace("WEIGHT", str(times))
    solution = make(keys[tie], weight)

    def call(rng):
        count, prompt = rng.randint(0, 5), rng.randint(3, 6)
        return (prompt, [rng.randint(0, 3) for _ in range(count)], [rng.randint(0, 5) for _ in range(count)],
                [rng.randint(1, 7) for _ in range(count)])  # fmt: skip

    wrong = {make(key, weight): f"ties go to {name}" for name, key in keys.items() if name != tie}
    return CodeVariant(
        "Replica `i` caches `cached[i]` tokens of the prompt, has `loads[i]` tokens of other requests and room for "
        "`room[i]` more tokens. Write `pick(prompt, cached, loads, room)`: the index of the replica with the least "
        f"cost, which is **{weight}** times the tokens of the prompt that it has to compute, plus its load. Only "
        f"replicas with room for the tokens to compute may take it; -1 if there is none. Of equal costs **{tie}** "
        "decides; if that is equal, too, the smaller index.",
        solution,
        ((8, [4, 0, 6], [5, 1, 9], [9, 9, 9]), (6, [0, 4], [0, 1], [5, 2])),
        (
            (5, [], [], []),
            (5, [0, 1], [0, 0], [4, 3]),
            (4, [2, 0], [2, 0], [9, 9]),
            (4, [0, 2], [0, 2 * weight], [9, 9]),
            (4, [2, 0], [2 * weight, 0], [9, 9]),
            (3, [1], [0], [2]),
        ),
        call,
        f"{weight} times the tokens to compute plus the load, ties to {tie}",
        wrong
        | {
            solution.replace("room[i] >= prompt - cached[i]", "room[i] >= prompt"): "cached tokens need no room",
            make(keys[tie], 3 - weight): "the weight of the tokens to compute",
        },
    )


BANK.written(
    22,
    "let a stream go on when its replica dies",
    "The token that came twice",
    "A replica dies in the middle of a stream and another one goes on. How can the client get a token twice, and how "
    "can it lose one? What must a message carry so that neither happens, also with a temperature above 0?",
    "The dead replica may have computed tokens that were not delivered (lost if the new one starts behind them), or "
    "delivered some that the router did not count (doubled). Each message carries its position and the number of the "
    "flight; the new replica starts behind the client's last token, and the noise depends on seed and position, so "
    "the text is the same.",
    rubric=(
        "how one is doubled",
        "how one is lost",
        "positions, and a flight's number",
        "noise by position keeps the text",
    ),
)
