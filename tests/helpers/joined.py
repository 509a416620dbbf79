"""A small model on the CPU's kernels, and which of their calls compute it."""

from __future__ import annotations

import pytest

from minillm import LLM
from minillm.kv_cache.native_attention import NativeAttention
from tests.helpers.model_zoo import save_checkpoint
from tests.helpers.tiny import byte_tokenizer


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The names of the calls of whole layers and decoders, in their order."""
    made: list[str] = []

    def spy(name, function):
        return lambda *given: (made.append(name), function(*given))[1]

    for name in ("run_layer", "run_decoder"):
        monkeypatch.setattr(NativeAttention, name, spy(name, getattr(NativeAttention, name)))
    return made


def load(folder, name: str, **options) -> LLM:
    save_checkpoint(folder, name)
    byte_tokenizer().save_pretrained(folder)
    options = dict(dtype="float32", num_kv_blocks=64) | options
    return LLM(str(folder), device="cpu", attention_backend="native", enable_prefix_caching=False, **options)
