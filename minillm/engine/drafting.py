"""Who drafts for an engine: n-grams, a draft model over a cache of its own, or a draft head. Built in chapter 18."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from minillm.engine.config import EngineConfig
from minillm.engine.draft_runner import DraftForward, draft_runner_of
from minillm.engine.eagle import build_eagle
from minillm.engine.runner import ModelRunner
from minillm.engine.speculation import Speculation
from minillm.kv_cache.manager import KVCacheManager
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import (
    load_config,
    load_model,
    load_tokenizer,
    resolve_model,
)
from minillm.model.decoder import Decoder
from minillm.speculative.adaptive import AdaptiveLength, StepCost
from minillm.speculative.config import SpeculativeConfig
from minillm.speculative.draft_model import ModelDrafter
from minillm.speculative.ngram import NgramDrafter
from minillm.trace import Trace

MEASURED_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # tokens of a step
REPEATS = 3


def build_speculation(
    model: Decoder, runner: ModelRunner, kv_cache: KVCacheManager, config: EngineConfig, trace: Trace
) -> Speculation | None:
    """What `speculative_config` asks for. Raises ValueError for a draft model with another vocabulary."""
    spec = config.speculative_config
    if spec is None:
        return None
    draft_cost = None
    if spec.method == "ngram":
        runner.drafter = NgramDrafter(spec.prompt_lookup_min, spec.prompt_lookup_max)
    elif spec.method == "eagle":
        runner.drafter, draft = build_eagle(model, runner, kv_cache, config, spec)
        draft_cost = measure_steps(draft, config.max_num_seqs) if spec.adaptive else None
    else:
        draft, manager = build_draft_runner(model, kv_cache, config, spec)
        forward = DraftForward(draft)
        runner.drafter = ModelDrafter(
            forward,
            manager,
            model.config.vocab_size,
            draft.model.config.max_position_embeddings,
            model.device,
            config.max_num_batched_tokens,
            forward.forget,
        )
        draft_cost = measure_steps(draft, config.max_num_seqs) if spec.adaptive else None
    most_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * (1 + spec.num_speculative_tokens))
    lengths = AdaptiveLength(measure_steps(runner, most_tokens), draft_cost) if spec.adaptive else None
    return Speculation(runner.draft, spec.num_speculative_tokens, lengths, trace)


def build_draft_runner(
    model: Decoder, kv_cache: KVCacheManager, config: EngineConfig, spec: SpeculativeConfig
) -> tuple[ModelRunner, KVCacheManager]:
    """The draft model over a cache of its own, with as many blocks as the target's."""
    path = resolve_model(spec.model)
    check_same_tokens(config.model, model.config.vocab_size, path)
    return draft_runner_of(load_model(path, model.dtype, model.device, spec.quantization), kv_cache, config)


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
            graphs.inputs.pad(recorded)
            graphs.run(graphs.batches[recorded])

        return replay
    numbers = torch.arange(size + 1, device=runner.model.device)
    zeros, ones = torch.zeros_like(numbers[:size]), torch.ones_like(numbers[:size])
    batch = ForwardBatch(
        token_ids=zeros, positions=zeros, query_start_loc=numbers, seq_lens=ones, block_table=zeros[:, None].int(),
        slot_mapping=zeros, max_query_len=1, logits_indices=numbers[:size], max_seq_len=1, num_decodes=size,
    )  # fmt: skip
    return lambda: runner.model.forward(batch, runner.attention)
