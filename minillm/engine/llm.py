"""LLM: a model you can ask, with vLLM's names. Built in chapter 04.

    prompts -> InputProcessor -> Request -> Generator -> tokens -> Detokenizer -> RequestOutput
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minillm.engine.config import EngineConfig
from minillm.engine.detokenizer import Detokenizer
from minillm.engine.generator import Generator, Prefilled
from minillm.engine.inputs import InputProcessor, Prompt
from minillm.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamDelta
from minillm.engine.request import Request
from minillm.model.checkpoint import load_model, load_tokenizer, resolve_model
from minillm.model.decoder import Decoder
from minillm.sampling.beam import Beam, beam_search
from minillm.sampling.logprobs import Logprob
from minillm.sampling.params import SamplingParams, check_int

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LLM:
    """Loads a model and answers prompts.

    `model` is a bundled name, a folder in Hugging Face layout, or a hub id. `dtype="auto"` is float32 on a CPU,
    bfloat16 on a GPU from sm_80 on, float16 below. `max_model_len` bounds prompt and answer together, in tokens.
    `seed` seeds the requests that bring no seed of their own. Values that come with a later chapter raise
    NotImplementedError and name it; wrong ones raise ValueError or TypeError and name what is allowed.
    """

    def __init__(
        self,
        model: str | Path = "tinyworld",
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        scheduling_policy: str = "fcfs",
        attention_backend: str = "auto",
        preemption_mode: str = "recompute",
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        speculative_config: dict[str, Any] | None = None,
        host_kv_bytes: int = 0,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        enforce_eager: bool = False,
        seed: int = 0,
    ):
        arguments = dict(locals())
        del arguments["self"]
        self.config = EngineConfig(**arguments)
        path = resolve_model(model)
        self.model = load_model(path, dtype, device)
        self.tokenizer = load_tokenizer(path)
        self.max_model_len = _max_model_len(max_model_len, self.model)
        eos_token_ids = frozenset(self.model.config.eos_token_ids)
        vocab_size = self.model.config.vocab_size
        self.inputs = InputProcessor(self.tokenizer, vocab_size, self.max_model_len, eos_token_ids, seed)
        self.generator = Generator(self.model)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        user: str | Sequence[str] | None = None,
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; results in the order of the prompts.

        A prompt is a string or {"prompt_token_ids": [...]}. `sampling_params` is one for all, or one each.
        Every prompt is checked before the first is computed; see `InputProcessor` for what is raised.
        """
        _refuse_later(priority=(priority, 9), user=(user, 9), lora_request=(lora_request, 23))
        return self._serve(self.inputs.requests(prompts, sampling_params), use_tqdm)

    def chat(
        self,
        messages: Sequence[dict[str, str]] | Sequence[Sequence[dict[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several: lists of {"role": ..., "content": ...}, through the chat template."""
        _refuse_later(lora_request=(lora_request, 23))
        prompts = self.inputs.conversations(messages)
        # The template writes the special tokens itself.
        return self._serve(self.inputs.requests(prompts, sampling_params, add_special_tokens=False), use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[StreamDelta]:
        """Continue one prompt, yielding each token as it is made. The joined texts are `generate`'s text.

        The text of a delta may be empty: half a character, or what may become a stop string, has to wait.
        """
        requests = self.inputs.requests(prompt, sampling_params)
        if len(requests) != 1:
            raise ValueError(f"stream() takes 1 prompt, not {len(requests)}; use generate() for several")
        if requests[0].params.n != 1:
            raise ValueError(f"stream() takes n=1, not n={requests[0].params.n}; use generate() for several samples")
        return self._stream(requests[0])

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        beam_width: int = 4,
        max_tokens: int = 64,
        length_penalty: float = 1.0,
        ignore_eos: bool = False,
    ) -> list[RequestOutput]:
        """The `beam_width` most probable continuations of each prompt that the search finds, best first."""
        check_int("beam_width", beam_width, 1)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        requests = self.inputs.requests(prompts, params)
        return [self._beam_search(request, beam_width, length_penalty) for request in requests]

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return self.tokenizer

    def _serve(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        if not use_tqdm:
            return [self._run(request) for request in requests]
        from tqdm.auto import tqdm

        outputs, num_tokens, start = [], 0, time.monotonic()
        with tqdm(total=len(requests), desc="Requests", dynamic_ncols=True) as bar:
            for request in requests:
                outputs.append(self._run(request))
                num_tokens += sum(len(sample.token_ids) for sample in outputs[-1].outputs)
                bar.set_postfix_str(f"{num_tokens / (time.monotonic() - start):.0f} tokens/s", refresh=False)
                bar.update()
        return outputs

    def _run(self, request: Request) -> RequestOutput:
        metrics = RequestMetrics(request.arrival_time)
        prefilled = self.generator.prefill(request)
        samples = [_new_sample(request, index) for index in range(request.params.n)]
        for sample in samples:
            for _ in self._continue(request, prefilled, sample):
                metrics.first_token_time = metrics.first_token_time or time.monotonic()
        metrics.finished_time = time.monotonic()
        logprobs = prefilled.prompt_logprobs and [self._decoded(row) for row in prefilled.prompt_logprobs]
        return RequestOutput(
            request.request_id, request.prompt, request.prompt_token_ids, samples, metrics, prompt_logprobs=logprobs
        )

    def _stream(self, request: Request) -> Iterator[StreamDelta]:
        yield from self._continue(request, self.generator.prefill(request), _new_sample(request, 0))

    def _continue(self, request: Request, prefilled: Prefilled, sample: CompletionOutput) -> Iterator[StreamDelta]:
        """Fill `sample` token by token, and say what each token added."""
        params = request.params
        detokenizer = Detokenizer(self._decode, request.prompt_token_ids, params.stop, params.min_tokens)
        for token in self.generator.decode(request, prefilled, sample.index):
            sample.token_ids.append(token.token_id)
            if token.logprobs is not None:
                sample.cumulative_logprob += token.logprobs[token.token_id].logprob
                sample.logprobs.append(self._decoded(token.logprobs))
            finish_reason, text = token.finish_reason, ""
            if finish_reason != "stop":  # a stop token ends the text and is no part of it
                text = detokenizer.add(token.token_id)
            elif token.token_id in params.stop_token_ids:
                sample.stop_reason = token.token_id
            if finish_reason:
                text += detokenizer.finish()
            if detokenizer.stop_string is not None:
                finish_reason, sample.stop_reason = "stop", detokenizer.stop_string
            sample.finish_reason = finish_reason
            sample.text += text
            yield StreamDelta(text, [token.token_id], finish_reason)
            if finish_reason:
                return

    def _beam_search(self, request: Request, beam_width: int, length_penalty: float) -> RequestOutput:
        metrics = RequestMetrics(request.arrival_time)
        prefilled = self.generator.prefill(request)

        def next_logprobs(beams: list[tuple[int, ...]]) -> torch.Tensor:
            logits = [self.generator.logits_after(prefilled, request, token_ids) for token_ids in beams]
            metrics.first_token_time = metrics.first_token_time or time.monotonic()
            return torch.cat(logits).log_softmax(dim=-1)

        beams = beam_search(next_logprobs, beam_width, request.max_tokens, request.stop_token_ids, length_penalty)
        samples = [self._beam_sample(request, index, beam) for index, beam in enumerate(beams)]
        metrics.finished_time = time.monotonic()
        return RequestOutput(request.request_id, request.prompt, request.prompt_token_ids, samples, metrics)

    def _beam_sample(self, request: Request, index: int, beam: Beam) -> CompletionOutput:
        detokenizer = Detokenizer(self._decode, request.prompt_token_ids)
        for token_id in beam.token_ids[: -1 if beam.finished else None]:
            detokenizer.add(token_id)
        detokenizer.finish()
        reason = "stop" if beam.finished else "length"
        return CompletionOutput(
            index, detokenizer.text, list(beam.token_ids), beam.cumulative_logprob, finish_reason=reason
        )

    def _decode(self, token_ids: list[int]) -> str:
        # The tokenizer's Rust core: its Python wrapper takes longer than a tiny model's whole step.
        return self.tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=True)

    def _decoded(self, row: dict[int, Logprob] | None) -> dict[int, Logprob] | None:
        if row is None:
            return None
        core = self.tokenizer.backend_tokenizer
        return {
            token_id: replace(entry, decoded_token=core.decode([token_id], skip_special_tokens=False))
            for token_id, entry in row.items()
        }


def _new_sample(request: Request, index: int) -> CompletionOutput:
    if request.params.logprobs is None:
        return CompletionOutput(index, "", [])
    return CompletionOutput(index, "", [], cumulative_logprob=0.0, logprobs=[])


def _max_model_len(asked: int | None, model: Decoder) -> int:
    limit = model.config.max_position_embeddings
    if asked is not None and asked > limit:
        raise ValueError(f"max_model_len={asked} exceeds the model's max_position_embeddings={limit}")
    return asked or limit


def _refuse_later(**arguments: tuple[Any, int]) -> None:
    for name, (value, chapter) in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name}={value!r} comes with chapter {chapter:02}; leave it out until then")
