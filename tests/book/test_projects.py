"""The projects of chapter 25: harnesses that count right and cannot be reached, a leaderboard that can be run again."""

from __future__ import annotations

import dataclasses
import json
import threading

import pytest
import torch
from typer.testing import CliRunner

from minillm.book import exercises, nbfile
from minillm.book.paths import notebooks
from minillm.book.projects import leaderboard, router, scheduler
from minillm.book.projects.catalogue import NAMES, find_project
from minillm.book.projects.leaderboard import Entry, places
from minillm.book.projects.run import Outcome, run, run_here
from minillm.book.projects.scheduler import Asked, Baseline, Plan
from minillm.book.projects.scoring import Project, Refused, Score
from minillm.book.projects.source import load, read_source, source_hash
from minillm.engine.metrics import Targets
from minillm.engine.simulator import StepRecorder, replay, simulated_engine
from minillm.kernels.language import MODE

SOLUTIONS = next(path for path in notebooks("solutions") if path.name.startswith("25"))
INTERPRETED = pytest.mark.skipif(MODE != "interpreted", reason="counts in Triton's interpreter")


@pytest.fixture(scope="module")
def references():
    """Project -> the reference's source, from the solutions."""
    found = {one.id: one.solution for one in exercises.exercises_in(nbfile.read(SOLUTIONS))}
    return {name: found[name] for name in NAMES}


@pytest.fixture(scope="module")
def outcomes(references):
    return {name: run_here(references[name], name, find_project(name).seeds) for name in ("scheduler", "router")}


# The harnesses.


@pytest.mark.parametrize("seed", [1, 2])
def test_the_schedulers_baseline_takes_the_engines_own_steps(seed):
    trace = scheduler.make_trace(seed)
    engine = simulated_engine(
        scheduler.COST,
        scheduler.NUM_BLOCKS,
        enable_prefix_caching=False,
        max_num_seqs=scheduler.MAX_NUM_SEQS,
        max_num_batched_tokens=scheduler.BUDGET,
    )
    engine.runner = StepRecorder(engine.runner)
    replay(engine, [scheduler.to_request(str(index), one) for index, one in enumerate(trace)])
    _, ours = scheduler.serve(Baseline, trace, wrap=StepRecorder)
    # Which block a request gets may differ: a plan gives blocks back before it takes any.
    steps, expected = (
        [([row[:3] for row in rows], preempted) for rows, preempted, *_ in one.runner.summaries]
        for one in (ours, engine)
    )
    assert steps == expected
    assert any(preempted for _, preempted in steps)
    assert ours.clock() == engine.clock()


def test_the_references_beat_the_baselines_by_the_figures_that_the_statements_give(outcomes):
    statements = {
        cell.metadata.nbgrader.grade_id: cell.source
        for cell in nbfile.read(SOLUTIONS).cells
        if cell.cell_type == "markdown" and "nbgrader" in cell.metadata
    }
    for name, outcome in outcomes.items():
        project = find_project(name)
        baseline = [project.score(project.baseline, seed).value for seed in project.seeds]
        for values in (outcome.values, baseline):
            told = ", ".join(f"{value:.0f}" for value in values[:-1]) + f" and {values[-1]:.0f}"
            assert told in statements[f"{name}_statement"], (name, told)
        assert outcome.gain > 1.05, name


@INTERPRETED
def test_the_kernels_reference_and_its_statement(references):
    outcome = run_here(references["kernel"], "kernel", [1])
    project = find_project("kernel")
    text = next(cell.source for cell in nbfile.read(SOLUTIONS).cells if cell.source.startswith("## 4"))
    assert outcome.is_valid, outcome.why
    assert outcome.gain > 2
    for value in (outcome.values[0], project.score(project.baseline, 1).value):
        assert f"{value:,.0f}" in text


def test_a_score_is_the_same_again_and_another_on_another_seed():
    for project in (scheduler.PROJECT, router.PROJECT):
        first, again, other = (project.score(project.baseline, seed) for seed in (1, 1, 2))
        assert first == again and first.figures != other.figures


