"""The equivalence matrix: greedy float32 tokens are those of `transformers`, whatever road they took.

With quantized weights they are those of `transformers` with the dequantized ones. With a cache in 8 bits they are those
of a reference without a cache that rounds every key and value, and reads the rounded ones back. Every pair of settings
occurs in some case. Where a case is meant to preempt, to hit or to swap, it is asserted that it did.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from functools import partial
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from minillm import LLM, LoRARequest, SamplingParams
from minillm.book.roads.pickled import pickle_steps
from minillm.kernels import language, native
from minillm.kernels.lora import TokenSlots
from minillm.model.attention import NoCacheAttention
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import load_model
from minillm.model.lora_adapter import read_adapter
from minillm.model.lora_slots import LoraSlots
from minillm.quantization.config import resolve
from minillm.quantization.rtn import round_to_nearest
from tests.helpers.adapters import save_adapter
from tests.helpers.kernel_cases import device
from tests.helpers.model_zoo import make_model
from tests.helpers.tiny import VOCAB_SIZE, byte_tokenizer

AXES = {
    "batch": ("together", "alone"),
    "block_size": (1, 7, 16),
    "chunk": ("whole", 5, 8),
    "memory": ("plenty", "few"),
    "prefix": ("off", "cold", "warm"),
    "preemption": ("recompute", "swap"),
    "window": (None, 9),
    "attention": ("torch", "native", "triton"),
    "steps": ("eager", "recorded"),
    "scheduling": ("in turn", "ahead"),
    "weights": ("float32", "int8", "int4"),
    "kv": ("auto", "int8", "fp8"),
    "speculation": ("off", "ngram", "noisy draft", "perfect draft"),
    "lora": ("off", "mixed"),
}
ADAPTERS = {"all": dict(r=4), "some": dict(r=3, targets=["q_proj", "o_proj", "up_proj"])}
ASKED = [None, "all", "some", "all", None, "some", "all"]  # of each prompt, where adapters are mixed
QUANTIZED = {"float32": None, "int8": "int8", "int4": {"weights": "int4", "group_size": 16, "symmetric": False}}
MAX_TOKENS, NEVER = 20, VOCAB_SIZE - 1
# A case whose kernels are interpreted: its cost in others; tokens of a request.
INTERPRETED_COST, INTERPRETED_TOKENS = 20, 12
SHARED = [3 + i * 7 % 90 for i in range(32)]  # two blocks of 16, and a prompt that is a full hit
PROMPTS = [
    [*SHARED, 50, 60, 70],
    SHARED,
    [5],
    SHARED[:16] + [9] * 5,
    [11, 12, 13, 14, 15, 16, 17],
    [*SHARED, 50, 61],
    list(range(20, 68)),
]


def covering_cases() -> list[dict]:
    """Cases in which every two values of different axes meet: always the combination that meets most pairs not yet met.

    One whose kernels are interpreted takes as long as a hundred others. INTERPRETED_COST lets few of them be chosen.
    """
    every = [dict(zip(AXES, values)) for values in random.Random(0).sample(list(product(*AXES.values())), 3000)]
    every = [case for case in every if not (case["memory"] == "few" and case["batch"] == "alone")]  # nothing to preempt
    number: dict[tuple, int] = {}
    # A bit for each pair.
    pairs = [sum(1 << number.setdefault(pair, len(number)) for pair in combinations(case.items(), 2)) for case in every]
    cost = [INTERPRETED_COST if case["attention"] == "triton" else 1 for case in every]

    missing, chosen = (1 << len(number)) - 1, []
    while missing:
        best = max(range(len(every)), key=lambda i: (pairs[i] & missing).bit_count() / cost[i])
        chosen.append(every[best])
        missing &= ~pairs[best]
    return chosen


CASES = covering_cases()


class Oracle:
    """For each window, weights, cache format, with and without adapters: a folder with a random model, and what has to
    be said to every prompt."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.found: dict[tuple, tuple[Path, list[list[int]]]] = {}

    def __call__(
        self, window: int | None, weights: str = "float32", kv: str = "auto", lora: str = "off"
    ) -> tuple[Path, list[list[int]]]:
        key = window, weights, kv, lora
        if key not in self.found:
            names = ASKED if lora == "mixed" else [None] * len(PROMPTS)
            said = (
                self.from_transformers(window, weights, names)
                if kv == "auto"
                else self.from_rounded_attention(window, weights, kv, names)
            )
            # No prompt's answer could pass for another's.
            assert len({tuple(tokens) for tokens in said}) == len(PROMPTS)
            self.found[key] = self.model_folder(window), said
        return self.found[key]

    def model_folder(self, window: int | None) -> Path:
        folder = self.folder / f"window-{window}"
        if not folder.exists():
            self.save_model(folder, window)
        return folder

    def save_model(self, folder: Path, window: int | None, noise: float = 0.0) -> None:
        kind = dict(model_type="llama") if window is None else dict(model_type="mistral", sliding_window=window)
        model = make_model(1, vocab_size=VOCAB_SIZE, num_hidden_layers=2, head_dim=16, eos_token_id=NEVER, **kind)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += noise * parameter.std() * torch.randn(parameter.shape)
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)

    def speculative_config(self, speculation: str, window: int | None) -> dict | None:
        """A draft model is the target with noise on its weights, which agrees with it now and then,
        or the target itself."""
        if speculation in ("off", "ngram"):
            return {"method": "ngram", "prompt_lookup_min": 1} if speculation == "ngram" else None
        folder = self.model_folder(window)
        if speculation == "noisy draft":
            folder = self.folder / f"noisy-{window}"
            if not folder.exists():
                self.save_model(folder, window, noise=0.1)
        return {"method": "draft_model", "model": folder, "num_speculative_tokens": 3}

    def adapter_folder(self, name: str) -> Path:
        """They fit both models."""
        folder = self.folder / name
        if not folder.exists():
            save_adapter(self.model_folder(None), folder, seed=list(ADAPTERS).index(name), **ADAPTERS[name])
        return folder

    def lora_requests(self) -> list[LoRARequest | None]:
        ids = {name: LoRARequest(name, at, self.adapter_folder(name)) for at, name in enumerate(ADAPTERS, 1)}
        return [None if name is None else ids[name] for name in ASKED]

    def from_transformers(self, window: int | None, weights: str, names: list[str | None]) -> list[list[int]]:
        model = AutoModelForCausalLM.from_pretrained(self.model_folder(window), dtype=torch.float32)
        if weights != "float32":
            config = resolve(QUANTIZED[weights])
            with torch.no_grad():
                for name, linear in model.named_modules():
                    if isinstance(linear, torch.nn.Linear):
                        head = name == "lm_head"
                        format, size = (config.lm_head, None) if head else (config.weights, config.group_size)
                        rounded = round_to_nearest(linear.weight, format, size, head or config.symmetric)
                        linear.weight.copy_(rounded.dequantize())
        if any(names):
            for name in ADAPTERS:
                make = model.load_adapter if isinstance(model, PeftModel) else partial(PeftModel.from_pretrained, model)
                made = make(self.adapter_folder(name), adapter_name=name)
                model = made if isinstance(made, PeftModel) else model
        said = []
        for prompt, name in zip(PROMPTS, names):
            if name is not None:
                model.set_adapter(name)
            ids = torch.tensor([prompt])
            with model.disable_adapter() if any(names) and name is None else nullcontext():
                out = model.generate(
                    input_ids=ids, do_sample=False, min_new_tokens=MAX_TOKENS, max_new_tokens=MAX_TOKENS
                )
            said.append(out[0, len(prompt) :].tolist())
        return said

    def from_rounded_attention(
        self, window: int | None, weights: str, kv: str, names: list[str | None]
    ) -> list[list[int]]:
        model = load_model(self.model_folder(window), "float32", "cpu", QUANTIZED[weights])
        attention = RoundedAttention(model.config.layer_windows, kv)
        if any(names):
            slots = LoraSlots(model, len(ADAPTERS), max_rank=4)
            for slot, name in enumerate(ADAPTERS):
                slots.put(slot, read_adapter(self.adapter_folder(name), model.config, slots.shapes, 4, torch.float32))
        said = []
        for prompt, name in zip(PROMPTS, names):
            tokens = list(prompt)
            for _ in range(MAX_TOKENS):
                batch = ForwardBatch.single(tokens)
                if name is not None:
                    slot = list(ADAPTERS).index(name)
                    batch.token_slots = TokenSlots(torch.full((len(tokens),), slot, dtype=torch.int32))
                tokens.append(int(model.forward(batch, attention).argmax()))
            said.append(tokens[len(prompt) :])
        return said


