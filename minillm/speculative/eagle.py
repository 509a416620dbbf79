"""EagleDrafter: a draft model that reads its target's features. Built in chapter 18.

    position            0    1    2    3    4   |  5    6
    token               t0   t1   t2   t3   t4  |  d5   d6
    its feature         0    g0   g1   g2   g3  |  h4   h5         g: made by the target; h: made by the head itself
    the head drafts                        d5   |  d6   d7

Each token comes with the feature of the token before it, so the head at t4 knows all that the target knew when it drew
t4, and t4. What the target has not computed yet, the head makes for itself. Where a feature is not known (the prefix
cache had the target's keys and not the head's), a zero takes its place: the draft may be worse, and is verified.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.speculative.draft_model import DraftRow, ModelDrafter
from minillm.speculative.drafter import Draft, DraftedRequest


class FeatureStore:
    """Features of each request's tokens, until the head has read them: (position of the first, [count, size])."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device):
        self.kept: dict[str, tuple[int, Tensor]] = {}
        self.zeros = torch.zeros(1, size, dtype=dtype, device=device)

    def add(self, request_id: str, start: int, features: Tensor) -> None:
        """Of the tokens from `start` on. What was known of them, of rejected draft tokens, is replaced."""
        first, known = self.kept.get(request_id, (start, features[:0]))
        if first < start <= first + len(known):
            start, features = first, torch.cat([known[: start - first], features])
        self.kept[request_id] = start, features

    def span(self, request_id: str, start: int, end: int) -> list[Tensor]:
        """Features of positions `start` to `end` - 1, in parts; zeros where none is known."""
        first, known = self.kept.get(request_id, (end, self.zeros[:0]))
        low, high = max(start, first), min(end, first + len(known))
        if low >= high:
            return [self.zeros.expand(end - start, -1)]
        parts = [known[low - first : high - first]]
        if start < low:
            parts.insert(0, self.zeros.expand(low - start, -1))
        return parts if high == end else [*parts, self.zeros.expand(end - high, -1)]

    def knows(self, request_id: str, position: int) -> bool:
        first, known = self.kept.get(request_id, (0, self.zeros[:0]))
        return first <= position < first + len(known)

    def trim(self, request_id: str, start: int, end: int) -> None:
        """Forget all but positions `start` to `end` - 1."""
        if request_id not in self.kept:
            return
        first, known = self.kept[request_id]
        start = max(start, first)
        if (rest := known[start - first : max(start, end) - first]).numel():
            self.kept[request_id] = start, rest
        else:
            del self.kept[request_id]


class EagleDrafter(ModelDrafter):
    """Drafts with an `EagleHead` behind `forward`; `store` has what `observe` saw of the target's steps. Of each text
    the head does not read the first `skipped` tokens: its own positions begin behind them."""

    def __init__(self, store: FeatureStore, *args, skipped: int = 0, **named):
        super().__init__(*args, **named)
        self.store, self.skipped = store, skipped

    def text_of(self, request: DraftedRequest) -> list[int]:
        return request.token_ids[self.skipped :] if self.skipped else request.token_ids

    def salt_of(self, request: DraftedRequest) -> str | None:
        """What the head does not read is in the features that it reads."""
        if not self.skipped:
            return request.cache_salt
        return json.dumps([request.token_ids[: self.skipped], request.cache_salt])

    def propose(self, requests: Sequence[DraftedRequest], counts: Sequence[int]) -> list[Draft]:
        kept = self.store.kept
        for request in requests:  # a sample that was split off goes on with the prompt's features
            name = request.request_id
            if name not in kept and (parent := name.rpartition("_")[0]) in kept:
                kept[name] = kept[parent]
        for request in requests:  # of rejected draft tokens, and of the last token, there are none
            self.store.trim(request.request_id, 0, len(request.token_ids) - 1)
        counts = [count if len(one.token_ids) > self.skipped else 0 for one, count in zip(requests, counts)]
        drafts = super().propose(requests, counts)
        for request in requests:
            state = self.states[request.request_id]
            # Drafted tokens were read with the head's own features; those accepted are read again, with the target's.
            state.num_computed_tokens = min(state.num_computed_tokens, len(self.text_of(request)))
            num_read = min(state.num_computed_tokens + self.skipped, len(request.token_ids) - 1)
            self.store.trim(request.request_id, num_read - 1, len(request.token_ids) - 1)
        return drafts

    def forget(self, request_id: str) -> None:
        self.store.kept.pop(request_id, None)
        super().forget(request_id)


def features_of(
    store: FeatureStore,
    rows: Sequence[DraftRow],
    made_for: dict[str, tuple[int, int]],
    made: Tensor | None,
    skipped: int = 0,
) -> Tensor:
    """What each token of the rows reads, [num_tokens, hidden_size]: the target's feature of the token before it, or
    where there is none the one that the head made in its last pass (`made_for`: its position, and its row in `made`).
    Positions of rows begin behind the `skipped` tokens.
    """
    parts: list[Tensor] = []
    for row in rows:
        name, before = row.request.request_id, row.start + skipped - 1
        position, at = made_for.get(name, (None, 0))
        if row.num_tokens == 1 and position == before and not store.knows(name, before):
            parts.append(made[at : at + 1])
        else:
            parts += store.span(name, before, before + row.num_tokens)
    return torch.cat(parts)
