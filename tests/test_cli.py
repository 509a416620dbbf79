"""The command line: what it lists, what it says, and that a mistake ends in one clear line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
from typer.testing import CliRunner

from minillm import cli
from minillm.bench import decode, ladder, measure, tasks
from minillm.bench.decode import Shape, write_random_checkpoint

TOY = Shape(vocab_size=512, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return str(write_random_checkpoint(TOY, tmp_path_factory.mktemp("toy")))


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch):
    """A busy machine is warned of on stderr; here that would stand between the lines."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], env={"COLUMNS": "140"})


def one_line_error(result, *words):
    assert result.exit_code == 1, result.output
    line = result.stderr.strip()
    assert line.startswith("error:") and "\n" not in line and "Traceback" not in line, line
    assert all(word in line for word in words), line


def test_help_lists_what_exists_and_nothing_else():
    result = run("--help")
    assert result.exit_code == 0
    names = [command.name or command.callback.__name__ for command in cli.app.registered_commands]
    assert names + [group.name for group in cli.app.registered_groups] == [
        "lab",
        "tour",
        "generate",
        "serve",
        "train",
        "quantize",
        "check",
        "progress",
        "bench",
        "course",
    ]
    assert all(name in result.stdout for name in names)


@pytest.mark.parametrize(
    "command",
    [
        "lab",
        "tour",
        "generate",
        "serve",
        "train",
        "check",
        "bench",
        "bench decode",
        "bench tasks",
        "bench ladder",
        "bench host",
        "bench compare",
    ],
)
def test_every_command_explains_itself(command):
    result = run(*command.split(), "--help")
    assert result.exit_code == 0 and len(result.stdout) > 200


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from minillm.cli import app; from typer.testing import CliRunner; "
        "assert CliRunner().invoke(app, ['lab', '--help']).exit_code == 0; "
        "print([m for m in ('torch', 'transformers', 'matplotlib', 'numpy') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


# lab


@pytest.mark.parametrize("user, more", [(1000, []), (0, ["--allow-root"])])
def test_lab_opens_chapter_00(tmp_path, monkeypatch, user, more):
    monkeypatch.setattr("os.geteuid", lambda: user)
    (tmp_path / "chapters").mkdir()
    (tmp_path / "chapters" / "00_start_here.ipynb").write_text("{}")
    calls = []
    monkeypatch.setattr(cli, "clone", lambda: tmp_path)
    monkeypatch.setattr(subprocess, "call", lambda command, cwd: calls.append((command, cwd)) or 0)
    assert run("lab", "--no-browser", "--port", 9123).exit_code == 0
    [(command, cwd)] = calls
    expected = [
        f"--ServerApp.root_dir={tmp_path}",
        "--LabApp.default_url=/lab/tree/chapters/00_start_here.ipynb",
        "--port=9123",
    ]
    assert command == [sys.executable, "-m", "jupyter", "lab", *expected, "--no-browser", *more]
    assert cwd == tmp_path


def test_the_server_reaches_the_exercises_and_opens_chapter_00(tmp_path, monkeypatch):
    """A real server, on a port of its own choice: what it serves, and where its first page leads."""
    calls = []
    monkeypatch.setattr(subprocess, "call", lambda command, cwd: calls.append(command) or 0)
    assert run("lab", "--no-browser", "--port", 0).exit_code == 0
    here = {
        name: str(tmp_path) for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")
    }
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(calls[0], env=os.environ | here, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:

        def get(path: str):
            about = json.loads(next(tmp_path.glob("jpserver-*.json")).read_text())
            request = urllib.request.Request(
                f"http://127.0.0.1:{about['port']}{path}", headers={"Authorization": f"token {about['token']}"}
            )
            return opener.open(request, timeout=30)

        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for _ in range(600):  # it writes the file before it listens
            try:
                get("/api")
                break
            except (StopIteration, ValueError, ConnectionError, urllib.error.URLError):
                assert server.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.1)
        for folder in ("chapters", "exercises"):
            names = {entry["name"] for entry in json.load(get(f"/api/contents/{folder}"))["content"]}
            assert "01_one_token_at_a_time.ipynb" in names
        assert urllib.parse.urlparse(get("/").url).path == "/lab/tree/chapters/00_start_here.ipynb"
    finally:
        server.kill()
        server.wait()


def test_lab_without_chapters_says_where_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "clone", lambda: tmp_path)
    one_line_error(run("lab"), "chapters", "clone")


# generate


def test_generate_streams_text_and_reports_on_stderr(toy):
    result = run("generate", "Once upon a time", "--model", toy, "--max-tokens", 12, "--seed", 1)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Once upon a time") and result.stdout.endswith("\n")
    assert "tokens" in result.stderr and "first token after" in result.stderr
    assert "first token" not in result.stdout
    assert run("generate", "Once upon a time", "--model", toy, "--max-tokens", 12, "--seed", 1).stdout == result.stdout
    assert run("generate", "Once upon a time", "--model", toy, "--max-tokens", 12, "--seed", 2).stdout != result.stdout


def test_generate_says_what_the_engine_says(toy):
    from minillm import LLM, SamplingParams

    [expected] = LLM(toy).generate("The sea", SamplingParams(temperature=0.0, max_tokens=9), use_tqdm=False)
    result = run("generate", "The sea", "--model", toy, "--max-tokens", 9, "--temperature", 0)
    assert result.stdout == "The sea" + expected.outputs[0].text + "\n"


def test_chat_prints_the_answer_alone(toy):
    from minillm import LLM, SamplingParams

    [expected] = LLM(toy).chat(
        [{"role": "user", "content": "Hello!"}], SamplingParams(temperature=0.0, max_tokens=9), use_tqdm=False
    )
    result = run("generate", "Hello!", "--chat", "--model", toy, "--max-tokens", 9, "--temperature", 0)
    assert result.exit_code == 0 and result.stdout == expected.outputs[0].text + "\n"


