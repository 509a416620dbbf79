"""A decoder in one call: the same bits as module by module, and only where no caller needs a module alone."""

from __future__ import annotations

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.kernels import native
from minillm.model import decoder_layer, joined
from tests.helpers.joined import calls, load
from tests.helpers.model_zoo import CHECKPOINTS, PLAIN, make_model
from tests.helpers.tiny import byte_tokenizer

__all__ = ["calls"]
pytestmark = pytest.mark.skipif(native.library() is None, reason="one call for all layers is for the CPU's kernels")
PROMPTS = [{"prompt_token_ids": [3 + (i * step) % 90 for i in range(length)]} for step, length in ((7, 3), (5, 90))]
# Several rotations, or one that scales only what it turns; mixtures, which say what they chose.
APART = {"phi3-longrope", "smollm3-no-rope", "smollm3-biases-window-tied", "mixtral", "qwen3-moe-sparse-step"}
SCORED = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2)


def told(llm: LLM, prompts: list[dict] = PROMPTS) -> list:
    """Tokens and log-probabilities of all prompts at once."""
    outputs = [one.outputs[0] for one in llm.generate(prompts, SCORED, use_tqdm=False)]
    return [(one.token_ids, [{token: row[token].logprob for token in row} for row in one.logprobs]) for one in outputs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted({*CHECKPOINTS, *PLAIN, *APART}))
def test_a_joined_model_is_its_layers(name, dtype, tmp_path, calls, monkeypatch):
    llm = load(tmp_path, name, dtype=dtype)
    together = told(llm)
    assert set(calls) == {"run_layer" if name in APART else "run_decoder"}
    calls.clear()
    monkeypatch.setattr(joined, "JOINED_MODEL", False)
    assert told(llm) == together
    assert set(calls) == {"run_layer"}


@pytest.mark.parametrize("cache", ["int8", "fp8"])
def test_a_joined_model_reads_pages_of_codes(cache, tmp_path, calls, monkeypatch):
    llm = load(tmp_path, "llama-mha", kv_cache_dtype=cache)
    together = told(llm)
    assert set(calls) == {"run_decoder"}
    monkeypatch.setattr(joined, "JOINED_MODEL", False)
    assert told(llm) == together


@pytest.mark.parametrize("scale", [{"embedding_multiplier": 3.0}, {"logits_scaling": 0.5}])
def test_scales_around_the_layers(scale, tmp_path, calls, monkeypatch):
    """Embeddings are scaled before the call; logits that are scaled are not C's."""
    make_model(model_type="granite", attention_multiplier=0.2, **scale).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), dtype="bfloat16", device="cpu", num_kv_blocks=64, enable_prefix_caching=False)
    together = told(llm)
    assert set(calls) == {"run_layer" if "logits_scaling" in scale else "run_decoder"}
    monkeypatch.setattr(joined, "JOINED_MODEL", False)
    assert told(llm) == together


def test_a_module_with_a_hook_is_called_by_itself(tmp_path, calls):
    llm = load(tmp_path, "llama-mha")
    together, model = told(llm), llm.model
    modules = model.layers[1], model.norm, model.lm_head, model.rotary
    listening = [module.register_forward_hook for module in modules]
    for listen in (*listening, model.layers[0].register_forward_pre_hook, model.norm.register_forward_pre_hook):
        calls.clear()
        heard = []
        handle = listen(lambda *given, heard=heard: heard.append(given[0]))
        assert told(llm) == together
        assert heard and set(calls) == {"run_layer"}
        handle.remove()
    calls.clear()
    assert told(llm) == together and set(calls) == {"run_decoder"}


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
    assert set(calls) == {"run_decoder"}
    assert [tokens for tokens, _ in told(llm)] == [tokens for tokens, _ in before]


def test_another_last_norm_and_another_output_matrix_are_those_that_compute(tmp_path, calls, monkeypatch):
    llm = load(tmp_path, "llama-mha")
    model, before = llm.model, told(llm)
    panels = model.lm_head.panels
    model.norm.weight = torch.nn.Parameter(model.norm.weight.flip(0).contiguous())
    assert (normed := told(llm)) != before
    model.lm_head.panels = panels * -1.0
    assert (turned := told(llm)) not in (before, normed)
    assert set(calls) == {"run_decoder"}
    monkeypatch.setattr(joined, "JOINED_MODEL", False)
    assert told(llm) == turned
    model.lm_head.panels = panels
    assert told(llm) == normed


@pytest.mark.parametrize("quantization", ["int8", {"name": "int4", "group_size": 16, "lm_head": "int4"}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_low_bit_weights_and_their_output_matrix(quantization, dtype, tmp_path, calls, monkeypatch):
    llm = load(tmp_path, "llama-mqa-biases-tied", dtype=dtype, quantization=quantization)
    together = told(llm)
    assert set(calls) == {"run_decoder"}
    monkeypatch.setattr(joined, "JOINED_MODEL", False)
    assert told(llm) == together


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_of_a_whole_prompt_and_of_none(dtype, tmp_path, calls, monkeypatch):
    """Logits of more rows than the matrix takes at once, and chunks of a prompt that want none."""
    llm = load(tmp_path, "llama-mha", dtype=dtype, max_num_batched_tokens=80)
    long = [{"prompt_token_ids": [3 + i * 7 % 90 for i in range(120)]}, *PROMPTS]
    scored = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=1)

    def answers():
        plain, asked = (llm.generate(long, params, use_tqdm=False) for params in (SCORED, scored))
        rows = [row or {} for each in asked for row in each.prompt_logprobs]
        tokens = [each.outputs[0].token_ids for each in (*plain, *asked)]
        return tokens, [{token: one.logprob for token, one in row.items()} for row in rows]

    together = answers()
    assert set(calls) == {"run_decoder"}
    monkeypatch.setattr(joined, "JOINED_MODEL", False)
    assert answers() == together


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_among_many_is_what_it_is_alone(dtype, tmp_path, calls):
    """So many that the next layer's pages are brought nearer meanwhile."""
    llm = load(tmp_path, "llama-mha", dtype=dtype, num_kv_blocks=400)
    prompts = [{"prompt_token_ids": [3 + i * step % 90 for i in range(1 + 5 * step)]} for step in range(1, 25)]
    many = told(llm, prompts)
    assert [told(llm, [prompt])[0] for prompt in prompts] == many
    assert set(calls) == {"run_decoder"}


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


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_logits_are_float32_whatever_torch_makes_by_default(default, tmp_path, calls):
    llm = load(tmp_path, "llama-mha")
    together, before = told(llm), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert told(llm) == together and set(calls) == {"run_decoder"}
    finally:
        torch.set_default_dtype(before)
