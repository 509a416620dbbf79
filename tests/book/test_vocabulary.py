"""One concept, one term: no private words in the book and the package, no term before its chapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from minillm.book import nbfile, vocabulary
from minillm.book.paths import chapter_number, notebooks

ROOT = Path(__file__).resolve().parents[2]
BOOKS = [path for folder in ("chapters", "solutions") for path in notebooks(folder, ROOT)]
STORIES = {"plots.py", "stories.py"}  # text that the bundled model was trained on
PAGES = [ROOT / "README.md", *sorted((ROOT / ".github").glob("*.md"))]


def prose(path: Path) -> list[tuple[int, str]]:
    cells = nbfile.read(path).cells
    return [(i, cell.source) for i, cell in enumerate(cells) if cell.cell_type == "markdown"]


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_notebook_speaks_the_fields_words(path):
    in_chapter = path.parent.name == "chapters"
    strictly = in_chapter or chapter_number(path) < 10
    found = [(i, told) for i, text in prose(path) for told in vocabulary.private_words(text, prose=strictly)]
    if in_chapter and 0 < chapter_number(path) < 90:
        found += [
            (i, told) for i, text in prose(path) for told in vocabulary.undefined_terms(chapter_number(path), text)
        ]
    assert not found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_speaks_the_fields_words(path):
    assert not [*vocabulary.private_words(path.read_text(encoding="utf-8"))]


def test_the_package_speaks_the_fields_words():
    """In comments, docstrings and messages."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {told}"
        for path in sorted((ROOT / "minillm").rglob("*.py"))
        if path.name not in {*STORIES, "vocabulary.py"}
        for line, text in vocabulary.texts_of(path)
        for told in vocabulary.private_words(text.replace('"', ""))
    ]
    assert not found


@pytest.mark.parametrize(
    "text, said",
    [
        ("Nobody waits for a stranger.", ["no request", "a request, a user"]),
        ("The **one who** waits", []),
        ("the one who waits", ["name it"]),
        ("a guess, two guesses", ["draft tokens"]),
        ("It waits for memory.", ["memory-bound"]),
        ("`nobody`, [x](nobody.ipynb), *\"nobody\"* and $nobody$", []),
    ],
)  # fmt: skip
def test_a_private_word_is_named_with_the_fields(text, said):
    told = [*vocabulary.private_words(text)]
    assert len(told) == len(said) and all(part in one for part, one in zip(said, told, strict=True))


def test_a_slot_is_one_of_two():
    found = [*vocabulary.private_words("A slot, a KV slot, a batch slot, `slot_mapping`.", prose=True)]
    assert len(found) == 1 and "batch slot (a row)" in found[0]


def test_a_term_is_explained_before_it_is_used():
    assert "chapter 07" in next(vocabulary.undefined_terms(3, "The prefix cache keeps them."))
    assert not [*vocabulary.undefined_terms(7, "The prefix cache keeps them.")]
    assert not [*vocabulary.undefined_terms(3, "The prefix cache (chapter 07) keeps them.")]
    assert [*vocabulary.undefined_terms(3, "Chapter 07 is later: see chapter 07.\n\nThe prefix cache keeps them.")]


def test_every_comment_and_string_is_read(tmp_path):
    file = tmp_path / "x.py"
    file.write_text('"""One."""\nx = f"two {x} three"  # four\n')
    texts = " ".join(text for _, text in vocabulary.texts_of(file))
    assert all(word in texts for word in ("One", "two", "three", "four"))
