"""The sampling defaults of a model: what generation_config.json says holds where no SamplingParams are given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import save_tiny_llama

from minillm import LLM, SamplingParams

PROMPT = "the cat"
DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "max_new_tokens": 5}
PARAMS = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.1, max_tokens=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(folder)
    return folder


def load(folder: Path, defaults: dict, **settings) -> LLM:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "do_sample": True} | defaults))
    return LLM(folder, device="cpu", num_kv_blocks=32, **settings)


def test_without_sampling_params_the_models_own_defaults_hold(folder):
    llm = load(folder, DEFAULTS)
    assert llm.get_default_sampling_params() == PARAMS
    requests = llm.inputs.requests([PROMPT, PROMPT])
    assert [request.params for request in requests] == [PARAMS, PARAMS]
    assert llm.inputs.requests(PROMPT, SamplingParams())[0].params == SamplingParams()
    assert llm.inputs.requests([PROMPT], [SamplingParams(top_k=3)])[0].params.temperature == 1.0  # not mixed with the defaults


def test_generate_chat_stream_and_submit_take_them(folder):
    llm = load(folder, {"temperature": 0.0, "max_new_tokens": 3})
    expected = LLM(folder, device="cpu", num_kv_blocks=32).generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=3))
    [output] = llm.generate(PROMPT, use_tqdm=False)
    assert output.outputs[0].token_ids == expected[0].outputs[0].token_ids
    assert [token for delta in llm.stream(PROMPT) for token in delta.token_ids] == output.outputs[0].token_ids
    [answer] = llm.chat([{"role": "user", "content": PROMPT}], use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == llm.submit(PROMPT).request.max_tokens == 3


def test_generation_config_vllm_leaves_the_library_defaults(folder):
    llm = load(folder, DEFAULTS, generation_config="vllm")
    assert llm.get_default_sampling_params() == llm.inputs.requests(PROMPT)[0].params == SamplingParams()
    assert llm.model.config.eos_token_ids == (1,)  # of the same file: these are no default
    with pytest.raises(ValueError, match="generation_config='hub' is not allowed; allowed: auto, vllm"):
        load(folder, DEFAULTS, generation_config="hub")


def test_what_a_model_leaves_open_is_the_library_default(folder):
    assert load(folder, {"temperature": None, "top_p": 0.9}).get_default_sampling_params() == SamplingParams(top_p=0.9)
    (folder / "generation_config.json").unlink()
    assert LLM(folder, device="cpu", num_kv_blocks=32).get_default_sampling_params() == SamplingParams()
    for bundled in ("tinyworld", "tinyworld-draft"):
        assert LLM(bundled, device="cpu", num_kv_blocks=32).get_default_sampling_params() == SamplingParams()


def test_a_wrong_default_names_the_file_and_the_way_out(folder):
    with pytest.raises(ValueError, match=r"generation_config\.json: top_p=7 is not allowed.* generation_config='vllm'"):
        load(folder, {"top_p": 7})
    load(folder, {"top_p": 7}, generation_config="vllm")
