"""Questions of chapter 05, continuous batching."""

from __future__ import annotations

from minillm.course.questions.coding import CodeVariant
from minillm.course.questions.question import Bank, Draw, Variant, each_of, rows_of
from minillm.engine.request import Request
from minillm.engine.scheduler import Scheduler
from minillm.engine.step import StepResult
from minillm.kv_cache.manager import KVCacheManager
from minillm.rounding import ceil_div
from minillm.sampling.params import SamplingParams

BANK = Bank()


def _serve(prompts: list[int], outputs: list[int], budget: int, slots: int = 8) -> list[int]:
    """Tokens that the engine's scheduler processes in each step."""
    scheduler = Scheduler(KVCacheManager(400, 4, False), max_num_seqs=slots, max_num_batched_tokens=budget)
    for index, (prompt, output) in enumerate(zip(prompts, outputs)):
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        scheduler.add(Request(f"r{index}", [5] * prompt, params, max_tokens=output))
    steps = []
    while scheduler.requests:
        output = scheduler.schedule()
        steps.append(output.num_tokens)
        scheduler.update(output, StepResult({row.request_id: [7] for row in output.rows if row.samples}))
    return steps


@BANK.computed(
    5,
    "write a scheduler with one rule",
    title="Steps under a token budget",
    minutes=10,
    unit="tokens in each step",
    within=(20, 70),
    rubric=(
        "the prompt is cut at the budget",
        "requests that run go first",
        "a request leaves with its last token",
        "the last token is never processed",
        "the sequence",
    ),
)
def steps_of_a_trace(draw: Draw) -> Variant:
    def make() -> tuple[list[int], list[int], int]:
        return draw.numbers(3, 5, 19), draw.numbers(3, 2, 5), draw.number(7, 12)

    def fits(drawn: tuple) -> bool:
        prompts, outputs, budget = drawn
        steps = _serve(prompts, outputs, budget)
        return len(steps) == 7 and prompts[0] > budget and steps[:2] == [budget] * 2 and steps[-1] == 1

    prompts, outputs, budget = draw.until(make, fits)
    steps = _serve(prompts, outputs, budget)
    table = rows_of(["request", "prompt tokens", "output tokens"], zip("ABC", prompts, outputs))
    without_cut = _serve(prompts, outputs, max(sum(prompts), budget))
    more = _serve(prompts, [one + 1 for one in outputs], budget)
    return Variant(
        f"Three requests wait, in this order, when the scheduler of chapter 05 begins:\n\n{table}\n\nThe token budget "
        f"of a step is {budget}; prompts may be cut, and there are slots and blocks for all. How many tokens does "
        "each step process, until all requests have finished? Give the list, one number a step.",
        steps,
        (
            (
                "Requests that run get their tokens first, in order of arrival; what is left of the budget goes to "
                "the next."
            ),
            "A request samples its first token in the step that processes the end of its prompt.",
            "It then processes one token a step. Its last token is sampled and never processed.",
            f"The steps: {steps}, {sum(steps)} tokens in all.",
        ),
        {"the budget cuts prompts": without_cut, "the last token of an answer is not processed": more},
        "seven steps",
    )


@BANK.computed(
    5,
    "count the idle places of a static batch",
    title="Idle places",
    minutes=5,
    unit="idle places",
    within=(60, 550),
    rubric=("a batch takes as long as its longest answer", "places times steps", "the idle ones"),
)
def idle_places(draw: Draw) -> Variant:
    lengths = draw.until(lambda: draw.numbers(8, 11, 99), lambda n: 70 < 4 * (max(n[:4]) + max(n[4:])) - sum(n) < 500
                         and max(n[:4]) != max(n))  # fmt: skip
    steps = max(lengths[:4]) + max(lengths[4:])
    return Variant(
        f"Eight requests are served in static batches of four, in this order; their answers have {each_of(lengths)} "
        "tokens. A batch begins when all four of the batch before have finished. How many places of the steps are "
        "idle?",
        4 * steps - sum(lengths),
        (
            f"Steps: {max(lengths[:4])} + {max(lengths[4:])} = {steps}.",
            f"Places: 4 · {steps} = {4 * steps}.",
            f"Used: {sum(lengths)}. Idle: {4 * steps - sum(lengths)}.",
        ),
        {"each batch ends with its own longest answer": 8 * max(lengths) - sum(lengths)},
    )


