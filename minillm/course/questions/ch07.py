"""Questions of chapter 07, prefix caching."""

from __future__ import annotations

from minillm.course.questions.coding import CodeVariant
from minillm.course.questions.question import Bank, Draw, Variant, each_of
from minillm.kv_cache.block_pool import BlockPool
from minillm.kv_cache.prefix import extend_chain, root_hash

BANK = Bank()


@BANK.computed(
    7,
    "name a block so that it is reused exactly where",
    title="Hits of a hash chain",
    minutes=6,
    unit="tokens",
    within=(6, 30),
    rubric=("compares whole blocks", "a block after a difference has another name", "the tokens found"),
)
def chain_hits(draw: Draw) -> Variant:
    size, tokens = draw.of(4, 5, 6), 31
    blocks = tokens // size
    first = [draw.number(10, 99) for _ in range(tokens)]
    hits, place = draw.number(2, blocks - 2), draw.number(1, size - 2)
    second = list(first)
    second[hits * size + place] = draw.until(lambda: draw.number(10, 99), lambda t: t != first[hits * size + place])
    chains: list[list[bytes]] = [[], []]
    for chain, text in zip(chains, (first, second)):
        extend_chain(chain, root_hash(exam=0), text, size, blocks)
    found = size * sum(one == other for one, other in zip(*chains))
    return Variant(
        f"A prefix cache has blocks of {size} tokens and holds all full blocks of the first "
        f"prompt:\n\n`{first}`\n\nThe second prompt is:\n\n`{second}`\n\nHow many of its tokens need not be computed?",
        found,
        (
            f"The prompts differ first at position {hits * size + place}, in block {hits}.",
            (
                f"The names of blocks 0 to {hits - 1} are the same. Block {hits} and all behind it have other names, "
                "since a name includes the one before."
            ),
            f"{hits} · {size} = {found} tokens.",
        ),
        {
            "a part of a block is not found": found + place,
            "blocks with the same tokens behind a difference have other names": found + size * (blocks - hits - 1),
        },
        "one difference",
    )


@BANK.computed(
    7,
    "follow a block through owned, free and cached",
    title="Hits of an LRU cache",
    minutes=6,
    unit="places",
    within=(25, 60),
    rubric=(("a hit makes a block the most recent"), "the least recent is evicted", "the places of the hits"),
)
def lru_hits(draw: Draw) -> Variant:
    def fifo(names: str) -> list[int]:
        held, hits = "", []
        for at, name in enumerate(names, 1):
            if name in held:
                hits.append(at)
            else:
                held = (held + name)[-3:]
        return hits

    def lru(names: str) -> list[int]:
        pool, hits = BlockPool(3), []
        for at, name in enumerate(names, 1):
            block = pool.lookup(name.encode())
            if block is not None:
                hits.append(at)
                pool.touch([block])
            else:
                [block] = pool.allocate(1)
                pool.cache(block, name.encode())
            pool.free([block])
        return hits

    def again(names: str) -> list[int]:
        return [at for at, name in enumerate(names, 1) if name in names[: at - 1]]

    def make() -> str:
        names = draw.of(*"ABCDE")
        while len(names) < 14:
            names += draw.of(*(name for name in "ABCDE" if name != names[-1]))
        return names

    def fits(names: str) -> bool:
        return len(set(names)) == 5 == len(fifo(names)) == len(lru(names)) and fifo(names) != lru(names)

    names = draw.until(make, fits)
    hits = lru(names)
    return Variant(
        "A cache has room for 3 blocks and evicts the least recently used. It is empty, and the blocks "
        f"{each_of(names)} are asked for, one after the other; one that is missing is computed and cached. Which "
        "requests are hits? Give their places in this list, counted from 1.",
        hits,
        (
            "Keep a list of three names, the most recent last; a hit moves its name to the end.",
            f"Hits: {each_of(f'{at} ({names[at - 1]})' for at in hits)}.",
        ),
        {
            "a hit makes a block recent again; this evicts the oldest": fifo(names),
            "the cache has only three places": again(names),
        },
        "five hits",
    )


