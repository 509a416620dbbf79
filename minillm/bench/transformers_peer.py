"""`transformers.generate` as a peer of the engine's throughput. Built in chapter 05."""

from __future__ import annotations

from pathlib import Path

import torch

from . import ladder

BATCH_SIZES, IMPLEMENTATIONS = (1, 4, 8, 16), ("sdpa", "eager")
CONTINUOUS = "continuous batching"
TEMPERATURE = 0.6


class Theirs:
    """transformers, a model for each attention implementation;
    batches in the order of the requests, padded on the left."""

    def __init__(
        self, path: Path, dtype: torch.dtype, device: torch.device, prompts: list[list[int]], lengths: list[int]
    ):
        from transformers import AutoModelForCausalLM

        self.prompts, self.lengths, self.device = prompts, lengths, device
        with ladder.no_progress_bars():
            self.models = {
                name: AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=name)
                .to(device)
                .eval()
                for name in (IMPLEMENTATIONS if device.type == "cpu" else IMPLEMENTATIONS[:1])
            }

    def run(self, setting: str) -> int:
        """All requests by one setting; how many tokens of use it made (continuous batching takes one length for
        all)."""
        if setting == CONTINUOUS:
            return self._generate_batch()
        implementation, _, batch_size = setting.partition(", batch ")
        for start in range(0, len(self.prompts), int(batch_size)):
            batch = self.prompts[start : start + int(batch_size)]
            self._generate(implementation, batch, max(self.lengths[start : start + int(batch_size)]), do_sample=True)
        return sum(self.lengths)

    def _generate_batch(self) -> int:
        """transformers' continuous batching: of equal answers as long as ours are on average."""
        from transformers import GenerationConfig

        count = sum(self.lengths) // len(self.lengths)
        model = self.models["sdpa"]
        config = GenerationConfig(
            max_new_tokens=count,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
            eos_token_id=model.config.vocab_size,
        )
        outputs = model.generate_batch(self.prompts, generation_config=config, progress_bar=False)
        made = sum(len(output.generated_tokens) for output in outputs.values())
        if made != count * len(self.prompts):
            raise RuntimeError(
                f"transformers' continuous batching made {made} tokens instead of {count * len(self.prompts)}"
            )
        return made

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        return self._generate("sdpa", [prompt], count, do_sample=False)[0, len(prompt) :].tolist()

    def _generate(self, implementation: str, batch: list[list[int]], count: int, do_sample: bool) -> torch.Tensor:
        from transformers import GenerationConfig

        longest = max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in batch], device=self.device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch], device=self.device)
        model = self.models[implementation]
        sampling = dict(temperature=TEMPERATURE, top_k=0, top_p=1.0) if do_sample else {}
        # generate() fills in an end of sequence where none is given, so "none" is an id that no token has.
        config = GenerationConfig(
            max_new_tokens=count, do_sample=do_sample, pad_token_id=0, eos_token_id=model.config.vocab_size, **sampling
        )
        return model.generate(ids, attention_mask=mask, generation_config=config)
