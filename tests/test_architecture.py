"""The house stands: floors, circles, docstrings, file lengths;
and the detectors see what is wrong in made-up houses."""

from __future__ import annotations

import re

import pytest

from minillm.book import rooms


def test_the_package_keeps_the_rules_of_the_house(root):
    assert rooms.violations(root / "minillm") == []


def test_every_engine_module_names_its_chapter(root):
    chapters = rooms.module_chapters(root / "minillm")
    engine_rooms = {
        name for name in rooms.find_modules(root / "minillm") if rooms.floor_of(name) in rooms.ENGINE_FLOORS
    }
    assert engine_rooms, "no engine module found: the walk looks in the wrong place"
    assert engine_rooms <= set(chapters)
    assert all(0 <= chapters[name] <= 25 for name in engine_rooms)


def house(tmp_path, **files: str):
    """A package `minillm` with the given modules; `a__b` stands for a/b.py, every docstring names a chapter."""
    package = tmp_path / "minillm"
    for name, body in files.items():
        file = package.joinpath(*name.split("__")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(body if body.startswith('"""') else f'"""A module. Built in chapter 01."""\n{body}\n')
    for folder in [package, *(p for p in package.rglob("*") if p.is_dir())]:
        if not (folder / "__init__.py").exists():
            (folder / "__init__.py").write_text('"""A room. Built in chapter 01."""\n')
    return package


def test_a_sound_house_has_no_violations(tmp_path):
    package = house(
        tmp_path,
        device="",
        model__layers="from minillm.device import x",
        engine__llm="from minillm.model import layers\nfrom .core import y",
        engine__core="import minillm.model.layers",
        bench="from minillm import LLM",
        cli="def run():\n    from minillm.engine.llm import LLM",
    )
    assert rooms.violations(package) == []


@pytest.mark.parametrize(
    "files, said",
    [
        (
            {"model__layers": "import minillm.engine.llm", "engine__llm": ""},
            "minillm.model.layers line 2: imports upward, from minillm.engine.llm",
        ),
        (
            {"model__layers": "def f():\n    from ..engine import llm", "engine__llm": ""},
            "imports upward, from minillm.engine.llm",
        ),
        (
            {"model__layers": "from minillm.sampling.params import P", "sampling__params": ""},
            "imports sideways, from minillm.sampling.params",
        ),
        ({"model__layers": "from minillm import LLM"}, "imports from the front door"),
        ({"attic": ""}, "no room called 'attic'"),
        (
            {
                "engine__a": "from minillm.engine.b import x",
                "engine__b": "from .c import x",
                "engine__c": "from minillm.engine import a",
            },
            "circular import: minillm.engine.a -> minillm.engine.b -> minillm.engine.c -> minillm.engine.a",
        ),
        (
            {"model__layers": '"""No chapter."""'},
            'minillm.model.layers: the first paragraph of its docstring must say "Built in chapter NN."',
        ),
        ({"model__layers": '"""First.\n\nBuilt in chapter 02, said too late."""'}, "must say"),
        ({"device": "x = 1\n" * 319}, "minillm.device: 321 lines, the limit is 320"),
    ],
)
def test_a_violation_is_found_and_named(tmp_path, files, said):
    found = rooms.violations(house(tmp_path, **files))
    assert len(found) == 1 and said in found[0], found


def test_types_may_be_imported_sideways_but_not_upward(tmp_path):
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from minillm.{} import X"
    assert (
        rooms.violations(house(tmp_path / "a", model__layers=typed.format("sampling.params"), sampling__params=""))
        == []
    )
    found = rooms.violations(house(tmp_path / "b", model__layers=typed.format("engine.llm"), engine__llm=""))
    assert len(found) == 1 and "upward" in found[0]


def test_chapters_come_from_the_first_paragraph(tmp_path):
    package = house(
        tmp_path,
        kv_cache__block_pool='"""Paged KV cache:\nthe block pool. Built in\nchapter 06."""',
        training='"""No chapter."""',
    )
    chapters = rooms.module_chapters(package)
    assert chapters["minillm.kv_cache.block_pool"] == 6
    assert "minillm.training" not in chapters


def test_the_first_sitting_in_the_readme_is_the_way_of_a_prompt(root):
    """Its files exist, have about as many lines as it says, and are read in one sitting."""
    text = (root / "README.md").read_text(encoding="utf-8")
    told = re.search(r"(\d+) files, ([\d,]+) lines", text)
    listed = re.findall(r"^\d+\. \[`([\w/]+\.py)`\]\(minillm/\1\):", text, re.MULTILINE)
    lines = sum(len((root / "minillm" / name).read_text(encoding="utf-8").splitlines()) for name in listed)
    assert len(listed) == int(told[1]) <= 16 and lines <= 3000
    assert abs(lines - int(told[2].replace(",", ""))) < 0.05 * lines