class RoundedAttention(NoCacheAttention):
    """Each key and value of a head rounded to 8 bits with a scale of its own, as PyTorch's casts round."""

    def __init__(self, layer_windows, kv: str):
        super().__init__(layer_windows)
        self.kv = kv

    def attend(self, q, k, v, layer, batch):
        return super().attend(q, self.rounded(k), self.rounded(v), layer, batch)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        largest = 127.0 if self.kv == "int8" else 448.0
        scale = x.abs().amax(-1, keepdim=True) / largest
        x = x / torch.where(scale == 0, 1.0, scale)
        return (x.round() if self.kv == "int8" else x.to(torch.float8_e4m3fn).float()) * scale


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("oracle"))


def tokens_of(case: dict) -> int:
    """Interpreted steps are slow, and twelve tokens still take most requests into another block."""
    return INTERPRETED_TOKENS if case["attention"] == "triton" and language.MODE == "interpreted" else MAX_TOKENS


def settings_of(case: dict) -> dict:
    block_size = case["block_size"]
    longest = max(map(len, PROMPTS)) + tokens_of(case)
    return dict(
        # Where there is a GPU, kernels are compiled for it.
        device=device() if case["attention"] == "triton" else "cpu",
        dtype="float32",
        block_size=block_size,
        max_num_seqs=1 if case["batch"] == "alone" else 8,
        max_num_batched_tokens=8192 if case["chunk"] == "whole" else case["chunk"],
        num_kv_blocks=400 if case["memory"] == "plenty" else -(-longest // block_size) + 2,
        enable_prefix_caching=case["prefix"] != "off",
        preemption_mode=case["preemption"],
        host_kv_bytes=10**7 if case["preemption"] == "swap" else 0,
        attention_backend=case["attention"],
        enforce_eager=case["steps"] == "eager",
        async_scheduling=case["scheduling"] == "ahead",
        quantization=QUANTIZED[case["weights"]],
        kv_cache_dtype=case["kv"],
        enable_lora=case["lora"] == "mixed",
        max_loras=2,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_tokens_equal_transformers(case, oracle):
    if case["attention"] == "native" and native.library() is None:
        pytest.skip("no C compiler here")
    if case["attention"] == "triton" and language.MODE == "absent":
        pytest.skip("Triton needs Linux")
    folder, said = oracle(case["window"], case["weights"], case["kv"], case["lora"])
    expected = [tokens[: tokens_of(case)] for tokens in said]
    llm = LLM(
        folder, **settings_of(case), speculative_config=oracle.speculative_config(case["speculation"], case["window"])
    )
    check_every_step(llm)
    pickle_steps(llm.engine)
    llm.trace.enabled = True
    params = SamplingParams(temperature=0.0, max_tokens=tokens_of(case), ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    runs, adapters = 2 if case["prefix"] == "warm" else 1, oracle.lora_requests() if case["lora"] == "mixed" else None
    for _ in range(runs):
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    cached = sum(output.metrics.num_cached_tokens for output in outputs)
    if case["prefix"] == "off":
        assert cached == 0
    if case["prefix"] == "warm" and case["memory"] == "plenty":
        assert cached > 50
    preempted = sum(output.metrics.num_preemptions for output in outputs)
    if case["memory"] == "plenty":
        assert preempted == 0
    elif case["speculation"] == "off" and (case["window"] is None or case["chunk"] == "whole"):
        # A window gives its blocks back, and good guesses end a text before the others need its blocks.
        assert preempted > 0
    swapped = sum(llm.trace.totals("swap_out").values()), sum(llm.trace.totals("swap_in").values())
    if case["preemption"] == "swap" and preempted > 0:
        assert min(swapped) > 0
    elif case["preemption"] == "recompute" or case["prefix"] == "off":  # else host memory takes prefixes too
        assert max(swapped) == 0
    if case["speculation"] != "off":
        guesses = llm.engine.speculation.metrics
        assert guesses.num_draft_tokens > 0
        if case["speculation"] == "noisy draft":
            assert 0.05 < guesses.alpha < 0.9
        elif case["speculation"] == "perfect draft" and case["weights"] == "float32" and case["lora"] == "off":
            assert guesses.alpha == 1


def check_every_step(llm: LLM) -> None:
    """Integrity is checked after each step, not only when idle."""
    step = llm.engine.step

    def checked():
        deltas = step()
        llm.engine.scheduler.check_integrity()
        return deltas

    llm.engine.step = checked


def test_the_cases_cover_every_pair():
    met = set().union(*(combinations(case.items(), 2) for case in CASES))
    values = [(name, value) for name in AXES for value in AXES[name]]
    missed = {pair for pair in combinations(values, 2) if pair[0][0] != pair[1][0] and pair not in met}
    assert missed == {(("batch", "alone"), ("memory", "few"))} and len(CASES) < 30
    interpreted = [case for case in CASES if case["attention"] == "triton"]
    assert len(interpreted) == len(AXES["speculation"]), "as few as the longest other axis allows"


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_seeded_request_says_the_same_when_it_is_preempted(mode, oracle):
    folder, _ = oracle(None)
    params = [
        SamplingParams(temperature=1.2, top_k=30, repetition_penalty=1.3, seed=i, max_tokens=MAX_TOKENS, n=2)
        for i in range(7)
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    common = dict(
        device="cpu", dtype="float32", preemption_mode=mode, host_kv_bytes=10**6 if mode == "swap" else 0, block_size=4
    )
    said = []
    for num_kv_blocks in (400, 20):
        llm = LLM(folder, num_kv_blocks=num_kv_blocks, **common)
        check_every_step(llm)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        said.append([[sample.token_ids for sample in output.outputs] for output in outputs])
        preempted = sum(output.metrics.num_preemptions for output in outputs)
        assert (preempted > 0) == (num_kv_blocks == 20)
    assert said[0] == said[1]
    assert all(len({tuple(sample) for sample in samples}) == 2 for samples in said[0])
