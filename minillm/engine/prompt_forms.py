"""The forms in which a prompt may come, brought to two: text, and a dictionary. Built in chapter 04.

"text" | [17, 4] | {"prompt": "text"} | {"prompt_token_ids": [17, 4]} | both keys | a list of these
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]  # requests with different salts share no cached block
    logprob_start_len: NotRequired[int]  # the token with which prompt log-probabilities begin


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is its text, which is reported and not read."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    logprob_start_len: NotRequired[int]


PromptType = str | list[int] | TextPrompt | TokensPrompt
ABSENT_KEYS = {
    "multi_modal_data": "the book serves text",
    "mm_processor_kwargs": "the book serves text",
    "multi_modal_uuids": "the book serves text",
    "media_io_kwargs": "the book serves text",
    "prompt_embeds": "a prompt is text or token ids",
    "encoder_prompt": "the book serves decoders alone",
    "decoder_prompt": "the book serves decoders alone",
    "token_type_ids": "the book serves decoders alone",
    "prompt_token_offsets": "the text of a prompt in token ids is reported and not read",
    "data": "a prompt is text or token ids",
}


def as_prompts(given: Any) -> Any:
    """One prompt or several as a list of strings and dictionaries. What is neither stays as it is, to be refused.
    Raises NotImplementedError for a key of vLLM's that the book does not serve."""
    if isinstance(given, (str, dict)) or _are_token_ids(given):
        given = [given]
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        return given
    return [_as_prompt(f"prompts[{index}]", prompt) for index, prompt in enumerate(given)]


def _as_prompt(name: str, prompt: Any) -> Any:
    if isinstance(prompt, (list, tuple)):
        return {"prompt_token_ids": prompt}
    if not isinstance(prompt, dict):
        return prompt
    kept = {key: value for key, value in prompt.items() if value is not None or key in TextPrompt.__required_keys__}
    for key in kept.keys() & ABSENT_KEYS.keys():
        raise NotImplementedError(f"{name} has the key {key!r}, which is not served: {ABSENT_KEYS[key]}")
    if kept.keys() >= {"prompt", "prompt_token_ids"} and not isinstance(kept["prompt"], str):
        del kept["prompt"]
    return kept


def _are_token_ids(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and bool(given) and all(type(one) is int for one in given)


def check_text(name: str, text: str) -> None:
    """Raise ValueError where `text` holds half of a UTF-16 pair, which stands for no character and has no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has a lone surrogate, {text[error.start]!r}, at character {error.start}: "
            "half of a UTF-16 pair, which no tokenizer can encode; remove it, "
            "or decode the bytes that it comes from with errors='replace'"
        ) from None
