"""References of chapter 18's exercises: the best length, a second chance, votes, a model that remembers what it read.
Built in chapter 18."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

VOCABULARY = 50


class Steps:
    """The time of a step, for the numbers of tokens that can come."""

    def __init__(self, costs: dict[int, float]) -> None:
        self.costs = costs

    def __call__(self, num_tokens: int) -> float:
        if num_tokens not in self.costs:
            raise ValueError(
                f"step_ms was called with {num_tokens} tokens; here a step has {', '.join(map(str, self.costs))}"
            )
        return self.costs[num_tokens]

    def __repr__(self) -> str:
        return f"<step_ms {self.costs}>"


def best_length(
    chances: Sequence[float],
    draft_ms: float,
    step_ms: Callable[[int], float],
    batch: int,
    *,
    tried: Sequence[int] = (),
    better: Callable[[float, float], bool] = lambda ms, best: ms < best,
    decimals: int = 9,
    patient: bool = True,
    shortest: int = 0,
    own: float = 1.0,
    chance: Callable[[float, float], float] = lambda before, chance: before * chance,
    passes: Callable[[int, int], int] = lambda length, batch: length,
    requests: Callable[[int], int] = lambda batch: batch,
) -> tuple[int, float]:
    """The length of the least time per token, and that time. The keywords from `better` on are mistakes."""
    best, accepted = None, 1.0
    tokens = own
    for length in range(len(chances) + 1):
        if length:
            accepted = chance(accepted, chances[length - 1])
            tokens += accepted
        if length < min(shortest, len(chances)) or (tried and length not in tried):
            continue
        ms = (passes(length, batch) * draft_ms + step_ms(batch * (length + 1))) / (requests(batch) * tokens)
        if best is None or better(round(ms, decimals), round(best[1], decimals)):
            best = length, ms
        elif not patient:
            break
    return best


def second_chance(
    p: np.ndarray,
    drafted: Sequence[int],
    qs: np.ndarray,
    chances: Sequence[float],
    last: float,
    *,
    normalise: bool = True,
    update: bool = True,
    rest_from_p: bool = False,
    accept_p: bool = False,
    at_least: bool = False,
    strictly: bool = True,
    ends_at_one: bool = False,
    last_id: bool = False,
    nothing: str = "stays",
    most: int = 10**9,
) -> tuple[int, int | None]:
    """The token and which draft token it was. The keywords are mistakes."""
    rest = p
    for index, (token, q, chance) in enumerate(zip(drafted[:most], qs, chances)):
        border, value = (p if accept_p else rest)[token], chance * q[token]
        if value < border or (value == border and not strictly):
            return int(token), index
        gap = np.maximum((rest if update else p) - q, 0.0)
        if gap.sum() > 0:
            rest = gap / gap.sum() if normalise else gap
        elif nothing == "p":
            rest = p
    rest = p if rest_from_p else rest if normalise else rest / rest.sum()
    running = np.cumsum(rest)
    running = running / running[-1] if ends_at_one else running
    above = np.flatnonzero(running >= last if at_least else running > last)
    if len(above):
        return int(above[0]), None
    return len(rest) - 1 if last_id else int(np.flatnonzero(rest)[-1]), None


class Votes:
    """What followed each n-gram, how often. Slow on purpose: it looks at the whole text for every draft token.
    The keywords are mistakes."""

    def __init__(
        self,
        min_n: int,
        max_n: int,
        *,
        longest: bool = True,
        unsure: str = "stop",
        more_than: float = 0.5,
        guesses_vote: bool = False,
        follows: bool = True,
        borders: bool = False,
    ):
        self.sizes = range(max_n, min_n - 1, -1) if longest else range(min_n, max_n + 1)
        self.unsure, self.more_than, self.guesses_vote = unsure, more_than, guesses_vote
        self.follows, self.borders = follows, borders
        self.text: list[int] = []
        self.calls: list[int] = []  # where the tokens of each call begin

    def extend(self, token_ids: Sequence[int]) -> None:
        self.calls.append(len(self.text))
        self.text += token_ids

    def propose(self, count: int) -> list[int]:
        guesses: list[int] = []
        while len(guesses) < count and (guess := self._guess(self.text + guesses * self.follows)) is not None:
            guesses.append(guess)
        self.text += guesses * self.guesses_vote
        return guesses

    def _guess(self, text: list[int]) -> int | None:
        for n in self.sizes:
            votes = Counter(self._followers(text[-n:])) if len(text) >= n else Counter()
            if votes:
                [(favourite, most)] = votes.most_common(1)
                if most > self.more_than * votes.total():
                    return favourite
                if self.unsure == "stop":
                    return None
        return None

    def _followers(self, gram: list[int]) -> Iterator[int]:
        for place in range(len(self.text) - len(gram)):
            end = place + len(gram)
            if self.text[place:end] == gram and not (self.borders and any(place < c <= end for c in self.calls)):
                yield self.text[end]


class ToyModel:
    """A draft model for experiments, with a cache of one KV slot per token.

    `read(token_ids, start)` writes the tokens into the KV slots from `start` on, and returns the token that it predicts
    after each of them, given everything in the cache up to there. As in a real cache, a KV slot that was never written
    holds something all the same (here a 0), and one that was written stays as it is until it is written again.
    """

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.reads: list[tuple[int, list[int]]] = []  # (start, token_ids) of each call

    def read(self, token_ids: Sequence[int], start: int) -> list[int]:
        token_ids = [int(token) for token in token_ids]
        if not token_ids or start < 0:
            raise ValueError(
                f"read(token_ids={token_ids}, start={start}): read at least one token, into KV slot 0 or a later one"
            )
        self.reads.append((start, token_ids))
        end = start + len(token_ids)
        self.slots += [0] * (end - len(self.slots))
        self.slots[start:end] = token_ids
        return [says(self.slots[: place + 1]) for place in range(start, end)]


class OnlyRead:
    """A model of which a drafter sees the method `read`, and nothing else."""

    def __init__(self, model: ToyModel) -> None:
        self.read = lambda token_ids, start: model.read(token_ids, start)

    def __repr__(self) -> str:
        return "<a model with the method read>"


def says(text: Sequence[int]) -> int:
    """What a ToyModel predicts after a text: depends on every token and its position."""
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
    print(f"{'text':>4}  {'it reads':<50}{'it drafts':<15}{'accepted':<10}the model, with an empty cache")
    for number in agrees:
        model.reads.clear()
        drafted, honest = one.propose(list(text), count), honest_draft(text, count)
        right = next((i for i in range(number) if drafted[i] != honest[i]), number)
        reads = ", ".join(
            f"{tokens} from {start}" if len(tokens) > 1 else f"{tokens[0]} at {start}" for start, tokens in model.reads
        )
        print(f"{len(text):>4}  {reads:<50}{str(drafted):<15}{right:<10}{honest}")
        text += [*honest[:right], (honest_draft(text + honest[:right], 1)[0] + (right == number < count)) % VOCABULARY]
