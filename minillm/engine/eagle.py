"""A draft head in the engine: features come from the target's steps, drafts from a runner of its own.
Built in chapter 18.

    target's step -> FeatureTap -> observe: fuse -> FeatureStore -> EagleForward -> the head's runner -> drafts
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.engine.config import EngineConfig
from minillm.engine.draft_runner import DraftForward, draft_runner_of
from minillm.engine.graphs import LARGEST
from minillm.engine.runner import ModelRunner
from minillm.engine.step_inputs import StepInputs
from minillm.kv_cache.manager import KVCacheManager
from minillm.model.decoder import Decoder
from minillm.model.features import FeatureTap
from minillm.speculative.config import SpeculativeConfig
from minillm.speculative.draft_model import DraftRow
from minillm.speculative.eagle import EagleDrafter, FeatureStore, features_of
from minillm.speculative.eagle3_head import load_eagle3
from minillm.speculative.eagle_config import FILE, load_head_config, resolve_head
from minillm.speculative.eagle_head import EagleHead, check_sizes, load_head
from minillm.staging import upload


def build_tap(model: Decoder, config: EngineConfig) -> FeatureTap | None:
    """Have the model's steps keep what a draft head reads, if `speculative_config` asks for one; before steps are
    recorded. Raises CheckpointError and ValueError for a head that is none, or does not fit, and for a model that was
    rotated."""
    spec = config.speculative_config
    if spec is None or spec.method != "eagle":
        return None
    if model.rotated:
        raise ValueError(
            "speculative_config: method='eagle' with a model that was quantized with rotate=True is not allowed: "
            "a draft head was trained on hidden states that are not rotated; use method='draft_model', or quantize "
            "without rotate"
        )
    head = load_head_config(resolve_head(spec.model), model.config)
    check_sizes(head, model)
    return FeatureTap(model, head.feature_layers, most_tokens(config))


def build_eagle(
    model: Decoder, runner: ModelRunner, kv_cache: KVCacheManager, config: EngineConfig, spec: SpeculativeConfig
) -> tuple[EagleDrafter, ModelRunner]:
    """The drafter, which hears of the steps of `runner`, and the runner of its head."""
    tap = getattr(model, "tap", None) or build_tap(model, config)
    path = resolve_head(spec.model)
    head = (load_head if (path / FILE).is_file() else load_eagle3)(path, model, most_tokens(config))
    draft, manager = draft_runner_of(head, kv_cache, config)
    store = FeatureStore(head.config.hidden_size, model.dtype, model.device)
    forward = EagleForward(draft, head, store)
    longest = model.config.max_position_embeddings
    drafter = EagleDrafter(
        store, forward, manager, model.config.vocab_size, min(longest, head.config.max_position_embeddings),
        model.device, config.max_num_batched_tokens, forward.forget, skipped=head.skipped,
    )  # fmt: skip
    runner.observe = Observer(tap, head, store)
    return drafter, draft


def most_tokens(config: EngineConfig) -> int:
    """The most rows of a step, padding of a recorded one included."""
    return max(config.max_num_batched_tokens, LARGEST)


class Observer:
    """Called behind every step of the target: keeps the fused features of its tokens."""

    def __init__(self, tap: FeatureTap, head: EagleHead, store: FeatureStore):
        self.tap, self.head, self.store = tap, head, store

    @torch.inference_mode()
    def __call__(self, step: StepInputs) -> None:
        features = self.head.fuse(self.tap.states[: step.num_tokens])
        ends = step.query_start_loc.tolist()
        for row, start, end in zip(step.rows, ends, ends[1:]):
            self.store.add(row.request_id, row.start, features[start:end])


class EagleForward(DraftForward):
    """Forward passes of the head: each token with its feature."""

    def __init__(self, runner: ModelRunner, head: EagleHead, store: FeatureStore):
        super().__init__(runner)
        self.head, self.store = head, store
        self.made: Tensor | None = None  # by the last pass, of each row that sampled [num_rows, hidden_size]
        self.made_for: dict[str, tuple[int, int]] = {}  # request id -> position, row of `made`

    def __call__(self, rows: list[DraftRow], token_ids: Tensor | None) -> Tensor:
        if token_ids is not None and self.further is not None:
            logits, self.made = self.head.run(self.further.of(rows, token_ids), self.runner.attention, self.made)
        else:
            given = self.made
            if token_ids is None:
                given = features_of(self.store, rows, self.made_for, self.made, self.head.skipped)
            self.head.given[: len(given)].copy_(given)
            logits, step, _ = self.runner.forward([self._told(row) for row in rows], token_ids)
            self.made = self.head.made.index_select(0, *upload(step.logits_wanted(), device=self.head.device))
        sampling = [row for row in rows if row.samples]
        self.made_for = {
            row.request.request_id: (row.start + row.num_tokens - 1 + self.head.skipped, at)
            for at, row in enumerate(sampling)
        }
        return logits

    def forget(self, request_id: str) -> None:
        self.made_for.pop(request_id, None)
        super().forget(request_id)
