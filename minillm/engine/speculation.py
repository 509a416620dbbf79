"""Speculation: before a step guesses are asked for, after it they are counted. Built in chapter 18.

Drafter.propose -> Request.spec_token_ids -> Scheduler gives them slots -> runner checks them -> Scheduler.update
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from minillm.engine.config import EngineConfig
from minillm.engine.memory import build_attention, build_cache, build_graphs, sliding_window
from minillm.engine.request import Request
from minillm.engine.runner import ModelRunner
from minillm.engine.scheduler import SampledToken, Scheduler, SchedulerOutput
from minillm.engine.warmup import warm_up
from minillm.kv_cache.manager import KVCacheManager
from minillm.kv_cache.triton_attention import TritonAttention
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import load_config, load_model, load_tokenizer, resolve_model
from minillm.model.decoder import Decoder
from minillm.speculative.adaptive import AdaptiveLength, StepCost
from minillm.speculative.config import SpeculativeConfig
from minillm.speculative.draft_model import ModelDrafter
from minillm.speculative.drafter import Draft, Drafter, by_chance
from minillm.speculative.metrics import SpeculationMetrics
from minillm.speculative.ngram import NgramDrafter
from minillm.trace import Trace

MEASURED_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # tokens of a step
REPEATS = 3
DEFAULT_LENGTH = 4


class Speculation:
    """Asks a drafter for guesses for every request that decodes, at most `num_tokens` each;
    `lengths` may choose fewer."""

    def __init__(
        self,
        drafter: Drafter,
        num_tokens: int = DEFAULT_LENGTH,
        vocab_size: int | None = None,
        lengths: AdaptiveLength | None = None,
        trace: Trace | None = None,
    ):
        self.drafter, self.num_tokens, self.vocab_size, self.lengths = drafter, num_tokens, vocab_size, lengths
        self.trace = trace or Trace(enabled=False)
        self.metrics = SpeculationMetrics()
        self._known: dict[str, Request] = {}  # those that the drafter may remember something of

    def propose(self, scheduler: Scheduler) -> None:
        """Give every request that is about to decode its guesses. None of their steps is in flight:
        a guess continues the last token, which has to be known."""
        self._forget_finished()
        for request in scheduler.running:  # guesses that the last step had no room for are of no use any more
            request.spec_token_ids, request.spec_probs = [], None
        ready = [request for request in scheduler.running if _takes_draft(request)]
        if not ready:
            return
        counts = self._counts(ready, scheduler)
        self._known |= {request.request_id: request for request in ready}
        with self.trace.span("draft"):
            drafts = self.drafter.propose(ready, counts)
        if not isinstance(drafts, list) or len(drafts) != len(ready):
            raise ValueError(
                f"{self._name}.propose returned {drafts!r:.200} for {len(ready)} requests; "
                "a list with a Draft for each, in their order"
            )
        for request, count, draft in zip(ready, counts, drafts):
            token_ids = self._checked(draft, count)
            probs = draft.probs if by_chance(request) else None  # else the target's own token decides
            if request.grammar is not None and (allowed := request.grammar.validate(token_ids)) < len(token_ids):
                if probs is not None:
                    raise ValueError(
                        f"{self._name} gives probs for token {token_ids[allowed]}, "
                        f"which the request's grammar forbids; draft inside request.grammar, or leave probs out"
                    )
                del token_ids[allowed:]
            request.spec_token_ids, request.spec_probs = token_ids, probs

    def count(self, output: SchedulerOutput, sampled: list[list[SampledToken]]) -> None:
        """What became of the guesses of a step."""
        for row, tokens in zip(output.rows, sampled):
            if not row.samples:
                continue
            drafted, accepted = len(row.draft), len(tokens) - 1
            if self.lengths is not None:
                self.lengths.add(row.request.request_id, drafted, accepted)
            if drafted:
                self.metrics.add(drafted, accepted)
                row.request.num_drafted_tokens += drafted
                row.request.num_accepted_tokens += accepted
                self.trace.count("drafted", drafted, request=row.request.request_id, draft=row.draft)
                self.trace.count("accepted", accepted, request=row.request.request_id)

    def _counts(self, ready: list[Request], scheduler: Scheduler) -> list[int]:
        """How many tokens each may guess: what is left of the budget when every running request has its own token."""
        left = max(0, scheduler.max_num_batched_tokens - len(scheduler.running))
        counts = []
        limits = [
            max(0, min(self.num_tokens, request.max_tokens - len(request.output_token_ids) - 1)) for request in ready
        ]
        if self.lengths is not None:
            limits = self.lengths.choose(
                [request.request_id for request in ready], limits, len(scheduler.running) - len(ready)
            )
        for limit in limits:
            counts.append(min(limit, left))
            left -= counts[-1]
        return counts

    @property
    def _name(self) -> str:
        return type(self.drafter).__name__

    def _checked(self, draft: Draft, count: int) -> list[int]:
        if not isinstance(draft, Draft) or not isinstance(draft.token_ids, (list, tuple)):
            raise TypeError(f"{self._name} drafted {draft!r:.200}; allowed: a Draft with a list of token ids")
        token_ids = list(draft.token_ids[:count])
        for token_id in token_ids:
            if type(token_id) is not int:
                raise TypeError(f"{self._name} drafted token id {token_id!r}; allowed: whole numbers")
            if self.vocab_size is not None and not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"{self._name} drafted token id {token_id!r}; the vocabulary has {self.vocab_size} tokens, "
                    f"so 0 to {self.vocab_size - 1} are allowed"
                )
        wanted = (len(draft.token_ids), self.vocab_size)
        if draft.probs is not None and tuple(draft.probs.shape) != wanted:
            raise ValueError(
                f"{self._name} gives probs of shape {tuple(draft.probs.shape)} for {wanted[0]} tokens; "
                f"allowed: {wanted}"
            )
        return token_ids

    def _forget_finished(self) -> None:
        for request_id in [request_id for request_id, request in self._known.items() if request.is_finished]:
            del self._known[request_id]
            self.drafter.forget(request_id)
            if self.lengths is not None:
                self.lengths.forget(request_id)


def _takes_draft(request: Request) -> bool:
    """Whether all but its last token is computed, and the prompt is not about to fork."""
    return (
        request.takes_drafts
        and request.num_computed_tokens == request.num_tokens - 1
        and request.num_in_flight == request.num_forks == 0
        and len(request.output_token_ids) > 0
    )


def build_speculation(
    model: Decoder, runner: ModelRunner, kv_cache: KVCacheManager, config: EngineConfig, trace: Trace
) -> Speculation | None:
    """What `speculative_config` asks for. Raises ValueError for a draft model with another vocabulary."""
    spec = SpeculativeConfig.of(config.speculative_config)
    if spec is None:
        return None
    draft_cost = None
    if spec.method == "ngram":
        drafter = NgramDrafter(spec.prompt_lookup_min, spec.prompt_lookup_max)
    else:
        draft, manager = build_draft_runner(model, kv_cache, config, spec)
        drafter = ModelDrafter(
            lambda rows, token_ids: draft.forward(rows, token_ids)[0],
            manager,
            model.config.vocab_size,
            draft.model.config.max_position_embeddings,
            model.device,
            config.max_num_batched_tokens,
        )
        draft_cost = measure_steps(draft, config.max_num_seqs) if spec.adaptive else None
    most_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * (1 + spec.num_speculative_tokens))
    lengths = AdaptiveLength(measure_steps(runner, most_tokens), draft_cost) if spec.adaptive else None
    return Speculation(drafter, spec.num_speculative_tokens, model.config.vocab_size, lengths, trace)


def build_draft_runner(
    model: Decoder, kv_cache: KVCacheManager, config: EngineConfig, spec: SpeculativeConfig
) -> tuple[ModelRunner, KVCacheManager]:
    """The draft model over a cache of its own, with as many blocks as the target's."""
    path = resolve_model(spec.model)
    check_same_tokens(config.model, model.config.vocab_size, path)
    draft = load_model(path, model.dtype, model.device, spec.quantization)
    manager = KVCacheManager(
        kv_cache.pool.num_blocks, kv_cache.block_size, config.enable_prefix_caching, sliding_window(draft)
    )
    cache = build_cache(draft, manager, config.kv_cache_dtype)
    attention = build_attention(draft, cache, config.attention_backend)
    # Two to catch up on after a full acceptance.
    graphs = build_graphs(draft, attention, manager, config, tokens_each=2)
    runner = ModelRunner(draft, cache, attention, graphs=graphs)
    if draft.device.type == "cuda" and isinstance(attention, TritonAttention):
        warm_up(draft, attention, runner.sampler)
    return runner, manager


