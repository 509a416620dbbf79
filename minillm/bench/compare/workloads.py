"""What is compared: decoding, prompts, many requests at once, weights of 8 and 4 bits; and the limit of each.
Built in chapter 14."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from ...model.config import ModelConfig
from .. import measure, throughput
from ..transformers_peer import TEMPERATURE
from .request import Answer, Request

# Ours, and the type of llama.cpp's file: in both the output matrix has as many bits as the others.
QUANTIZATIONS = {"int8": ("int8", "Q8_0"), "int4": ({"name": "int4", "lm_head": "int4"}, "Q4_0")}
PEERS = ("transformers", "llama.cpp", "vllm", "vllm-eager")


@dataclass(frozen=True)
class Workload:
    shape: str = "smollm2-135m"
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    batches: tuple[int, ...] = (1, 8, 32)  # sequences that decode together
    prompt_tokens: int = 16  # of each
    output_tokens: int = 64
    prompts: tuple[int, ...] = (128, 1024, 4096)  # tokens of a prompt that is computed alone
    offline: tuple[int, ...] = (16, 64)  # requests at once, prompts and outputs of unequal length:
    shortest: int = 16
    longest: int = 256
    quantizations: tuple[str, ...] = tuple(QUANTIZATIONS)  # over the same batches, with bfloat16 activations
    only: tuple[str, ...] = ()  # names of cases ("decode-8") or groups of them ("decode"); all by default
    peers: tuple[str, ...] = ()  # all that there are by default
    repeats: int = measure.MIN_REPEATS
    seed: int = 0
    name: str = "compare"

    def quick(self) -> Workload:
        """A short form that tries everything once at least; its result has a name of its own."""
        return replace(
            self, batches=(1, 8), prompts=(128,), offline=(16,), longest=32, output_tokens=16, name="compare-quick"
        )

    @property
    def full_name(self) -> str:
        """With what was chosen, so that the results of two choices lie side by side."""
        groups = dict.fromkeys(one.split("-")[0] for one in self.only)
        dtypes = self.dtypes if self.dtypes != Workload.dtypes else ()
        return "-".join((self.name, *groups, *dtypes, self.shape))

    @property
    def case_names(self) -> list[str]:
        groups = {"decode": self.batches, "prompt": self.prompts, "offline": self.offline}
        groups |= dict.fromkeys(self.quantizations, self.batches)
        return [f"{group}-{size}" for group, sizes in groups.items() for size in sizes]

    def check(self) -> None:
        """Raises ValueError for an unknown case, dtype or peer."""
        groups = dict.fromkeys(name.split("-")[0] for name in self.case_names)
        for field, values, allowed in (
            ("only", self.only, [*groups, *self.case_names]),
            ("dtype", self.dtypes, ["bfloat16", "float32"]),
            ("peer", self.peers, PEERS),
        ):
            if unknown := [value for value in values if value not in allowed]:
                raise ValueError(f"{field}={unknown[0]!r} is unknown; choose of {', '.join(allowed)}")

    def cases(self, vocab_size: int) -> list[Case]:
        chosen = [name for name in self.case_names if not self.only or {name, name.split("-")[0]} & set(self.only)]
        return [self._case(name, vocab_size) for name in chosen]

    def _case(self, name: str, vocab_size: int) -> Case:
        group, size = name.split("-")[0], int(name.split("-")[1])
        if group == "offline":
            recipe = throughput.Workload(self.shape, size, self.shortest, self.longest, seed=self.seed)
            return Case(name, group, Request(*recipe.lengths_and_prompts(vocab_size), TEMPERATURE))
        if group == "prompt":
            return Case(name, group, Request(random_prompts(vocab_size, (size,), self.seed), [1]))
        prompts = random_prompts(vocab_size, (self.prompt_tokens,) * size, self.seed)
        quantization = group if group in self.quantizations else None
        return Case(name, "decode", Request(prompts, [self.output_tokens] * size), quantization)


DEFAULT = Workload()


def random_prompts(vocab_size: int, lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(min(4, vocab_size - 1), vocab_size) for _ in range(length)] for length in lengths]


@dataclass(frozen=True)
class Case:
    name: str
    group: str  # "decode", "prompt" or "offline"
    request: Request
    quantization: str | None = None

    @property
    def counted(self) -> str:
        """What the figure counts a second."""
        return {"decode": "decoded", "prompt": "prompt", "offline": "output"}[self.group] + " tokens"

    def seconds_per_token(self, answer: Answer) -> float:
        """The prompts are left out of decoding, and counted in with the output of many requests at once."""
        if self.group == "prompt":
            return answer.seconds / self.request.prompt_tokens
        if self.group == "offline":
            return answer.seconds / answer.output_tokens
        return (answer.seconds - answer.first_seconds) / (answer.output_tokens - answer.first_tokens)

    def limit(
        self, config: ModelConfig, dtype, ceilings: measure.Ceilings, weight_bytes: int | None = None
    ) -> tuple[float, str]:
        """Seconds a token that no engine can fall below on this machine, and what sets them.

        `weight_bytes` are those of quantized weights; their products may be computed in integers, whose rate is not
        measured, so that reading them is the limit. The weights are read once in a step for all its sequences.
        """
        rate = ceilings.matmul_flops_per_second[measure.name_of(dtype)]
        weights = config.num_parameters()
        if not config.tie_word_embeddings:
            weights -= config.vocab_size * config.hidden_size  # a row of the input embedding is read, no more
        if self.group == "offline":
            seconds = throughput.limit_seconds(config, dtype, self.request.prompts, self.request.lengths, ceilings)
            return seconds / self.request.output_tokens, "matrix products and read bandwidth"
        if self.group == "prompt":
            count = self.request.prompt_tokens
            head = config.vocab_size * config.hidden_size  # needed for the last token only
            attention = 2 * config.num_layers * config.num_heads * config.head_dim * count**2  # causal: half of it
            return (2 * (weights - head) * count + 2 * head + attention) / rate / count, "matrix products"
        batch = len(self.request.prompts)
        context = len(self.request.prompts[0]) + self.request.lengths[0] / 2
        read = batch * context * config.kv_bytes_per_token(dtype) + (weight_bytes or weights * dtype.itemsize)
        memory, arithmetic = read / ceilings.bandwidth, 2 * weights * batch / rate
        if weight_bytes is None and arithmetic > memory:
            return arithmetic / batch, "matrix products"
        return memory / batch, "read bandwidth"
