"""`show` quotes what the package holds now, and says so when it no longer does."""

from __future__ import annotations

import pytest

from minillm.book import paths, quote, show
from minillm.book.streams import Lane
from minillm.cli import clone


def test_a_function_is_quoted_whole_with_its_place():
    quoted = show(paths.chapter_number)
    assert quoted.label == "minillm/book/paths.py · chapter_number"
    assert quoted.text.startswith("def chapter_number(path: Path) -> int:\n")
    assert quoted.text.endswith("return int(digits)")
    assert [number for number, _ in quoted.numbered] == list(range(1, len(quoted.numbered) + 1))


def test_a_method_is_moved_to_the_margin():
    quoted = show(Lane.advance)
    assert quoted.label == "minillm/book/streams.py · Lane.advance"
    assert quoted.text.startswith("def advance(self")


def test_only_keeps_the_class_line_and_the_named_methods():
    quoted = show(Lane, only="advance", docstrings=False)
    lines = quoted.text.splitlines()
    assert lines[:3] == ["@dataclass", "class Lane:", ""]
    assert lines[3].startswith("    def advance(")
    assert "rate" not in quoted.text and "seconds: float" not in quoted.text
    assert "⋮" in repr(quoted)
    assert "    @property\n    def rate(self)" in show(Lane, only=["rate"]).text


def test_between_and_lines_and_dotted_lines_cut_the_same_piece():
    whole = show(paths.chapter_number)
    first = next(i for i, line in enumerate(whole.text.splitlines(), 1) if "isdigit" in line)
    by_mark = show(paths.chapter_number, between=("isdigit", "raise"))
    assert (
        by_mark.text
        == show(paths.chapter_number, lines=(first, first + 1)).text
        == show(paths.chapter_number, lines="isdigit..raise").text
    )
    assert by_mark.text.splitlines()[0] == "if not digits.isdigit():"


def test_docstrings_can_be_left_out():
    assert '"""' in show(paths.chapter_number).text
    assert '"""' not in show(paths.chapter_number, docstrings=False).text


def test_modules_properties_and_packages_have_places():
    assert show(paths).label == "minillm/book/paths.py"
    assert show(Lane.rate).text.startswith("@property\ndef rate(self)")
    assert show(clone).label == "minillm/cli/__init__.py · clone"


@pytest.mark.parametrize(
    "asked, said",
    [
        ({"only": "teleport"}, "has no 'teleport' any more; it has "),
        ({"between": ("beam me", "up")}, "no longer holds the line 'beam me'"),
        ({"between": ("class Lane", "engage")}, "no longer holds the line 'engage' after 'class Lane'"),
        ({"lines": (3, 999)}, r"lines=\(3, 999\): .* has lines 1 to \d+"),
    ],
)
def test_what_is_gone_is_named(asked, said):
    with pytest.raises(LookupError, match=said):
        show(Lane, **asked)


def test_built_ins_have_no_source():
    with pytest.raises(LookupError, match="has no Python source"):
        show(len)


def test_html_holds_the_lines_and_no_absolute_path():
    page = show(quote.show)._repr_html_()
    assert "minillm/book/quote.py · show" in page and str(paths.repository_root()) not in page
    assert page.count("user-select:none") == len(show(quote.show).numbered)
    assert "between: tuple[str, str]" not in page  # highlighted: the annotation is broken into spans
