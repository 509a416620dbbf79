"""Chats: a conversation as the text that the model's chat template makes of it. Built in chapter 04."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from minillm.engine.prompt_forms import check_text
from minillm.model.errors import DAMAGE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMATS = ("auto", "string", "openai")
# Of apply_chat_template, which has to give the text of these very messages.
NO_KWARGS = ("conversation", "tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask")


def render_chats(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Any],
    chat_template: str | Path | None = None,
    chat_template_content_format: str = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[dict[str, Any]] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[str]:
    """One conversation or several, each as text. `chat_template` is Jinja's text, or a file of it, in the place of the
    model's own. Content in parts is joined by line breaks, or handed to the template as it is ("openai"). Raises
    ValueError naming the message."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"messages={messages!r} is not allowed; allowed: a list of messages, or of such lists")
    template = _template(chat_template)
    if not (template or tokenizer.chat_template):
        raise ValueError("the model's tokenizer has no chat template; write the prompt yourself and use generate()")
    if chat_template_content_format not in FORMATS:
        allowed = ", ".join(FORMATS)
        raise ValueError(
            f"chat_template_content_format={chat_template_content_format!r} is not allowed; allowed: {allowed}"
        )
    for name, value in (
        ("add_generation_prompt", add_generation_prompt),
        ("continue_final_message", continue_final_message),
    ):
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is not allowed; allowed: True or False")
    _check_kwargs(chat_template_kwargs)
    if add_generation_prompt and continue_final_message:
        raise ValueError(
            "continue_final_message=True goes on with the last message, add_generation_prompt=True begins another one; "
            "set add_generation_prompt=False"
        )
    is_one = isinstance(messages[0], dict)
    options = {"add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
    if continue_final_message:
        options["continue_final_message"] = True
    if template is not None:
        options["chat_template"] = template
    if tools:
        options["tools"] = list(tools)
    texts = []
    for index, conversation in enumerate([messages] if is_one else messages):
        checked = _conversation(
            "messages" if is_one else f"messages[{index}]", conversation, chat_template_content_format == "openai"
        )
        try:
            texts.append(tokenizer.apply_chat_template(checked, tokenize=False, **options))
        except (TemplateError, *DAMAGE) as error:
            of = "given" if template is not None else f"of {tokenizer.name_or_path or 'the model'}"
            raise ValueError(
                f"the chat template {of} cannot be applied to the messages ({type(error).__name__}: {error}); "
                "pass another as chat_template=..., or write the prompt yourself and use generate()"
            ) from error
    return texts


def _check_kwargs(given: Any) -> None:
    if not isinstance(given, Mapping | None):
        raise TypeError(f"chat_template_kwargs={given!r} is not allowed; allowed: a dictionary, or None")
    for name in NO_KWARGS:
        if name in (given or {}):
            raise ValueError(
                f"chat_template_kwargs has {name}={given[name]!r}, which is not for the template; "
                "allowed: what the template reads"
            )


def _template(given: str | Path | None) -> str | None:
    if given is None or (isinstance(given, str) and ("{" in given or "\n" in given)):
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        raise ValueError(
            f"chat_template={str(given)!r} is not allowed; allowed: the text of a template, or a file of it"
        )
    return path.read_text(encoding="utf-8")


def _conversation(name: str, conversation: Any, in_parts: bool) -> list[dict[str, Any]]:
    if not isinstance(conversation, (list, tuple)) or not conversation:
        raise ValueError(f"{name}={conversation!r} is not allowed; allowed: a list of at least one message")
    return [_message(name, index, message, in_parts) for index, message in enumerate(conversation)]


def _message(name: str, index: int, message: Any, in_parts: bool) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"{name} has the message {message!r}; allowed: {{'role': string, 'content': string}}")
    place = f"{name}[{index}]"
    calls = message.get("tool_calls")
    if calls and not isinstance(calls, list | tuple):
        raise ValueError(f"{place}['tool_calls']={shown(calls)} is not allowed; allowed: a list of calls")
    content = message.get("content")
    if content is None and calls:
        content = ""
    texts = [content] if isinstance(content, str) else _texts(name, message, content)
    for text in (message["role"], *texts):
        check_text(f"{place}[{'role' if text is message['role'] else 'content'!r}]", text)
    made = dict(message)
    made["content"] = [{"type": "text", "text": text} for text in texts] if in_parts else "\n".join(texts)
    if calls:
        made["tool_calls"] = [_tool_call(place, call) for call in calls]
    return made


def _texts(name: str, message: dict[str, Any], content: Any) -> list[str]:
    """The texts of OpenAI's content parts."""
    allowed = "allowed: {'role': string, 'content': string, or a list of {'type': 'text', 'text': string}}"
    if not isinstance(content, list) or not content:
        raise ValueError(f"{name} has the message {message!r}; {allowed}")
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "refusal") and kind is not None:
            raise ValueError(f"{name} has a part of type {kind!r}, and the book serves text; {allowed}")
        if not isinstance(part, dict) or not isinstance(part.get("text", part.get("refusal")), str):
            raise ValueError(f"{name} has the part {part!r}; {allowed}")
    return [part.get("text", part.get("refusal")) for part in parts]


def _tool_call(place: str, call: Any) -> dict[str, Any]:
    """A call of an assistant's message; its arguments as the template wants them, a dictionary."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"{place}['tool_calls'] has {call!r}; allowed: {{'function': {{'name': ..., 'arguments': ...}}}}"
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place}['tool_calls']: arguments={shown(arguments)} are not JSON: {error}") from None
    return {**call, "function": {**function, "arguments": arguments}}
