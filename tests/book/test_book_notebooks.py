"""Executing, normalising and linting notebooks; each rule of the lint sees a notebook that breaks it."""

from __future__ import annotations

import base64

import nbformat
import pytest

from minillm.book import lint, nbfile, notebooks
from minillm.book.style import canvas, picture


@pytest.fixture
def problems(tmp_path):
    """Lint a notebook as if it were chapters/06_sample.ipynb (or in another folder); messages only."""

    def run(nb, folder="chapters", normalise=True):
        path = tmp_path / folder / "06_sample.ipynb"
        path.parent.mkdir(exist_ok=True)
        path.write_text(nbfile.dumps(nbfile.normalise(nb) if normalise else nb))
        return [problem.message for problem in notebooks.lint(path)]

    return run


def text_output(text, name="stdout"):
    return nbformat.v4.new_output("stream", name=name, text=text)


def data_output(data, metadata=None):
    return nbformat.v4.new_output("display_data", data=data, metadata=metadata or {})


def test_a_sound_chapter_has_no_problems(problems, sample_chapter):
    assert problems(sample_chapter) == []


BROKEN = {
    "begin with the title `# 06 · Name`": lambda nb: nb.cells[0].update(source="## Sample"),
    "no Colab badge": lambda nb: nb.cells[0].update(source="# 06 · Sample"),
    "badge points to": lambda nb: nb.cells[0].update(source=nb.cells[0].source.replace("06_sample", "05_sample")),
    "must be the set-up cell": lambda nb: nb.cells[1].metadata.update(tags=["measured"]),
    "not the one of minillm.book.colab": lambda nb: nb.cells[1].update(source=nb.cells[1].source + "\nx = 1"),
    "book.minutes=95: must be a whole number from 1 to 90": lambda nb: nb.metadata.book.update(minutes=95),
    "book.minutes=None: must be a whole number": lambda nb: nb.metadata.book.pop("minutes"),
    "book.needs=['6']: must be": lambda nb: nb.metadata.book.update(needs=["6"]),
    "book.objectives=[]: must be": lambda nb: nb.metadata.book.update(objectives=[]),
    "execution count 7, expected 2": lambda nb: nb.cells[2].update(execution_count=7),
    "execution count None, expected 2": lambda nb: nb.cells[2].update(execution_count=None),
    "tag it either nbval-check-output or measured": lambda nb: nb.cells[2].metadata.pop("tags"),
    "tag it either": lambda nb: nb.cells[2].metadata.update(tags=["measured", "nbval-check-output"]),
    "has no output to compare": lambda nb: nb.cells[2].update(outputs=[]),
    "26 lines, the limit is 25": lambda nb: nb.cells[2].update(source="x = 1\n" * 26),
    "holds an error output: KeyError": lambda nb: nb.cells[2].outputs.append(
        nbformat.v4.new_output("error", ename="KeyError", evalue="", traceback=[])
    ),
    "a figure has no alt text": lambda nb: nb.cells[2].outputs.append(data_output({"image/png": "AAAA"})),
    "an image has no alt text": lambda nb: nb.cells[0].update(source=nb.cells[0].source + "\n\n![](figure.png)"),
    "an image of 300,000 bytes": lambda nb: nb.cells[2].outputs.append(
        data_output({"image/png": "A" * 400_000}, {"image/png": {"alt": "x"}})
    ),
    "bytes, the limit is 1,500,000": lambda nb: nb.cells[2].outputs.append(text_output("x" * 1_600_000, "stdout")),
    "its output holds an absolute path: /home/r": lambda nb: nb.cells[2].outputs.append(
        text_output("saved in /home/reader/x\n")
    ),
    "holds an absolute path: /tmp/x": lambda nb: nb.cells[2].update(source="open('/tmp/x')"),
    "writes to stderr: 'careful'": lambda nb: nb.cells[2].outputs.append(text_output("careful\n", "stderr")),
    "holds a progress bar": lambda nb: nb.cells[2].outputs.append(text_output(" 40%|████      | 4/10\n")),
    "holds a memory address": lambda nb: nb.cells[2].outputs.append(text_output("<object at 0x7f00aa11bb22>\n")),
}


@pytest.mark.parametrize("said", BROKEN)
def test_a_broken_rule_is_named(problems, sample_chapter, said):
    BROKEN[said](sample_chapter)
    found = problems(sample_chapter)
    assert len(found) == 1 and said in found[0], found


def test_links_and_urls_are_no_paths(problems, sample_chapter):
    sample_chapter.cells[0].source += "\n\nSee https://example.org/home/page and `chapters/tmp/x`, a/tmp/b."
    assert problems(sample_chapter) == []


def test_what_is_not_normalised_is_told(problems, sample_chapter):
    sample_chapter.cells[2].metadata["collapsed"] = True
    assert problems(sample_chapter, normalise=False) == [
        "is not normalised: `minillm check --execute` writes it in its stable form"
    ]


def test_exercises_and_solutions_carry_no_outputs(problems, sample_solution):
    assert problems(sample_solution, "solutions") == []
    sample_solution.cells[-1].outputs = [text_output("4\n")]
    assert problems(sample_solution, "solutions") == ["has saved outputs; exercises and solutions carry none"]


