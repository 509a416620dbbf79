"""Questions of chapter 06, the paged KV cache."""

from __future__ import annotations

from minillm.course.questions.coding import CodeVariant
from minillm.course.questions.question import Bank, Draw, Variant, each_of
from minillm.rounding import ceil_div

BANK = Bank()


@BANK.computed(
    6,
    "wastes memory, and count each",
    title="Blocks and waste",
    minutes=5,
    unit="slots",
    within=(10, 90),
    rubric=("blocks of each sequence, rounded up", "slots of all blocks", "those without a token"),
)
def block_waste(draw: Draw) -> Variant:
    def waste(drawn: tuple[list[int], int]) -> int:
        lengths, size = drawn
        return sum(ceil_div(length, size) * size - length for length in lengths)

    lengths, size = drawn = draw.until(
        lambda: (draw.numbers(4, 21, 99), draw.of(16, 32)),
        lambda d: 12 < waste(d) < 85 and all(one % d[1] for one in d[0]) and waste(d) != -sum(d[0]) % d[1],
    )
    blocks = [ceil_div(length, size) for length in lengths]
    return Variant(
        f"Four sequences hold {each_of(lengths)} tokens in a paged cache with blocks of {size}. How many slots of "
        "their blocks hold no token?",
        waste(drawn),
        (
            f"Blocks: {each_of(blocks)}, together {sum(blocks)}.",
            f"Slots: {sum(blocks)} · {size} = {sum(blocks) * size}.",
            f"Tokens: {sum(lengths)}. Without a token: {waste(drawn)}.",
        ),
        {"sequences do not share a last block": -sum(lengths) % size},
    )


@BANK.computed(
    6,
    "build a block pool and block tables",
    title="Slots of a table",
    minutes=5,
    unit="slots",
    within=(60, 600),
    rubric=("the entry of the table", "the place in the block", "the slots"),
)
def slots_of_positions(draw: Draw) -> Variant:
    size, table = draw.of(4, 8), draw.numbers(5, 2, 19)
    positions = draw.until(
        lambda: sorted(draw.numbers(4, size, 5 * size - 1)), lambda p: len({q // size for q in p}) == 3
    )
    slots = [table[p // size] * size + p % size for p in positions]
    return Variant(
        f"The block table of a request is {table}, with blocks of {size} tokens. In which slots do the keys of the "
        f"positions {each_of(positions)} lie? Give the list in this order.",
        slots,
        (
            f"Entries: {each_of(f'{p} // {size} = {p // size}' for p in positions)}.",
            f"Blocks: {each_of(table[p // size] for p in positions)}.",
            f"Block · {size} + place: {slots}.",
        ),
        {
            "the place in the block is missing": [table[p // size] * size for p in positions],
            "the table was counted from 1": [table[p // size - 1] * size + p % size for p in positions],
        },
    )


@BANK.computed(
    6,
    "share blocks between samples",
    title="Blocks of several samples",
    minutes=7,
    unit="blocks",
    within=(15, 120),
    rubric=(
        "full blocks of the prompt are shared",
        "the last block of the prompt is copied",
        "blocks of each sample's own",
        "the blocks in use",
    ),
)
def shared_blocks(draw: Draw) -> Variant:
    def use(drawn: tuple[int, int, int]) -> tuple[int, int]:
        prompt, output, samples = drawn
        shared = prompt // 16
        return shared, shared + samples * (ceil_div(prompt + output, 16) - shared)

    prompt, output, samples = drawn = draw.until(
        lambda: (draw.number(70, 190), draw.number(35, 95), draw.number(3, 8)),
        lambda d: d[0] % 16 and 18 < use(d)[1] < 99,
    )
    (shared, answer), all_own = use(drawn), samples * ceil_div(prompt + output, 16)
    return Variant(
        f"A prompt of {prompt} tokens is answered by {samples} samples, which share its blocks and copy one when they "
        f"write to it. Blocks hold 16 tokens. How many blocks are in use when the keys and values of {output} tokens "
        "of each sample have been written?",
        answer,
        (
            f"Full blocks of the prompt: {prompt} // 16 = {shared}, shared by all.",
            f"A sample's blocks in all: ({prompt} + {output}) / 16, rounded up: {ceil_div(prompt + output, 16)}.",
            f"Of its own: {ceil_div(prompt + output, 16) - shared}.",
            f"In use: {shared} + {samples} · {ceil_div(prompt + output, 16) - shared} = {answer}.",
        ),
        {
            "full blocks of the prompt are shared": all_own,
            "the prompt's last block is not full, so each sample has a copy": answer - samples + 1,
        },
    )


@BANK.code(6, "build a block pool and block tables", title="A pool with a rule", minutes=15)
def pool(draw: Draw) -> CodeVariant:
    first = draw.of("the lowest free id", "the highest free id", "the block that was freed last")
    pick = {"the lowest free id": "free.pop(free.index(min(free)))",
            "the highest free id": "free.pop(free.index(max(free)))",
            "the block that was freed last": "free.pop()"}  # fmt: skip
    body = '''
def allocations(num_blocks: int, calls: list[int]) -> list[int]:
    """What the pool hands out: one block for each 0 in `calls`, -1 where none is free; other numbers free a block."""
    free, handed_out = list(range(num_blocks, 0, -1)), []
    for block in calls:
        if block:
            if 1 <= block <= num_blocks and block not in free:
                free.append(block)
        else:
            handed_out.append(PICK if free else -1)
    return handed_out
'''

    def call(rng) -> tuple[int, list[int]]:
        size = rng.randint(1, 5)
        return size, [rng.choice((0, 0, rng.randint(1, size + 1))) for _ in range(rng.randint(0, 14))]

    return CodeVariant(
        "A pool has the blocks 1 to `num_blocks`, all free at first, as if they had been freed from the highest id "
        f"down to the lowest. It always hands out **{first}**. Write `allocations(num_blocks, calls)`: for each `0` "
        "in `calls` one block is handed out, or -1 where none is free; a number from 1 on frees that block. To free a "
        "block that is free or does not exist changes nothing. Return what was handed out, in order.",
        body.replace("PICK", pick[first]),
        ((3, [0, 0, 1, 0, 0]), (4, [0, 0, 0, 2, 3, 0, 0, 0])),
        ((2, [0, 0, 0, 1, 0]), (2, [1, 0, 0, 0]), (1, []), (3, [0, 0, 0, 1, 1, 0, 0]), (2, [3, 0, 0, 0])),
        call,
        f"{first} goes first",
        {body.replace("PICK", code): f"this pool hands out {name}" for name, code in pick.items() if name != first}
        | {body.replace("PICK", pick[first]).replace(" and block not in free", ""): "a free block can be freed twice"},
    )


BANK.written(
    6,
    "wastes memory, and count each",
    "Blocks of one token",
    "A paged cache could have blocks of one token, which waste no slot at all. Give two reasons against, and one "
    "reason against blocks of 512 tokens.",
    "With blocks of one token the table is as long as the text, which the host fills and the kernel reads for every "
    "token; reads are scattered, and copies to host memory are small. Blocks of 512 waste 256 slots of each request "
    "on average, and share only whole blocks of a prefix.",
    rubric=(
        "long tables, work for each token",
        "scattered reads or small copies",
        "half a block is wasted for each request",
    ),
)
