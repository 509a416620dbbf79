"""A grammar that could not be started ends its own request. Built in chapter 19."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from minillm.sampling.grammar.marker import MarkedRules
from minillm.sampling.grammar.protocol import CompiledGrammar, Grammar
from minillm.sampling.params import SamplingParams

Compile = Callable[[SamplingParams], CompiledGrammar]  # of parameters with structured_outputs


class FailedGrammar:
    """In the place of a grammar that could not be started: its request ends with the error, and no other."""

    is_terminated = False

    def __init__(self, error: Exception):
        self.error = error

    def fill_mask(self, words: np.ndarray) -> None:
        raise self.error

    def copy(self) -> FailedGrammar:
        return self


def started(
    compile_grammar: Compile, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> Grammar | FailedGrammar:
    """The grammar of a request, behind what it has generated."""
    try:
        rules = compile_grammar(params)
        grammar = rules.start(prompt_ids) if isinstance(rules, MarkedRules) else rules.start()
        for token_id in output_ids:
            grammar.accept(token_id)
        return grammar
    except Exception as error:
        return FailedGrammar(error)
