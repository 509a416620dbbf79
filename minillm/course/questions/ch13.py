"""Questions of chapter 13, attention over pages."""

from __future__ import annotations

from minillm.course.questions.question import Bank, Draw, Variant
from minillm.kernels.decode_plan import plan_sizes
from minillm.rounding import ceil_div

BANK = Bank()


@BANK.computed(
    13,
    "split a long sequence",
    title="Splits for a few long sequences",
    minutes=6,
    unit="splits",
    within=(2, 20),
    rubric=("programs without a split", "programs that the GPU has room for", "splits of each sequence, rounded down"),
)
def splits(draw: Draw) -> Variant:
    kv_heads, sms = draw.of(2, 4, 8), draw.number(72, 144, 12)
    target = plan_sizes(1, kv_heads, 2**20, sms)[2]
    per_sm = target * kv_heads // sms
    sequences = draw.until(lambda: draw.number(4, 29), lambda s: 3 <= target // s <= 18 and target % s)
    return Variant(
        f"A decode step attends for {sequences} sequences of equal length over {kv_heads} KV heads; without splits "
        f"there is one program for each sequence and KV head. The GPU has {sms} SMs, and the planner wants {per_sm} "
        "programs on each, rounded down to whole splits. Into how many splits of the same size is each sequence cut, "
        "so that no more programs are launched than wanted?",
        target // sequences,
        (
            f"Programs without a split: {sequences} · {kv_heads} = {sequences * kv_heads}.",
            f"Wanted: {per_sm} · {sms} = {per_sm * sms}, that is {target} splits of each KV head for all sequences.",
            f"{target} / {sequences}, rounded down: {target // sequences}.",
        ),
        {
            "there is a program for each KV head, too": per_sm * sms // sequences,
            "rounded up, too many are launched": target // sequences + 1,
        },
    )


@BANK.computed(
    13,
    "prompts in chunks over cached pages",
    title=("A prefix that a batch shares"),
    minutes=5,
    unit="MB",
    tolerance=0.01,
    within=(100, 1000),
    rubric=("what each request reads without sharing", "what is read once", "the bytes saved"),
)
def cascade(draw: Draw) -> Variant:
    def saved(drawn: tuple[int, int, int]) -> float:
        requests, prefix, each = drawn
        return (requests - 1) * prefix * each / 1e6

    requests, prefix, each = drawn = draw.until(
        lambda: (draw.number(12, 48, 4), draw.number(1100, 3900, 100), draw.of(2048, 4096, 8192)),
        lambda d: 120 < saved(d) < 900,
    )
    own = draw.number(110, 390, 10)
    return Variant(
        f"{requests} requests decode in one batch. They share a prefix of {prefix} tokens, and each has {own} tokens "
        f"of its own. Keys and values of a token take {each} bytes in a layer. How many megabytes ($10^6$ bytes) "
        "fewer does a layer's attention read if the shared prefix is read once for the batch?",
        saved(drawn),
        (
            f"Without sharing the prefix is read {requests} times.",
            "With it, once. The tokens of its own are read in both cases.",
            f"{requests - 1} · {prefix} · {each} = {saved(drawn):.1f} MB.",
        ),
        {
            "the prefix is still read once": requests * prefix * each / 1e6,
            "each request's own tokens are read in any case": ((requests - 1) * (prefix + own)) * each / 1e6,
        },
    )


@BANK.computed(
    13,
    "write keys and values by slot",
    title=("The first slot that does not fit"),
    minutes=5,
    unit="slots",
    within=(2e5, 2.2e6),
    rubric=("numbers of a slot", "numbers that 31 bits address", "the slot"),
)
def int32_slot(draw: Draw) -> Variant:
    heads, dim = draw.of((8, 128), (8, 256), (16, 128), (16, 96), (24, 128), (12, 128), (20, 64), (40, 128), (16, 160))
    width = heads * dim
    answer = ceil_div(2**31, width)
    return Variant(
        f"A kernel computes the place of a key as slot · {heads} heads · {dim} numbers, in a signed integer of 32 "
        "bits. From which slot on is the place of its first number wrong?",
        answer,
        (
            f"Numbers of a slot: {heads} · {dim} = {width}.",
            "The largest place that fits is $2^{31} - 1$.",
            f"$2^{{31}} / {width}$, rounded up: {answer:,}.",
        ),
        {"one bit of the 32 is the sign": ceil_div(2**32, width), "heads were left out": ceil_div(2**31, dim)},
    )


BANK.written(
    13,
    "split a long sequence over the whole GPU",
    "Split the short ones, too",
    "Splitting a sequence among programs makes a decode step with one long sequence several times as fast. Why does "
    "it gain nothing for 64 sequences of 500 tokens? What does splitting cost?",
    "64 sequences times their KV heads already fill the SMs, and the bandwidth is used. Each split stores a partial "
    "output and its softmax state, which a second pass reads and merges, and the parts of short sequences are too "
    "short to be worth a program.",
    rubric=(
        "one sequence leaves SMs idle",
        "many sequences already fill them",
        "partial results are stored and merged",
    ),
)
