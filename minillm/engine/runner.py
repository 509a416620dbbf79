"""ModelRunner: one step of the scheduler becomes one forward pass and one draw. Built in chapter 05.

    SchedulerOutput -> arrivals, block copies -> ForwardBatch -> Decoder.forward -> logits -> Sampler -> StepResult

It keeps its own record of every request (`InputBatch`), and hears of one only through the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from minillm.engine.following import fill_masks, note_failed
from minillm.engine.graphs import DecodeGraphs
from minillm.engine.input_batch import InputBatch
from minillm.engine.launched import LaunchedStep
from minillm.engine.logits_room import LogitsRoom
from minillm.engine.lora_cache import AdapterCache
from minillm.engine.pieces import PieceGraphs
from minillm.engine.prompt_scores import ScoredPrompt, prompts_to_score, score_prompts
from minillm.engine.step import ScheduledRequest, SchedulerOutput, StepResult
from minillm.engine.step_inputs import RequestState, StepInputs
from minillm.kernels.lora import TokenSlots
from minillm.kernels.native_threads import threads_of_team
from minillm.kv_cache.paged import PagedKVCache
from minillm.kv_cache.transfer import BlockTransfer
from minillm.model.attention import AttentionBackend
from minillm.model.batch import ForwardBatch
from minillm.model.decoder import Decoder
from minillm.sampling.grammar.failed import Compile
from minillm.sampling.grammar.mask import GrammarMasks
from minillm.sampling.metadata import SamplingMetadata, SamplingRow
from minillm.sampling.sampler import Sampler
from minillm.speculative.drafter import Drafter, checked_drafts
from minillm.speculative.rejection import Drafted
from minillm.staging import upload
from minillm.trace import Trace


class ModelRunner:
    """Owns the model and the memory of the cache; knows nothing of queues.

    `compile_grammar` makes the grammar of a request that asks for structured outputs (chapter 19); `drafter` proposes
    tokens to verify (chapter 18).
    """

    def __init__(
        self,
        model: Decoder,
        cache: PagedKVCache,
        attention: AttentionBackend,
        sampler: Sampler | None = None,
        trace: Trace | None = None,
        graphs: DecodeGraphs | None = None,
        transfer: BlockTransfer | None = None,
        pieces: PieceGraphs | None = None,
        drafter: Drafter | None = None,
        adapters: AdapterCache | None = None,
    ):
        self.model, self.cache, self.attention = model, cache, attention
        self.kernels = getattr(attention, "kernels", None)  # the native ones, on a CPU
        self.sampler, self.room = sampler or Sampler(), LogitsRoom(model)
        self.trace = trace or Trace(enabled=False)
        self.graphs, self.pieces, self.vocab_size = graphs, pieces, model.config.vocab_size
        self.transfer, self.drafter, self.adapters = transfer, drafter, adapters
        self.compile_grammar: Compile | None = None
        self.observe: Callable[[StepInputs], object] = lambda step: None  # called behind a forward pass
        self.requests = InputBatch(cache.block_size, model.device)
        self.masks = GrammarMasks(self.vocab_size, model.device)
        self._sampled: Tensor | None = None  # the last step's tokens, on the device
        self._sampling: list[RequestState] = []  # whose they are, where each has one
        self._next_starts = np.zeros(0, np.int64)  # where these go on, if nothing comes between
        self._metadata: SamplingMetadata | None = None

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Compute a step."""
        return self.launch(output).wait()

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Start a step. A GPU computes it while the caller goes on; `wait` for its tokens, and launch at most one other
        step before. A row may need the token that the last launched step samples: it never leaves the device.
        """
        self._hear(output)
        if output.moves:
            with self.trace.span("move blocks"):
                (self.transfer or self.cache).move(output.moves)
        if not output.rows:
            return LaunchedStep([], [], None, [], self.requests, self.trace)
        with threads_of_team(self.kernels, output.num_tokens):
            logits, step, scored = self.forward(output.rows)
            self.observe(step)
            with self.trace.span("sample"):
                if not scored:
                    return self._sample(step, logits, [])
                num_last = len(logits) - sum(count for _, _, count in scored)
                return self._sample(step, logits[:num_last], score_prompts(logits[num_last:], scored))

    def draft(self, asked: Sequence[tuple[str, int]]) -> list[list[int]]:
        """Draft tokens for requests that all but their last token is computed of: at most so many for each.
        What they were drawn from stays here."""
        states, counts = [self.requests[request_id] for request_id, _ in asked], [count for _, count in asked]
        with self.trace.span("draft"), threads_of_team(self.kernels):
            drafts = checked_drafts(self.drafter, states, counts, self.vocab_size)
        for state, draft in zip(states, drafts):
            state.draft_probs = draft.probs
        return [draft.token_ids for draft in drafts]

    def forward(
        self, rows: Sequence[ScheduledRequest], token_ids: Tensor | None = None
    ) -> tuple[Tensor, StepInputs, list[tuple[RequestState, int, int]]]:
        """One forward pass: the logits that `build_batch` names. A draft model passes the tokens that it drew last,
        `token_ids` [len(rows)] on the device, where each row processes the one that the host has not seen."""
        with self.trace.span("build batch"):
            step = self.requests.inputs(rows)
            row_slots = None if self.adapters is None else self.adapters.row_slots(step.states)
            plain = row_slots is None  # steps with adapters are not recorded: chapter 23
            recorded = plain and self.graphs is not None and self.graphs.serves(step)
            batch, scored = (self.graphs.fill(step, self.requests), []) if recorded else self.build_batch(step)
            if not plain:
                max_loras = self.adapters.slots.max_loras
                batch.token_slots = TokenSlots.on(self.model.device, row_slots.repeat(step.counts), max_loras)
            if token_ids is None:
                self._feed_sampled(batch.token_ids, step)
            else:
                batch.token_ids[: len(rows)] = token_ids
        with self.trace.span("forward"):
            if not recorded:
                in_pieces = plain and self.pieces is not None and self.pieces.serves(batch)
                room = self.room.of(len(batch.logits_indices))
                logits = self.pieces.forward(batch) if in_pieces else self.model.forward(batch, self.attention, room)
                return logits, step, scored
            logits = self.graphs.run(batch)
        wanted = step.logits_wanted()  # all there are, but for padding and what a draft model catches up on
        if wanted[-1] == len(wanted) - 1:
            return logits[: len(wanted)], step, scored
        return logits.index_select(0, *upload(wanted, device=self.model.device)), step, scored

    def build_batch(self, step: StepInputs) -> tuple[ForwardBatch, list[tuple[RequestState, int, int]]]:
        """The flat batch of a step. Its logits are those of the last token of every row that samples,
        and of each of its draft tokens; then those that prompt log-probabilities need. The second value says of which
        requests, from which token of the prompt on, and how many.
        """
        wanted, scored = step.logits_wanted(), []
        if step.any_scored:
            scored, added = prompts_to_score(step)
            wanted = np.concatenate([wanted, *added])
        seq_lens = step.seq_lens
        longest = int(seq_lens.max())
        on_host, block_table = self.requests.blocks.rows(step.slots, -(-longest // self.cache.block_size))
        most, num_decodes = 1, len(step.rows)
        if not step.all_decode:
            most = max(step.counts)
            num_decodes = next((at for at, count in enumerate(step.counts) if count > 1), 0)  # those in front
        index = (step.token_ids, step.positions, step.query_start_loc, seq_lens, step.slot_mapping, wanted)
        *index, slot_mapping, wanted = upload(*index, device=self.model.device)
        batch = ForwardBatch(*index, block_table, slot_mapping, most, wanted, longest, num_decodes)
        batch.on_host = (step.query_start_loc, seq_lens, on_host)
        return batch, scored

    def _hear(self, output: SchedulerOutput) -> None:
        """Who came and who went since the last step."""
        for request_id in list(self.requests.states) if output.reset else output.finished:
            self.requests.remove(request_id)
            if self.drafter is not None:
                self.drafter.forget(request_id)
        for new in output.arrived:
            self.requests.add(new, self.compile_grammar)

    def _feed_sampled(self, token_ids: Tensor, step: StepInputs) -> None:
        """Put the tokens that the last launched step samples, and the host has not seen, where this step reads them."""
        if not len(step.late):
            return
        late = step.late  # these rows have one token each, and stand first
        sources = self.requests.sampled_at[step.slots[late]]
        in_place = np.arange(len(late))
        if np.array_equal(late, in_place) and np.array_equal(sources, late):  # the same requests, as in most steps
            token_ids[: len(late)] = self._sampled[: len(late)]
        else:
            target, source = upload(late, sources, device=token_ids.device)
            token_ids.index_copy_(0, target, self._sampled.index_select(0, source))

    def _sample(self, step: StepInputs, logits: Tensor, prompts: list[ScoredPrompt]) -> LaunchedStep:
        """Draw for the rows that sample; logits has one row for each of them, and one for each draft token."""
        states, rows, slots, starts, most = step.states, step.rows, step.slots, step.starts, 1
        if not step.all_sample:
            if not (most := max(step.samples)):
                self._sampling = []
                return LaunchedStep([], [], None, prompts, self.requests, self.trace)
            sampling = np.flatnonzero(step.samples).tolist()
            states, rows = [states[at] for at in sampling], [rows[at] for at in sampling]
            slots, starts = slots[sampling], starts[sampling]
        if most > 1:  # a prompt about to fork: one row of logits, n draws
            repeats = [repeat for row in rows for repeat in (row.samples, *[1] * len(row.draft))]
            logits = logits.index_select(0, *upload(np.arange(len(repeats)).repeat(repeats), device=logits.device))
        is_plain = most == 1 and not step.has_drafts
        same = is_plain and step.all_decode and self._sampling == states
        if same and not np.count_nonzero(starts - self._next_starts):  # as in the last step, each one token further
            metadata, self._next_starts = self._metadata, starts + 1
        else:
            metadata = self._sampling_metadata(states, rows, starts, is_plain)
            self.requests.sampled_at[slots] = self.requests.numbers(len(slots))
        if metadata.has_grammars:
            is_plain = False
            with self.trace.span("masks"):  # a GPU is still computing the logits
                metadata.masks = fill_masks(self.masks, states, rows)
        sampled = self.sampler.sample(logits, metadata)
        if metadata.rules is not None and metadata.rules.readers:
            is_plain = False
            note_failed(metadata.rules.failed, states, rows)
        metadata.advance(sampled.token_ids)
        self._sampled = sampled.token_ids
        return LaunchedStep(rows, states, sampled, prompts, self.requests, self.trace, slots, is_plain, metadata.counts)

    def _sampling_metadata(
        self, states: list[RequestState], rows: Sequence[ScheduledRequest], starts: np.ndarray, is_plain: bool
    ) -> SamplingMetadata:
        """Built where other requests sample than in the last step, or each more than one token further;
        `advance` keeps it up to date."""
        ends = starts + [row.num_tokens for row in rows]
        self._sampling, self._next_starts = (states, ends) if is_plain else ([], ends)
        made = [
            SamplingRow(
                state.params,
                state.sample_seed(state.index + sample),
                state.prompt_token_ids,
                [*state.output_token_ids, *row.draft[:place]] if place else state.output_token_ids,
                state.stop_token_ids,
                end - state.num_prompt_tokens - len(row.draft) + place,
            )
            for state, row, end in zip(states, rows, ends.tolist())
            for sample in range(row.samples)
            for place in range(1 + len(row.draft))
        ]
        self._metadata = SamplingMetadata(made, self.vocab_size, self.model.device, self._metadata)
        drafts = () if is_plain else ((row.samples, row.draft, state.draft_probs) for state, row in zip(states, rows))
        self._metadata.drafted = Drafted.of(drafts, self.model.device)
        return self._metadata
