"""JSON Schema and context-free grammars, by the library llguidance. Built in chapter 19.

What nests has no finite automaton; it takes a parser beside the lexer. Of the two libraries that vLLM and SGLang use
for it we take llguidance: it makes a mask from the parser's state when it is asked for one, so a new schema costs less
than a millisecond and not a walk over the whole vocabulary for every state of the grammar, as in xgrammar; it names the
keyword of a schema that it cannot serve, where others ignore it; and it takes tokens back.

Where the text is forced, its masks allow one token only: the one that the tokenizer would make there. To the library an
<unk> or an ordinary token that ends the text may be as good as any, so its masks are cut to the tokens that can be
said.

A parser works within limits, so that no text keeps a batch waiting: a text may come to a place from which the library
does not follow it. That is a GrammarError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from minillm.sampling.grammar.multiples import MAX_MULTIPLE, states_of_multiples
from minillm.sampling.grammar.params import StructuredOutputsParams, cut, shortened
from minillm.sampling.grammar.patterns import used_up_patterns
from minillm.sampling.grammar.protocol import GrammarError, check_rollback
from minillm.sampling.grammar.schema import can_end
from minillm.sampling.grammar.spelling import as_lark, schema_of, style_of, tagged_text
from minillm.sampling.grammar.vocabulary import Vocabulary

BITS = (1 << np.arange(32)).astype(np.uint32).view(np.int32)  # the word in which only this bit is set
LIMITS = LLParserLimits(verbose_errors=False)  # of a lexer's states and of a parser's items, as the library sets them
NO_TOKEN = "the vocabulary has no token for anything that may come next; constrain to text that it has tokens for"
SUPPORTED = {
    "json": "JSON Schema's types, enum, const, properties, required, items, prefixItems, bounds of numbers, "
    "strings and arrays, pattern, format, anyOf, allOf, oneOf of options that exclude each other, "
    "and $ref to its own $defs",
    "json_object": "True",
    "grammar": (
        "Lark's rules and terminals in EBNF, beginning with the rule start, without look-around in regular "
        "expressions, or EBNF as GBNF writes it, beginning with the rule root"
    ),
    "structural_tag": (
        '{"structures": [{"begin": text, "schema": JSON Schema, "end": text}], "triggers": [text]}, where each begin '
        "starts with a trigger"
    ),
}
# In Lark's text: a string, a regular expression or a comment, which may hold anything; or else a reference to a token.
SPECIAL_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|(<[^<>\s]+>)')


class LibraryCompiler:
    """llguidance for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        tokenizer = json.loads(vocabulary.tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
        for token in tokenizer["added_tokens"]:
            token["special"] = True  # none of them is text
        num_tokens = max(vocabulary.size, len(vocabulary.tokenizer))
        self.tokenizer = LLTokenizer(json.dumps(tokenizer), num_tokens, sorted(vocabulary.eos_token_ids))

    def compile(self, params: StructuredOutputsParams) -> LibraryRules:
        if (states := states_of_multiples(params)) > MAX_MULTIPLE:
            raise _refusal(
                params, f"its multipleOf takes {states} states to count with; at most {MAX_MULTIPLE} are allowed"
            )
        text = _grammar_text(params)
        rules = LibraryRules(lambda: LLMatcher(self.tokenizer, text, log_level=0, limits=LIMITS), self.vocabulary)
        if rules.matcher.is_error():
            raise _refusal(params, rules.matcher.get_error())
        if params.kind == "json" and not can_end(json.loads(params.json)):
            raise _refusal(params, "it has no text that ends, since what it requires refers back to itself")
        if params.kind == "json" and (found := used_up_patterns(json.loads(params.json))):
            patterns, names = (", ".join(map(repr, some)) for some in found)
            raise _refusal(
                params,
                f"its patternProperties {patterns} match no name but the declared {names}: write them as properties",
            )
        begins = rules.matcher.compute_ff_bytes()
        if not self.vocabulary.can_spell(begins):
            shown = shortened(begins.decode(errors="replace"))
            raise _refusal(params, f"the vocabulary has no tokens for what it begins with, {shown}")
        try:
            # What leads nowhere is found when it is tried.
            rules.start().fill_mask(np.empty(self.vocabulary.num_words, np.int32))
        except GrammarError as error:
            raise _refusal(params, f"it matches no text: {error}") from None
        return rules


class Lexer:
    """Stands for what a matcher and its copies share. It gives no state back, and takes no more than so many."""

    is_spent = False


class LibraryRules:
    """A compiled grammar: a matcher at its beginning, whose copies share what the lexer has learned."""

    def __init__(self, make: Callable[[], LLMatcher], vocabulary: Vocabulary):
        self.make, self.vocabulary = make, vocabulary
        self.matcher, self.lexer = make(), Lexer()

    def start(self) -> LibraryGrammar:
        if self.lexer.is_spent:
            self.matcher, self.lexer = self.make(), Lexer()
        return LibraryGrammar(self, self.matcher.deep_copy(), self.lexer)


class LibraryGrammar:
    """A `Grammar` around one of llguidance's matchers, which never sees the end-of-sequence token.

    A forced run of tokens is asked for once, its masks are written from it, and the matcher hears of them together:
    a fifth of the time of computed masks.
    """

    def __init__(
        self, rules: LibraryRules, matcher: LLMatcher, lexer: Lexer, token_ids: Sequence[int] = (), ended: bool = False
    ):
        self.rules, self.vocabulary = rules, rules.vocabulary
        self.matcher, self.lexer = matcher, lexer
        self.token_ids = list(token_ids)  # accepted so far, without the end-of-sequence token
        self.is_terminated = ended
        self._forced: list[int] = []  # tokens that must come next, the last of them first
        self._pending: list[int] = []  # accepted ones of which the matcher has not heard yet

    def fill_mask(self, words: np.ndarray) -> None:
        if self.is_terminated:
            words.fill(0)
            return
        if not self._forced and (forced := self._ask(LLMatcher.compute_ff_tokens)):
            self._forced = self._sayable(forced)[::-1]
            if not self._forced:
                self._fill_along(self._ask(LLMatcher.compute_ff_bytes), words)
                return
        if self._forced:
            word, bit = divmod(self._forced[-1], 32)
            words.fill(0)
            words[word] = BITS[bit]
        else:
            self._fill_free(words)

    def _fill_free(self, words: np.ndarray) -> None:
        """Allow all tokens that the grammar does, where there is a choice."""
        found = np.frombuffer(self._ask(LLMatcher.compute_bitmask), np.int32)
        np.bitwise_and(found[: len(words)], self.vocabulary.sayable, out=words)
        if self.matcher.is_accepting():
            words |= self.vocabulary.ends
        self._check_not_stuck(words)

    def _fill_along(self, text: bytes, words: np.ndarray) -> None:
        """Allow whatever tokens say the forced `text`, where the tokenizer's own for it cannot be said."""
        allowed = np.zeros(self.vocabulary.size, bool)
        for token_id in self.vocabulary.tokens_along(text):
            allowed[token_id] = self.matcher.validate_tokens([token_id]) == 1
        words[:] = self.vocabulary.pack(allowed)
        self._check_not_stuck(words)

    def _check_not_stuck(self, words: np.ndarray) -> None:
        if self.vocabulary.missing_bytes and not words.any():  # with all bytes there is always one to go on with
            raise GrammarError(NO_TOKEN)

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """What the matcher answers. One that has met an error answers nothing any more, and its copies answer wrong;
        another takes its place and is asked again, since it may have been others that left no room in the lexer they
        share."""
        for _ in range(2):
            if self.lexer.is_spent:
                self.matcher, self.lexer = self.rules.make(), Lexer()
                self._pending = self.token_ids.copy()
            if self._pending:
                self.matcher.consume_tokens(self._pending)
                self._pending = []
            answer = question(self.matcher, *arguments)
            if not self.matcher.is_error():
                return answer
            self.lexer.is_spent = True
        error = self.matcher.get_error().split("\n")[0]
        stuck = "NoExtensionBias" in error  # the library's name for a mask in which there is nothing
        if stuck:
            raise GrammarError(NO_TOKEN)
        raise GrammarError(
            f"after {len(self.token_ids)} tokens the text has outgrown what the grammar's parser can follow: {error}; "
            "write the grammar with fewer ways to read one text, or ask for a shorter one"
        )

    def accept(self, token_id: int) -> None:
        if self.is_terminated or not self._take(token_id):
            raise ValueError(self.vocabulary.refusal(token_id, self.is_terminated))

    def _take(self, token_id: int) -> bool:
        if self._forced and self._forced[-1] == token_id:
            self._pending.append(self._forced.pop())
            self.token_ids.append(token_id)
            return True
        if token_id in self.vocabulary.eos_token_ids:
            self.is_terminated = self._ask(LLMatcher.is_accepting)
            return self.is_terminated
        if not self.vocabulary.can_say(token_id) or self._ask(LLMatcher.try_consume_tokens, [token_id]) != 1:
            return False
        self.token_ids.append(token_id)
        self._forced = []  # if there were any: the same text in other tokens
        return True

    def validate(self, token_ids: Sequence[int]) -> int:
        copy = self.copy()
        for count, token_id in enumerate(token_ids):
            try:
                if copy.is_terminated or not copy._take(token_id):
                    return count
            except GrammarError:  # it could not be accepted
                return count
        return len(token_ids)

    def rollback(self, count: int) -> None:
        check_rollback(count, len(self.token_ids) + self.is_terminated)
        if count and self.is_terminated:
            self.is_terminated, count = False, count - 1
        if count:
            self._forced = []
            self._ask(LLMatcher.rollback, count)
            del self.token_ids[-count:]

    def jump_tokens(self) -> list[int]:
        return [] if self.is_terminated else self._sayable(self._ask(LLMatcher.compute_ff_tokens))

    def _sayable(self, token_ids: list[int]) -> list[int]:
        """As many of them as can be said: the tokenizer has an <unk> for what its vocabulary has no token for."""
        return list(takewhile(self.vocabulary.can_say, token_ids))

    def copy(self) -> LibraryGrammar:
        copy = LibraryGrammar(self.rules, self.matcher.deep_copy(), self.lexer, self.token_ids, self.is_terminated)
        copy._pending = self._pending.copy()
        return copy


def _grammar_text(params: StructuredOutputsParams) -> str:
    if params.kind == "grammar":
        lark = as_lark(params.grammar)
        special = next((found[1] for found in SPECIAL_TOKEN.finditer(lark) if found[1]), None)
        if special:
            raise _refusal(
                params, f"it names the token {special}, and only text can be constrained; quote it if it is text"
            )
        return LLMatcher.grammar_from_lark(lark)
    try:
        if params.kind == "structural_tag":
            return LLMatcher.grammar_from_lark(tagged_text(json.loads(params.structural_tag)))
        return LLMatcher.grammar_from_json_schema(schema_of(params), overrides=style_of(params))
    except ValueError as error:
        raise _refusal(params, str(error)) from None


def _refusal(params: StructuredOutputsParams, why: str) -> ValueError:
    why = why.split("<state>")[0].split("<backtrace>")[0].strip()  # what follows is for the library's own authors
    why = cut(why, 400)
    return ValueError(
        f"{params.kind}={shortened(getattr(params, params.kind))} is not possible: {why}; supported: "
        f"{SUPPORTED[params.kind]}"
    )
