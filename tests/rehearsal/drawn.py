"""Scenarios drawn by chance, every knob at once: `python -m tests.rehearsal --random 50 --seed 0`.

What a scenario of the table shows alone must hold in company: no exception, tokens that have arrived before they are
read, no wait but those for tokens, drafts and the disk, and no kernel compiled after the start.
"""

from __future__ import annotations

import random

from .scenarios import PROMPTS, Scenario


def drawn(seed: int) -> Scenario:
    """The same scenario for the same seed."""
    rng = random.Random(seed)
    settings = _memory(rng) | _numbers(rng)
    if rng.random() < 0.2:
        settings["kv_retention"] = {"sinks": rng.choice([0, 4]), "window": rng.choice([20, 60])}
        if "disk_kv_path" in settings:  # tiers keep prefixes, and there are none
            settings = {name: value for name, value in settings.items() if not name.startswith(("disk_kv", "host_kv"))}
    if rng.random() < 0.5:
        settings |= _drafts(rng, with_model="kv_retention" not in settings)
    count = rng.randint(1, 6)
    prompts = [rng.choice(PROMPTS) * rng.choice([1, 1, 4]) for _ in range(count)]
    twice = rng.random() < 0.3
    return Scenario(
        settings, lambda: _params(random.Random(seed), count), lambda llm, params: _drive(llm, params, prompts, twice)
    )


def _numbers(rng: random.Random) -> dict:
    settings = dict(
        max_num_seqs=rng.choice([1, 2, 8, 24]),
        max_num_batched_tokens=rng.choice([16, 64, 64, 200]),
        scheduling_policy=rng.choice(["fcfs", "priority", "sjf", "fair", "lpm"]),
        async_scheduling=rng.choice([None, True, False]),
        enforce_eager=rng.random() < 0.2,
    )
    if rng.random() < 0.3:
        settings["quantization"] = rng.choice(["int8", "int4", "fp8"])
    elif rng.random() < 0.15:
        settings["cpu_offload_bytes"] = 9_000_000
    if rng.random() < 0.3:
        settings["kv_cache_dtype"] = rng.choice(["int8", "fp8"])
    return settings


def _memory(rng: random.Random) -> dict:
    """Plenty, or too little: with swap, tiers, or recomputation."""
    block_size, max_model_len = rng.choice([8, 16, 32]), rng.choice([150, 512])
    settings = dict(block_size=block_size, max_model_len=max_model_len, enable_prefix_caching=rng.random() < 0.7)
    few = dict(num_kv_blocks=-(-max_model_len // block_size) + rng.randint(1, 3))
    return settings | rng.choice(
        [
            {},
            few,
            few | dict(preemption_mode="swap", host_kv_bytes=2**22),
            few | dict(enable_prefix_caching=True, host_kv_bytes=2**20, disk_kv_path="", disk_kv_bytes=2**24),
        ]
    )


def _drafts(rng: random.Random, with_model: bool) -> dict:
    few = {"num_speculative_tokens": rng.randint(1, 5), "adaptive": rng.random() < 0.3}
    kinds = [{"method": "ngram", "prompt_lookup_min": 1}, {"method": "draft_model", "model": "tinyworld-draft"}]
    return dict(speculative_config=rng.choice(kinds[: 1 + with_model]) | few)


def _params(rng: random.Random, count: int) -> list:
    from minillm import SamplingParams
    from minillm.sampling.grammar.params import StructuredOutputsParams

    def one() -> SamplingParams:
        chosen = dict(
            max_tokens=rng.choice([1, 6, 20]), ignore_eos=rng.random() < 0.7, temperature=rng.choice([0.0, 0.8])
        )
        several = [
            dict(seed=3), dict(top_k=20), dict(top_p=0.9), dict(min_p=0.1), dict(repetition_penalty=1.3),
            dict(presence_penalty=0.4), dict(frequency_penalty=0.2), dict(logprobs=2), dict(prompt_logprobs=1),
            dict(logit_bias={5: 1.0}), dict(min_tokens=1), dict(n=2), dict(stop=["."]),
            dict(structured_outputs=StructuredOutputsParams(regex="[ -~\n]*")),
        ]  # fmt: skip
        for more in rng.sample(several, rng.choice([0, 0, 1, 2, 4])):
            chosen |= more
        if chosen["temperature"] == 0.0:
            chosen.pop("n", None)
        if "structured_outputs" in chosen:
            chosen["ignore_eos"] = False
        return SamplingParams(**chosen)

    return [one() for _ in range(count)]


def _drive(llm, params: list, prompts: list[str], twice: bool) -> list:
    for _ in range(1 + twice):
        answers = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.scheduler.check_integrity()
    llm.close()
    return answers
