"""References of chapter 18's exercises: the best length, a second chance, votes, a model that remembers what it read.
Built in chapter 18."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

VOCABULARY = 50


def tokens_per_step(chances: Sequence[float], length: int) -> float:
    """The target's own token, and each guess with the chance that it and all before it are right."""
    return 1.0 + float(sum(np.cumprod(chances[:length])))


def time_per_token(
    chances: Sequence[float], draft_ms: float, step_ms: Callable[[int], float], batch: int, length: int
) -> float:
    return (length * draft_ms + step_ms(batch * (length + 1))) / (batch * tokens_per_step(chances, length))


def second_chance(
    p: np.ndarray,
    guesses: Sequence[int],
    qs: np.ndarray,
    chances: Sequence[float],
    last: float,
    *,
    normalise: bool = True,
    update: bool = True,
    rest_from_p: bool = False,
    accept_p: bool = False,
    at_least: bool = False,
) -> tuple[int, int | None]:
    """The token and which guess it was. The keywords are mistakes, for hints."""
    rest = p
    for index, (guess, q, chance) in enumerate(zip(guesses, qs, chances)):
        if chance * q[guess] < (p if accept_p else rest)[guess]:
            return int(guess), index
        gap = np.maximum((rest if update else p) - q, 0.0)
        if gap.sum() > 0:
            rest = gap / gap.sum() if normalise else gap
    if rest_from_p:
        rest = p
    running = np.cumsum(rest / rest.sum())
    above = np.flatnonzero(running >= last if at_least else running > last)
    return int(above[0] if len(above) else np.flatnonzero(rest)[-1]), None


class Votes:
    """What followed each n-gram, how often. Slow on purpose: it looks at the whole text for every guess."""

    def __init__(
        self,
        min_n: int,
        max_n: int,
        *,
        sizes: str = "longest",
        unsure: str = "stop",
        more_than: float = 0.5,
        guesses_vote: bool = False,
    ):
        self.sizes = range(max_n, min_n - 1, -1) if sizes == "longest" else range(min_n, max_n + 1)
        self.unsure, self.more_than, self.guesses_vote = unsure, more_than, guesses_vote
        self.text: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        self.text += token_ids

    def propose(self, count: int) -> list[int]:
        guesses: list[int] = []
        while (
            len(guesses) < count
            and (guess := self._guess(self.text + guesses, self.text + guesses if self.guesses_vote else self.text))
            is not None
        ):
            guesses.append(guess)
        return guesses

    def _guess(self, text: list[int], voting: list[int]) -> int | None:
        for n in self.sizes:
            end = text[-n:]
            votes = (
                Counter(voting[i + n] for i in range(len(voting) - n) if voting[i : i + n] == end)
                if len(text) >= n
                else Counter()
            )
            if votes:
                [(favourite, most)] = votes.most_common(1)
                if most > self.more_than * votes.total():
                    return favourite
                if self.unsure == "stop":
                    return None
        return None


class ToyModel:
    """A draft model for experiments, with a cache of one slot a token.

    `read(token_ids, start)` writes them into the slots from `start` on, and returns the token that it would say behind
    each of them, looking at everything in the cache up to there. As in a real cache, a slot that was never written
    holds something all the same (here a 0), and one that was written stays as it is until it is written again.
    """

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.reads: list[tuple[int, list[int]]] = []  # (start, token_ids) of each call

    def read(self, token_ids: Sequence[int], start: int) -> list[int]:
        token_ids = [int(token) for token in token_ids]
        if not token_ids or start < 0:
            raise ValueError(
                f"read(token_ids={token_ids}, start={start}): at least one token, from a place of 0 or more"
            )
        self.reads.append((start, token_ids))
        end = start + len(token_ids)
        self.slots += [0] * (end - len(self.slots))
        self.slots[start:end] = token_ids
        return [says(self.slots[: place + 1]) for place in range(start, end)]


def says(text: Sequence[int]) -> int:
    """What a ToyModel says behind a text: depends on every token and its place."""
    return sum((7 * place + 3) * (token + 1) for place, token in enumerate(text)) * 31 // 8 % VOCABULARY


def honest_draft(text: Sequence[int], count: int) -> list[int]:
    text = list(text)
    for _ in range(count):
        text.append(says(text))
    return text[len(text) - count :] if count else []


def trace_of(drafter: type, agrees: Sequence[int] = (3, 3, 3, 2, 3), count: int = 3) -> None:
    """Run a drafter beside a target that wants what the model honestly says, for so many tokens in each step."""
    model, text = ToyModel(), [4, 8, 15, 16, 23]
    one = drafter(model)
    print(f"{'text':>4}  {'it reads':<50}{'it guesses':<15}{'accepted':<10}the model, asked afresh")
    for number in agrees:
        model.reads.clear()
        guesses, honest = one.propose(list(text), count), honest_draft(text, count)
        right = next((i for i in range(number) if guesses[i] != honest[i]), number)
        reads = ", ".join(
            f"{tokens} from {start}" if len(tokens) > 1 else f"{tokens[0]} at {start}" for start, tokens in model.reads
        )
        print(f"{len(text):>4}  {reads:<50}{str(guesses):<15}{right:<10}{honest}")
        text += [*honest[:right], (honest_draft(text + honest[:right], 1)[0] + (right == number < count)) % VOCABULARY]