def test_mistakes_end_in_one_line(toy):
    one_line_error(run("generate", "x", "--model", toy, "--temperature", -1), "temperature", "-1")
    one_line_error(run("generate", "x", "--model", toy, "--top-p", 3), "top_p", "3")
    one_line_error(run("generate", "x", "--model", toy, "--device", "abacus"), "abacus")
    one_line_error(run("generate", "x", "--model", "no-such-model"), "no-such-model")
    one_line_error(run("generate", "", "--model", toy, "--max-tokens", 0), "max_tokens")


def test_traceback_shows_where_it_came_from(toy):
    result = run("--traceback", "generate", "x", "--model", toy, "--temperature", -1)
    assert isinstance(result.exception, ValueError)


# train


def test_train_goes_on_where_it_was_and_the_result_speaks(tmp_path, monkeypatch):
    from minillm import training

    toy = training.TrainingConfig(
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=64,
        context=64,
        tokens_per_batch=128,
        stages=((1.0, 64),),
    )
    monkeypatch.setitem(training.PRESETS, "tinyworld", toy)
    out = tmp_path / "model"
    result = run("train", "--tokens", 256, "--out", out, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert (out / "model.safetensors").exists() and "loss" in result.stdout and "generate" in result.stdout
    one_line_error(run("train", "--out", out), "finished model")
    assert run("train", "--tokens", 128, "--out", out, "--device", "cpu", "--overwrite").exit_code == 0
    one_line_error(run("train", "--preset", "giant", "--out", tmp_path / "x"), "giant", "tinyworld-draft")
    assert run("generate", "Tom", "--model", out, "--max-tokens", 4).exit_code == 0


# tour and bench


def test_the_tour_prints_the_ladder(toy):
    result = run("tour", "--model", toy, "--max-tokens", 6, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert all(rung.name in result.stdout for rung in ladder.RUNGS)
    one_line_error(run("tour", "--model", "no-such-model"), "no-such-model")


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("tasks", ["--model", "TOY", "--documents", 1, "--task", "json", "--task", "story"]),
        ("ladder", ["--model", "TOY", "--max-tokens", 4]),
        ("decode", ["--shape", "toy", "--dtype", "float32", "--prompt-tokens", 4, "--output-tokens", 4]),
        ("host", ["--model", "TOY", "--batch", 2, "--arrivals", 2, "--prompt-tokens", 4, "--steps", 2]),
    ],
)
def test_a_benchmark_writes_its_result_where_it_is_told(name, arguments, toy, tmp_path, monkeypatch):
    monkeypatch.setitem(decode.SHAPES, "toy", TOY)
    monkeypatch.setattr(tasks, "MAX_TOKENS", dict.fromkeys(tasks.MAX_TOKENS, 4))
    result = run("bench", name, *[toy if a == "TOY" else a for a in arguments], "--device", "cpu", "--save", tmp_path)
    assert result.exit_code == 0, result.output
    [path] = tmp_path.glob("*.json")
    assert path.name.startswith(name) and path.name in result.stderr.replace("\n", "")
    assert json.loads(path.read_text())["figures"]


def test_a_benchmark_writes_nothing_unasked(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "MAX_TOKENS", dict.fromkeys(tasks.MAX_TOKENS, 4))
    before = sorted(measure.RESULTS.glob("*.json"))
    assert run("bench", "tasks", "--model", toy, "--documents", 1, "--task", "json").exit_code == 0
    assert sorted(measure.RESULTS.glob("*.json")) == before


def test_a_busy_machine_is_warned_of(toy, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0), raising=False)
    assert "busy: 1000.0 of" in run("bench", "decode", "--shape", "huge").stderr


def test_benchmarks_name_what_is_wrong(toy):
    one_line_error(run("bench", "decode", "--shape", "huge"), "huge", "smollm2-135m")
    one_line_error(
        run("bench", "decode", "--repeats", 2, "--shape", "tinyworld", "--output-tokens", 4), "repeats=2", "5"
    )
    one_line_error(run("bench", "tasks", "--model", toy, "--task", "poem"), "poem")
    one_line_error(run("bench", "tasks", "--model", toy, "--seed", 0), "seed=0")


# check


def test_check_lists_the_problems_and_fails(tmp_path, monkeypatch):
    from minillm.book import notebooks

    monkeypatch.setattr(
        notebooks, "check", lambda paths, **how: ["01: a cell was not run"] if how["execute_first"] else []
    )
    assert run("check").exit_code == 0
    result = run("check", "--execute")
    assert result.exit_code == 1 and "01: a cell was not run" in result.stdout and not result.stderr


def test_check_like_a_gpu_lists_the_cells_and_fails(monkeypatch):
    from minillm.book import like_a_gpu

    monkeypatch.setattr(
        like_a_gpu, "check", lambda paths, **how: [f"{path.name}: a cell differs" for path in paths[5:6]]
    )
    result = run("check", "--like-a-gpu")
    assert (
        result.exit_code == 1
        and "05_continuous_batching.ipynb: a cell differs" in result.stdout
        and not result.stderr.strip()
    )
    assert "clean" not in result.stdout  # the lint was not asked for
    assert run("check", "--like-a-gpu", "chapters/00_start_here.ipynb").exit_code == 0


def test_badges_need_a_repository():
    one_line_error(run("check", "--badges"), "--repository")
    one_line_error(run("check", "--repository", "a/b"), "--badges")
    one_line_error(run("check", "--badges", "--repository", "nonsense"), "nonsense", "owner/name")
