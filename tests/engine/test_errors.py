"""Bad input: every error names the field, the value and the limit, and the LLM serves on afterwards."""

from __future__ import annotations

import inspect
import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from minillm import LLM, SamplingParams
from minillm.engine.config import EngineConfig
from tests.helpers.tiny import VOCAB_SIZE, save_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(str(folder), device="cpu", max_model_len=32)


@pytest.fixture(scope="module")
def healthy(llm) -> list[int]:
    """What the LLM says as long as all is well."""
    return llm.generate("the cat", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


BAD_PROMPTS = [
    ("", ValueError, ["prompts[0]", "empty"]),
    (["the cat", ""], ValueError, ["prompts[1]", "empty"]),
    ({"prompt_token_ids": []}, ValueError, ["prompts[0]", "0 tokens"]),
    ([{"prompt_token_ids": [5]}, {"prompt_token_ids": [5, VOCAB_SIZE]}], ValueError,
     ["prompts[1]", f"token id {VOCAB_SIZE}", f"0 to {VOCAB_SIZE - 1}"]),
    ({"prompt_token_ids": [-1]}, ValueError, ["token id -1", f"{VOCAB_SIZE} tokens"]),
    ({"prompt_token_ids": [5] * 32}, ValueError, ["32 tokens", "max_model_len=32", "at most 31"]),
    ("cat " * 50, ValueError, ["prompts[0]", "max_model_len=32"]),
    ({"prompt_token_ids": [1.0]}, TypeError, ["prompt_token_ids=[1.0]"]),
    ({"prompt_token_ids": "12"}, TypeError, ["prompt_token_ids='12'"]),
    ({"prompt_token_ids": [True]}, TypeError, ["prompt_token_ids=[True]"]),
    ({"tokens": [1]}, TypeError, ["prompts[0]={'tokens': [1]}", "prompt_token_ids"]),
    ({"prompt": "a", "multi_modal_data": {"image": 1}}, NotImplementedError, ["prompts[0]", "'multi_modal_data'"]),
    ([5, 6.5, 7], TypeError, ["prompts[0]=5", "prompt_token_ids"]),
    ([[5, 6], [5, VOCAB_SIZE]], ValueError, ["prompts[1]", f"token id {VOCAB_SIZE}"]),
    (None, TypeError, ["prompts=None"]),
    (b"the cat", TypeError, ["prompts=b'the cat'"]),
    (7, TypeError, ["prompts=7"]),
    ("the \ud83d cat", ValueError, ["prompts[0]", "character 4", "'\\ud83d'", "lone surrogate"]),
    (["the cat", {"prompt": "cat\udcff"}], ValueError, ["prompts[1]", "character 3", "'\\udcff'"]),
]  # fmt: skip


@pytest.mark.parametrize("prompts, error, said", BAD_PROMPTS, ids=lambda value: str(value)[:30])
def test_bad_prompts_are_refused_and_the_llm_serves_on(llm, healthy, prompts, error, said):
    for serve in (llm.generate, llm.beam_search):
        with pytest.raises(error) as raised:
            serve(prompts)
        assert all(part in str(raised.value) for part in said), raised.value
    assert llm.generate("the cat", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == healthy


def test_all_prompts_are_checked_before_any_is_computed(llm, monkeypatch):
    computed = []
    monkeypatch.setattr(llm.engine, "add_request", computed.append)
    with pytest.raises(ValueError, match=r"prompts\[2\]"):
        llm.generate(["the cat", "the mat", ""], GREEDY, use_tqdm=False)
    assert computed == []


def test_a_stream_is_checked_when_it_is_asked_for(llm):
    with pytest.raises(ValueError, match="empty"):
        llm.stream("", GREEDY)
    for prompts, count in ((["a", "b"], 2), ([], 0)):
        with pytest.raises(ValueError, match=f"1 prompt, not {count}"):
            llm.stream(prompts, GREEDY)


BAD_PARAMS = [
    (SamplingParams(stop_token_ids=[3, VOCAB_SIZE]), ValueError, ["stop_token_ids", str(VOCAB_SIZE)]),
    (SamplingParams(logit_bias={10**6: 1.0}), ValueError, ["logit_bias", "1000000", f"0 to {VOCAB_SIZE - 1}"]),
    (SamplingParams(logprobs=VOCAB_SIZE + 1), ValueError, [f"logprobs={VOCAB_SIZE + 1}", f"{VOCAB_SIZE} tokens"]),
    (SamplingParams(prompt_logprobs=10**6), ValueError, ["prompt_logprobs=1000000"]),
    ([GREEDY, GREEDY], ValueError, ["2 entries for 1 prompts"]),
    ([], ValueError, ["0 entries for 1 prompts"]),
    ({"temperature": 0}, TypeError, ["sampling_params={'temperature': 0}"]),
    ([0.5], TypeError, ["sampling_params=0.5"]),
]


@pytest.mark.parametrize("params, error, said", BAD_PARAMS, ids=lambda value: str(value)[:40])
def test_bad_parameters_are_refused_and_the_llm_serves_on(llm, healthy, params, error, said):
    with pytest.raises(error) as raised:
        llm.generate("the cat", params, use_tqdm=False)
    assert all(part in str(raised.value) for part in said), raised.value
    assert llm.generate("the cat", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == healthy


BAD_ENGINE = [
    ("max_num_seqs", 0, ValueError), ("max_num_batched_tokens", -1, ValueError), ("block_size", 2.5, TypeError),
    ("num_kv_blocks", 0, ValueError), ("gpu_memory_utilization", 1.5, ValueError), ("host_kv_bytes", -1, ValueError),
    ("scheduling_policy", "lifo", ValueError), ("attention_backend", "cuda", ValueError),
    ("preemption_mode", "kill", ValueError), ("tensor_parallel_size", 0, ValueError),
    ("pipeline_parallel_size", 0, ValueError), ("distributed_executor_backend", "external_launcher", ValueError),
    ("seed", -1, ValueError),
    ("enforce_eager", "yes", TypeError), ("enable_prefix_caching", 1, TypeError), ("max_model_len", 1, ValueError),
    ("model", 5, TypeError), ("max_model_len", "long", TypeError),
]  # fmt: skip


@pytest.mark.parametrize("name, value, error", BAD_ENGINE, ids=str)
def test_wrong_engine_values_are_refused_by_name(name, value, error):
    with pytest.raises(error) as raised:
        LLM(**{"model": "no model is looked for", name: value})
    assert f"{name}={value!r}" in str(raised.value) and "allowed" in str(raised.value)


def test_llm_and_engine_config_agree_on_every_argument():
    *parameters, of_vllm = inspect.signature(LLM).parameters.values()
    assert of_vllm.kind is inspect.Parameter.VAR_KEYWORD
    assert [parameter.name for parameter in parameters] == [field.name for field in fields(EngineConfig)]
    assert [parameter.default for parameter in parameters[1:]] == [field.default for field in fields(EngineConfig)[1:]]


def test_max_model_len_over_the_models_own_is_refused(folder):
    with pytest.raises(ValueError, match="max_model_len=129 exceeds the model's max_position_embeddings=128"):
        LLM(str(folder), device="cpu", max_model_len=129)


def test_wrong_device_and_dtype_are_refused_by_name(folder):
    with pytest.raises(ValueError, match="device='abacus'"):
        LLM(str(folder), device="abacus")
    with pytest.raises(ValueError, match="dtype='int3'"):
        LLM(str(folder), device="cpu", dtype="int3")


def test_a_model_that_is_nowhere_is_named():
    with pytest.raises(ValueError, match=r"model='tinywurld'.*tinyworld"):
        LLM("tinywurld")


def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "broken"))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, tmp_path, file):
    broken = copy(folder, tmp_path)
    (broken / file).unlink()
    with pytest.raises(ValueError, match=file if file == "config.json" else "no .*safetensors"):
        LLM(str(broken), device="cpu")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_weight_file_is_named(folder, tmp_path, share):
    file = copy(folder, tmp_path) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match=r"model\.safetensors.*bytes"):
        LLM(str(file.parent), device="cpu")


