"""The glossary: one list of terms, complete, in order, and the same as the table that the notebook shows."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, astuple
from html.parser import HTMLParser

import pytest

from minillm.book import nbfile
from minillm.book.glossary import CHAPTERS, COLUMNS, TERMS, Term, find, show_glossary
from minillm.book.paths import notebooks, repository_root

NOTEBOOK = repository_root() / "chapters" / "91_glossary.ipynb"

# The words that the engine, its API and its chapters use without explaining them each time.
STANDARD = [
    "radix node",
    *"""
request num_computed_tokens block block_size block_table slot_mapping ref_cnt BlockPool KVCacheManager
get_computed_blocks allocate_slots free SchedulerOutput max_num_batched_tokens max_num_seqs query_start_loc seq_lens
WAITING RUNNING PREEMPTED FINISHED TTFT TPOT ITL TBT goodput MBU MFU page extend
""".split(),
]
TAUGHT = (
    """
token|logit|prefill|decode|KV cache|prefix cache|chunked prefill|preemption|recompute|swap|continuous batching
iteration-level scheduling|ragged batch|cu_seqlens|GQA|MQA|MLA|RoPE|Gumbel-max|top-p|nucleus sampling|roofline
ridge point|tensor parallel|pipeline parallel|speculative decoding|draft model|acceptance rate|grammar
structured output|quantization|scale, zero point|group size|GPTQ|AWQ|SmoothQuant
absorbed form|decoupled rotary key|prompt caching|agent loop|SLO|preemptive priority|TMA|wgmma|tcgen05|tensor memory
warp specialisation|ping-pong scheduling|MUFU|conditional rescaling|Stream-K|Gluon|CuTe DSL|graph break|piecewise graph
programmatic dependent launch|megakernel|NVFP4|MXFP4|NF4|two-level scale|block scaling|Hadamard matrix
rotation (of a model)|learned sink logit|hybrid model|gated linear attention|state snapshot|delta rule|sparse attention
lightning indexer|draft head|training-time test|multi-token prediction|dynamic tree|tree verification
acceptance by position|tool call|tool parser|marker|thinking budget|token healing
""".strip()
    .replace("\n", "|")
    .split("|")
)


def test_no_term_twice_and_all_in_order():
    names = [term.name.casefold() for term in TERMS]
    assert names == sorted(names), "sort TERMS by name, whatever the case"
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
def test_a_term_is_well_formed(term):
    assert term.chapter in CHAPTERS
    assert re.fullmatch(r"\S.*\.", term.meaning), "the meaning is a sentence"
    for text in (term.name, term.meaning, term.vllm, term.sglang, term.papers):
        assert text == text.strip() and text.count("`") % 2 == 0
    with pytest.raises(FrozenInstanceError):
        term.name = "other"


@pytest.mark.parametrize("word", STANDARD)
def test_every_standard_word_is_explained(word):
    whole = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)")
    assert any(whole.search(text) for term in TERMS for text in (term.name, term.meaning)), f"{word} stands in no term"


@pytest.mark.parametrize("name", TAUGHT)
def test_what_the_chapters_teach_is_a_term(name):
    assert name in {term.name for term in TERMS}


@pytest.mark.parametrize(
    "search, name",
    [
        ("Retract", "preemption"),
        ("out_cache_loc", "slot_mapping"),
        ("mem-fraction", "gpu_memory_utilization"),
        ("initiation phase", "prefill"),
        ("lock_ref", "ref_cnt"),
        ("kv block", "block"),
    ],
)
def test_a_term_is_found_under_the_names_of_others(search, name):
    assert name in [term.name for term in find(search)]


def test_search_that_finds_nothing_says_so():
    assert find("no such word") == []
    shown = show_glossary("<no such word>")
    assert "no term holds" in repr(shown) and "<no" not in shown._repr_html_()


def test_the_table_is_the_list():
    assert _rows(show_glossary()._repr_html_()) == [list(COLUMNS), *map(_row, TERMS)]


def test_the_notebook_shows_the_list_as_it_is_now():
    outputs = [
        output
        for cell in nbfile.read(NOTEBOOK).cells
        if cell.cell_type == "code" and cell.source.endswith("show_glossary()")
        for output in cell.outputs
    ]
    assert len(outputs) == 1, "one cell of the notebook shows the whole glossary"
    assert _rows(outputs[0].data["text/html"]) == [list(COLUMNS), *map(_row, TERMS)], (
        "run chapters/91_glossary.ipynb again"
    )


def test_chapters_are_links_to_notebooks_that_are_there():
    linked = set(re.findall(r'href="([^"]+)"', show_glossary()._repr_html_()))
    assert linked <= {path.name for path in notebooks("chapters")}
    assert {
        path.name for path in notebooks("chapters") if path.name[:2] in {f"{term.chapter:02d}" for term in TERMS}
    } == linked


def _row(term: Term) -> list[str]:
    """A term as its row should read: no backticks, a dash for no name, the chapter in two digits."""
    *texts, chapter = astuple(term)
    return [text.replace("`", "") or "–" for text in texts] + [f"{chapter:02d}"]


def _rows(page: str) -> list[list[str]]:
    """The text of every cell of a table."""
    rows: list[list[str]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag == "tr":
                rows.append([])
            elif tag in ("td", "th"):
                rows[-1].append("")

        def handle_data(self, data):
            rows[-1][-1] += data

    Reader().feed(page)
    return rows
