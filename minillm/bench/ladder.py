"""The ladder: one prompt, served by every stage of the book, from slowest to fastest. Built in chapter 00.

A rung loads a model and gives back a stream: a function that yields tokens greedily as they are made, each with the
time at which it was made, so that two rungs can be watched side by side. All rungs but those with rounded weights
generate the same tokens (in float32); they differ in when they do. A later chapter adds its own with
`RUNGS.append(Rung(...))`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from .. import LLM, SamplingParams
from ..device import resolve_device, resolve_dtype
from ..engine.detokenizer import Detokenizer
from ..kv_cache.contiguous import ContiguousAttention, ContiguousKVCache
from ..model.attention import NoCacheAttention
from ..model.batch import ForwardBatch
from ..model.checkpoint import load_config, load_model, load_tokenizer, resolve_model
from . import measure
from .recording import Recording, Stream, TimedText
from .switches import no_progress_bars, switched_off


@dataclass(frozen=True)
class Rung:
    """One stage: `load(model, device, dtype)` gives its stream."""

    name: str
    chapter: str  # "03": where the book builds it
    load: Callable[[str, torch.device, torch.dtype], Stream]
    num_streams: int = 1  # texts generated at once; what is shown and timed is the first of them
    exact: bool = True  # generates the same tokens as the others; with rounded weights it is another model

    def open(self, model: str = "tinyworld", device: str = "auto", dtype: str = "float32") -> Stream:
        """The rung, loaded and ready. float32, so that every rung generates the same."""
        resolved = resolve_device(device)
        return self.load(model, resolved, resolve_dtype(dtype, resolved))

    def texts(self, prompt: str, max_tokens: int, model: str = "tinyworld", device: str = "auto") -> Iterator[str]:
        """Pieces of text as they are made, one a token, by a rung that is loaded and warm already."""
        stream, ids = self.open(model, device), prompt_ids(model, prompt)
        record(self.name, stream, ids, 2)
        return (piece.text for piece in stream(ids, max_tokens, False))


def record(
    name: str,
    stream: Stream,
    prompt_token_ids: list[int],
    max_tokens: int,
    ignore_eos: bool = False,
    seconds: float = float("inf"),
    on_text: Callable[[TimedText], None] = lambda piece: None,
    num_streams: int = 1,
) -> Recording:
    """Run the `stream` of the rung `name` to its end, or until `seconds` have passed."""
    said, pieces = [], stream(prompt_token_ids, max_tokens, ignore_eos)
    for piece in pieces:
        said.append(piece)
        on_text(piece)
        if piece.seconds > seconds:
            pieces.close()
            return Recording(name, tuple(said), complete=False, num_streams=num_streams)
    return Recording(name, tuple(said), complete=True, num_streams=num_streams)


def prompt_ids(model: str, prompt: str) -> list[int]:
    """Token ids of `prompt`, with the begin token that the model's tokenizer puts first."""
    return load_tokenizer(resolve_model(model)).encode(prompt)


def with_transformers(use_cache: bool) -> Callable[[str, torch.device, torch.dtype], Stream]:
    """`transformers.generate`, as its users call it."""

    def load(model: str, device: torch.device, dtype: torch.dtype) -> Stream:
        from transformers import GenerationConfig, StoppingCriteriaList

        loaded, tokenizer = _transformers_model(model, device, dtype), load_tokenizer(resolve_model(model))
        end_ids = loaded.generation_config.eos_token_id
        # generate() fills in an end of sequence where none is given, so "none" is an id that no token has.
        no_end_id = loaded.config.vocab_size

        def stream(prompt_token_ids: list[int], max_tokens: int, ignore_eos: bool = False) -> Iterator[TimedText]:
            made: queue.Queue = queue.Queue()
            stopped = threading.Event()
            config = GenerationConfig(
                max_new_tokens=max_tokens,
                do_sample=False,
                use_cache=use_cache,
                pad_token_id=0,
                eos_token_id=no_end_id if ignore_eos else end_ids,
            )

            def generate() -> None:
                try:
                    prompt = torch.tensor([prompt_token_ids], device=device)  # [1, prompt_len]
                    loaded.generate(
                        prompt,
                        attention_mask=torch.ones_like(prompt),
                        generation_config=config,
                        streamer=TokenClock(made.put),
                        stopping_criteria=StoppingCriteriaList([lambda ids, scores, **_: _all(ids, stopped.is_set())]),
                    )
                    made.put(None)
                except Exception as error:  # raised again below, in the reader's thread
                    made.put(error)

            # generate() returns only at the end; its streamer runs in a thread of its own.
            worker, text = threading.Thread(target=generate, daemon=True), _detokenizer(tokenizer, prompt_token_ids)
            started = at = time.perf_counter()
            worker.start()
            try:
                while (item := made.get()) is not None:
                    if isinstance(item, Exception):
                        raise item
                    token, at = item
                    yield TimedText(text.add(token), (token,), at - started)
                if rest := text.finish():
                    yield TimedText(rest, (), at - started)
            finally:
                stopped.set()
                worker.join()

        return stream

    return load


