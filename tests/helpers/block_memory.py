"""A runner without a model that knows what must be where: every slot remembers which text it was written for."""

from __future__ import annotations

from minillm.engine.scheduler import Scheduler
from minillm.engine.step import Announcer, NewRequest, ScheduledRequest, SchedulerOutput, StepResult

NEVER_WRITTEN = "never written"


class BlockMemory:
    """Takes a `ModelRunner`'s place. What it writes into a slot is the whole text up to that token, so that whatever a
    row reads can be checked: a stale block, a missing copy, a wrong page all show. Made-up tokens depend on the text
    alone.

    Of the requests it knows what the steps have told it, as a worker in another process would.
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
        self.requests: dict[str, NewRequest] = {}
        self.tables: dict[str, list[int]] = {}
        self.steps = 0
        self.announcer = Announcer()

    def next_step(self, scheduler: Scheduler) -> SchedulerOutput:
        """What `scheduler` decides, completed as the engine does."""
        output = scheduler.schedule()
        self.announcer.complete(output, scheduler.requests, scheduler.kv_cache.tables)
        return output

    def execute(self, output: SchedulerOutput) -> StepResult:
        self.steps += 1
        assert sum(row.num_tokens for row in output.rows) <= self.max_tokens, "over the token budget"
        assert len(output.rows) <= self.max_rows, "over max_num_seqs"
        assert len({row.request_id for row in output.rows}) == len(output.rows), "a request twice in a step"
        counts = [row.num_tokens for row in output.rows]
        assert all(count > 0 for count in counts), "a row without tokens"
        assert sorted(counts, key=lambda count: count > 1) == counts, "rows with one token stand first"
        for name in (*output.finished, *(list(self.requests) if output.reset else ())):
            self.requests.pop(name), self.tables.pop(name, None)
        for new in output.arrived:
            self.requests[new.request_id] = new
        for block, place in output.moves.swap_out:
            self.host[place] = self._block(block)
        for source, target in output.moves.copies:
            self._fill(target, self._block(source))
        for place, block in output.moves.swap_in:
            self._fill(block, self.host[place])
        result = StepResult()
        for row in output.rows:
            self._read_and_write(row)
            request = self.requests[row.request_id]
            for index, name in enumerate((row.request_id, *row.fork_ids) if row.samples else ()):
                result.token_ids[name] = [self._token(request, index)]
        for name, token_ids in result.token_ids.items():
            if name in self.requests:
                self.requests[name].token_ids.extend(token_ids)
        return result

    def _read_and_write(self, row: ScheduledRequest) -> None:
        request, end = self.requests[row.request_id], row.start + row.num_tokens
        self.tables.setdefault(row.request_id, [])[row.first_block :] = row.block_ids
        known = len(request.token_ids)
        assert end <= known and row.samples == (0 if end < known else 1 + len(row.fork_ids))
        first = 0 if self.window is None else max(0, row.start - self.window + 1)
        for position in range(first, row.start):
            found = self.slots.get(self._slot(row.request_id, position), NEVER_WRITTEN)
            assert found == self._text(request, position), f"{row.request_id} reads {found} at {position}"
        for position in range(row.start, end):
            slot = self._slot(row.request_id, position)
            assert slot >= self.block_size, f"{row.request_id} writes into the null block at {position}"
            self.slots[slot] = self._text(request, position)

    def _slot(self, request_id: str, position: int) -> int:
        return self.tables[request_id][position // self.block_size] * self.block_size + position % self.block_size

    def _text(self, request: NewRequest, position: int):
        return request.cache_salt, tuple(request.token_ids[: position + 1])

    def _token(self, request: NewRequest, index: int) -> int:
        return hash((tuple(request.token_ids), request.index + index)) % self.vocab_size

    def _block(self, block: int) -> list:
        return [self.slots.get(block * self.block_size + i, NEVER_WRITTEN) for i in range(self.block_size)]

    def _fill(self, block: int, content: list) -> None:
        for i, text in enumerate(content):
            self.slots[block * self.block_size + i] = text