def test_a_damaged_config_is_named(folder, tmp_path):
    file = copy(folder, tmp_path) / "config.json"
    file.write_text(file.read_text()[:50])
    with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
        LLM(str(file.parent), device="cpu")


def test_a_config_that_does_not_fit_the_weights_is_refused(folder, tmp_path):
    file = copy(folder, tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"missing: model.layers.2"):
        LLM(str(file.parent), device="cpu")


BAD_MESSAGES = [
    ([], ["messages=[]"]),
    ([[]], ["messages[0]=[]"]),
    ("hello", ["messages="]),
    ([{"role": "user"}], ["messages", "{'role': 'user'}"]),
    ([{"role": "user", "content": 5}], ["'content': 5"]),
    ([[{"role": "user", "content": "a"}], ["b"]], ["messages[1]", "'b'"]),
    (
        [{"role": "system", "content": "a"}, {"role": "user", "content": "a\ud800"}],
        ["messages[1]['content']", "character 1"],
    ),
    (
        [[{"role": "user", "content": "a"}], [{"role": "\ud800", "content": "a"}]],
        ["messages[1][0]['role']", "character 0"],
    ),
]


@pytest.mark.parametrize("messages, said", BAD_MESSAGES, ids=str)
def test_bad_conversations_are_refused(llm, healthy, messages, said):
    with pytest.raises(ValueError) as raised:
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert all(part in str(raised.value) for part in said), raised.value
    assert llm.generate("the cat", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == healthy


def test_chat_without_a_template_says_what_to_do(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match=r"no chat template.*generate"):
        llm.chat([{"role": "user", "content": "a"}], GREEDY, use_tqdm=False)