def check_same_tokens(target: str | Path, vocab_size: int, draft: Path) -> None:
    """Raise ValueError unless a token id means the same to both models."""
    found = load_config(draft).vocab_size
    if found != vocab_size:
        raise ValueError(
            f"speculative_config: the draft model {str(draft)!r} has a vocabulary of {found} tokens, "
            f"the model has {vocab_size}; draft and target need the same tokenizer"
        )
    if not target:  # an engine that was made from parts
        return
    ours, theirs = (load_tokenizer(path).get_vocab() for path in (resolve_model(target), draft))
    if different := sorted(
        token for token, token_id in ours.items() if token_id < vocab_size and theirs.get(token) != token_id
    ):
        raise ValueError(
            f"speculative_config: the draft model {str(draft)!r} has another tokenizer: {different[0]!r} is "
            f"{theirs.get(different[0])} there and {ours[different[0]]} here; draft and target need the same one"
        )


def measure_steps(runner: ModelRunner, most_tokens: int, clock: Callable[[], float] = time.perf_counter) -> StepCost:
    """Seconds of a step by how many tokens it processes: from its inputs on the host to its logits on the device,
    which the host waits for, as it waits for the tokens of every step that speculation prepares.

    Steps that the engine replays are replayed here too, with nothing but padding: eager, a GPU's steps are all as long
    as the host takes for their launches, and more tokens would seem to be free. The others write into the null block.
    """
    device, seconds = runner.model.device, {}
    for size in [size for size in MEASURED_SIZES if size <= most_tokens] or [1]:
        run, times = _step_of(runner, size), []
        for _ in range(1 + REPEATS):
            start = clock()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(clock() - start)
        seconds[size] = median(times[1:])  # the first one warms up
    return StepCost(seconds)


def _step_of(runner: ModelRunner, size: int) -> Callable[[], object]:
    """A step of `size` tokens, recorded where the engine would replay one, each token a sequence of its own."""
    graphs = runner.graphs
    if graphs is not None and size <= graphs.sizes[-1]:
        recorded = next(recorded for recorded in graphs.sizes if recorded >= size)

        def replay() -> None:
            graphs.inputs.fill([], recorded, graphs.block_size)
            graphs.run(graphs.batches[recorded])

        return replay
    numbers = torch.arange(size + 1, device=runner.model.device)
    zeros, ones = torch.zeros_like(numbers[:size]), torch.ones_like(numbers[:size])
    batch = ForwardBatch(
        token_ids=zeros, positions=zeros, query_start_loc=numbers, seq_lens=ones, block_table=zeros[:, None],
        slot_mapping=zeros, max_query_len=1, logits_indices=numbers[:size], max_seq_len=1, num_decodes=size,
    )  # fmt: skip
    return lambda: runner.model.forward(batch, runner.attention)
