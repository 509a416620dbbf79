"""The forms in which a prompt may come, brought to two: text, and a dictionary. Built in chapter 04.

"text" | [17, 4] | {"prompt": "text"} | {"prompt_token_ids": [17, 4]} | both keys | a list of these
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

from minillm.sampling.checks import Absent, refuse_absent
from minillm.sampling.params import SamplingParams, check_int


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    heal: NotRequired[bool]  # its last tokens are generated anew, so that its last word may go on (chapter 19)
    cache_salt: NotRequired[str]  # requests with different salts share no cached block
    logprob_start_len: NotRequired[int]  # the token with which prompt log-probabilities begin


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is its text, which is reported and not read."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    heal: NotRequired[bool]
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


def check_length(name: str, text: str, most_tokens: int, longest: float) -> None:
    """Raise ValueError for a text that is too long even if each token were the `longest`. The tokenizer serves one
    thread at a time, and would hold up the others for seconds."""
    if len(text) > (most := most_tokens * longest):
        raise ValueError(
            f"{name} has {len(text)} characters; max_model_len leaves room for {most_tokens} tokens of at most "
            f"{longest} characters each, so at most {most} are allowed"
        )


def longest_token(tokenizer: Any) -> float:
    """Its characters; infinite where the tokenizer may leave out characters of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.normalizer is not None:
        return math.inf
    splits = repr(backend.pre_tokenizer)
    is_whole = "ByteLevel(" in splits and "Whitespace" not in splits and "Removed" not in splits
    if not is_whole or any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values()):
        return math.inf
    return max(map(len, tokenizer.get_vocab()))


def salt_of(name: str, prompt: Any) -> str | None:
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise TypeError(f"{name}: cache_salt={salt!r} is not allowed; allowed: a string that is not empty")
    return salt


def logprob_start_of(name: str, prompt: Any, checked: tuple[str | None, list[int]], params: SamplingParams) -> int:
    """The token with which prompt log-probabilities begin: what lies before it may come from the prefix cache."""
    start = prompt.get("logprob_start_len", 0) if isinstance(prompt, dict) else 0
    check_int(f"{name}: logprob_start_len", start, 0, len(checked[1]) - 1)
    if start and params.prompt_logprobs is None:
        raise ValueError(
            f"{name}: logprob_start_len={start} needs prompt_logprobs; set SamplingParams(prompt_logprobs=0)"
        )
    return start


def one_each(name: str, given: Any, kind: type, default: Any, num_prompts: int) -> list:
    """`given` for every prompt, or one value each."""
    if given is None:
        return [default] * num_prompts
    if type(given) is kind:
        return [given] * num_prompts
    if not isinstance(given, Sequence) or not all(type(value) is kind for value in given):
        raise TypeError(f"{name}={given!r} is not allowed; allowed: {kind.__name__}, or a list of one for each prompt")
    if len(given) != num_prompts:
        raise ValueError(f"{name} has {len(given)} entries for {num_prompts} prompts; pass one for all, or one each")
    return list(given)


def check_callback(on_delta: object) -> None:
    if on_delta is not None and not callable(on_delta):
        raise TypeError(f"on_delta={on_delta!r} is not allowed; allowed: a function, or None")


# Keywords of calls that vLLM has and the book does not build.
ABSENT_KEYWORDS = {
    "tokenization_kwargs": Absent("encode the prompt with llm.get_tokenizer(), and give its token ids"),
    "mm_processor_kwargs": Absent("the book serves text"),
}


def check_call(method: str, others: dict[str, Any]) -> None:
    """Raise NotImplementedError for a keyword of vLLM that asks for what is not built, TypeError for any other."""
    if unknown := list(refuse_absent(ABSENT_KEYWORDS, others)):
        raise TypeError(f"LLM.{method}() has no keyword {unknown[0]!r}; see help(LLM.{method})")
