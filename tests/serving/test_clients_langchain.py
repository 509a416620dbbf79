"""langchain-openai, unmodified: chats, tools, structured output, completions."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pydantic
import pytest

from minillm import SamplingParams

from .conftest import MODEL

pytest.importorskip("langchain_openai", reason="langchain-openai is not installed; the extra `test` has it")
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

QUESTION = "What does a cow say?"


class Animal(pydantic.BaseModel):
    """An animal."""

    size: Literal["big", "small"]
    legs: Literal[2, 4]


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@pytest.fixture
def options(server) -> dict[str, Any]:
    return {"base_url": f"{server.url}/v1", "api_key": "none", "model": MODEL, "max_retries": 0, "temperature": 0}


@pytest.fixture
def chat(options) -> ChatOpenAI:
    return ChatOpenAI(**options, max_tokens=12)


@pytest.fixture(scope="module")
def expected(llm) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    return output.outputs[0].text


def test_invoke_stream_batch_and_ainvoke_say_the_same(chat, expected):
    assert chat.invoke(QUESTION).content == expected
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == expected
    assert [answer.content for answer in chat.batch([QUESTION] * 3)] == [expected] * 3
    assert asyncio.run(chat.ainvoke(QUESTION)).content == expected


def test_usage_and_logprobs_arrive(options):
    answer = ChatOpenAI(**options, max_tokens=3, logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert answer.usage_metadata["output_tokens"] == 3 == len(answer.response_metadata["logprobs"]["content"])
    chunks = list(ChatOpenAI(**options, max_tokens=3, stream_usage=True).stream(QUESTION))
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == 3


@pytest.mark.parametrize("choice", ["any", "weather"])
def test_tools_are_called_and_streamed(options, choice):
    chat = ChatOpenAI(**options, max_tokens=300).bind_tools([weather], tool_choice=choice, parallel_tool_calls=False)
    [call] = chat.invoke(QUESTION).tool_calls
    assert call["name"] == "weather" and weather.invoke(call["args"]).startswith("sunny")
    gathered = None
    for chunk in chat.stream(QUESTION):
        gathered = chunk if gathered is None else gathered + chunk
    assert [one["args"] for one in gathered.tool_calls] == [call["args"]]


def test_a_conversation_with_every_kind_of_message(chat):
    call = {"name": "weather", "args": {"city": "Rome"}, "id": "call_1"}
    messages = [
        SystemMessage("Be short."),
        HumanMessage([{"type": "text", "text": "The weather?"}], name="ann"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("sunny", tool_call_id="call_1"),
    ]
    assert isinstance(chat.bind_tools([weather]).invoke(messages), AIMessage)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("strict", [None, True])
def test_structured_output_is_an_object(options, method, strict):
    chat = ChatOpenAI(**options, max_tokens=300)
    assert isinstance(chat.with_structured_output(Animal, method=method, strict=strict).invoke(QUESTION), Animal)


def test_json_mode_holds_the_answer_to_json(options):
    chat = ChatOpenAI(**options | {"temperature": 1}, max_tokens=8, seed=3)
    with pytest.raises(openai.LengthFinishReasonError) as cut:  # the model does not end its object: the client says so
        chat.with_structured_output(Animal, method="json_mode").invoke(QUESTION)
    assert cut.value.completion.choices[0].message.content.lstrip().startswith("{")


def test_its_completions_class(options, llm):
    completions = OpenAI(**options, max_tokens=8)
    outputs = llm.generate(["Once", "A dog"], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    expected = [output.outputs[0].text for output in outputs]
    assert completions.batch(["Once", "A dog"]) == expected
    assert "".join(completions.stream("Once")) == expected[0]
    two = OpenAI(**options | {"temperature": 1}, max_tokens=4, n=2, best_of=2).generate(["Once"])
    assert len(two.generations[0]) == 2


def test_what_is_not_served_is_named(options):
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings is not served"):
        OpenAIEmbeddings(
            base_url=options["base_url"], api_key="none", model=MODEL, check_embedding_ctx_length=False
        ).embed_query("x")
    with pytest.raises(openai.NotFoundError, match="/v1/responses is not served"):
        ChatOpenAI(**options, use_responses_api=True).invoke("x")