@BANK.computed(
    5,
    "follow a request through WAITING",
    title="Back from a preemption",
    minutes=5,
    unit="steps",
    within=(3, 12),
    rubric=("what was computed is lost, prompt and answer", "room in a step", "the steps, rounded up"),
)
def steps_after_preemption(draw: Draw) -> Variant:
    def fits(drawn: tuple[int, ...]) -> bool:
        prompt, output, streams, budget = drawn
        steps = ceil_div(prompt + output, budget - streams)
        others = {ceil_div(prompt, budget - streams), ceil_div(prompt + output, budget)}
        return 4 <= steps <= 10 and steps not in others and len(others) == 2

    prompt, output, streams, budget = draw.until(
        lambda: (draw.number(310, 690), draw.number(110, 290), draw.number(17, 39), draw.number(110, 190)), fits
    )
    room, answer = budget - streams, ceil_div(prompt + output, budget - streams)
    return Variant(
        f"A request with a prompt of {prompt} tokens was preempted after it had sampled {output} tokens, and all of "
        f"its blocks were freed. It comes back first in the queue, while {streams} requests decode in every step. The "
        f"token budget is {budget}, and there is no prefix cache. After how many steps does it sample its next token?",
        answer,
        (
            f"To process: {prompt} + {output} = {prompt + output} tokens.",
            f"Room in a step: {budget} − {streams} = {room}.",
            f"{prompt + output} / {room}, rounded up: {answer} steps. The last of them samples.",
        ),
        {
            "its own answer has to be computed again, too": ceil_div(prompt, room),
            "the others' tokens take room in every step": ceil_div(prompt + output, budget),
        },
    )


@BANK.code(5, "write a scheduler with one rule", title="Admission under a budget", minutes=15)
def admit(draw: Draw) -> CodeVariant:
    order = draw.of("in order of arrival", "the longest first, ties in order of arrival")
    passes = draw.of("the first that does not fit ends the admission", "one that does not fit is passed over")
    key = "" if order.startswith("in") else ", key=lambda i: -prompts[i]"
    stop = "break" if passes.startswith("the") else "continue"
    body = '''
def admit(prompts: list[int], budget: int, slots: int) -> list[int]:
    """The indices of the waiting requests that are admitted, in the order of admission."""
    admitted = []
    for index in sorted(range(len(prompts)){key}):
        if len(admitted) == slots or prompts[index] > budget:
            {stop}
        admitted.append(index)
        budget -= prompts[index]
    return admitted
'''
    solution = body.format(key=key, stop=stop)
    other_key = "" if key else ", key=lambda i: -prompts[i]"
    return CodeVariant(
        "Prompts wait, `prompts[i]` tokens long, and are admitted whole. Write `admit(prompts, budget, slots)`: the "
        f"indices of those that enter this step, in the order of admission. Requests are looked at **{order}**; "
        "together they have at most `budget` tokens, and there are at most `slots` of them. "
        f"**{passes[0].upper()}{passes[1:]}.** A prompt that takes exactly what is left fits.",
        solution,
        (([5, 9, 2, 4], 11, 4), ([3, 3, 3], 9, 2)),
        (([], 5, 2), ([4], 3, 1), ([4], 4, 1), ([2, 2], 4, 0), ([6, 2, 5, 3], 10, 9), ([2, 2, 1], 5, 3)),
        lambda rng: ([rng.randint(1, 9) for _ in range(rng.randint(0, 7))], rng.randint(3, 25), rng.randint(1, 5)),
        f"{order}; {passes}",
        {
            body.format(key=other_key, stop=stop): "requests are looked at in another order",
            body.format(key=key, stop="continue" if stop == "break" else "break"): "the rule for one that does not fit",
            solution.replace("> budget", ">= budget"): "a prompt that takes exactly what is left fits",
        },
    )


BANK.written(
    5,
    "how much traffic continuous batching adds",
    "Equal lengths",
    "All requests of a service generate exactly 100 tokens, and a queue is never empty. What does continuous batching "
    "gain over static batches here? Change one thing about the traffic so that it gains much, and say why.",
    "Nothing: all slots of a static batch end in the same step, so no slot is idle. Answers whose lengths differ "
    "leave idle slots until the longest ends; requests that arrive while a batch runs wait for its end. Continuous "
    "batching fills a slot in the next step.",
    rubric=(
        "nothing is gained",
        "no slot is idle when lengths are equal",
        "a change: other lengths, or arrivals in between",
        "the reason",
    ),
)