def test_an_exercise_names_sections_that_exist(problems, sample_chapter, sample_solution):
    text = "\n\n## Idea: *one* table\n\n### Optional: more"
    sample_chapter.cells[0].source += text
    problems(sample_chapter)
    statement = sample_solution.cells[3]
    begin, end = statement.source.split("\n", 1)

    def needing(line):
        statement.source = f"{begin}\n*Needs: {line}*\n{end}"
        return problems(sample_solution, "solutions")

    assert (
        needing('the sections "Idea: one table" and "Optional: more", "more", exercise 1, and "Anything" above.') == []
    )
    assert needing('the section "Idea".') == ['needs "Idea", which is no heading of chapter 06']
    assert needing('"Idea: one table" in chapter 07.') == []  # there is no chapter 07 here to compare with


@pytest.fixture
def made_up_package(tmp_path, monkeypatch):
    """A package whose rooms are built in chapters 02 and 09, re-exported by the room of chapter 02."""
    package = tmp_path / "minillm"
    for name, text in {
        "__init__": '"""The front door."""',
        "model/__init__": '"""Built in chapter 02."""\nfrom .layers import Norm\nfrom .late import Late',
        "model/layers": '"""Built in chapter 02."""\nclass Norm: ...',
        "model/late": '"""Built in chapter 09."""\nclass Late: ...',
        "book/__init__": '"""Built in chapter 99."""',
    }.items():
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(lint, "PACKAGE", package)


@pytest.mark.parametrize(
    "source, said",
    [
        ("from minillm.model.late import Late", "minillm.model.late"),
        ("import minillm.model.late", "minillm.model.late"),
        ("from minillm.model import Norm, Late", "minillm.model.late"),
        ("from minillm.model import late", "minillm.model.late"),
        ("def f():\n    from minillm.model.late import Late", "minillm.model.late"),
        ("from minillm.model import Norm", None),
        ("from minillm import LLM, SamplingParams", None),
        ("import minillm.book", None),
        ("import torch", None),
    ],
)
def test_chapters_do_not_look_ahead(problems, sample_chapter, made_up_package, source, said):
    sample_chapter.cells[2].source, sample_chapter.cells[2].outputs = source, []
    sample_chapter.cells[2].metadata.tags = []
    expected = [f"imports {said}, which chapter 09 builds; this is chapter 06"] if said else []
    assert problems(sample_chapter) == expected


def test_chapter_00_may_look_ahead(tmp_path, sample_chapter, made_up_package):
    sample_chapter.cells[2].source = "import minillm.model.late\nprint(4)"
    sample_chapter.cells[0].source = sample_chapter.cells[0].source.replace("06", "00")
    path = tmp_path / "chapters" / "00_sample.ipynb"
    path.parent.mkdir()
    path.write_text(nbfile.dumps(nbfile.normalise(sample_chapter)))
    assert notebooks.lint(path) == []


def test_normalising_drops_what_changes_and_keeps_what_is_read(sample_chapter):
    before = nbfile.dumps(sample_chapter)
    fig, _ = canvas(width=1, height=1)
    data, metadata = picture(fig, "Nothing.")._repr_mimebundle_()
    cell = sample_chapter.cells[2]
    cell.metadata.update({"execution": {"iopub.status.busy": "2025"}, "scrolled": True, "id": "x", "colab": {}})
    cell.outputs = [
        text_output("a"),
        text_output("b"),
        data_output({**data, "application/vnd.jupyter.widget-view+json": {"model_id": "1f"}}, metadata),
        data_output(
            {"application/vnd.jupyter.widget-view+json": {"model_id": "2e"}, "text/plain": "VBox(children=())"}
        ),
    ]
    sample_chapter.metadata.update(
        {"widgets": {"state": {}}, "language_info": {"name": "python", "version": "3.12.1"}, "colab": {}}
    )
    cell["id"] = "random"
    clean = nbfile.normalise(sample_chapter)
    outputs = clean.cells[2].outputs
    assert [o.output_type for o in outputs] == ["stream", "display_data"] and outputs[0].text == "ab"
    assert set(outputs[1].data) == {"image/png", "text/plain"} and outputs[1].metadata["image/png"]["alt"] == "Nothing."
    assert dict(clean.metadata) == {
        "book": sample_chapter.metadata.book,
        "language_info": {"name": "python"},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    }
    assert clean.cells[2].metadata == {"tags": ["nbval-check-output"]}
    cell.outputs = [text_output("4\n")]
    assert nbfile.dumps(nbfile.normalise(sample_chapter)) == before
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")


def test_cell_ids_follow_content_and_stay_unique(sample_chapter):
    twin = nbformat.v4.new_code_cell(sample_chapter.cells[2].source)
    ids = [cell["id"] for cell in nbfile.normalise(sample_chapter).cells]
    sample_chapter.cells.append(twin)
    again = [cell["id"] for cell in nbfile.normalise(sample_chapter).cells]
    assert again[:3] == ids and again[3] == f"{ids[2]}-2"


def test_execute_saves_outputs_counts_and_nothing_volatile(tmp_path, sample_chapter):
    path = tmp_path / "chapters" / "06_sample.ipynb"
    path.parent.mkdir()
    source = nbfile.clear_outputs(sample_chapter)
    source.cells.append(
        nbformat.v4.new_code_cell("import os\nos.path.basename(os.getcwd())", metadata={"tags": ["nbval-check-output"]})
    )
    nbfile.write(nbfile.normalise(source), path)
    notebooks.execute(path)
    saved = nbfile.read(path)
    assert [cell.execution_count for cell in saved.cells[1:]] == [1, 2, 3]
    assert saved.cells[2].outputs[0].text == "4\n" and saved.cells[3].outputs[0].data["text/plain"] == "'chapters'"
    lines = []
    assert notebooks.check([path], report=lines.append) == [] and lines == ["chapters/06_sample.ipynb: clean"]
