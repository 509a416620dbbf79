"""The sampling defaults of a model: what generation_config.json says holds where no SamplingParams are given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minillm import LLM, SamplingParams
from minillm.model.errors import CheckpointError
from tests.helpers.tiny import save_tiny_llama

PROMPT = "the cat"
DEFAULTS = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "max_new_tokens": 5,
}
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
    # Not mixed with the defaults.
    assert llm.inputs.requests([PROMPT], [SamplingParams(top_k=3)])[0].params.temperature == 1.0


def test_generate_chat_stream_and_submit_take_them(folder):
    llm = load(folder, {"temperature": 0.0, "max_new_tokens": 3})
    expected = LLM(folder, device="cpu", num_kv_blocks=32).generate(
        PROMPT, SamplingParams(temperature=0.0, max_tokens=3)
    )
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


@pytest.mark.parametrize("text", ["[1]", "null", '"x"', "[" * 100_000])
def test_a_file_that_holds_no_object_is_named(folder, text):
    load(folder, {})
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config.json .*fetch it again"):
        LLM(folder, device="cpu", num_kv_blocks=32)


@pytest.mark.parametrize("eos", ["x", True, [3, 1.5]])
def test_an_end_of_text_that_is_no_token_id_is_refused(folder, eos):
    with pytest.raises(CheckpointError, match=r"eos_token_id=.*allowed: a token id"):
        load(folder, {"eos_token_id": eos})


def test_an_end_of_text_outside_of_the_vocabulary_is_never_generated(folder):
    llm = load(folder, {"eos_token_id": [-1, 99_999]})
    assert all(0 <= token_id < llm.model.config.vocab_size for token_id in llm.model.config.eos_token_ids)
    params = SamplingParams(temperature=0.0, max_tokens=4, min_tokens=4)
    assert len(llm.generate("the cat", params, use_tqdm=False)[0].outputs[0].token_ids) == 4
