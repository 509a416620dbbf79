"""Log-probabilities of prompts: which logits of a step they need, and what these say. Built in chapter 05."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from minillm.engine.step_inputs import RequestState, StepInputs
from minillm.sampling.logprobs import LogprobTensors, score_tokens
from minillm.staging import upload


class ScoredPrompt(NamedTuple):
    """The log-probabilities of a part of a prompt, on the device."""

    request_id: str
    first: int  # token of the prompt
    counts: list[int]
    scores: LogprobTensors


def prompts_to_score(step: StepInputs) -> tuple[list[tuple[RequestState, int, int]], list[range]]:
    """For prompt log-probabilities: which tokens of which prompts, and the places in the batch whose logits they need.
    The logits of a token say how probable the next one of the prompt was."""
    scored, added = [], []
    for state, row, begin in zip(step.states, step.rows, step.query_start_loc.tolist()):
        if state.params.prompt_logprobs is None:
            continue
        first = max(row.start, state.logprob_start_len - 1) - row.start
        count = min(row.num_tokens, state.num_prompt_tokens - 1 - row.start) - first
        if count > 0:
            scored.append((state, row.start + first + 1, count))
            added.append(range(begin + first, begin + first + count))
    return scored, added


def score_prompts(logits: Tensor, scored: list[tuple[RequestState, int, int]]) -> list[ScoredPrompt]:
    """logits [sum of the counts, vocab_size] of what `prompts_to_score` named."""
    parts, start = [], 0
    for state, first, count in scored:
        following = upload(state.prompt[first : first + count], device=logits.device)[0]
        counts = [state.params.prompt_logprobs] * count
        scores = score_tokens(logits[start : start + count], following, counts)
        parts.append(ScoredPrompt(state.request_id, first, counts, scores))
        start += count
    return parts