class TokenClock:
    """A `transformers` streamer: passes each new token on with the time at which it came."""

    def __init__(self, on_token: Callable[[tuple[int, float]], None]):
        self.on_token, self.prompt_seen = on_token, False

    def put(self, ids: torch.Tensor) -> None:
        if self.prompt_seen:
            self.on_token((int(ids[0]), time.perf_counter()))
        self.prompt_seen = True  # the first call has the prompt

    def end(self) -> None:
        pass


def without_cache(model: str, device: torch.device, dtype: torch.dtype) -> Stream:
    """minillm's decoder, the whole text computed again for every token."""
    path = resolve_model(model)
    decoder, tokenizer = _decoder(model, device, dtype), load_tokenizer(path)
    attention = NoCacheAttention.of(decoder)

    def stream(prompt_token_ids: list[int], max_tokens: int, ignore_eos: bool = False) -> Iterator[TimedText]:
        text, ids, started = _detokenizer(tokenizer, prompt_token_ids), list(prompt_token_ids), time.perf_counter()
        at = 0.0
        for _ in range(max_tokens):
            with torch.inference_mode():
                logits = decoder.forward(ForwardBatch.single(ids, device=device), attention)  # [1, vocab_size]
            token = int(logits[-1].argmax())
            ids.append(token)
            at = time.perf_counter() - started
            yield TimedText(text.add(token), (token,), at)
            if token in decoder.config.eos_token_ids and not ignore_eos:
                break
        if rest := text.finish():
            yield TimedText(rest, (), at)

    return stream


def contiguous(model: str, device: torch.device, dtype: torch.dtype) -> Stream:
    """minillm's decoder over chapter 03's cache: one token a step."""
    decoder, tokenizer = _decoder(model, device, dtype), load_tokenizer(resolve_model(model))
    config = decoder.config

    def stream(prompt_token_ids: list[int], max_tokens: int, ignore_eos: bool = False) -> Iterator[TimedText]:
        text, started = _detokenizer(tokenizer, prompt_token_ids), time.perf_counter()
        max_len = len(prompt_token_ids) + max_tokens
        cache = ContiguousKVCache(
            config.num_layers, config.num_kv_heads, config.head_dim, max_len, decoder.dtype, device
        )
        attention = ContiguousAttention(cache, config)
        new, at = prompt_token_ids, 0.0
        for _ in range(max_tokens):
            batch = ForwardBatch.single(new, start=cache.length, device=device)
            new = [token] = decoder.forward(batch, attention).argmax(dim=-1).tolist()
            at = time.perf_counter() - started
            yield TimedText(text.add(token), (token,), at)
            if token in config.eos_token_ids and not ignore_eos:
                break
        if rest := text.finish():
            yield TimedText(rest, (), at)

    return stream


