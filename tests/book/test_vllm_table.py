"""The table of vLLM's names says what minillm does: each row is tried, and no name of minillm's is missing."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields

import pytest

from minillm import LLM, BeamSearchParams, PoolingParams, SamplingParams, StructuredOutputsParams
from minillm.book.vllm_table import ROWS, Row, show_vllm_table
from minillm.engine.config import EngineConfig
from minillm.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from minillm.engine.policies import POLICIES
from minillm.engine.vllm_names import merged
from minillm.speculative.config import METHODS

# What a class cannot be made without.
PARAMETERS = {
    "SamplingParams": (SamplingParams, {}),
    "StructuredOutputsParams": (StructuredOutputsParams, {"json_object": True}),
    "BeamSearchParams": (BeamSearchParams, {"beam_width": 2, "max_tokens": 4}),
    "PoolingParams": (PoolingParams, {}),
}
OUTPUTS = {
    "RequestOutput": RequestOutput("0", "a", [5], None, [], True, RequestMetrics(0.0)),
    "CompletionOutput": CompletionOutput(0, "a", [5]),
}
# Of each keyword that vLLM has and `EngineConfig` has not: a value that is taken.
TAKEN = {
    "tokenizer": "tinyworld", "chat_template": "{{ messages }}", "override_generation_config": {"temperature": 0.5},
    "num_gpu_blocks_override": 40, "cpu_offload_gb": 0.5, "kv_offloading_size": 0.5, "spec_method": "ngram",
    "spec_model": "tinyworld-draft", "spec_tokens": 3, "runner": "pooling", "convert": "embed", "max_logprobs": 20,
    "disable_log_stats": True, "enable_sleep_mode": True, "pooler_config": {"pooling_type": "MEAN"},
    "profiler_config": {"torch_profiler_dir": "traces"}, "swap_space": 4,
    "load_format": "dummy",
}  # fmt: skip


class Something:
    """A value that no parameter has by default."""


def rows(owner: str, *hows: str) -> list[Row]:
    found = [row for row in ROWS if row.owner == owner and row.how in hows]
    assert found, f"the table has no {hows} of {owner}"
    return found


def test_every_row_is_there_once_and_says_what_has_to_be_said():
    assert len({(row.owner, row.name) for row in ROWS}) == len(ROWS)
    assert {row.owner for row in ROWS} == {*PARAMETERS, *OUTPUTS, "LLM and EngineArgs", "LLM's methods"}
    for row in ROWS:
        assert row.how in ("same", "differs", "absent", "own") and bool(row.told) == (row.how != "same"), row


@pytest.mark.parametrize("owner", PARAMETERS)
def test_parameters_are_taken_or_refused_as_the_table_says(owner):
    cls, needed = PARAMETERS[owner]
    there = {one.name: one for one in fields(cls) if one.init}
    for row in rows(owner, "same", "differs", "own"):
        default = there[row.name].default
        cls(**{row.name: None if default is MISSING else default} | needed)
    for row in rows(owner, "absent"):
        with pytest.raises(NotImplementedError) as raised:
            cls(**needed, **{row.name: Something()})
        assert str(raised.value).startswith(f"{row.name}=") and str(raised.value).endswith(row.told), row
    assert set(there) <= {row.name for row in ROWS if row.owner == owner}


def test_keywords_are_taken_or_refused_as_the_table_says():
    config = {one.name: one.default for one in fields(EngineConfig)} | {"model": "tinyworld"}
    there = rows("LLM and EngineArgs", "same", "differs", "own")
    for row in there:
        if row.name in config:
            assert row.name in inspect.signature(LLM).parameters
            merged({row.name: config[row.name]}, {})
        else:
            merged({}, {row.name: TAKEN[row.name]})
    assert {row.name for row in there} == {*config, *TAKEN}
    for row in rows("LLM and EngineArgs", "absent"):
        with pytest.raises(NotImplementedError) as raised:
            LLM("no model is looked for", **{row.name: Something()})
        assert str(raised.value).startswith(f"{row.name}=") and str(raised.value).endswith(row.told), row


def test_methods_are_there_or_say_why_not():
    there = rows("LLM's methods", "same", "differs", "own")
    public = {name for name, _ in inspect.getmembers(LLM, callable) if not name.startswith("_")}
    assert {row.name for row in there} == public
    llm = object.__new__(LLM)
    for row in rows("LLM's methods", "absent"):
        with pytest.raises(AttributeError) as raised:
            getattr(llm, row.name)
        assert str(raised.value) == f"LLM.{row.name} is not built: {row.told}"


@pytest.mark.parametrize("owner", OUTPUTS)
def test_outputs_have_the_fields_that_the_table_names(owner):
    output = OUTPUTS[owner]
    there = rows(owner, "same", "differs", "own")
    for row in there:
        value = getattr(output, row.name)
        assert value is None or not row.told.startswith("always None"), row
    assert {one.name for one in fields(output)} <= {row.name for row in there}


@pytest.mark.parametrize("name, allowed", [("speculative_config", METHODS), ("scheduling_policy", POLICIES)])
def test_a_row_that_lists_what_is_allowed_lists_all_of_it(name, allowed):
    [row] = [row for row in ROWS if (row.owner, row.name) == ("LLM and EngineArgs", name)]
    assert set(allowed) <= set(re.findall(r"\w+", row.told))


def test_the_table_is_shown_whole_or_in_part():
    whole = show_vllm_table()
    assert all(row.name in whole.text and row.told in whole.text for row in ROWS)
    assert whole.html.count("<code") == len(ROWS)
    part = show_vllm_table("CompletionOutput", "own")
    assert repr(part) == "CompletionOutput: 1 own\n  error [own] what went wrong"
    assert "the owners are SamplingParams, " in repr(show_vllm_table("Sampler"))
