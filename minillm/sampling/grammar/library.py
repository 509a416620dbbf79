"""JSON Schema and context-free grammars, by the library llguidance. Built in chapter 19.

What nests has no finite automaton; it takes a parser beside the lexer. Of the two libraries that vLLM and SGLang use
for it we take llguidance: it makes a mask from the parser's state when it is asked for one, so a new schema costs less
than a millisecond and not a walk over the whole vocabulary for every state of the grammar, as in xgrammar; it names the
keyword of a schema that it cannot serve, where others ignore it; and it takes tokens back.

Where the text is forced, its masks allow one token only: the one that the tokenizer would make there. To the library an
<unk> or an ordinary token that ends the text may be as good as any, so its masks are cut to the tokens that can be said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from minillm.sampling.grammar.params import StructuredOutputsParams, cut, shortened
from minillm.sampling.grammar.protocol import check_rollback
from minillm.sampling.grammar.schema import can_end
from minillm.sampling.grammar.vocabulary import Vocabulary

# As json.dumps writes it: one way to put spaces, so that brackets, names and colons are forced and can be jumped over.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
BITS = (1 << np.arange(32)).astype(np.uint32).view(np.int32)  # the word in which only this bit is set
NO_TOKEN = "the vocabulary has no token for anything that may come next; constrain to text that it has tokens for"
SUPPORTED = {
    "json": "JSON Schema's types, enum, const, properties, required, items, prefixItems, bounds of numbers, strings and "
    "arrays, pattern, format, anyOf, allOf, oneOf of options that exclude each other, and $ref to its own $defs",
    "json_object": "True",
    "grammar": "Lark's rules and terminals in EBNF, beginning with the rule start, without look-around in regular expressions",
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
        matcher = LLMatcher(self.tokenizer, _grammar_text(params), log_level=0)
        if matcher.is_error():
            raise _refusal(params, matcher.get_error())
        if params.kind == "json" and not can_end(json.loads(params.json)):
            raise _refusal(params, "it has no text that ends, since what it requires refers back to itself")
        rules, begins = LibraryRules(matcher, self.vocabulary), matcher.compute_ff_bytes()
        if not self.vocabulary.can_spell(begins):
            text = shortened(begins.decode(errors="replace"))
            raise _refusal(params, f"the vocabulary has no tokens for what it begins with, {text}")
        try:
            rules.start().fill_mask(np.empty(self.vocabulary.num_words, np.int32))  # what leads nowhere is found when it is tried
        except RuntimeError as error:
            raise _refusal(params, f"it matches no text: {error}") from None
        return rules


class LibraryRules:
    """A compiled grammar: a matcher at its beginning, whose copies share what the lexer has learned."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary):
        self.matcher = matcher
        self.vocabulary = vocabulary

    def start(self) -> LibraryGrammar:
        return LibraryGrammar(self.matcher.deep_copy(), self.vocabulary)


class LibraryGrammar:
    """A `Grammar` around one of llguidance's matchers, which never sees the end-of-sequence token.

    A forced run of tokens is asked for once and its masks are written from it, a fifth of the time of one computed mask.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, num_accepted: int = 0, ended: bool = False):
        self.matcher = matcher
        self.vocabulary = vocabulary
        self.num_accepted = num_accepted  # the end-of-sequence token counted in
        self.is_terminated = ended
        self._forced: list[int] = []  # tokens that must come next, the last of them first

    def fill_mask(self, words: np.ndarray) -> None:
        if self.is_terminated:
            words.fill(0)
            return
        if not self._forced and (forced := self.matcher.compute_ff_tokens()):
            self._forced = self._sayable(forced)[::-1]
            if not self._forced:
                self._fill_along(self.matcher.compute_ff_bytes(), words)
                return
        if self._forced:
            words.fill(0)
            words[self._forced[-1] // 32] = BITS[self._forced[-1] % 32]
        else:
            self._fill_free(words)

    def _fill_free(self, words: np.ndarray) -> None:
        """Allow all tokens that the grammar does, where there is a choice."""
        found = np.frombuffer(self.matcher.compute_bitmask(), np.int32)
        if self.matcher.is_error():
            error = self.matcher.get_error()
            stuck = "NoExtensionBias" in error  # the library's name for a mask in which there is nothing
            raise RuntimeError(NO_TOKEN if stuck else f"the text has outgrown what the grammar's parser can follow: {error}")
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
            raise RuntimeError(NO_TOKEN)

    def accept(self, token_id: int) -> None:
        if self.is_terminated or not self._take(token_id):
            raise ValueError(self.vocabulary.refusal(token_id, self.is_terminated))
        self.num_accepted += 1

    def _take(self, token_id: int) -> bool:
        if token_id in self.vocabulary.eos_token_ids:
            self.is_terminated = self.matcher.is_accepting()
            return self.is_terminated
        taken = self.vocabulary.can_say(token_id) and self.matcher.try_consume_tokens([token_id]) == 1
        if taken and self._forced and self._forced.pop() != token_id:
            self._forced = []  # the same text in other tokens
        return taken

    def validate(self, token_ids: Sequence[int]) -> int:
        copy = self.copy()
        for count, token_id in enumerate(token_ids):
            if copy.is_terminated or not copy._take(token_id):
                return count
        return len(token_ids)

    def rollback(self, count: int) -> None:
        check_rollback(count, self.num_accepted)
        self.num_accepted -= count
        if count and self.is_terminated:
            self.is_terminated, count = False, count - 1
        if count:
            self._forced = []
            self.matcher.rollback(count)

    def jump_tokens(self) -> list[int]:
        return [] if self.is_terminated else self._sayable(self.matcher.compute_ff_tokens())

    def _sayable(self, token_ids: list[int]) -> list[int]:
        """As many of them as can be said: the tokenizer has an <unk> for what its vocabulary has no token for."""
        return list(takewhile(self.vocabulary.can_say, token_ids))

    def copy(self) -> LibraryGrammar:
        return LibraryGrammar(self.matcher.deep_copy(), self.vocabulary, self.num_accepted, self.is_terminated)


def _grammar_text(params: StructuredOutputsParams) -> str:
    if params.kind == "grammar":
        special = next((found[1] for found in SPECIAL_TOKEN.finditer(params.grammar) if found[1]), None)
        if special:
            raise _refusal(params, f"it names the token {special}, and only text can be constrained; quote it if it is text")
        return LLMatcher.grammar_from_lark(params.grammar)
    schema = {"type": "object"} if params.kind == "json_object" else json.loads(params.json)
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE)
    except ValueError as error:
        raise _refusal(params, str(error)) from None


def _refusal(params: StructuredOutputsParams, why: str) -> ValueError:
    why = why.split("<state>")[0].split("<backtrace>")[0].strip()  # what follows is for the library's own authors
    why = cut(why, 400)
    return ValueError(f"{params.kind}={shortened(getattr(params, params.kind))} is not possible: {why}; supported: {SUPPORTED[params.kind]}")
