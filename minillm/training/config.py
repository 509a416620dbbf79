"""What a training run is made of, and the presets of the bundled models. Built in chapter 00."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenizers import Tokenizer
from transformers import LlamaConfig

from ..zoo import tokenizer as bpe


@dataclass(frozen=True)
class TrainingConfig:
    """One training run. Batch number `i` and the learning rate at step `i` follow from these numbers alone."""

    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    intermediate_size: int = 704
    context: int = 1024
    tokens: int = 25_400_000
    tokens_per_batch: int = 8_192
    stages: tuple[tuple[float, int], ...] = ((0.5, 256), (0.8, 512), (1.0, 1024))  # (until this share, row length)
    muon_lr: float = 0.02
    adamw_lr: float = 3e-3
    warmup: float = 0.02
    decay: float = 0.4  # the learning rate falls linearly to zero over this last share
    answer_weight: float = 4.0
    repeats: float = 0.25  # share of the run in which half the documents are repeated random tokens
    seed: int = 0
    # See `minillm.training.moe` (chapter 21). `intermediate_size` is that of one expert, where there are experts.
    start_from: str | None = None  # a bundled model whose weights the run begins with
    num_experts: int = 0
    num_experts_per_tok: int = 2
    balance: float = 0.01  # weight of the load-balancing loss

    @property
    def num_steps(self) -> int:
        return max(1, self.tokens // self.tokens_per_batch)


# Both begin with tinyworld's weights, and a token meets as many of them: 2 experts of 192, or one MLP of 384.
UPCYCLED = TrainingConfig(
    intermediate_size=192,
    tokens=2_800_000,
    stages=((0.3, 256), (0.6, 512), (1.0, 1024)),
    muon_lr=0.01,
    adamw_lr=1.5e-3,
    decay=0.7,
    repeats=0.0,
    start_from="tinyworld",
    num_experts=8,
)
PRESETS = {
    "tinyworld": TrainingConfig(),
    "tinyworld-draft": TrainingConfig(hidden_size=96, num_layers=2, num_heads=3, num_kv_heads=1,
                                      intermediate_size=256, tokens=8_000_000),
    "tinyworld-moe": UPCYCLED,
    "tinyworld-active": replace(UPCYCLED, intermediate_size=384, num_experts=0),
}  # fmt: skip


def llama_config(config: TrainingConfig, tokenizer: Tokenizer) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.context,
        rope_theta=10_000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
        bos_token_id=tokenizer.token_to_id(bpe.BEGIN),
        eos_token_id=tokenizer.token_to_id(bpe.END),
    )