@BANK.computed(
    7,
    "trade samples of one prompt for accuracy",
    title="The second turn of a chat",
    minutes=7,
    unit="tokens",
    within=(40, 400),
    rubric=(
        "what the first turn has computed, without its last token",
        "full blocks only",
        "the length of the prompt",
        "the tokens to compute",
    ),
)
def second_turn(draw: Draw) -> Variant:
    def parts(drawn: tuple[int, ...]) -> tuple[int, int, int]:
        first, answer, question = drawn
        cached = (first + answer - 1) // 16 * 16
        return first + answer + question, cached, first + answer + question - cached

    first, answer, question = drawn = draw.until(
        lambda: (draw.number(210, 690), draw.number(110, 290), draw.number(41, 99)),
        lambda d: 45 < parts(d)[2] < 115 and parts(d)[2] not in (d[2], d[1] + d[2] + d[0] % 16),
    )
    prompt, cached, to_compute = parts(drawn)
    return Variant(
        f"The first prompt of a chat has {first} tokens and was answered with {answer} tokens. The prompt of the "
        f"second turn is all of that and {question} new tokens. Blocks hold 16 tokens, and nothing was evicted. How "
        "many tokens of the second prompt does the engine compute?",
        to_compute,
        (
            (
                f"Keys and values exist for {first} + {answer} − 1 = {first + answer - 1} tokens; the last was never "
                "processed."
            ),
            f"In full blocks: {cached}.",
            f"The prompt has {prompt} tokens.",
            f"To compute: {prompt} − {cached} = {to_compute}.",
        ),
        {
            "only full blocks are found": question + 1,
            "the answer's keys and values are cached, too": prompt - first // 16 * 16,
        },
    )


@BANK.code(7, "trade samples of one prompt for accuracy", title="A vote with a rule for ties", minutes=12)
def vote(draw: Draw) -> CodeVariant:
    tie, blank = draw.of("first", "last"), draw.of("do not vote", "count as one more answer, None")
    body = '''
def vote(answers: list[str | None]) -> str | None:
    """The answer with the most votes; None for no vote at all."""
    counts = {}
    for place, answer in enumerate(answers):
        SKIP
            counts.setdefault(answer, []).append(place)
    best = max(map(len, counts.values()), default=0)
    tied = [answer for answer, places in counts.items() if len(places) == best]
    return PICK
'''
    skips = {"do not vote": "if answer is not None:", "count as one more answer, None": "if True:"}
    picks = {"first": "min(tied, key=lambda answer: counts[answer][0], default=None)",
             "last": "max(tied, key=lambda answer: counts[answer][-1], default=None)"}  # fmt: skip
    said = {"first": "whose first vote came earliest", "last": "whose last vote came latest"}
    other, other_blank = ({*picks} - {tie}).pop(), ({*skips} - {blank}).pop()
    make = lambda pick, skip: body.replace("SKIP", skips[skip]).replace("PICK", picks[pick])
    return CodeVariant(
        "Samples of one prompt were answered; `answers[i]` is the answer of sample `i`, or None where none could be "
        f"read. Write `vote(answers)`: the answer with the most votes. Answers of None **{blank}**. Of equal counts "
        f"the answer **{said[tie]}** wins. Without any vote the result is None.",
        make(tie, blank),
        ((["4", "7", "7", "4", "9"],), (["1", None, None, "1", "1", None, None],)),
        (([],), ([None, None],), ([None, "3"],), (["3", None],), (["a", "b", "a", "b"],), (["b", "a", "a", "b"],)),
        lambda rng: ([rng.choice(["4", "7", "9", None]) for _ in range(rng.randint(0, 8))],),
        f"ties go to the answer {said[tie]}; answers of None {blank}",
        {
            make(other, blank): "the tie-break is another one",
            make(tie, other_blank): "the rule for None is another one",
            make(tie, blank).replace("places) == best", "places) >= best - 1"): "one vote fewer is no tie",
        },
    )


BANK.written(
    7,
    "name a block so that it is reused exactly where",
    "A hash of the block alone",
    "A colleague names a block by the hash of its own tokens, without the chain. Give two prompts for which the "
    "engine then computes a wrong answer, and explain what is wrong in the cache.",
    "Two prompts whose second blocks have the same tokens behind different first blocks. Keys and values of a token "
    "depend on all tokens before it (from the second layer on) and on its position, so the cached block belongs to "
    "another prefix.",
    rubric=(
        "same block behind different beginnings",
        "keys and values depend on everything before",
        "so the text is answered with another's cache",
    ),
)
