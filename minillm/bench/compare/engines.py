"""minillm and `transformers` as engines of the comparison. Built in chapter 14."""

from __future__ import annotations

import time
from bisect import bisect_right
from pathlib import Path

import torch

from ... import LLM, SamplingParams, __version__
from ..switches import no_progress_bars
from .request import Answer, Request

BATCH_SIZE = 16  # the largest batch of transformers for requests of unequal length: the best of `bench throughput`


class Minillm:
    version = __version__

    def __init__(
        self, path: Path, dtype: str, max_num_seqs: int, num_kv_blocks: int, quantization: str | dict | None = None
    ):
        self.llm = LLM(
            str(path),
            device="cpu",
            dtype=dtype,
            quantization=quantization,
            max_num_seqs=max_num_seqs,
            num_kv_blocks=num_kv_blocks,
            enable_prefix_caching=False,
        )

    def answer(self, request: Request) -> Answer:
        params = [
            SamplingParams(temperature=request.temperature, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in request.lengths
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in request.prompts]
        started = time.monotonic()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.monotonic() - started
        first = max(output.metrics.first_token_time for output in outputs)
        return Answer(
            [list(output.outputs[0].token_ids) for output in outputs],
            seconds,
            first - started,
            sum(bisect_right(output.metrics.token_times, first) for output in outputs),
        )

    def close(self) -> None:
        del self.llm


class Transformers:
    """`generate`, scaled dot-product attention; prompts of one length in one batch, others in batches of BATCH_SIZE
    that are padded on the left."""

    def __init__(self, path: Path, dtype: str):
        import transformers

        self.version = transformers.__version__
        with no_progress_bars():
            self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()

    def answer(self, request: Request) -> Answer:
        count = len(request.prompts)
        size = count if len(set(map(len, request.prompts))) == 1 else BATCH_SIZE
        token_ids: list[list[int]] = []
        started = time.monotonic()
        for start in range(0, count, size):
            lengths = request.lengths[start : start + size]
            clock = FirstToken()
            generated = self._generate(request.prompts[start : start + size], max(lengths), request.temperature, clock)
            first, first_tokens = clock.at, sum(map(len, token_ids)) + len(lengths)
            token_ids += [row[:length] for row, length in zip(generated, lengths)]
        return Answer(token_ids, time.monotonic() - started, first - started, first_tokens)

    def _generate(self, prompts: list[list[int]], count: int, temperature: float, clock: FirstToken) -> list[list[int]]:
        from transformers import GenerationConfig

        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])  # [num_seqs, longest]
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        sampling = dict(temperature=temperature, top_k=0, top_p=1.0) if temperature else {}
        # generate() fills in an end of sequence where none is given, so "none" is an id that no token has.
        config = GenerationConfig(
            max_new_tokens=count,
            do_sample=bool(temperature),
            pad_token_id=0,
            eos_token_id=self.model.config.vocab_size,
            **sampling,
        )
        output = self.model.generate(ids, attention_mask=mask, generation_config=config, streamer=clock)
        return output[:, longest:].tolist()

    def close(self) -> None:
        del self.model


class FirstToken:
    """A streamer of `transformers` that notes when the first token of each sequence came."""

    def __init__(self):
        self.calls, self.at = 0, 0.0

    def put(self, ids: torch.Tensor) -> None:
        self.calls += 1  # the first call brings the prompts
        if self.calls == 2:
            self.at = time.monotonic()

    def end(self) -> None:
        pass
