"""GrammarCompiler: a constraint made ready for a vocabulary, once for all requests that share it.
Built in chapter 19."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING

from minillm.sampling.grammar.automaton import MAX_NFA_STATES, TooManyStates, build_automaton
from minillm.sampling.grammar.marker import MarkedRules
from minillm.sampling.grammar.params import StructuredOutputsParams, shortened
from minillm.sampling.grammar.prefix import PrefixRules
from minillm.sampling.grammar.protocol import CompiledGrammar
from minillm.sampling.grammar.regex import parse_choice, parse_regex
from minillm.sampling.grammar.tokens import TokenAutomaton
from minillm.sampling.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from minillm.sampling.grammar.library import LibraryCompiler


class GrammarCompiler:
    """Compiles for one model and keeps the last `cache_size` grammars, with the masks they have made.

    Nothing of the vocabulary is read before the first constraint comes.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_token_ids: Collection[int],
        cache_size: int = 64,
    ):
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.cache_size = cache_size
        self._cache: OrderedDict[tuple, CompiledGrammar] = OrderedDict()

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Raises ValueError naming the constraint, what is wrong with it or not supported, and what is."""
        key = params.key
        if key not in self._cache:
            self._cache[key] = self._compile(params)
            if len(self._cache) > self.cache_size:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return self._cache[key]

    def _compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        if params.after is not None:
            return MarkedRules(self.compile(params.plain), params, self.vocabulary)
        if params.kind == "begin":
            return PrefixRules(params.begin, self.vocabulary)
        if params.kind not in ("regex", "choice"):
            return self._library.compile(params)
        if params.kind == "choice" and sum(map(len, params.choice)) > MAX_NFA_STATES:  # a character takes one at least
            raise ValueError(
                f"choice={shortened(params.choice)} is not possible: it takes over {MAX_NFA_STATES} states to write "
                "down; give fewer or shorter choices"
            )
        tree = parse_regex(params.regex) if params.kind == "regex" else parse_choice(params.choice)
        try:
            return TokenAutomaton(build_automaton(tree, self.vocabulary.characters), self.vocabulary)
        except ValueError as error:
            why = str(error)
            if isinstance(error, TooManyStates):
                why += "; " + ("give fewer or shorter choices" if params.kind == "choice" else error.way_out)
            raise ValueError(
                f"{params.kind}={shortened(getattr(params, params.kind))} is not possible: {why}"
            ) from None

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer, self.vocab_size, self.eos_token_ids)

    @cached_property
    def _library(self) -> LibraryCompiler:
        from minillm.sampling.grammar.library import LibraryCompiler  # not everybody needs it

        return LibraryCompiler(self.vocabulary)
