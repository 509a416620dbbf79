"""SamplingParams: every valid value is taken, every wrong one is refused by name."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import given, strategies as st

from minillm import SamplingParams
from minillm.sampling.params import MAX_SEED
from tests.helpers.tiny import seeded


def test_fields_and_defaults_are_those_of_vllm():
    assert {field.name: getattr(SamplingParams(), field.name) for field in fields(SamplingParams)} == {
        "n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "repetition_penalty": 1.0, "stop": (), "stop_token_ids": (), "ignore_eos": False,
        "max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None, "logit_bias": {},
        "structured_outputs": None,
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
    assert isinstance(params.stop, tuple) and isinstance(params.stop_token_ids, tuple)
    assert replace(params) == params  # what was made is valid itself


JUNK = st.none() | st.text() | st.floats() | st.integers() | st.booleans() | st.lists(st.integers()) | st.binary()


@seeded
@given(st.sampled_from([field.name for field in fields(SamplingParams)]), JUNK)
def test_anything_else_is_refused_with_the_field_named_or_taken(name, value):
    try:
        params = SamplingParams(**{name: value})
    except (ValueError, TypeError, NotImplementedError) as error:
        assert name in str(error)
    else:
        assert replace(params) == params


WRONG = [
    ("n", 0, ValueError), ("n", 1.5, TypeError), ("n", True, TypeError), ("n", None, TypeError),
    ("temperature", -0.1, ValueError), ("temperature", float("nan"), ValueError), ("temperature", "1", TypeError),
    ("temperature", float("inf"), ValueError), ("temperature", None, TypeError),
    ("top_p", 0.0, ValueError), ("top_p", 1.01, ValueError), ("top_p", float("nan"), ValueError),
    ("top_k", -2, ValueError), ("top_k", 1.0, TypeError),
    ("min_p", -0.1, ValueError), ("min_p", 1.1, ValueError),
    ("seed", -1, ValueError), ("seed", MAX_SEED + 1, ValueError), ("seed", 1.0, TypeError),
    ("presence_penalty", 2.1, ValueError), ("frequency_penalty", -2.1, ValueError),
    ("repetition_penalty", 0, ValueError), ("repetition_penalty", -1.0, ValueError),
    ("stop", "", ValueError), ("stop", ["a", ""], ValueError), ("stop", [1], TypeError), ("stop", 5, TypeError),
    ("stop_token_ids", [-1], ValueError), ("stop_token_ids", ["a"], TypeError), ("stop_token_ids", 3, TypeError),
    ("ignore_eos", 1, TypeError),
    ("max_tokens", 0, ValueError), ("max_tokens", 1.5, TypeError),
    ("min_tokens", -1, ValueError), ("min_tokens", 17, ValueError),  # over max_tokens=16
    ("logprobs", -2, ValueError), ("prompt_logprobs", -2, ValueError), ("logprobs", True, TypeError),
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


def test_it_is_frozen_and_does_not_share_what_it_was_given():
    bias, stop = {3: 1.0}, ["end"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[4], stop[0] = 2.0, ""
    assert params.logit_bias == {3: 1.0} and params.stop == ("end",)
    with pytest.raises(FrozenInstanceError):
        params.temperature = 2.0
