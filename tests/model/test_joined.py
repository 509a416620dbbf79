"""All layers in one call: the same bits as layer by layer, and only where no caller needs a layer alone."""

from __future__ import annotations

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.kernels import native
from minillm.kv_cache.native_attention import NativeAttention
from minillm.model import decoder_layer, joined
from tests.helpers.model_zoo import CHECKPOINTS, save_checkpoint
from tests.helpers.tiny import byte_tokenizer

pytestmark = pytest.mark.skipif(native.library() is None, reason="joined layers are for the CPU's kernels")
PROMPTS = [{"prompt_token_ids": [3 + (i * step) % 90 for i in range(length)]} for step, length in ((7, 3), (5, 90))]
SCORED = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2)


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The names of the calls of whole layers, in their order."""
    made: list[str] = []

    def spy(name, function):
        return lambda *given: (made.append(name), function(*given))[1]

    for name in ("run_layer", "run_layers"):
        monkeypatch.setattr(NativeAttention, name, spy(name, getattr(NativeAttention, name)))
    return made


def load(folder, name: str, **options) -> LLM:
    save_checkpoint(folder, name)
    byte_tokenizer().save_pretrained(folder)
    options = dict(dtype="float32", num_kv_blocks=64) | options
    return LLM(str(folder), device="cpu", attention_backend="native", enable_prefix_caching=False, **options)


def told(llm: LLM) -> list:
    """Tokens and log-probabilities; a step has two requests."""
    outputs = [one.outputs[0] for one in llm.generate(PROMPTS, SCORED, use_tqdm=False)]
    return [(one.token_ids, [{token: row[token].logprob for token in row} for row in one.logprobs]) for one in outputs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(CHECKPOINTS))
def test_joined_layers_are_the_layers(name, dtype, tmp_path, calls, monkeypatch):
    llm = load(tmp_path, name, dtype=dtype)
    together = told(llm)
    one_by_one = {"run_layer"} if llm.model.layers[0].kind is not None else {"run_layers"}
    assert set(calls) == one_by_one
    calls.clear()
    monkeypatch.setattr(joined, "JOINED_LAYERS", False)
    assert told(llm) == together
    assert set(calls) == {"run_layer"}


@pytest.mark.parametrize("cache", ["int8", "fp8"])
def test_joined_layers_read_pages_of_codes(cache, tmp_path, calls, monkeypatch):
    llm = load(tmp_path, "llama-mha", kv_cache_dtype=cache)
    together = told(llm)
    assert set(calls) == {"run_layers"}
    monkeypatch.setattr(joined, "JOINED_LAYERS", False)
    assert told(llm) == together


def test_a_layer_with_a_hook_is_called_by_itself(tmp_path, calls):
    llm = load(tmp_path, "llama-mha")
    together, layers = told(llm), llm.model.layers
    for listen in (layers[1].register_forward_hook, layers[0].register_forward_pre_hook):
        calls.clear()
        heard = []
        handle = listen(lambda *given, heard=heard: heard.append(given[0]))
        assert told(llm) == together
        assert heard and set(calls) == {"run_layer"}
        handle.remove()
    calls.clear()
    assert told(llm) == together and set(calls) == {"run_layers"}


def test_layers_that_run_in_parts_are_not_joined(tmp_path, calls, monkeypatch):
    llm = load(tmp_path, "llama-mha")
    together, last = told(llm), llm.model.layers[-1]
    calls.clear()
    whole, last.whole = last.whole, None
    told(llm)  # in parts the last bits of a layer may differ
    assert set(calls) == {"run_layer"}
    last.whole = whole
    assert told(llm) == together
    calls.clear()
    monkeypatch.setattr(decoder_layer, "WHOLE_LAYERS", False)
    told(llm)
    assert not calls


def test_weights_that_are_prepared_anew_are_those_that_compute(tmp_path, calls):
    llm = load(tmp_path, "llama-mha")
    layers, before = llm.model.layers, told(llm)
    with torch.no_grad():
        layers[1].post_attention_layernorm.weight.mul_(3.0)  # in place: the structure holds its address
    changed = told(llm)
    assert changed != before
    layers[1].post_attention_layernorm.weight = torch.nn.Parameter(layers[1].post_attention_layernorm.weight / 3.0)
    layers[1].prepare(llm.model.config)
    assert set(calls) == {"run_layers"}
    assert [tokens for tokens, _ in told(llm)] == [tokens for tokens, _ in before]


def test_hooks_of_all_modules_and_forwards_of_one_are_heard(tmp_path, calls):
    llm = load(tmp_path, "llama-mha")
    together, layer, heard = told(llm), llm.model.layers[0], []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *given: heard.append(given[0]))
    calls.clear()
    assert told(llm) == together and layer in heard and set(calls) == {"run_layer"}
    handle.remove()
    heard.clear()
    forward = layer.forward
    layer.forward = lambda *given: (heard.append(layer), forward(*given))[1]
    assert told(llm) == together and heard
