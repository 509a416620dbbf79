"""N-gram drafting: what came after these tokens the last time? Built in chapter 18.

    token_ids   ... [the cat sat] on the mat ... then [the cat sat] ?
                                  ^^^^^^^^^^                        the draft: on the mat

Prompt lookup (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding): no model, no memory traffic. It pays
where a text repeats: quoting, editing code, filling JSON, answers from a document.
"""

from __future__ import annotations

from collections.abc import Sequence

from minillm.speculative.drafter import Draft, DraftedRequest


class NgramDrafter:
    """Looks up the last `max_n` tokens, then fewer down to `min_n`; the most recent place where they stood wins."""

    def __init__(self, min_n: int = 2, max_n: int = 4):
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n={min_n}, max_n={max_n} are not allowed; allowed: 1 <= min_n <= max_n")
        self.sizes = range(max_n, min_n - 1, -1)
        self.indices: dict[str, NgramIndex] = {}

    def propose(self, requests: Sequence[DraftedRequest], counts: Sequence[int]) -> list[Draft]:
        return [Draft(self._lookup(request, count)) for request, count in zip(requests, counts)]

    def forget(self, request_id: str) -> None:
        self.indices.pop(request_id, None)

    def _lookup(self, request: DraftedRequest, count: int) -> list[int]:
        index = self.indices.setdefault(request.request_id, NgramIndex(self.sizes))
        index.extend(request.token_ids)
        return index.continuation(request.token_ids, count)


class NgramIndex:
    """Where each n-gram of a growing text was seen last. A token costs one entry for each size,
    a lookup one for each."""

    def __init__(self, sizes: Sequence[int]):
        self.sizes = sizes
        self.after: dict[tuple[int, ...], int] = {}  # n-gram -> the place behind its last occurrence
        self.num_read = 0

    def extend(self, token_ids: list[int]) -> None:
        """Enter the n-grams that end before the last token: only what has a successor can be continued."""
        for end in range(self.num_read, len(token_ids) - 1):
            for size in self.sizes:
                if size <= end + 1:
                    self.after[tuple(token_ids[end + 1 - size : end + 1])] = end + 1
        self.num_read = max(self.num_read, len(token_ids) - 1)

    def continuation(self, token_ids: list[int], count: int) -> list[int]:
        """Up to `count` tokens, none if no n-gram at the end of the text was seen before."""
        for size in self.sizes:
            place = self.after.get(tuple(token_ids[-size:])) if size <= len(token_ids) else None
            if place is not None:
                found = token_ids[place : place + count]
                period = len(token_ids) - place  # the text has been repeating itself: go on doing so
                return [found[i % period] for i in range(count)] if len(found) < count else found
        return []
