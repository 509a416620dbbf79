"""The edges of top-k and top-p: the smallest logit that each keeps, found by halving an interval. Built in chapter 14.

The search reads a list of the largest logits, which `minillm.kernels.sampling_filters` made, and the row itself only
where the list does not hold the edge. Probabilities are added as integers, in units of 2^-42 of the largest one, so the
order of additions does not matter. Vocabularies up to 2^20 tokens fit in 64 bits.
"""

from __future__ import annotations

from minillm.kernels.language import tl, triton

ROOM: tl.constexpr = tl.constexpr(8192)  # tokens of a row's list
LOWEST: tl.constexpr = tl.constexpr(-2139095041)  # the rank of -inf


@triton.jit
def threshold_kernel(
    logits, temperature, top_k, top_p, marks, tally, listed, bound, last_tie, row_stride, vocab_size,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The smallest value that is kept, and of the tokens that have exactly this value the last one that is."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    listed += row * ROOM
    heat, largest = tl.load(temperature + row), tl.load(marks + row * 3)
    k, p = k_and_p(top_k, top_p, row, vocab_size, TOP_K, TOP_P)
    length, left = tl.load(tally + row * 3).to(tl.int32), tl.load(tally + row * 3 + 1).to(tl.int32)
    total = tl.load(tally + row * 3 + 2)
    complete = length <= ROOM
    least = rank(tl.load(marks + row * 3 + 1))
    last = vocab_size
    if TOP_K:
        if k < tl.minimum(left, vocab_size):  # min-p left more than k
            complete = complete & (k <= length)
            least, _, _ = find_edge(
                logits, listed, complete, length, heat, largest, k.to(tl.int64), vocab_size, False, TILE
            )
            if TOP_P:
                values, size = tl.where(complete, listed, logits), tl.where(complete, length, vocab_size)
                total, _, _, _ = weigh(values, size, heat, largest, least, True, TILE)
    if TOP_P:
        if (p < 1.0) & (left > 0):
            # The largest rank such that the tokens from it on hold p of what is left.
            goal = tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            if complete:
                held, _, _, _ = weigh(listed, length, heat, largest, LOWEST, True, TILE)
                complete = held >= goal
            least, above, held = find_edge(
                logits, listed, complete, length, heat, largest, goal, vocab_size, True, TILE
            )
            # Of the tokens at the edge as many as it takes, the smaller ids first.
            each = mass_of(unrank(least), largest)
            needed = (goal - above + each - 1) // each
            if needed * each < held - above:
                last = nth_equal(logits, heat, least, needed.to(tl.int32), vocab_size, TILE)
    tl.store(bound + row, unrank(least))
    tl.store(last_tie + row, last.to(tl.int64))


@triton.jit
def k_and_p(top_k, top_p, row, vocab_size, TOP_K: tl.constexpr, TOP_P: tl.constexpr):
    """A row's k and p; what keeps every token where no row has one."""
    k, p = vocab_size, 1.0
    if TOP_K:
        k = tl.load(top_k + row).to(tl.int32)
    if TOP_P:
        p = tl.load(top_p + row)
    return k, p


@triton.jit
def find_edge(
    logits, listed, complete, length, heat, largest, goal, vocab_size, MASS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The largest rank from which on the tokens weigh `goal`, what those above it weigh, and what those from it on do.

    Where the list does not hold the edge, passes over the row narrow the interval until its tokens fit in the list.
    """
    low, high = tl.full((), LOWEST, tl.int64), rank(largest).to(tl.int64)
    above, held = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    if not complete:
        num_low, num_above = vocab_size, 0
        while (low < high) & (num_low - num_above > ROOM):
            low, high, above, held, num_low, num_above = halve(
                logits, vocab_size, heat, largest, goal, 0, low, high, above, held, num_low, num_above, MASS, TILE
            )
        if low < high:
            length = list_between(logits, listed, heat, low.to(tl.int32), high.to(tl.int32), vocab_size, TILE)
    num_low, num_above, over = length, 0, above  # the list lacks what weighs `over`
    while low < high:
        low, high, above, held, num_low, num_above = halve(
            listed, length, heat, largest, goal, over, low, high, above, held, num_low, num_above, MASS, TILE
        )
    return high.to(tl.int32), above, held


@triton.jit
def halve(
    values, size, heat, largest, goal, over, low, high, above, held, num_low, num_above, MASS: tl.constexpr,
    TILE: tl.constexpr
):  # fmt: skip
    """One step of the search for an edge, which lies between `low` and `high`.

        rank   low ....... middle ....... high        weigh(middle) >= goal: the edge is at `middle` or above
                 down here ->|<- up here              else: below it

    The end that moves goes on to a token that exists: among equal tokens the search is over at once.
    """
    middle = high - (high - low) // 2  # over low
    here, number, up, down = weigh(values, size, heat, largest, middle.to(tl.int32), MASS, TILE)
    here += over
    reached = here >= goal
    low, held, num_low = tl.where(reached, up, low), tl.where(reached, here, held), tl.where(reached, number, num_low)
    high, above = tl.where(reached, high, tl.maximum(down, low)), tl.where(reached, above, here)
    return low, high, above, held, num_low, tl.where(reached, num_above, number)


@triton.jit
def weigh(values, size, heat, largest, middle, MASS: tl.constexpr, TILE: tl.constexpr):
    """The tokens that rank `middle` or higher: their mass (or number) and their number;
    the lowest such rank, the next below."""
    mass, number = tl.zeros((TILE,), tl.int64), tl.zeros((TILE,), tl.int32)
    up, down = tl.full((TILE,), 2147483647, tl.int32), tl.full((TILE,), LOWEST, tl.int32)
    for start in range(0, size, TILE):
        x = load_tile(values, heat, start, size, TILE)
        order = rank(x)
        reaches = order >= middle
        counts = reaches & (x > float("-inf"))
        number += counts.to(tl.int32)
        if MASS:
            mass += tl.where(counts, mass_of(x, largest), 0)
        up = tl.minimum(up, tl.where(reaches, order, 2147483647))
        down = tl.maximum(down, tl.where(reaches, LOWEST, order))
    how_many = tl.sum(number, 0)
    weight = how_many.to(tl.int64)
    if MASS:
        weight = tl.sum(mass, 0)
    return weight, how_many, tl.min(up, 0).to(tl.int64), tl.max(down, 0).to(tl.int64)


@triton.jit
def list_between(logits, listed, heat, low, high, vocab_size, TILE: tl.constexpr):
    """The logits that rank from `low` to `high` into the list; how many.
    The barriers: threads read what others write."""
    tl.debug_barrier()
    length = 0
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        logit = tl.load(logits + ids, ids < vocab_size, float("-inf"))
        order = rank(tl.div_rn(logit, heat))
        chosen = (order >= low) & (order <= high) & (order > LOWEST)
        ones = chosen.to(tl.int32)
        tl.store(listed + length + tl.cumsum(ones, 0) - 1, logit, chosen)
        length += tl.sum(ones, 0)
    tl.debug_barrier()
    return length


@triton.jit
def nth_equal(logits, heat, wanted, n, vocab_size, TILE: tl.constexpr):
    """The id of the n-th token of this rank."""
    found, start, last = 0, 0, vocab_size
    while (found < n) & (start < vocab_size):
        equal = (rank(load_tile(logits, heat, start, vocab_size, TILE)) == wanted).to(tl.int32)
        place = tl.cumsum(equal, 0) + found
        last = tl.minimum(
            last, tl.min(tl.where((place == n) & (equal == 1), start + tl.arange(0, TILE), vocab_size), 0)
        )
        found += tl.sum(equal, 0)
        start += TILE
    return last


@triton.jit
def load_tile(values, heat, start, size, TILE: tl.constexpr):
    ids = start + tl.arange(0, TILE)
    return tl.div_rn(tl.load(values + ids, ids < size, float("-inf")), heat)


@triton.jit
def mass_of(x, largest):
    """The exponential as a whole number: 2^42 for the largest logit, 0 for those more than 29 below it."""
    return (tl.where(x == largest, 1.0, tl.exp(x - largest)) * 4398046511104.0 + 0.5).to(tl.int64)


@triton.jit
def rank(x):
    """An int32 that orders as the float does: the bits of a negative one are turned around, and -0 is 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unrank(order):
    bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)
