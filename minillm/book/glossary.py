"""The field's words: what each means here, in vLLM, in SGLang and in the papers. Built in chapter 91.

`glossary_terms` and the modules named after it have the terms;
chapters/91_glossary.ipynb shows them as one table.
"""

from __future__ import annotations

import html
import re
from dataclasses import astuple

from minillm.book.chips import Html
from minillm.book.glossary_applications import APPLICATION_TERMS
from minillm.book.glossary_drafting import DRAFTING_TERMS
from minillm.book.glossary_experts import EXPERT_TERMS
from minillm.book.glossary_fleet import FLEET_TERMS
from minillm.book.glossary_formats import FORMAT_TERMS
from minillm.book.glossary_gpus import GPU_TERMS
from minillm.book.glossary_images import IMAGE_TERMS
from minillm.book.glossary_latent import LATENT_TERMS
from minillm.book.glossary_long import LONG_TERMS
from minillm.book.glossary_parallel import PARALLEL_TERMS
from minillm.book.glossary_service import SERVICE_TERMS
from minillm.book.glossary_terms import TERMS as ENGINE_TERMS, Term
from minillm.book.paths import notebooks

TERMS = sorted(
    [
        *ENGINE_TERMS,
        *APPLICATION_TERMS,
        *DRAFTING_TERMS,
        *EXPERT_TERMS,
        *LONG_TERMS,
        *PARALLEL_TERMS,
        *FLEET_TERMS,
        *SERVICE_TERMS,
        *IMAGE_TERMS,
        *FORMAT_TERMS,
        *LATENT_TERMS,
        *GPU_TERMS,
    ],
    key=lambda term: term.name.casefold(),
)
COLUMNS = {"term": 14, "meaning": 28, "vLLM": 20, "SGLang": 20, "papers": 13, "ch.": 5}  # width in percent
CHAPTERS = range(26)  # the numbered chapters of the book, without the appendix


def show_glossary(search: str = "") -> Html:
    """The terms that hold `search` anywhere, under any of their names; all of them by default."""
    found = find(search)
    if not found:
        text = f"no term holds {search!r}; the glossary has {len(TERMS)} terms"
        return Html(f"<p>{html.escape(text)}</p>", text)
    cell = "padding:3px 8px;border-bottom:1px solid #e6e9ed;text-align:left;vertical-align:top;white-space:normal"
    lines = [
        "<tr>"
        + "".join(f'<th style="{cell};width:{width}%">{column}</th>' for column, width in COLUMNS.items())
        + "</tr>"
    ]
    for term in found:
        name, *others = (_marked(text) for text in (term.name, term.meaning, term.vllm, term.sglang, term.papers))
        cells = [f"<b>{name}</b>", *others, _chapter_link(term.chapter)]
        lines.append("<tr>" + "".join(f'<td style="{cell}">{text}</td>' for text in cells) + "</tr>")
    table = "font:13px sans-serif;border-collapse:collapse;background:#fff;color:#24292f;width:100%;table-layout:fixed"
    return Html(f'<table style="{table}">{"".join(lines)}</table>', "\n".join(_in_words(term) for term in found))


def find(search: str) -> list[Term]:
    """The terms in which `search` occurs, whatever the case, in any field."""
    return [term for term in TERMS if search.lower() in " | ".join(map(str, astuple(term))).lower()]


def _marked(text: str) -> str:
    """Backticks become code; a long identifier may break after a punctuation mark or before a capital."""
    text = re.sub(r"`([^`]+)`", r'<code style="white-space:normal">\1</code>', html.escape(text, quote=False))
    return (
        re.sub(r"[\w.:]{20,}", lambda long: re.sub(r"(?<=[a-z])([_.:])|(?<=[a-z])(?=[A-Z])", r"\1<wbr>", long[0]), text)
        or "–"
    )


def _chapter_link(chapter: int) -> str:
    """The chapter's number, as a link once its notebook is there."""
    try:
        file = next((path for path in notebooks("chapters") if path.name.startswith(f"{chapter:02d}_")), None)
    except FileNotFoundError:  # the package was installed without the book
        file = None
    return f'<a href="{file.name}">{chapter:02d}</a>' if file else f"{chapter:02d}"


def _in_words(term: Term) -> str:
    others = {"vLLM": term.vllm, "SGLang": term.sglang, "papers": term.papers}
    names = "; ".join(f"{who}: {text}" for who, text in others.items() if text)
    return f"{term.name} [{term.chapter:02d}] {term.meaning}" + (f" ({names})" if names else "")
