"""Pooling: a text as one vector, and how near two texts are. Built in chapter 02.

    tokens -> all layers -> hidden states behind the last norm -> last token | mean -> length 1

A decoder that was trained to write has no vectors that were trained to be compared. The call is that of an embedding
model's; how well it works is the checkpoint's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minillm.engine.inputs import InputProcessor, Prompt
from minillm.engine.lock import locked
from minillm.engine.lora_request import LoRAs
from minillm.engine.progress import progress_bar
from minillm.engine.prompt_forms import check_call
from minillm.kernels.lora import TokenSlots
from minillm.kv_cache.contiguous import ContiguousAttention, ContiguousKVCache
from minillm.model.batch import ForwardBatch
from minillm.model.decoder import Decoder
from minillm.parallel.decoder import ParallelDecoder
from minillm.sampling.checks import Absent, check_int, takes_names_of_vllm

if TYPE_CHECKING:
    from minillm.engine.engine import Engine
    from minillm.engine.request import Request
    from minillm.engine.vllm_names import ModelOptions

CHUNK = 2048  # tokens that go through the layers together
TASKS = ("embed", "token_embed")
ABSENT = {
    "step_tag_id": Absent("the book builds no reward model"),
    "returned_token_ids": Absent("the book builds no reward model"),
    "requires_token_ids": Absent("each output has its prompt_token_ids", False),
    "skip_reading_prefix_cache": Absent("a pooled text is computed without a cache", False),
    "late_interaction_params": Absent(
        "ask for the hidden states of all tokens: encode(..., pooling_task='token_embed')"
    ),
    "extra_kwargs": Absent("the pooling of the book has no further arguments"),
    "output_kind": Absent("a pooled text comes once, whole"),
}


@takes_names_of_vllm(ABSENT, ("use_activation", "dimensions"))
@dataclass
class PoolingParams:
    """How a text becomes a vector. Names and meaning are vLLM's."""

    use_activation: bool | None = None  # divide by the length; None: what the LLM's pooler_config says
    dimensions: int | None = None  # keep so many numbers of each vector
    task: str | None = None  # "embed": one vector a text; "token_embed": one a token

    def __post_init__(self):
        check_int("dimensions", self.dimensions, 1, none_means="all")
        if not isinstance(self.use_activation, bool | None):
            raise TypeError(f"use_activation={self.use_activation!r} is not allowed; allowed: True, False or None")
        if self.task not in (None, *TASKS):
            raise ValueError(f"task={self.task!r} is not allowed; allowed: {', '.join(TASKS)}, or None")


@dataclass(eq=False)
class PoolingOutput:
    """Hidden states: [hidden_size], or of every token [num_tokens, hidden_size]."""

    data: Tensor


