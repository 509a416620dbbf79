"""What a program written for vLLM gives that must neither be lost nor change another caller's call."""

from __future__ import annotations

import argparse

import pytest
import torch

from minillm import LLM, EngineArgs, LLMEngine, PoolingParams, SamplingParams
from minillm.engine import pooling
from minillm.engine.thread import EngineThread
from minillm.engine.vllm_names import translated
from tests.helpers.tiny import save_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = "the cat sat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(path)
    return str(path)


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(folder, device="cpu")


def tokens(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    "name, value, match",
    [
        ("max_logprobs", -2, "max_logprobs=-2 .* whole number from -1 on"),
        ("swap_space", -1, "swap_space=-1 .* number from 0 to"),
        ("pooler_config", {"poling_type": "MEAN"}, "pooler_config has no field 'poling_type'.*pooling_type"),
        ("pooler_config", {"use_activation": "no"}, "use_activation='no' .*True or False"),
        ("profiler_config", {"profiler": "cuda"}, "profiler='cuda' .*torch"),
        ("profiler_config", {"torch_profiler_with_flops": True}, "torch_profiler_with_flops"),
        ("profiler_config", {"torch_profiler_dir": 5}, "torch_profiler_dir=5"),
        ("tokenizer", 5, "tokenizer=5"),
        ("chat_template", 5, "chat_template=5"),
        ("override_generation_config", {"temprature": 1.0}, "override_generation_config.*temprature.*temperature"),
        ("override_generation_config", {"temperature": -1.0}, "override_generation_config.*temperature=-1"),
    ],
)
def test_a_value_that_would_be_lost_is_refused_by_name(folder, name, value, match):
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=match) as error:
        LLM(folder, device="cpu", **{name: value})
    # A range of 2**31 numbers is named by its ends: all of them would take minutes and gigabytes.
    assert len(str(error.value)) < 1000 and "mend the file" not in str(error.value)


def test_half_a_gibibyte_of_swap_space_is_taken_as_a_whole_one_is():
    assert translated({"swap_space": 0.5}) == translated({"swap_space": 4})


def test_a_parameter_that_vllm_does_not_have_is_refused_with_the_nearest():
    with pytest.raises(TypeError, match="SamplingParams has no argument temprature; did you mean temperature"):
        SamplingParams(temprature=1.0)


@pytest.mark.parametrize("bias", [{"a": 1.0}, {"1": "x"}, {"1": float("nan")}, {1.7: 1.0}, [1]])
def test_a_bias_that_json_may_hold_and_no_token_may_have_is_refused_by_name(bias):
    with pytest.raises((TypeError, ValueError), match="logit_bias"):
        SamplingParams.from_optional(logit_bias=bias)


@pytest.mark.parametrize("given", [0, False, ""])
def test_stop_token_ids_that_are_no_list_are_refused_whatever_they_are(given):
    with pytest.raises(TypeError, match=r"stop_token_ids=.*a list of token ids"):
        SamplingParams(stop_token_ids=given)


def test_changing_the_default_parameters_changes_no_other_call(folder):
    llm = LLM(folder, device="cpu", override_generation_config={"max_tokens": 5, "ignore_eos": True})
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature = 2, 0.0
    assert len(llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids) == 2
    assert len(llm.generate(PROMPT, use_tqdm=False)[0].outputs[0].token_ids) == 5
    assert llm.get_default_sampling_params().max_tokens == 5


@pytest.mark.parametrize("how", ["asleep", "half awake", "changed"])
def test_weights_are_loaded_again_also_where_the_llm_sleeps(folder, llm, how):
    other = LLM(folder, device="cpu", load_format="auto" if how == "changed" else "dummy")
    if how == "changed":
        other.apply_model(lambda model: [weight.zero_() for weight in model.state_dict().values()])
    other.sleep(2 if how == "half awake" else 1)
    if how == "half awake":
        other.wake_up(tags=["weights"])
    assert tokens(llm) is not None and other.collective_rpc("reload_weights") == [None]
    other.wake_up()
    assert tokens(other) == tokens(llm)


@pytest.mark.parametrize("calls", [["sleep", "close"], ["close", "sleep"]])
def test_an_llm_that_was_closed_is_not_woken(folder, calls):
    llm = LLM(folder, device="cpu")
    for call in calls:
        if call == "sleep" and llm.engine.is_closed:
            with pytest.raises(RuntimeError, match="closed"):
                llm.sleep()
        else:
            getattr(llm, call)()
    llm.wake_up()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate(PROMPT, GREEDY, use_tqdm=False)


def test_a_deeper_sleep_frees_the_weights_too(folder, llm):
    other = LLM(folder, device="cpu")
    other.sleep(1)
    other.sleep(2)
    assert other.model is None
    other.wake_up()
    assert tokens(other) == tokens(llm)


