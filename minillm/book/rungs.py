"""One engine in several configurations: what came since chapter 06, switched on and off. Built in chapter 14."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import count
from typing import NamedTuple
from unittest import mock

import torch

from minillm import SamplingParams
from minillm.device import resolve_device
from minillm.engine.config import EngineConfig
from minillm.engine.engine import Engine
from minillm.engine.request import Request
from minillm.kernels import native
from minillm.model import decoder, decoder_layer, joined, layers
from minillm.model.config import ModelConfig
from minillm.trace import Trace

SWITCHES = {  # what is put in the place of what, to do without
    "C kernels": (native, "library", lambda dtype=torch.float32: None),
    "packed weights": (layers, "can_pack", lambda weight: False),
    "whole layers": (decoder_layer, "WHOLE_LAYERS", False),
    "joined model": (joined, "JOINED_MODEL", False),
}


class Rung(NamedTuple):
    """One configuration of the engine: what is switched off, and the engine's own arguments."""

    name: str
    off: tuple = ()
    knobs: Mapping = {}


def shape(num_layers, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152) -> ModelConfig:
    """A Llama of this shape; by default the layers of SmolLM2-135M."""
    return ModelConfig.from_hf(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "num_hidden_layers": num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "intermediate_size": intermediate,
            "vocab_size": vocab,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        }
    )


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Switches off what is named in `SWITCHES`."""
    with ExitStack() as stack:
        for owner, attribute, stand_in in (SWITCHES[name] for name in names):
            stack.enter_context(mock.patch.object(owner, attribute, stand_in))
        yield


@cache
def built(config: ModelConfig, off: tuple = ()) -> decoder.Decoder:
    """A model with random float32 weights, prepared with these switches off."""
    with without(*off), mock.patch.object(decoder, "CACHE_BYTES", 0):  # a small model must not be treated otherwise
        model = decoder.Decoder(config, torch.float32, resolve_device("auto"))
        generator, spread = torch.Generator().manual_seed(0), 2 * config.hidden_size**-0.5
        for weight in model.parameters():
            matrix = weight.dim() > 1
            weight.copy_(_noise(weight.shape, generator) * spread if matrix else torch.ones(len(weight)))
        return model.prepare()


def _noise(size: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Normal numbers; a large matrix repeats a million of them, at other columns in each row, to save time."""
    drawn = torch.randn(min(size.numel(), 2**20 + 7), generator=generator)
    return drawn.repeat(-(-size.numel() // len(drawn)))[: size.numel()].view(size)


class Served:
    """An engine on one rung that serves `batch` prompts of 16 tokens, again and again."""

    def __init__(self, rung: Rung, config: ModelConfig, batch: int = 1):
        self.rung, self.config, self.batch, self.names = rung, config, batch, count()
        self.trace, self.requests = Trace(enabled=False), []
        knobs = dict(max_num_seqs=batch, max_model_len=128, num_kv_blocks=8 * batch, enable_prefix_caching=False)
        model = built(config, tuple(name for name in rung.off if name not in ("whole layers", "joined model")))
        with without(*rung.off):
            self.engine = Engine(model, trace=self.trace, config=EngineConfig("", **knobs, **rung.knobs))

    def begin(self, steps: int) -> None:
        """Compute the prompts; `steps` decode steps are left."""
        params = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
        vocab = self.config.vocab_size
        prompts = [[(7 * i + 13 * row + 3) % vocab for i in range(16)] for row in range(self.batch)]
        self.requests = [Request(str(next(self.names)), prompt, params, max_tokens=steps + 1) for prompt in prompts]
        for request in self.requests:
            self.engine.add_request(request)
        while not self.requests[-1].output_token_ids:
            self.engine.step()

    def run(self, steps: int = 8) -> float:
        """Seconds per decode step."""
        with without(*self.rung.off):
            self.begin(steps)
            start = time.perf_counter()
            while self.engine.has_unfinished:
                self.engine.step()
            return (time.perf_counter() - start) / steps


def best_of(candidates: Mapping[object, Callable], repeats: int = 5) -> dict:
    """Seconds of each candidate's best run: other work on the machine can only make a run longer."""
    device, best = resolve_device("auto"), dict.fromkeys(candidates, float("inf"))
    for warm in (False, *[True] * repeats):  # in turns, after a round that warms up
        for name, run in candidates.items():
            start = time.perf_counter()
            own = run()  # a candidate that returns a number has timed itself
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds = own if isinstance(own, float) else time.perf_counter() - start
            best[name] = min(best[name], seconds) if warm else best[name]
    return best
