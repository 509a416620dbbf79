"""Token healing: the end of a prompt is generated anew, so that its last word may go on. Built in chapter 19.

A prompt that is cut inside of a word ends in tokens that the model has never read in front of the rest of the word.
`{"prompt": text, "heal": True}` takes these tokens back, and the new text has to begin with their text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from minillm.sampling.grammar.params import StructuredOutputsParams
from minillm.sampling.grammar.prefix import taken_back
from minillm.sampling.grammar.vocabulary import Vocabulary
from minillm.sampling.params import SamplingParams

EXCLUDED = (
    "structured_outputs", "allowed_token_ids", "bad_words", "logits_processors", "prompt_logprobs",
)  # fmt: skip


class Prompt(NamedTuple):
    """A prompt as the engine gets it."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    taken_back: tuple[int, ...] = ()  # the last tokens of the prompt, which are generated anew


def healed(
    name: str,
    prompt: Any,
    tokens: tuple[str | None, list[int]],
    params: SamplingParams,
    vocabulary: Callable[[], Vocabulary],
) -> Prompt:
    """The prompt as it is, or healed where it asks for that. Raises TypeError for a `heal` that is no truth value, and
    ValueError naming the parameter that it cannot stand beside."""
    heal = prompt.get("heal", False) if isinstance(prompt, dict) else False
    if not isinstance(heal, bool):
        raise TypeError(f"{name}: heal={heal!r} is not allowed; allowed: True or False")
    if not heal:
        return Prompt(*tokens, params)
    for field in EXCLUDED:
        if (value := getattr(params, field)) not in (None, []):
            raise ValueError(
                f"{name}: heal=True generates the end of the prompt anew, and {field}={value!r} cannot hold there; "
                f"use only one of heal and {field}"
            )
    text, token_ids = tokens
    count = taken_back(token_ids, words := vocabulary())
    if not count:
        return Prompt(text, token_ids, params)
    begin = b"".join(words.token_bytes[one] for one in token_ids[-count:]).decode("utf-8", "surrogateescape")
    constrained = replace(params, structured_outputs=StructuredOutputsParams(begin=begin))
    constrained.bad_words_token_ids = params.bad_words_token_ids
    return Prompt(text, token_ids[:-count], constrained, tuple(token_ids[-count:]))


def all_healed(
    prompts: Sequence[Any],
    tokens: Sequence[tuple[str | None, list[int]]],
    params: Sequence[SamplingParams],
    vocabulary: Callable[[], Vocabulary],
) -> list[Prompt]:
    return [healed(f"prompts[{at}]", *one, vocabulary) for at, one in enumerate(zip(prompts, tokens, params))]