@pytest.mark.parametrize("when", ["now", float("nan"), True])
def test_a_time_of_arrival_that_is_none_is_refused(folder, when):
    engine = LLMEngine(LLM(folder, device="cpu", scheduling_policy="fair"))
    engine.add_request("good", PROMPT, GREEDY)
    with pytest.raises((TypeError, ValueError), match="arrival_time="):
        engine.add_request("bad", PROMPT, GREEDY, arrival_time=when)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [output.request_id for output in outputs if output.finished] == ["good"]


def test_two_tasks_for_one_text_are_refused(llm):
    for call in (
        lambda: llm.embed(PROMPT, pooling_params=PoolingParams(task="token_embed"), use_tqdm=False),
        lambda: llm.encode(PROMPT, PoolingParams(task="embed"), pooling_task="token_embed", use_tqdm=False),
    ):
        with pytest.raises(ValueError, match=r"task='.*embed'"):
            call()


def test_texts_to_be_scored_are_checked_before_the_first_is_computed(llm, monkeypatch):
    def compute(*_):
        raise AssertionError("computed")

    monkeypatch.setattr(pooling, "hidden_states", compute)
    for data_1, data_2, params in (
        ([PROMPT, "a"], ["a", "b", "c"], None),
        (PROMPT, [""], None),
        (PROMPT, "a", [PoolingParams()]),
        (PROMPT, "a", PoolingParams(task="token_embed")),
    ):
        with pytest.raises((TypeError, ValueError), match=r"data_1 has|prompts\[0\]|pooling_params=|task='"):
            llm.score(data_1, data_2, pooling_params=params, use_tqdm=False)


def test_a_text_as_long_as_the_model_takes_is_embedded(folder):
    llm = LLM(folder, device="cpu", max_model_len=8)
    [output] = llm.encode([[5] * 8], use_tqdm=False)
    assert output.outputs.data.shape == (8, llm.model.config.hidden_size) and not torch.isnan(output.outputs.data).any()
    with pytest.raises(ValueError, match="9 tokens; max_model_len=8"):
        llm.embed([[5] * 9], use_tqdm=False)
    with pytest.raises(ValueError, match="at most 7 are allowed"):
        llm.generate([[5] * 8], GREEDY, use_tqdm=False)


def test_another_callers_function_that_fails_is_not_heard_of_in_the_engine(folder, llm):
    engine = LLMEngine(LLM(folder, device="cpu"))

    def fail(sink, delta):
        raise KeyError("of another caller")

    sink = engine.llm.submit(PROMPT, GREEDY, on_delta=fail)
    engine.add_request("mine", PROMPT, GREEDY)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].token_ids == tokens(llm) and isinstance(sink.error, KeyError)


def test_a_sleep_of_another_thread_is_named_where_a_text_was_to_be_embedded(folder, monkeypatch):
    llm = LLM(folder, device="cpu")
    requests = llm.inputs.requests

    def fall_asleep(*args, **options):
        llm.sleep(2)
        return requests(*args, **options)

    monkeypatch.setattr(llm.inputs, "requests", fall_asleep)
    with pytest.raises(RuntimeError, match="asleep"):
        llm.embed(PROMPT, use_tqdm=False)


def test_threads_go_on_taking_turns_at_an_llm_that_has_slept(folder):
    llm = LLM(folder, device="cpu")
    lock = llm.lock
    llm.sleep()
    llm.wake_up()
    assert llm.lock is lock and llm.engine.lock is lock


@pytest.mark.parametrize("options", [
    {"add_generation_prompt": "no"}, {"continue_final_message": 0, "add_generation_prompt": False},
    {"chat_template_kwargs": 5}, {"chat_template_kwargs": {"tokenize": True}},
])  # fmt: skip
def test_an_option_of_a_chat_that_is_no_value_of_it_is_refused_by_name(llm, options):
    with pytest.raises((TypeError, ValueError), match=rf"{next(iter(options))}.* allowed"):
        llm.chat([{"role": "user", "content": PROMPT}], GREEDY, use_tqdm=False, **options)


def test_what_cannot_be_called_is_refused_before_a_request_is_added(llm):
    with pytest.raises(TypeError, match="on_delta=5 is not allowed"):
        llm.submit(PROMPT, GREEDY, on_delta=5)
    assert not llm.engine.has_unfinished
    with EngineThread(llm) as thread, pytest.raises(TypeError, match="on_delta=5 is not allowed"):
        thread.submit(PROMPT, GREEDY, on_delta=5)


def test_a_dictionary_comes_from_the_command_line_as_json(folder):
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    args = parser.parse_args(["--model", folder, "--speculative-config", '{"method": "ngram"}'])
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
    assert llm.config.speculative_config.method == "ngram"