@dataclass
class EmbeddingOutput:
    """A text as one vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class ScoringOutput:
    """How near two texts are: the cosine of the angle between their vectors."""

    score: float


@dataclass
class PoolingRequestOutput:
    """What became of one prompt."""

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool


class EmbeddingRequestOutput(PoolingRequestOutput):
    """`outputs` is an EmbeddingOutput."""


class ScoringRequestOutput(PoolingRequestOutput):
    """`outputs` is a ScoringOutput."""


@torch.inference_mode()
def hidden_states(model: Decoder, token_ids: Sequence[int], slot: int | None = None) -> Tensor:
    """Of every token, behind the last norm: [num_tokens, hidden_size] float32. A long text goes through in chunks.
    `slot`: the batch slot of its adapter."""
    config, parts = model.config, []
    sizes = (config.num_layers, config.num_kv_heads, config.head_dim, len(token_ids))
    value_dim = None if config.mla is None else config.mla.kv_lora_rank
    attention = ContiguousAttention(ContiguousKVCache(*sizes, model.dtype, model.device, value_dim), config)
    for start in range(0, len(token_ids), CHUNK):
        batch = ForwardBatch.single(token_ids[start : start + CHUNK], start, device=model.device)
        if slot is not None:
            batch.token_slots = TokenSlots(torch.full_like(batch.token_ids, slot, dtype=torch.int32))
        if isinstance(model, ParallelDecoder):
            parts.append(model.states(batch, attention))
            continue
        hidden, rotary = model.embed(batch.token_ids), model.rotary(batch.positions)
        for layer in model.in_order():
            hidden = layer(hidden, rotary, attention, batch)
        parts.append(model.norm(hidden).float())
    return torch.cat(parts)


def pooled(hidden: Tensor, params: PoolingParams, pooling_type: str, normalize: bool) -> Tensor:
    """[hidden_size] of [num_tokens, hidden_size], or all of them, cut to `dimensions`, then of length 1."""
    if params.task != "token_embed":
        hidden = hidden[-1] if pooling_type == "LAST" else hidden.mean(dim=0)
    if params.dimensions is not None:
        hidden = hidden[..., : params.dimensions]
    by_default = normalize and params.task != "token_embed"
    activate = by_default if params.use_activation is None else params.use_activation
    return torch.nn.functional.normalize(hidden, dim=-1) if activate else hidden


class Pooling:
    """The methods of an `LLM` that make vectors of texts."""

    engine: Engine
    inputs: InputProcessor
    model: Decoder
    options: ModelOptions

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRAs = None,
        pooling_task: str | None = None,
        **others: Any,
    ) -> list[PoolingRequestOutput]:
        """The hidden states of each prompt: one vector ("embed"), or by default one for each token ("token_embed").
        Prompts are computed one after the other, each as one turn beside the requests of other threads."""
        check_call("encode", others)
        self.engine.check_open()
        return self._computed(self._checked(prompts, pooling_params, pooling_task, lora_request), use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRAs = None,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Each prompt as one vector of length 1: of its last token, or with `pooler_config={"pooling_type": "MEAN"}`
        the mean of all."""
        check_call("embed", others)
        options = dict(use_tqdm=use_tqdm, lora_request=lora_request, pooling_task="embed")
        return [
            EmbeddingRequestOutput(
                one.request_id, EmbeddingOutput(one.outputs.data.tolist()), one.prompt_token_ids, 0, True
            )
            for one in self.encode(prompts, pooling_params, **options)
        ]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        /,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRAs = None,
        **others: Any,
    ) -> list[ScoringRequestOutput]:
        """How near each text of `data_2` is to its partner in `data_1`, or to the only one there."""
        check_call("score", others)
        self.engine.check_open()
        if not isinstance(pooling_params, PoolingParams | None):
            raise TypeError(f"pooling_params={pooling_params!r} is not allowed; allowed: a PoolingParams for all texts")
        params = replace(pooling_params or PoolingParams(), use_activation=True)
        texts = [self._checked(data, params, "embed", lora_request) for data in (data_1, data_2)]
        if len(texts[0]) not in (1, len(texts[1])):
            raise ValueError(f"data_1 has {len(texts[0])} texts and data_2 {len(texts[1])}; allowed: 1, or as many")
        first, second = (self._computed(some, use_tqdm) for some in texts)
        first = first * len(second) if len(first) == 1 else first
        return [
            ScoringRequestOutput(
                b.request_id, ScoringOutput(float(a.outputs.data @ b.outputs.data)),
                a.prompt_token_ids + b.prompt_token_ids, 0, True,
            )
            for a, b in zip(first, second)
        ]  # fmt: skip

    def _checked(
        self, prompts: Any, given: Any, task: str | None, lora_request: LoRAs
    ) -> list[tuple[Request, PoolingParams]]:
        """The texts that are to be computed, each with its parameters."""
        requests = self.inputs.requests(prompts, num_new=0, lora_request=lora_request)
        return list(zip(requests, self._pooling_params(given, len(requests), task)))

    def _computed(
        self, texts: list[tuple[Request, PoolingParams]], use_tqdm: bool | Callable[..., Any]
    ) -> list[PoolingRequestOutput]:
        outputs = []
        with progress_bar(len(texts), use_tqdm) as advance:
            for request, params in texts:
                data, ids = self._pool(request, params), request.prompt_token_ids
                outputs.append(PoolingRequestOutput(request.request_id, PoolingOutput(data), ids, 0, True))
                advance(1, len(ids))
        return outputs

    @locked
    def _pool(self, request: Request, params: PoolingParams) -> Tensor:
        self.engine.check_open()
        ids, adapter = request.prompt_token_ids, request.adapter
        if (in_workers := getattr(self.model, "hidden_states", None)) is not None:
            hidden = in_workers(ids, adapter)
        else:
            slot = None if adapter is None else self.engine.runner.adapters.slot(adapter)
            hidden = hidden_states(self.model, ids, slot)
        return pooled(hidden, params, self.options.pooling_type, self.options.normalize).cpu()

    def _pooling_params(self, given: Any, num_prompts: int, task: str | None) -> list[PoolingParams]:
        params = list(given) if isinstance(given, Sequence) else [given] * num_prompts
        if len(params) != num_prompts:
            raise ValueError(f"pooling_params has {len(params)} entries for {num_prompts} prompts; pass one for all")
        made = []
        with self.engine.lock:  # another thread may have put the model to sleep
            self.engine.check_open()
            if self.model.rotated:
                raise ValueError(
                    "the model was quantized with rotate=True: its hidden states are not those of the checkpoint, but "
                    "rotated, and without the last norm's gain; make vectors with a model that is not rotated"
                )
            most = self.model.config.hidden_size
        for one in params:
            if not isinstance(one, PoolingParams | None):
                raise TypeError(f"pooling_params={one!r} is not allowed; allowed: a PoolingParams, or a list of them")
            if one is not None and task is not None and one.task not in (None, task):
                raise ValueError(f"pooling_params has task={one.task!r}, and this call computes {task!r}; leave it out")
            made.append(replace(one or PoolingParams(), task=task or (one and one.task) or "token_embed"))
            if most < (made[-1].dimensions or 0):
                raise ValueError(f"dimensions={made[-1].dimensions} exceeds the model's {most}")
        return made
