"""Following: what a request takes of the tokens that were drawn for it. Built in chapter 18.

draft, drawn    [a b] [a c x]      a is accepted, c is the request's own token, x belongs to a text that does not exist
grammar         takes a token, and may force others behind it (chapter 19)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minillm.engine.step import ScheduledRequest
from minillm.engine.step_inputs import RequestState
from minillm.sampling.grammar.mask import GrammarMasks, Stuck
from minillm.sampling.grammar.protocol import Grammar
from minillm.sampling.logprobs import Logprob

Drawn = list[tuple[int, dict[int, Logprob] | None]]  # token and log-probabilities


def num_accepted(drawn: Drawn, draft: Sequence[int]) -> int:
    """How many draft tokens the target has drawn itself, one after the other: what stands behind the first other one
    was drawn for a text that does not exist."""
    same = [token_id == expected for (token_id, _), expected in zip(drawn, draft)]
    return same.index(False) if False in same else len(same)


def follow(
    state: RequestState, grammar: Grammar | None, drawn: Drawn, fork: bool = False
) -> tuple[Drawn, bool, str | None]:
    """The tokens that a text goes on with: what was drawn as far as its grammar takes it, and what the grammar forces
    behind each token. Drawn tokens behind a jump count only if they are that very jump. Also says whether the grammar
    is complete, and why it cannot go on.

    What was drawn without a mask (`stuck`) is not taken. `fork` leaves the grammar where it is. Whatever a grammar
    raises ends its own request alone.
    """
    if grammar is None:
        if state.stuck is None or len(drawn) <= state.stuck.num_tokens:
            return drawn, False, None
        return drawn[: state.stuck.num_tokens], False, str(state.stuck.error)
    taken: Drawn = []
    left = drawn[::-1]
    jumps = state.params.structured_outputs.jump_forward
    try:
        grammar = grammar.copy() if fork else grammar
        while left and not grammar.is_terminated:
            if state.stuck is not None and len(drawn) - len(left) >= state.stuck.num_tokens:
                return taken, False, str(state.stuck.error)
            grammar.accept(left[-1][0])
            taken.append(left.pop())
            for token_id in grammar.jump_tokens() if jumps and not grammar.is_terminated else ():
                if left and left[-1][0] != token_id:
                    left.clear()
                grammar.accept(token_id)
                taken.append(left.pop() if left else (token_id, None))
    except Exception as error:
        return taken, False, str(error)
    return taken, grammar.is_terminated, None


def note_failed(
    failed: Mapping[int, Exception], states: Sequence[RequestState], rows: Sequence[ScheduledRequest]
) -> None:
    """Write down whose rules could make no logits (`minillm.sampling.rules`): what was drawn there is not taken."""
    first = 0
    for state, row in zip(states, rows):
        if state.grammar is None:
            places = [at - first for at in range(first, first + row.samples + len(row.draft)) if at in failed]
            state.stuck = Stuck(places[0] if row.draft else 0, failed[first + places[0]]) if places else None
        first += row.samples + len(row.draft)


def fill_masks(
    masks: GrammarMasks, states: Sequence[RequestState], rows: Sequence[ScheduledRequest]
) -> GrammarMasks | None:
    """The masks of a step's draws; a request whose grammar can make none is told why (`stuck`)."""
    drawing = [(state, row) for state, row in zip(states, rows) for _ in range(row.samples)]
    filled = masks.fill([(state.grammar, row.draft) for state, row in drawing])
    for state, _ in drawing:
        state.stuck = None
    for index, stuck in masks.stuck.items():
        drawing[index][0].stuck = stuck
    return filled