def with_engine(num_streams: int = 1, **settings) -> Callable[[str, torch.device, torch.dtype], Stream]:
    """minillm's `LLM`, generating the text `num_streams` times at once; `settings` are the LLM's."""

    def load(model: str, device: torch.device, dtype: torch.dtype) -> Stream:
        # Rungs are open side by side: on a GPU each takes the blocks of its texts, not 90% of the memory.
        room = (
            measure.room_for(num_streams, load_config(resolve_model(model)).max_position_embeddings)
            if device.type == "cuda"
            else {}
        )
        llm = LLM(model, device=str(device), dtype=str(dtype).removeprefix("torch."), **(room | settings))

        def stream(prompt_token_ids: list[int], max_tokens: int, ignore_eos: bool = False) -> Iterator[TimedText]:
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
            prompt = {"prompt_token_ids": prompt_token_ids}
            started = time.perf_counter()
            for delta, *_ in zip(*(llm.stream(prompt, params) for _ in range(num_streams))):
                yield TimedText(delta.text, tuple(delta.token_ids), time.perf_counter() - started)

        return stream

    return load


def guessing(model: str, device: torch.device, dtype: torch.dtype) -> Stream:
    """Draft tokens from the bundled draft model, and for another model from n-grams."""
    draft = {"method": "draft_model", "model": "tinyworld-draft", "num_speculative_tokens": 3}
    return with_engine(speculative_config=draft if model == "tinyworld" else {"method": "ngram"})(model, device, dtype)


def in_torch(
    load: Callable[[str, torch.device, torch.dtype], Stream],
) -> Callable[[str, torch.device, torch.dtype], Stream]:
    """The same rung before Part III: torch's operations only, our C kernels switched off while it loads and runs."""

    def loaded(model: str, device: torch.device, dtype: torch.dtype) -> Stream:
        with switched_off(("C kernels",)):
            inner = load(model, device, dtype)

        def stream(prompt_token_ids: list[int], max_tokens: int, ignore_eos: bool = False) -> Iterator[TimedText]:
            pieces = inner(prompt_token_ids, max_tokens, ignore_eos)
            try:
                while True:
                    with switched_off(("C kernels",)):  # only while this rung is at work: others may take turns with it
                        piece = next(pieces, None)
                    if piece is None:
                        return
                    yield piece
            finally:
                pieces.close()

        return stream

    return loaded


def _detokenizer(tokenizer, prompt_token_ids: list[int]) -> Detokenizer:
    """Text as tokens come, by the engine's own detokenizer: it holds half a character back until the rest is there."""
    return Detokenizer(lambda ids: tokenizer.decode(ids, skip_special_tokens=True), prompt_token_ids)


def _all(ids: torch.Tensor, value: bool) -> torch.Tensor:
    return torch.full((ids.shape[0],), value, device=ids.device)  # [num_seqs]: is this sequence done?


@lru_cache(maxsize=2)
def _transformers_model(model: str, device: torch.device, dtype: torch.dtype):
    from transformers import AutoModelForCausalLM

    with no_progress_bars():
        return AutoModelForCausalLM.from_pretrained(resolve_model(model), dtype=dtype).to(device).eval()


@lru_cache(maxsize=2)
def _decoder(model: str, device: torch.device, dtype: torch.dtype):
    return load_model(resolve_model(model), dtype, device)


# On a GPU the plain engine is also without our Triton kernels, recorded steps and scheduling ahead.
PLAIN = dict(attention_backend="torch", enforce_eager=True, async_scheduling=False)

RUNGS: list[Rung] = [
    Rung("transformers, no cache", "01", with_transformers(use_cache=False)),
    Rung("transformers", "01", with_transformers(use_cache=True)),
    Rung("minillm, no cache", "02", in_torch(without_cache)),
    Rung("minillm, KV cache", "03", in_torch(contiguous)),
    Rung("minillm, engine", "05", in_torch(with_engine(**PLAIN))),
    Rung("minillm, own kernels", "14", with_engine()),
    Rung("minillm, weights in 8 bits", "15", with_engine(quantization="int8"), exact=False),
    Rung("minillm, speculation", "18", guessing),
    Rung("minillm, 16 at once", "14", with_engine(num_streams=16), num_streams=16),
]
