"""A runner without a model that knows what must be where: every slot remembers which text it was written for."""

from __future__ import annotations

from minillm.engine.request import Request
from minillm.engine.scheduler import SampledToken, SchedulerOutput

NEVER_WRITTEN = "never written"


class BlockMemory:
    """Takes a `ModelRunner`'s place. What it writes into a slot is the whole text up to that token, so that whatever a
    row reads can be checked: a stale block, a missing copy, a wrong page all show. Made-up tokens depend on the text
    alone.
    """

    def __init__(
        self,
        block_size: int,
        window: int | None = None,
        vocab_size: int = 50,
        max_tokens: int = 10**9,
        max_rows: int = 10**9,
    ):
        self.block_size, self.window, self.vocab_size = block_size, window, vocab_size
        self.max_tokens, self.max_rows = max_tokens, max_rows
        self.slots: dict[int, object] = {}
        self.host: dict[int, list] = {}
        self.steps = 0

    def execute(self, output: SchedulerOutput) -> list[list[SampledToken]]:
        self.steps += 1
        assert sum(row.num_tokens for row in output.rows) <= self.max_tokens, "over the token budget"
        assert len(output.rows) <= self.max_rows, "over max_num_seqs"
        assert len({row.request.request_id for row in output.rows}) == len(output.rows), "a request twice in a step"
        counts = [row.num_tokens for row in output.rows]
        assert all(count > 0 for count in counts), "a row without tokens"
        assert sorted(counts, key=lambda count: count > 1) == counts, "rows with one token stand first"
        for block, place in output.moves.swap_out:
            self.host[place] = self._block(block)
        for source, target in output.moves.copies:
            self._fill(target, self._block(source))
        for place, block in output.moves.swap_in:
            self._fill(block, self.host[place])
        for row in output.rows:
            self._read_and_write(row)
        return [[self._token(row.request, index) for index in range(row.samples)] for row in output.rows]

    def _read_and_write(self, row) -> None:
        request, end = row.request, row.start + row.num_tokens
        assert end <= request.num_tokens and row.samples == (0 if end < request.num_tokens else 1 + request.num_forks)
        first = 0 if self.window is None else max(0, row.start - self.window + 1)
        for position in range(first, row.start):
            found = self.slots.get(self._slot(row.block_ids, position), NEVER_WRITTEN)
            assert found == self._text(request, position), f"{request.request_id} reads {found} at {position}"
        for position in range(row.start, end):
            slot = self._slot(row.block_ids, position)
            assert slot >= self.block_size, f"{request.request_id} writes into the null block at {position}"
            self.slots[slot] = self._text(request, position)

    def _slot(self, block_ids: list[int], position: int) -> int:
        return block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def _text(self, request: Request, position: int):
        return request.cache_salt, tuple(request.token_ids[: position + 1])

    def _token(self, request: Request, index: int) -> SampledToken:
        return SampledToken(hash((tuple(request.token_ids), request.index + index)) % self.vocab_size)

    def _block(self, block: int) -> list:
        return [self.slots.get(block * self.block_size + i, NEVER_WRITTEN) for i in range(self.block_size)]

    def _fill(self, block: int, content: list) -> None:
        for i, text in enumerate(content):
            self.slots[block * self.block_size + i] = text