def test_kept_promises_are_counted_from_the_records():
    quick, never = Targets(ttft=10.0, tpot=10.0), Targets(ttft=1e-9)
    kinds = [dataclasses.replace(scheduler.CHAT, targets=targets) for targets in (quick, never, quick)]
    trace = [Asked(float(place), kind, 40, 16) for place, kind in enumerate(kinds)]
    score = scheduler.score(Baseline, 0, trace)
    figures = score.figures
    assert score.value == 2
    assert (figures["chats kept"], figures["chats"], figures["preemptions"]) == (2, 3, 0)
    assert figures["tokens"] == 3 * (40 + 15), "the last token of an answer is not processed"


class _Once:
    """A plan of its own for the first step in which a request is there, the baseline's then."""

    def __init__(self, change):
        self.change, self.baseline, self.seen = change, Baseline(), []

    def plan(self, view):
        self.seen.append(view)
        return self.change(view, self.baseline.plan(view))


def _serve(change, trace=None):
    made = []

    class Submission(_Once):
        def __init__(self):
            super().__init__(change)
            made.append(self)

    scheduler.serve(Submission, trace or [Asked(0.0, scheduler.CHAT, 40, 16)] * 3)
    return made[0]


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda view, plan: None, "return Plan"),
        (lambda view, plan: Plan({}), "the plan has no token, and 3 requests are not finished"),
        (lambda view, plan: Plan({"0": 0}), "0 tokens for request '0'; a whole number from 1 on"),
        (lambda view, plan: Plan({"0": True}), "True tokens for request '0'"),
        (lambda view, plan: Plan({"0": 1.0}), r"1\.0 tokens for request '0'"),
        (lambda view, plan: Plan({"0": torch.tensor(1)}), r"tensor\(1\) tokens"),
        (lambda view, plan: Plan({"0": 41}), "41 tokens for request 0, of which 40 are missing"),
        (lambda view, plan: Plan({"7": 1}), "there is no request '7'"),
        (lambda view, plan: Plan({7: 1}), "7 is no request's id; ids are strings"),
        (lambda view, plan: Plan({"0": 1}, (None,)), "None is no request's id"),
        (lambda view, plan: Plan({"0": 1025}), "1025 tokens in all; the budget is 1024"),
        (lambda view, plan: Plan({"0": 1}, ("0",)), "request '0' cannot be preempted"),
        (lambda view, plan: Plan({"0": 1}, ("1",)), "request '1' cannot be preempted"),
        (lambda view, plan: Plan([("0", 1)]), "return Plan"),
        (lambda view, plan: view.boom, "plan raised AttributeError"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused_with_the_step(change, told):
    with pytest.raises(Refused, match=told) as refused:
        _serve(change)
    assert "step 1, at 0.000 s" in str(refused.value)


def test_memory_places_and_steps_are_the_harness_own_accounts():
    many = [Asked(0.0, scheduler.CHAT, 40, 16)] * 60
    with pytest.raises(Refused, match="request 48 would be number 49 of those that run"):
        _serve(lambda view, plan: Plan({one.request_id: 1 for one in view.waiting}), many)
    large = [Asked(0.0, scheduler.DOCUMENT, 6000, 96)] * 6
    greedy = lambda view, plan: Plan({one.request_id: min(one.missing, 170) for one in view.running + view.waiting})
    with pytest.raises(Refused, match="no room for"):
        _serve(greedy, large)

    class Slow:
        def plan(self, view):
            one = (view.running or view.waiting)[0]
            return Plan({one.request_id: 1})

    with pytest.raises(Refused, match="more than 20 times as many steps"):
        scheduler.score(Slow, 0, [Asked(0.0, scheduler.DOCUMENT, 6000, 16)])


def test_what_is_checked_of_a_plan_is_what_is_done(monkeypatch):
    """A plan whose `tokens` are others at the second look."""
    looks = iter([{"0": 1}, {"0": 4000}, {"0": 4000}])

    class Changing:
        def __init__(self):
            self.made = Plan({})
            monkeypatch.setattr(Plan, "tokens", property(lambda plan: next(looks)), raising=False)

        def plan(self, view):
            return self.made

    with pytest.raises(Refused, match=r"step 2, .*4000 tokens in all"):
        scheduler.serve(Changing, [Asked(0.0, scheduler.CHAT, 40, 16)])


def test_each_seed_begins_with_a_fresh_source():
    source = """
SEEN = []

class MyRouter:
    def pick(self, arrival, loads):
        SEEN.append(arrival)
        return len(loads) if arrival.number < len(SEEN) - 1 else 0
"""
    assert run_here(source, "router", [1, 1]).is_valid


def test_a_view_holds_no_future_and_nothing_of_the_engine():
    trace = [Asked(0.0, scheduler.CHAT, 40, 17), Asked(5.0, scheduler.CHAT, 40, 99)]
    made = _serve(lambda view, plan: plan, trace)
    for view in made.seen:
        assert all(one.arrival <= view.now for one in view.running + view.waiting)
        for one in view.running + view.waiting:
            assert one.max_tokens == scheduler.CHAT.answer[1]
            values = [getattr(one, field.name) for field in dataclasses.fields(one)]
            assert all(isinstance(value, (str, int, float, type(None))) for value in values)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.seen[0].now = 0.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.seen[0].waiting[0].num_computed = 40


@pytest.mark.parametrize("wrong", [-1, 12, True, 1.0, None, "replica-0"])
def test_a_router_returns_the_index_of_a_replica(wrong):
    class Submission:
        def pick(self, arrival, loads):
            return wrong

    with pytest.raises(Refused, match=r"request 0: pick returned .*from 0 to 11"):
        router.score(Submission)


def test_a_router_sees_no_answer_and_no_live_state():
    seen = []

    class Submission:
        def pick(self, arrival, loads):
            seen.append((arrival, loads))
            return arrival.number % len(loads)

    score = router.score(Submission, 3)
    trace = list(router.make_trace(3))
    assert [(one.number, one.prompt_tokens) for one, _ in seen] == [
        (i, one.input_length) for i, one in enumerate(trace)
    ]
    fields = {field.name for one in seen[0] for field in dataclasses.fields(one[0] if isinstance(one, tuple) else one)}
    assert fields == {"number", "prompt_tokens", "block_hashes", "num_requests", "num_tokens", "cached_tokens"}
    assert score.figures["requests"] == len(trace)
    assert score.value == pytest.approx(
        score.figures["P99 of TTFT (ms)"] + router.PRICE * score.figures["KV computed (GB)"], abs=0.01
    )


@INTERPRETED
def test_the_kernels_cost_is_that_of_the_busiest_multiprocessor():
    from minillm.book.projects import kernel

    case = kernel.Case.make(kernel.Shape(17, 5), torch.Generator().manual_seed(0))
    counts = kernel.counts(case.run(kernel.baseline))
    case.check()
    row = 5 * 4  # bytes of a row in float32
    per_program = [3 * row, 3 * row, row + 5 + 4]  # add; norm, with the weight; quantize
    # Rows 0 and 16 share a multiprocessor in each of the three launches.
    assert counts["cost"] == sum(kernel.PER_LAUNCH + 2 * (kernel.PER_PROGRAM + one) for one in per_program)
    assert (counts["launches"], counts["programs"]) == (3, 51)
    assert counts["bytes loaded"] == 17 * (2 * row + 2 * row + row)
    assert counts["bytes stored"] == 17 * (row + row + 5 + 4)


@INTERPRETED
@pytest.mark.parametrize(
    "change, told",
    [
        (("+ 0.5)", "+ 0.0)"), r"codes\[0, 0\]|codes\["),
        (("tl.sum(h * h) / size", "tl.sum(h * h) / BLOCK"), "scales"),
        (("tl.store(residual_ptr + places, h, inside)", "pass"), "residual"),
        (("inside, other=0.0) + tl.load(residual", "inside) + tl.load(residual"), "residual|scales|codes"),
        (("rows, STRIDE):", "rows + 1, STRIDE):"), "raised"),
        (("    my_kernel[", "    residual.add_(x)\n    my_kernel["), "torch operation"),
        (("    my_kernel[", "    return\n    my_kernel["), "no Triton kernel was launched"),
    ],
)
def test_a_wrong_kernel_is_refused(references, change, told):
    from minillm.book.projects import kernel

    source = references["kernel"]
    assert source.count(change[0]) == 1, change
    launcher = load(source.replace(*change), kernel.PROJECT)
    case = kernel.Case.make(kernel.Shape(18, 33), torch.Generator().manual_seed(0))
    with pytest.raises(Refused, match=told):
        case.run(launcher)
        case.check()


@INTERPRETED
def test_numbers_that_were_read_outside_the_kernels_are_refused():
    """A launcher that computes in Python and lets a kernel store the results, one by one."""
    from minillm.book.projects import kernel
    from minillm.kernels.language import tl, triton

    @triton.jit
    def poke(out, place, value):
        tl.store(out + place, value)

    def launcher(x, residual, weight, eps, codes, scales):
        for place, (left, right) in enumerate(zip(x.tolist()[0], residual.tolist()[0])):
            poke[(1,)](residual, place, left + right)

    case = kernel.Case.make(kernel.Shape(1, 3), torch.Generator().manual_seed(0))
    with pytest.raises(Refused, match=r"no kernel loads x\[0, 0\]"):
        case.run(launcher)
    language = "from minillm.kernels.language import tl, triton\n"
    for line, told in {
        "x = print.tolist": "the attribute tolist is not allowed",
        "x = triton.runtime.interpreter": "triton.runtime is not allowed",
        "x = tl.core": "triton.language.core is not allowed",
        "tl.load = print": "tl.load may not be changed",
        "x = tl": "the module tl may only be used as tl.name",
    }.items():
        with pytest.raises(Refused, match=f"line 2: {told}"):
            load(language + line, kernel.PROJECT)


# Sources.


@pytest.mark.parametrize(
    "line, told",
    [
        ("import os", "import os is not allowed"),
        ("import minillm.engine.engine", "import minillm.engine.engine is not allowed"),
        ("from minillm.book.projects.scheduler import make_trace", "import make_trace is not allowed"),
        ("from minillm.book.projects import scheduler", "import scheduler is not allowed"),
        ("from math import *", r"import \* is not allowed"),
        ("from . import x", "is not allowed"),
        ("import math as m\nx = m", "the module m may only be used as m.name"),
        ("import statistics\nx = statistics.sys", "statistics.sys is not allowed"),
        ("import dataclasses\nx = dataclasses.sys.modules", "dataclasses.sys is not allowed"),
        ("from functools import update_wrapper", "import update_wrapper is not allowed"),
        ("import random\nx = random.random()", "random.random is not allowed"),
        ("x = ().__class__.__mro__", "the attribute __class__ is not allowed"),
        ("x = f'{().__class__}'", "the attribute __class__ is not allowed"),
        ("x = (i for i in ()).gi_frame.f_back", "the attribute (f_back|gi_frame) is not allowed"),
        ("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    x = e.__traceback__", "__traceback__ is not allowed"),
        ("import math\nmath.inf = 0", "math.inf may not be changed"),
        ("x = eval('1')", "eval is not allowed"),
        ("x = getattr(1, 'real')", "getattr is not allowed"),
        ("x = __builtins__", "__builtins__ is not allowed"),
        ("x = open('f')", "open is not allowed"),
        ("match 1:\n    case int(__class__=x):\n        pass", "the attribute __class__ is not allowed"),
        ("def f(:", "the source is no Python"),
        ("x = 1 / 0", "the source raised ZeroDivisionError"),
        ("x = 1", "does not define MyScheduler"),
        ("x = '" + "a" * 100_000 + "'", "the limit is 100,000"),
    ],
)
def test_a_source_that_reaches_out_is_refused(line, told):
    with pytest.raises(Refused, match=told):
        load(line, scheduler.PROJECT)


def test_an_honest_source_may_use_the_tools_of_the_trade():
    source = """
from __future__ import annotations
import heapq, math
import itertools as it
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random

from minillm.book.projects.scheduler import Plan

@dataclass
class Note:
    seen: Counter = field(default_factory=Counter)

class MyScheduler:
    def __init__(self):
        self.note, self._rng = Note(), Random(1)

    def plan(self, view):
        self.note.seen[view.now] += 1
        first = heapq.nsmallest(1, view.running + view.waiting, key=lambda one: (one.arrival, int(one.request_id)))[0]
        print("said", math.inf, list(it.islice([1], 1)), self._rng.random() < 2)
        return Plan({first.request_id: min(first.missing, view.budget)})
"""
    made = load(source, scheduler.PROJECT)
    requests, _ = scheduler.serve(made, [Asked(0.0, scheduler.CHAT, 40, 16)] * 2)
    assert all(one.is_finished for one in requests)


def test_a_submission_is_read_from_a_file_or_from_the_last_cell_that_defines_it(tmp_path):
    import nbformat

    project = scheduler.PROJECT
    cells = ["%matplotlib inline", "class MyScheduler:\n    old = 1", "x = 1", "class MyScheduler:\n    new = 1\n",
             "# Helpers.\n\ndef helper(): pass", "check(MyScheduler)", "def later(): pass"]  # fmt: skip
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    path = tmp_path / "übung eins.ipynb"
    nbformat.write(notebook, path)
    read = read_source(path, project)
    assert "new = 1" in read and "def helper" in read and "old" not in read and "later" not in read
    (tmp_path / "a.py").write_text("class MyScheduler: pass\n")
    assert read_source(tmp_path / "a.py", project) == "class MyScheduler: pass\n"
    with pytest.raises(ValueError, match="no code cell defines MyRouter, which project router asks for"):
        read_source(path, router.PROJECT)
    with pytest.raises(ValueError, match=r"a\.txt: a submission is a \.py file or a notebook"):
        read_source(tmp_path / "a.txt", project)


# The leaderboard.


def entry(name, gain=1.0, why="", project="router", seeds=(1,), source="a" * 64):
    return Entry(project, name, source, list(seeds), gain, [2.0] if not why else [], [], why)


def test_ties_share_a_rank_and_the_earlier_one_stands_first():
    entries = [entry("Ada", 1.5), entry("Bob", 2.0), entry("Cem", 1.5), entry("Dora", 1.2), entry("Eve", why="no"),
               entry("Ada", 1.1), entry("Dora", why="broken"), entry("Other", 9.0, project="scheduler")]  # fmt: skip
    assert [(place.rank, place.entry.name, place.entry.gain) for place in places(entries, "router")] == [
        (1, "Bob", 2.0),
        (2, "Ada", 1.5),
        (2, "Cem", 1.5),
        (4, "Dora", 1.2),
        (0, "Eve", 1.0),
    ]
    assert [place.entry.name for place in places([*entries, entry("Finn", 1.0, seeds=(7,))], "router")] == ["Finn"]
    assert places(entries, "kernel") == []


def test_the_gain_is_a_geometric_mean_over_the_seeds():
    half = Project(
        "half", "f", "x", more=False, seeds=(1,), score=lambda f, seed: Score(f * seed), baseline=8.0, imports={}
    )
    assert half.gain([Score(4.0), Score(4.0)], [1, 2]) == pytest.approx((2 * 4) ** 0.5)
    more = dataclasses.replace(half, more=True)
    assert more.gain([Score(16.0), Score(0.0)], [1, 2]) == 0.0
    with pytest.raises(ValueError, match="1 scores for 2 seeds"):
        half.gain([Score(1.0)], [1, 2])


def test_the_command_adds_prints_and_runs_again(tmp_path, references, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    from minillm.cli import app

    monkeypatch.setattr(leaderboard, "run", lambda source, project, seeds: run_here(source, project, seeds))
    board, file = tmp_path / "meine Rangliste", tmp_path / "Lösung.py"
    file.write_text(references["router"], encoding="utf-8")
    add = ["course", "leaderboard", str(board), "--add", str(file), "--project", "router", "--seed", "5"]
    done = CliRunner().invoke(app, [*add, "--name", "Zoë"])
    assert done.exit_code == 0, done.output
    file.write_text(references["router"].replace("return best\n", "return 99\n"), encoding="utf-8")
    done = CliRunner().invoke(app, [*add, "--name", "Max"])
    assert done.exit_code == 0 and "Max: not valid: request 0: pick returned 99" in done.output, done.output
    assert "   1  Zoë " in done.output and "not valid: request 0" in done.output
    done = CliRunner().invoke(app, ["course", "leaderboard", str(board), "--verify"])
    assert done.exit_code == 0 and done.output.count("the same again") == 2, done.output

    lines = (board / "entries.jsonl").read_text(encoding="utf-8").splitlines()
    boasting = json.loads(lines[0]) | {"gain": 99.0, "values": [0.1]}
    (board / "entries.jsonl").write_text(json.dumps(boasting) + "\n", encoding="utf-8")
    done = CliRunner().invoke(app, ["course", "leaderboard", str(board), "--verify"])
    assert done.exit_code == 1 and "where the entry has [0.1]" in done.output, done.output
    source = board / "sources" / f"{boasting['source']}.py"
    source.write_text("class MyRouter: pass")
    done = CliRunner().invoke(app, ["course", "leaderboard", str(board), "--verify"])
    assert done.exit_code == 1 and "was changed" in done.output, done.output


@pytest.mark.parametrize(
    "options, told",
    [
        ([], "no leaderboard here"),
        (["--add", "nowhere.py", "--project", "router", "--name", "A"], "nowhere.py"),
        (["--add", "x.py", "--project", "chess", "--name", "A"], "choose one of scheduler, kernel, router"),
        (["--add", "x.py", "--project", "router"], "1 to 60 printable characters"),
        (["--add", "x.py", "--project", "router", "--name", "a\nb"], "1 to 60 printable characters"),
    ],
)
def test_bad_input_to_the_command_is_told(tmp_path, monkeypatch, options, told):
    from minillm.cli import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(app, ["course", "leaderboard", str(tmp_path / "board"), *options])
    assert done.exit_code == 1 and told in " ".join(done.output.split()), done.output
    assert not (tmp_path / "board").exists()


def test_a_broken_line_of_the_file_is_named(tmp_path):
    (tmp_path / "entries.jsonl").write_text('{"project": "router"}\n')
    with pytest.raises(ValueError, match=r"entries\.jsonl, line 1: "):
        leaderboard.read(tmp_path)


def test_two_writers_at_once_lose_nothing(tmp_path):
    def write(place):
        for number in range(25):
            source = f"x = {number}"
            leaderboard.keep(tmp_path, entry(f"{place}", number, source=source_hash(source)), source)

    threads = [threading.Thread(target=write, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(leaderboard.read(tmp_path)) == 100
    assert len(list((tmp_path / "sources").glob("*.py"))) == 25


def test_a_run_in_its_own_process(references):
    outcome = run(references["router"], "router", [5])
    assert outcome == run_here(references["router"], "router", [5])
    assert run("while True: pass", "router", [1], seconds=0.2) == Outcome(why="took more than 0.2 s on 1 seeds")
    with pytest.raises(ValueError, match="at least one seed"):
        run("x", "router", [])
