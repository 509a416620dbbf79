"""litellm and dspy, unmodified. Both come with the extra `clients`: they want an older openai than others do."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any, Literal

import pydantic
import pytest

from minillm import SamplingParams

from .conftest import CONVERSATION, MODEL

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would download its list of prices
litellm = pytest.importorskip("litellm", reason="litellm is not installed; pip install 'minillm-book[clients]'")
dspy = pytest.importorskip("dspy", reason="dspy is not installed; pip install 'minillm-book[clients]'")

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Animal(pydantic.BaseModel):
    size: Literal["big", "small"]


@pytest.fixture
def base(server) -> str:
    return f"{server.url}/v1"


@pytest.fixture
def options(base) -> dict[str, Any]:
    return {"model": f"openai/{MODEL}", "api_base": base, "api_key": "none", "messages": CONVERSATION, "temperature": 0}


@pytest.fixture(scope="module")
def expected(llm) -> str:
    [output] = llm.chat(CONVERSATION, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    return output.outputs[0].text


def test_litellm_completes_streams_and_awaits(options, expected):
    options |= {"max_tokens": 12}
    assert litellm.completion(**options).choices[0].message.content == expected
    chunks = litellm.completion(**options, stream=True, stream_options={"include_usage": True})
    built = litellm.stream_chunk_builder(list(chunks))
    assert built.choices[0].message.content == expected and built.usage.completion_tokens <= 12
    assert asyncio.run(litellm.acompletion(**options)).choices[0].message.content == expected


def test_litellm_uses_tools_and_schemas(options):
    options |= {"max_tokens": 300, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    [call] = litellm.completion(**options).choices[0].message.tool_calls
    [streamed] = (
        litellm.stream_chunk_builder(list(litellm.completion(**options, stream=True))).choices[0].message.tool_calls
    )
    assert call.function.name == "weather" and streamed.function.arguments == call.function.arguments
    for name in ("tools", "tool_choice", "parallel_tool_calls"):
        del options[name]
    answer = litellm.completion(**options, response_format=Animal)
    assert Animal.model_validate_json(answer.choices[0].message.content)


def test_litellm_has_a_provider_for_vllm_and_one_for_completions(base):
    more = {"api_base": base, "api_key": "none", "max_tokens": 3}
    answer = litellm.completion(
        model=f"hosted_vllm/{MODEL}", messages=CONVERSATION, top_k=3, extra_body={"min_p": 0.1}, **more
    )
    assert answer.usage.completion_tokens == 3
    answer = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="Once", **more)
    assert answer.choices[0].text


def test_litellm_reads_the_errors(options):
    with pytest.raises(litellm.NotFoundError, match="'no' is not served here"):
        litellm.completion(**options | {"model": "openai/no"}, num_retries=0)
    with pytest.raises(litellm.BadRequestError, match="temperature=-1"):
        litellm.completion(**options | {"temperature": -1}, num_retries=0)


@pytest.mark.parametrize("adapter", ["ChatAdapter", "JSONAdapter", "XMLAdapter"])
@pytest.mark.parametrize("module", ["Predict", "ChainOfThought"])
def test_dspy_asks_what_its_adapters_send(base, server, adapter, module):
    """The small model does not answer in dspy's format; each request is served all the same."""
    lm = dspy.LM(
        f"openai/{MODEL}", api_base=base, api_key="none", max_tokens=40, temperature=0.5, cache=False, num_retries=0
    )
    refused = dict(server.models.metrics.num_refused)
    unread = contextlib.suppress(dspy.utils.exceptions.AdapterParseError)
    with dspy.context(lm=lm, adapter=getattr(dspy, adapter)()), unread:
        getattr(dspy, module)("question -> answer: str")(question="What does a cow say?")
    assert len(lm.history) >= 1 and dict(server.models.metrics.num_refused) == refused


def test_dspy_gets_texts_and_completions(base, expected):
    common = {"api_base": base, "api_key": "none", "cache": False, "num_retries": 0, "temperature": 0, "max_tokens": 12}
    assert dspy.LM(f"openai/{MODEL}", **common)(CONVERSATION[0]["content"]) == [expected]
    assert dspy.LM(f"openai/{MODEL}", model_type="text", **common)("Once")[0]
