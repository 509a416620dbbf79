"""A GPU's defaults on a CPU: engines take them where MINILLM_LIKE_A_GPU asks, and notebooks run with them as saved."""

from __future__ import annotations

import copy

import nbformat
import pytest

from minillm.book import like_a_gpu, nbfile
from minillm.book.paths import notebooks
from minillm.device import GPU_DEFAULTS, LIKE_A_GPU
from minillm.engine.config import EngineConfig
from minillm.engine.engine import Engine
from minillm.kv_cache.triton_attention import TritonAttention
from minillm.model.checkpoint import load_model
from tests.helpers.kernel_cases import needs_triton
from tests.helpers.tiny import save_tiny_llama

# The cheapest chapters that failed: the one took it for granted that a layer is called, the other that steps are
# scheduled in turn.
SAMPLE = [path for path in notebooks("chapters") if path.name[:2] in ("04", "05")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder, head_dim=16)
    return load_model(folder, "float32", "cpu")


def engine_of(model, **settings) -> Engine:
    return Engine(model, config=EngineConfig("", num_kv_blocks=20, max_num_seqs=2, **settings))


def test_a_cpu_schedules_ahead_where_it_is_asked_to(model, monkeypatch):
    assert not engine_of(model).overlap
    monkeypatch.setenv(LIKE_A_GPU, "ahead")
    assert engine_of(model).overlap
    assert not engine_of(model, async_scheduling=False).overlap  # what is asked for explicitly keeps its meaning
    assert not isinstance(engine_of(model).runner.attention, TritonAttention)


@needs_triton
def test_a_cpu_attends_in_triton_and_records_steps_where_it_is_asked_to(model, monkeypatch):
    monkeypatch.setenv(LIKE_A_GPU, "ahead, triton")
    runner = engine_of(model).runner
    assert isinstance(runner.attention, TritonAttention) and runner.graphs is not None
    assert not isinstance(engine_of(model, attention_backend="torch").runner.attention, TritonAttention)
    monkeypatch.setenv(LIKE_A_GPU, "")
    assert not isinstance(engine_of(model).runner.attention, TritonAttention)


def test_a_default_that_no_gpu_has_is_refused(model, monkeypatch):
    monkeypatch.setenv(LIKE_A_GPU, "ahead,recorded")
    with pytest.raises(ValueError, match="MINILLM_LIKE_A_GPU='recorded' is no default of a GPU; use ahead or triton"):
        engine_of(model)


def cell(source: str, *outputs, tag: str = "nbval-check-output"):
    return nbformat.v4.new_code_cell(source, outputs=list(outputs), execution_count=1, metadata={"tags": [tag]})


def printed(text: str):
    return nbformat.v4.new_output("stream", name="stdout", text=text)


def shown(**data):
    return nbformat.v4.new_output("display_data", data={kind.replace("_", "/"): value for kind, value in data.items()})


def differences(saved, ran) -> list[str]:
    nbs = [nbformat.v4.new_notebook(cells=copy.deepcopy([one])) for one in (saved, ran)]
    return [problem.message for problem in like_a_gpu.compare(*nbs, SAMPLE[0])]


def test_checked_outputs_are_compared_and_nothing_else():
    assert differences(cell("f()", printed("4\n")), cell("f()", printed("4\n"))) == []
    assert differences(cell("f()", printed("a\n41\n")), cell("f()", printed("a\n42\n"))) == [
        "[1] `f()` shows '42'; saved is '41'"
    ]
    assert differences(cell("f()", printed("4\n")), cell("f()")) == ["[1] `f()` shows nothing; saved is stdout"]
    assert differences(cell("f()", printed("4\n")), cell("f()", printed("4\n5\n"))) == [
        "[1] `f()` shows 2 lines; saved are 1"
    ]
    assert differences(cell("f()", printed("4\n"), tag="measured"), cell("f()", printed("5\n"), tag="measured")) == []
    coloured = [
        cell("f()", shown(text_html=f'<b>x</b><span style="{style}">y</span>', image_png=style))
        for style in ("red", "blue")
    ]
    assert differences(*coloured) == []
    error = nbformat.v4.new_output("error", ename="KeyError", evalue="'x'", traceback=[])
    assert differences(cell("f()", tag="measured"), cell("f()", error, tag="measured")) == [
        "[1] `f()` raises KeyError: 'x'"
    ]
    assert differences(cell("f()", tag="raises-exception"), cell("f()", error, tag="raises-exception")) == []


def test_a_notebook_runs_with_the_defaults_to_its_end_and_is_not_saved(sample_chapter, tmp_path):
    sample_chapter.cells += [
        cell("import os\n1 / 0"),
        cell(f"print(os.environ['{LIKE_A_GPU}'])", printed("nothing\n")),
        cell("print(9)", printed("9\n")),
    ]
    path = tmp_path / "06_sample.ipynb"
    nbfile.write(nbfile.normalise(sample_chapter), path)
    before, counted, said = path.read_bytes(), [], []
    problems = like_a_gpu.check([path], report=said.append, advance=counted.append)
    assert [problem.message for problem in problems] == [
        "[3] `import os` raises ZeroDivisionError: division by zero",
        (
            f"[4] `print(os.environ['{LIKE_A_GPU}'])` shows '{','.join(like_a_gpu.defaults_for(path))}'; "
            "saved is 'nothing'"
        ),
    ]
    assert path.read_bytes() == before
    assert len(counted) == like_a_gpu.num_code_cells(path) == 5 and len(said) == 1 and said[0].endswith("2 problems")


@pytest.mark.parametrize("path", SAMPLE, ids=lambda path: path.stem)
def test_a_sample_of_the_chapters_gives_what_is_saved(path):
    assert [str(problem) for problem in like_a_gpu.run(path, like_a_gpu.defaults_for(path))] == []


@needs_triton
def test_the_sample_runs_with_every_default():
    assert set().union(*map(like_a_gpu.defaults_for, SAMPLE)) == set(GPU_DEFAULTS)
