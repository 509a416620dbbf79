"""Questions of chapter 23, the server."""

from __future__ import annotations

from minillm.course.questions.question import Bank, Draw, Variant

BANK = Bank()


@BANK.computed(
    23,
    "read and write a streamed answer",
    title="Bytes of a stream",
    minutes=5,
    unit="bytes",
    within=(200, 1900),
    rubric=("what an event adds to its text", "the last event", "the bytes"),
)
def sse_bytes(draw: Draw) -> Variant:
    events, size = draw.number(11, 19), draw.number(22, 69)
    answer = events * (size + 8) + len(b"data: [DONE]\n\n")
    return Variant(
        f"An answer is streamed as {events} server-sent events, each with {size} bytes of JSON in one `data: ` line, "
        "lines ended by a single `\\n`, and the event that says `[DONE]` behind them. How many bytes is the body?",
        answer,
        (
            f"`data: ` is 6 bytes, the line's end 1, the empty line 1: {size} + 8 = {size + 8} bytes.",
            "The last event: 6 + 6 + 2 = 14 bytes.",
            f"{events} · {size + 8} + 14 = {answer}.",
        ),
        {"an event ends with an empty line": answer - events - 1, "the last event counts, too": answer - 14},
    )


@BANK.computed(
    23,
    "bound the latency of an overloaded server",
    title=("The longest wait"),
    minutes=5,
    unit="seconds",
    tolerance=0.01,
    within=(2, 20),
    rubric=("requests that the limit admits", "those that wait", "the time"),
)
def longest_wait(draw: Draw) -> Variant:
    def wait(drawn: tuple[int, ...]) -> float:
        limit, size, batch, rate = drawn
        return (limit * 1000 / size - batch) / (rate / 10)

    limit, size, batch, rate = drawn = draw.until(
        lambda: (draw.number(40, 95, 5), draw.number(400, 800, 100), draw.number(12, 48, 4), draw.number(61, 149)),
        lambda d: 2.4 < wait(d) < 18 and d[0] * 1000 % d[1] == 0,
    )
    return Variant(
        f"A server admits requests as long as what is under way comes to at most {limit} thousand tokens. Each "
        f"request counts {size} tokens. {batch} requests run at a time, and {rate / 10} requests a second are "
        "finished. How long does the last request in the queue wait before it runs?",
        wait(drawn),
        (
            f"Under way: {limit * 1000} / {size} = {limit * 1000 // size} requests.",
            f"Waiting: {limit * 1000 // size} − {batch} = {limit * 1000 // size - batch}.",
            f"{limit * 1000 // size - batch} / {rate / 10} = {wait(drawn):.2f} s.",
        ),
        {"those that run do not wait": limit * 1000 / size / (rate / 10)},
    )


@BANK.computed(
    23,
    "serve many LoRA adapters",
    title="Adapters in memory",
    minutes=6,
    unit="adapters",
    within=(10, 99),
    rubric=("weights of one product's pair", "bytes of an adapter", "adapters, rounded down"),
)
def adapters(draw: Draw) -> Variant:
    def count(drawn: tuple[int, ...], products: int = 4) -> int:
        layers, hidden, rank, megabytes = drawn
        return megabytes * 10**6 // (layers * products * 2 * hidden * rank * 2)

    layers, hidden, rank, megabytes = drawn = draw.until(
        lambda: (draw.number(24, 40, 2), draw.number(2048, 4096, 512), draw.of(8, 16, 32), draw.number(600, 1900, 100)),
        lambda d: 13 < count(d) < 90 and count(d) * 2 < 400,
    )
    each = layers * 4 * 2 * hidden * rank * 2
    return Variant(
        f"Adapters of rank {rank} change four products in each of {layers} layers, each with {hidden} inputs and "
        f"{hidden} outputs; their weights are kept in bfloat16. How many adapters fit into {megabytes} MB ($10^6$ "
        "bytes)?",
        count(drawn),
        (
            f"A product: {rank} · ({hidden} + {hidden}) = {rank * 2 * hidden:,} weights.",
            f"An adapter: {layers} · 4 · {rank * 2 * hidden:,} · 2 = {each:,} bytes.",
            f"{megabytes} · $10^6$ / {each:,}, rounded down: {count(drawn)}.",
        ),
        {
            "an adapter has two thin matrices a product": megabytes * 10**6 // (each // 2),
            "four products are changed": count(drawn, 1),
        },
    )


BANK.written(
    23,
    "connect an event loop to an engine thread",
    "A step in the event loop",
    "A server calls `engine.step()` in a coroutine. What do the clients notice, although every handler is `async`? "
    "Describe the way of a token from the engine to the client in a design that does not have this problem.",
    "A step blocks the event loop: no connection is accepted, nothing is written and no disconnect is noticed while "
    "it runs. One thread owns the engine; requests reach it through a queue, and it hands tokens to the loop with "
    "call_soon_threadsafe, where the client's coroutine takes them from an asyncio queue.",
    rubric=(
        "the loop stands still during a step",
        "what clients notice",
        "one thread owns the engine",
        "messages in, call_soon_threadsafe out",
    ),
)
