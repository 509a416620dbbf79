"""SamplingParams: every valid value is taken, every wrong one is refused by name."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, strategies as st

from minillm import SamplingParams
from minillm.sampling.params import MAX_SEED, RequestOutputKind
from tests.helpers.tiny import seeded

NAMES = [field.name for field in fields(SamplingParams) if field.init]


def test_fields_and_defaults_are_those_of_vllm():
    assert {name: getattr(SamplingParams(), name) for name in NAMES} == {
        "n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "repetition_penalty": 1.0, "stop": [], "stop_token_ids": [], "ignore_eos": False,
        "max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None, "logit_bias": {},
        "structured_outputs": None, "logprob_token_ids": None, "detokenize": True, "skip_special_tokens": True,
        "spaces_between_special_tokens": True, "include_stop_str_in_output": False,
        "output_kind": RequestOutputKind.CUMULATIVE, "allowed_token_ids": None, "extra_args": None, "bad_words": [],
        "logits_processors": [],
    }  # fmt: skip


VALID = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 8),
        "temperature": st.floats(1e-5, 1000) | st.integers(1, 1000),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": st.integers(-1, 10**9),
        "min_p": st.floats(0, 1),
        "seed": st.none() | st.integers(0, MAX_SEED),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.01, 100),
        "stop": st.none() | st.text(min_size=1) | st.lists(st.text(min_size=1)),
        "stop_token_ids": st.none() | st.lists(st.integers(0, 10**6)),
        "ignore_eos": st.booleans(),
        "max_tokens": st.none() | st.integers(10, 10**6),
        "min_tokens": st.integers(0, 10),
        "logprobs": st.none() | st.integers(-1, 100),
        "prompt_logprobs": st.none() | st.integers(-1, 100),
        "logit_bias": st.none() | st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100)),
    },
)


@seeded
@given(VALID)
def test_every_valid_value_is_kept(values):
    params = SamplingParams(**values)
    for name in values.keys() - {"stop", "stop_token_ids", "logit_bias"}:
        assert getattr(params, name) == values[name]
    assert isinstance(params.stop, list) and isinstance(params.stop_token_ids, list)
    assert replace(params) == params  # what was made is valid itself


JUNK = st.none() | st.text() | st.floats() | st.integers() | st.booleans() | st.lists(st.integers()) | st.binary()


@seeded
@given(st.sampled_from(NAMES), JUNK)
def test_anything_else_is_refused_with_the_field_named_or_taken(name, value):
    try:
        params = SamplingParams(**{name: value})
    except (ValueError, TypeError, NotImplementedError) as error:
        assert name in str(error)
    else:
        assert replace(params) == params


WRONG = [
    ("n", 0, ValueError), ("n", 1.5, TypeError), ("n", True, TypeError),
    ("temperature", -0.1, ValueError), ("temperature", float("nan"), ValueError), ("temperature", "1", TypeError),
    ("temperature", float("inf"), ValueError),
    ("top_p", 0.0, ValueError), ("top_p", 1.01, ValueError), ("top_p", float("nan"), ValueError),
    ("top_k", -2, ValueError), ("top_k", 1.0, TypeError),
    ("min_p", -0.1, ValueError), ("min_p", 1.1, ValueError),
    ("seed", -2, ValueError), ("seed", MAX_SEED + 1, ValueError), ("seed", 1.0, TypeError),
    ("presence_penalty", 2.1, ValueError), ("frequency_penalty", -2.1, ValueError),
    ("repetition_penalty", 0, ValueError), ("repetition_penalty", -1.0, ValueError),
    ("stop", "", ValueError), ("stop", ["a", ""], ValueError), ("stop", [1], TypeError), ("stop", 5, TypeError),
    ("stop_token_ids", [-1], ValueError), ("stop_token_ids", ["a"], TypeError), ("stop_token_ids", 3, TypeError),
    ("ignore_eos", 1, TypeError),
    ("max_tokens", 0, ValueError), ("max_tokens", 1.5, TypeError),
    ("min_tokens", -1, ValueError), ("min_tokens", 17, ValueError),  # over max_tokens=16
    ("logprobs", -2, ValueError), ("prompt_logprobs", -2, ValueError), ("logprobs", False, TypeError),
    ("allowed_token_ids", [], ValueError), ("allowed_token_ids", [-1], ValueError), ("bad_words", [""], ValueError),
    ("bad_words", [5], TypeError), ("logprob_token_ids", [], ValueError), ("logprob_token_ids", ["a"], TypeError),
    ("detokenize", 1, TypeError), ("skip_special_tokens", "no", TypeError), ("output_kind", 1, TypeError),
    ("logits_processors", ["f"], TypeError), ("logits_processors", print, TypeError), ("extra_args", [1], TypeError),
    ("logit_bias", {-1: 1.0}, ValueError), ("logit_bias", {1: 101}, ValueError), ("logit_bias", {"a": 1}, TypeError),
    ("logit_bias", [1], TypeError), ("logit_bias", {1: None}, TypeError),
]  # fmt: skip


@pytest.mark.parametrize("name, value, error", WRONG, ids=lambda value: str(value)[:30])
def test_wrong_values_are_refused_by_name(name, value, error):
    shown = {"logit_bias": "allowed"}.get(name, repr(value))
    with pytest.raises(error) as raised:
        SamplingParams(**{name: value})
    assert name in str(raised.value) and shown in str(raised.value)


def test_greedy_has_one_sample():
    with pytest.raises(ValueError, match="n=2 greedy samples would all be the same"):
        SamplingParams(n=2, temperature=0.0)


def test_structured_outputs_may_be_a_dict_and_end_the_text():
    assert SamplingParams(structured_outputs={"regex": "a*"}).structured_outputs.regex == "a*"
    with pytest.raises(ValueError, match="ignore_eos=True goes on after the end of the text"):
        SamplingParams(structured_outputs={"regex": "a*"}, ignore_eos=True)


def test_it_may_be_changed_and_does_not_share_what_it_was_given():
    bias, stop = {3: 1.0}, ["end"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[4], stop[0] = 2.0, ""
    assert params.logit_bias == {3: 1.0} and params.stop == ["end"]
    params.temperature = -1.0
    with pytest.raises(ValueError, match=r"temperature=-1\.0 is not allowed"):
        params.clone()
    with pytest.raises(AttributeError, match="temprature"):
        params.temprature = 0.5


def test_none_stands_for_the_default_and_minus_one_for_no_seed():
    assert SamplingParams(**dict.fromkeys(set(NAMES) - {"max_tokens"})) == SamplingParams()
    assert SamplingParams(seed=-1).seed is None and SamplingParams(logprobs=True, prompt_logprobs=True).logprobs == 1


def test_by_position_come_those_that_all_versions_of_vllm_have_in_one_order():
    params = SamplingParams(2, 0.1, 0.2, 1.3, 0.4)
    assert (params.n, params.presence_penalty, params.frequency_penalty) == (2, 0.1, 0.2)
    assert (params.repetition_penalty, params.temperature) == (1.3, 0.4)
    with pytest.raises(TypeError, match=r"6 values without a name.*n, presence_penalty.*name them"):
        SamplingParams(1, 0.0, 0.0, 1.0, 0.0, 0.5)


def test_names_of_vllm_that_are_not_built_are_refused_where_they_ask_for_something():
    SamplingParams(flat_logprobs=False, watermarking=None, routed_experts_prompt_start=0)
    for name, value in {"flat_logprobs": True, "trace_decode_token_ids": [1], "routed_experts_prompt_start": 3}.items():
        with pytest.raises(NotImplementedError, match=f"{name}=.* is not served: "):
            SamplingParams(**{name: value})
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)


def test_json_may_name_tokens_by_strings():
    params = SamplingParams.from_optional(logit_bias={"5": 300, "6": -1}, temperature=None)
    assert params.logit_bias == {5: 100.0, 6: -1} and params.temperature == 1.0


@pytest.mark.parametrize(
    "values, told",
    [
        ({"structured_outputs": {"regex": "a"}, "bad_words": ["a"]}, "bad_words=.* may forbid every token"),
        ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]}, "allowed_token_ids=.* may forbid"),
        ({"stop": "a", "detokenize": False}, "stop=.*detokenize=False makes none"),
        ({"logprobs": 5, "logprob_token_ids": [1, 2]}, "logprobs=5 asks for the best tokens"),
    ],
)
def test_fields_that_exclude_each_other_are_refused(values, told):
    with pytest.raises(ValueError, match=told):
        SamplingParams(**values)


def test_its_text_names_what_differs_from_the_default():
    assert repr(SamplingParams(temperature=0.5, stop="a")) == "SamplingParams(temperature=0.5, stop=['a'])"
