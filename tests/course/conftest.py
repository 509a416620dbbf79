"""What the tests of the course share: the small book, and a course over it that nbgrader has released."""

from __future__ import annotations

import shutil

import pytest

from minillm.course import settings
from tests.course.small_book import make_book, make_course


@pytest.fixture(scope="session")
def book(tmp_path_factory):
    return make_book(tmp_path_factory.mktemp("book"))


@pytest.fixture(scope="session")
def released_course(book, tmp_path_factory):
    """Released once; `course` is a copy of it."""
    folder = tmp_path_factory.mktemp("a lecturer's Kurs für alle") / "2026"
    return make_course(folder, book, repository="you/fork", tag="v1", branch="term", releases_folder="kurs/release")


@pytest.fixture(scope="module")
def course(released_course, tmp_path_factory):
    """A copy for the tests of one file."""
    folder = tmp_path_factory.mktemp("course") / "Kurs 2026"
    shutil.copytree(released_course.folder, folder)
    return settings.load(folder)
