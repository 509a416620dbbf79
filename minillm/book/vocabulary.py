"""One concept, one term: private words are refused, and a term is explained before it is used. Built in chapter 91."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from minillm.book.glossary import TERMS

# A private word, and what the field says. Each is a regular expression; case does not matter.
PRIVATE = {
    r"nobody|no one": "say what does not act: no request, no reader, nothing",
    r"whoever": "name it: the request that ..., a reader who ...",
    r"(some|any)body": "name it: a request, a caller, a reader",
    r"the ones? who": "name it: the request that ..., the reader who ...",
    r"strangers?|newcomers?": "a request, a user",
    r"dearer": "more expensive",
    r"few bits": "low-bit",
    r"guesse[sd]|guessing": "draft tokens; predict, predicted",
    r"waits? for (the )?(memory|arithmetic)|what is waited for": "memory-bound, compute-bound; the bottleneck",
    r"ask(s|ed|ing)? for ahead|fetch(es|ed)? ahead": "prefetch",
    r"tokens? more\b(?! (than|likely|probable|often))": "one more token, two more tokens",
    r"the bend": "the ridge point",
}
_SLOT = r"(?<!batch )(?<!KV )(?<!adapter )(?<![\w`.])slots?(?![\w`=(]| mapping| offset)"
PROSE_ONLY = {
    r"\broads?\b": "a configuration, a path",
    _SLOT: "a batch slot (a row) or a KV slot (a token's room)",
}
# Words of the glossary that are plain English, too: before their chapter they mean that.
HOMONYMS = {
    "block", "bubble", "calibration", "data parallel", "drain", "extend", "feature", "flight", "fusion", "grammar",
    "knee", "padding", "page", "program", "rank", "replica", "request", "router", "swap", "tile",
}  # fmt: skip
_PATTERNS = [(re.compile(rf"\b(?:{word})\b", re.IGNORECASE), instead) for word, instead in PRIVATE.items()]
_PROSE = [(re.compile(word), instead) for word, instead in PROSE_ONLY.items()]
_CODE = re.compile(r"```.*?```|\$\$.*?\$\$|`[^`\n]*`|\$[^$\n]*\$|\]\([^)]*\)|https?://\S+", re.DOTALL)
_QUOTED = re.compile(r"\*\"[^\"]*\"\*|[\"“][^\"”\n]*[\"”]")
_TOLD = re.compile(r"[Cc]hapters? \d\d|\d\d_\w+\.ipynb|primers|https?://")  # or another work's title


def private_words(text: str, *, prose: bool = False) -> Iterator[str]:
    """A complaint for each private word in a text; code, links and quotations are left out.

    prose: also refuse words that only readers would misread, such as a bare "slot".
    """
    text = _QUOTED.sub(" ", _CODE.sub(" ", text))
    for pattern, instead in [*_PATTERNS, *(_PROSE if prose else ())]:
        for match in pattern.finditer(text):
            around = " ".join(text[max(0, match.start() - 30) : match.end() + 30].split())
            yield f"{match[0]!r} in {around!r}: {instead}"


def undefined_terms(chapter: int, text: str) -> Iterator[str]:
    """A complaint for each term of the glossary that a later chapter explains, in a paragraph that names no chapter."""
    paragraphs = [part for part in re.split(r"\n\s*\n|\n(?=[*\d|-])", text) if not _TOLD.search(part)]
    for term in TERMS:
        if term.chapter <= chapter or term.name in HOMONYMS:
            continue
        case = re.IGNORECASE if term.name.islower() else 0
        pattern = re.compile(rf"(?<![\w`]){re.escape(term.name)}s?(?![\w`])", case)
        if any(pattern.search(part) for part in paragraphs):
            yield f"{term.name!r} is explained in chapter {term.chapter:02d}: name that chapter beside it"


def texts_of(source: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every comment and string of a Python file."""
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(source.read_text(encoding="utf-8")).readline):
        if token.type in kinds:
            yield token.start[0], token.string
