"""Appendix 92 and the README's chart: every result is shown, and by the names its benchmark gave."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minillm.book import measured, measured_figures, nbfile

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted(path.stem for path in measured.RESULTS.glob("*.json"))


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_has_its_command_and_its_tables(name):
    shown = measured.report(name)
    saved = measured.result(name)
    assert saved["command"] in shown.text and saved["hardware"]["name"] in shown.text
    assert shown.html.count("<table") == len(measured.tables_of(name, saved)) >= 1


def test_the_appendix_shows_every_result():
    source = "\n".join(cell.source for cell in nbfile.read(ROOT / "chapters" / "92_measured.ipynb").cells)
    quoted = re.findall(r'"([a-z][\w.-]+)"', source)
    left = [name for name in RESULTS if not any(name.startswith(quote) for quote in quoted)]
    # Of a training run whose weights are not bundled.
    assert left == ["tasks-tinyworld-active-amd-epyc-1-threads-avx512"]


def test_a_name_that_is_none_or_several():
    with pytest.raises(LookupError, match="0 results begin like this"):
        measured.result("nothing")
    with pytest.raises(LookupError, match="10 results begin like this"):
        measured.result("compare")
    with pytest.raises(LookupError, match="no benchmark shows it"):
        measured.tables_of("nothing", {})


def test_old_results_keep_their_columns_names():
    """A table of results names the columns as the result does, whatever the benchmark measures by now."""
    together = measured.tables_of("speculation", measured.result("speculation"))[-1]
    assert [column.header for column in together.columns] == ["batch", "plain", "draft model", "adaptive"]


def test_the_readmes_chart_is_that_of_the_saved_result():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"![{measured_figures.ladder().alt}](chapters/images/ladder.png)" in readme


def test_the_readme_says_how_long_the_book_is():
    from minillm.book.contents import chapters

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    hours = sum(chapter.minutes for chapter in chapters()) / 60
    practice = [nbfile.read(path).metadata.book.exercises for path in (ROOT / "exercises").glob("*.ipynb")]
    more = sum(one["minutes"] for exercises in practice for one in exercises.values()) / 60
    assert f"about {hours:.0f} hours, the exercises about {more:.0f} more" in " ".join(readme.split())


def test_figures_name_what_they_draw():
    told = measured_figures.over_peers("compare-offline-bfloat16", title="x").alt
    assert re.search(r"bfloat16/offline-16 1\.\d\d times vllm", told)
    assert "minillm int8" in measured_figures.shares_of_limit("bits", "batch 1", "x").alt
    assert "GPTQ" in measured_figures.perplexities().alt
    assert "int4 2.09" in measured_figures.over_batches("bits", "x", first="bfloat16").alt
