"""Checks of chapter 07: the bill of an agent loop. Built in chapter 07."""

from __future__ import annotations

from minillm.book.checks import Draw, FunctionChecker

PRICES = {"input": 20, "write": 25, "read": 2, "output": 100}  # Anthropic's ratios; in millionths of a cent
FREE_WRITES = {"input": 28, "write": 28, "read": 3, "output": 42}


def billed(
    turns, prices, lifetime, minimum, *, on_use=True, answers=0, inclusive=True, grows=True, least_new=False,
    premium="write", output=True,
) -> tuple[int, int]:  # fmt: skip
    total = read = history = cached = last = 0
    for minute, new, answer in turns:
        prompt = history + new
        alive = cached and (minute - last <= lifetime if inclusive else minute - last < lifetime)
        hit = min(cached, prompt) if alive else 0
        long = (new if least_new else prompt) >= minimum
        total += hit * prices["read"] + (prompt - hit) * prices[premium if long else "input"]
        total += answer * prices["output"] * output
        read += hit
        if long:
            if grows or not hit:
                cached = prompt + answer * answers
            if on_use or not hit:
                last = minute
        history = prompt + answer
    return total, read


def _random_loop(draw: Draw) -> tuple:
    minute, turns = draw.randint(0, 5), []
    for _ in range(draw.randint(1, 9)):
        turns.append((minute, draw.randint(1, 900), draw.randint(0, 200)))
        minute += draw.rng.choice((0, 1, 3, 5, 5, 6, 20))
    prices = {name: draw.randint(1, 60) for name in ("input", "write", "read", "output")}
    return turns, prices, draw.rng.choice((1, 5, 60)), draw.rng.choice((1, 500, 1024, 2048))


check_agent_bill = FunctionChecker(
    "agent_bill",
    billed,
    hint="Follow three numbers from turn to turn: the history, how much of it is cached, and when that was last used.",
    examples=[
        ([(0, 2000, 100), (1, 50, 100), (2, 50, 100)], PRICES, 5, 1024),
        ([(0, 2000, 100), (9, 50, 100)], PRICES, 5, 1024),
    ],
    edges={
        "too short at first": ([(0, 600, 100), (1, 500, 10), (2, 5, 10)], PRICES, 5, 1024),
        "just long enough": ([(0, 1024, 0), (1, 1, 0)], PRICES, 5, 1024),
        "one token too short": ([(0, 1023, 0), (0, 0, 0)], PRICES, 5, 1024),
        "used in time, again and again": ([(0, 2000, 9), (4, 1, 9), (8, 1, 9), (12, 1, 9)], PRICES, 5, 1024),
        "in the last minute of its life": ([(0, 2000, 9), (5, 1, 9)], PRICES, 5, 1024),
        "a minute later": ([(0, 2000, 9), (6, 1, 9)], PRICES, 5, 1024),
        "lost and written again": ([(0, 2000, 9), (60, 1, 9), (61, 1, 9)], PRICES, 5, 1024),
        "writes cost nothing more": ([(0, 300, 40), (1, 300, 40), (2, 300, 40)], FREE_WRITES, 60, 64),
        "nothing is new": ([(0, 2000, 9), (1, 0, 9)], PRICES, 5, 1024),
        "no turn": ([], PRICES, 5, 1024),
        "nothing is said": ([(3, 2000, 0)], PRICES, 5, 1024),
    },
    random=_random_loop,
    trials=80,
    returns=("the bill", "the tokens read from the cache"),
    misconceptions={
        "The lifetime begins anew with each use, not only with the first write.": dict(on_use=False),
        "A prompt is cached, its answer is not: the next turn writes it.": dict(answers=1),
        "An entry is alive up to and including `lifetime` minutes after its last use.": dict(inclusive=False),
        "What a turn writes is cached too: the next turn reads the whole prompt of this one.": dict(grows=False),
        "The whole prompt has to reach the minimum, not what is new in it.": dict(least_new=True),
        "Tokens that are written to the cache cost the price of a write.": dict(premium="input"),
        "Answers cost money, too, at the price of output.": dict(output=False),
    },
)
