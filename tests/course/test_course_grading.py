"""`minillm course grade`: honest answers earn what they deserve, dishonest ones nothing, and the reason is found."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import subprocess
import sys

import nbformat
import pytest

from minillm.book import nbfile
from minillm.book.exercises import exercises_in
from minillm.book.paths import notebooks
from minillm.book.proofs import load_mutants
from minillm.course import secret
from minillm.course.grading import landlock
from minillm.course.grading.confine import Limits
from minillm.course.grading.grade import histories
from minillm.course.grading.look import checkers_and_imports, look
from minillm.course.grading.plan import Source, reference_steps
from minillm.course.grading.submission import Grader, Submission
from minillm.course.grading.talk import Outcome, Talk, Verdict, know_speakers
from tests.course.dishonest import ATTACKS, RIGHT, TOLD
from tests.course.odd import CELLS
from tests.course.sample_assignment import SECRET, Assignment, answered, grade_id

# In the names of stored mistakes that are meant to be refused.
CHEATS = ("everything", "caller's frame", "the check's own reference")

pytest.importorskip("nbgrader", reason="needs nbgrader: pip install -e '.[test]'")
pytestmark = pytest.mark.filterwarnings("ignore:Non-unique cell id")


@pytest.fixture(scope="module")
def hidden_folder(tmp_path_factory):
    """A course's folder, which no submission may see."""
    folder = tmp_path_factory.mktemp("hidden course")
    (folder / ".grading-secret").write_text("4d" * 32)
    return folder


@pytest.fixture(scope="module")
def assignment(tmp_path_factory, hidden_folder):
    limits = Limits(memory=1.0, cell_seconds=20.0, line_seconds=20.0)
    made = Assignment(tmp_path_factory.mktemp("assignment"), limits, [hidden_folder])
    with made.worker:
        yield made


def points(grade):
    return {exercise.id: exercise.points for exercise in grade.exercises}


def messages(grade, exercise):
    return [part.message for e in grade.exercises if e.id == exercise for part in e.parts if not part.passed]


@contextlib.contextmanager
def limited(assignment, **changes):
    before = assignment.worker.limits
    assignment.worker.limits = dataclasses.replace(before, **changes)
    try:
        yield
    finally:
        assignment.worker.limits = before


def test_honest_answers_earn_full_marks(assignment):
    grade = assignment.grade_answers()
    assert points(grade) == {"lowest": 5, "twice": 5}
    assert grade.flags == [] and grade.status == "graded"
    assert [(e.title, e.minutes, e.max_points) for e in grade.exercises] == [
        ("The lowest", 30, 5),
        ("The twice", 30, 5),
    ]


def test_a_wrong_answer_earns_the_parts_that_it_passes_and_reads_the_message(assignment):
    grade = assignment.grade_answers(lowest="def lowest(free):\n    return sorted(free)[0]\n")
    assert points(grade) == {"lowest": 3, "twice": 5}
    assert "raised IndexError" in messages(grade, "lowest")[0] and grade.status == "graded"


@pytest.mark.parametrize("name", ATTACKS)
def test_a_dishonest_answer_earns_nothing_and_disturbs_no_other(assignment, name):
    attack = ATTACKS[name]
    with limited(assignment, line_seconds=0.5 if attack.message == "took more than" else 20.0):
        grade = assignment.grade_answers(**{attack.exercise: attack.answer})
    other = ({"lowest", "twice"} - {attack.exercise}).pop()
    assert points(grade) == {attack.exercise: 0, other: 5 * (not attack.spreads)}, grade
    if attack.message:
        assert any(attack.message in message for message in messages(grade, attack.exercise)), grade.exercises
    if attack.flag:
        found = [flag for flag in grade.flags if attack.flag in flag.reason and flag.refused]
        assert found, grade.flags
        assert not attack.line or any(flag.line == attack.line and flag.exercise for flag in found), found


@pytest.mark.parametrize("name", TOLD)
def test_a_person_is_told_of_attributes_that_are_found_without_their_name(assignment, name):
    source, told, line = TOLD[name]
    grade = assignment.grade_answers(lowest=source)
    assert points(grade) == {"lowest": 5, "twice": 5}, grade
    found = [flag for flag in grade.flags if told in flag.reason]
    assert [(flag.line, flag.exercise, flag.refused) for flag in found] == [(line, "lowest", False)], grade.flags


@pytest.mark.parametrize(
    "spoken",
    [
        [("begin", "1")],  # the first step has not begun
        [("begin", "0"), ("begin", "0")],  # which would move the time limit
        [("begin", "0"), ("end", "1", "0.1", "", "0")],
        [("begin", "0"), ("done",)],
        [("begin", "0"), ("broken", "the machine was too slow")],
        [("begin", "0"), ("end", "0")],
        [("begin", "0"), ("nothing",)],
        [("begin", "0"), ("end", "0", "0.1", "", "0"), ("begin", "99")],
    ],
)
def test_what_is_said_out_of_turn_forges_the_whole_submission(assignment, spoken):
    """A student's code that finds the channel can say what it likes; our own says each thing once, in its place."""
    steps, outcome = dict(enumerate(reference_steps(assignment.worker.source))), Outcome()
    outcome.verdicts["lowest", "example"] = Verdict(True, "")
    talk = Talk(assignment.worker.source, Limits(), steps, outcome, lambda exercise, part: 0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall("".join(json.dumps(["token", *fields]) + "\n" for fields in spoken).encode())
        theirs.shutdown(socket.SHUT_WR)
        assert talk.listen(ours, "token") == "it spoke out of turn and was stopped"
    assert outcome.forged and not outcome.verdicts and outcome.events[-1].refused


def test_the_students_test_cells_make_no_difference(assignment):
    """Edited, deleted, duplicated or moved: the graded lines are the lecturer's."""
    honest, wrong = answered(assignment.release, **assignment.right), answered(assignment.release, twice=RIGHT)
    for nb in (honest, wrong):
        lines = [cell for cell in nb.cells if grade_id(cell).rpartition("_")[2] in ("example", "edges", "random")]
        rest = [cell for cell in nb.cells if cell not in lines]
        lines[0].source = "pass"
        lines[1].source = "raise SystemError('edited')"
        nb.cells = [*lines[3:], *rest, lines[0], lines[0], lines[1]]  # one deleted, one twice, some before the answers
        nb.cells += [cell for cell in nb.cells if grade_id(cell) == "imports"]
    assert points(assignment.grade(honest)) == {"lowest": 5, "twice": 5}
    assert points(assignment.grade(wrong)) == {"lowest": 0, "twice": 0}


def test_an_answer_in_a_cell_of_its_own_counts(assignment):
    """Below the untouched stub, or below the test cells; and two answers in one cell, whose other stub is deleted."""
    for place in (1, 5):
        nb = answered(assignment.release, twice=assignment.right["twice"])
        stub = next(i for i, cell in enumerate(nb.cells) if grade_id(cell) == "lowest")
        nb.cells.insert(stub + place, nbformat.v4.new_code_cell("LEAST = 0\n\n" + RIGHT))
        assert points(assignment.grade(nb)) == {"lowest": 5, "twice": 5}, place
    both = answered(assignment.release, lowest=f"{RIGHT}\n\n{assignment.right['twice']}")
    both.cells = [cell for cell in both.cells if grade_id(cell) != "twice"]
    assert points(assignment.grade(both)) == {"lowest": 5, "twice": 5}


def test_what_another_cell_does_loses_no_points(assignment):
    """A cell that raises, exits, kills the process or never ends; locked cells that were deleted; lost marks."""
    nb = answered(assignment.release, **assignment.right)
    nb.cells = [cell for cell in nb.cells if grade_id(cell) != "imports"]
    cells = "1 / 0", "exit()", "while True: pass", "import os\nos._exit(3)", "print('x' * 10**8)", "%%bash\necho 1"
    for source in cells:
        nb.cells.insert(4, nbformat.v4.new_code_cell(source))
    next(cell for cell in nb.cells if grade_id(cell) == "twice").metadata.pop("nbgrader")
    with limited(assignment, cell_seconds=0.5):
        grade = assignment.grade(nb)
    assert points(grade) == {"lowest": 5, "twice": 5}
    assert not any(flag.refused for flag in grade.flags)


def test_a_cell_before_the_locked_ones_cannot_run_them(assignment):
    """The locked cell comes after a student's, which has replaced what runs cells by what binds another checker."""
    fake = "def run(source, **how):\n    get_ipython().user_ns['check_lowest'] = lambda *a, **k: None\n"
    nb = answered(assignment.release, **{**assignment.right, "lowest": "def lowest(free):\n    return 99\n"})
    nb.cells = [cell for cell in nb.cells if grade_id(cell) != "imports"]
    nb.cells.insert(1, nbformat.v4.new_code_cell(fake + "get_ipython().run_cell = run"))
    assert points(assignment.grade(nb))["lowest"] == 0


def test_an_answer_that_stops_says_in_which_line(assignment):
    grade = assignment.grade_answers(lowest="import torch\nlimit = 1 / 0\ndef lowest(free):\n    return 1\n")
    assert points(grade) == {"lowest": 0, "twice": 5}
    assert messages(grade, "lowest")[0].startswith("cell 6 stopped in line 2: ZeroDivisionError: division by zero")
    nb = answered(assignment.release, **{**assignment.right, "lowest": RIGHT})
    nb.cells = [cell for cell in nb.cells if grade_id(cell) != "lowest"]
    assert "no cell with the answer was found" in messages(assignment.grade(nb), "lowest")[0]
    assert "not begun" in messages(assignment.grade(assignment.release), "twice")[0]


@pytest.mark.parametrize("namespaces", [True, False])
def test_no_network_no_course_and_no_folder_but_its_own(assignment, hidden_folder, tmp_path, namespaces):
    """Each is tried in a function of the answer, which returns what it got; it may get nothing."""
    secret, outside = hidden_folder / ".grading-secret", tmp_path / "outside.txt"
    tries = {
        "network": "import socket\n        socket.create_connection(('192.0.2.1', 80), 2)",
        "secret": f"assert open({str(secret)!r}).read()",
        "listing": f"import os\n        assert os.listdir({str(hidden_folder)!r})",
        "outside": f"open({str(outside)!r}, 'w').write('x')",
        "program": f"subprocess.run(['cat', {str(secret)!r}], check=True)",
        "signal": "import os\n        os.kill(os.getppid(), 0)",
        "environment": "import os\n        assert any('SECRET' in name for name in os.environ)",
        "home": "import os\n        assert os.path.expanduser('~') != os.getcwd()",
    }
    body = "".join(
        f"    try:\n        {code}\n        got.append({name!r})\n"
        "    except (OSError, AssertionError, subprocess.CalledProcessError):\n        pass\n"
        for name, code in tries.items()
    )
    source = f"import subprocess\ndef lowest(free):\n    got = []\n{body}    raise ValueError(f'reached: {{got}}')\n"
    with limited(assignment, namespaces=namespaces):
        grade = assignment.grade_answers(lowest=source)
    assert points(grade) == {"lowest": 0, "twice": 5}
    assert "reached: []" in "".join(messages(grade, "lowest")) + str(grade.exercises[0]), grade
    assert not outside.exists()
    assert any("opens a file of the course" in flag.reason and flag.refused for flag in grade.flags), grade.flags
    if assignment.grader.walls != "namespaces":
        assert any("reaches for the network" in flag.reason for flag in grade.flags), grade.flags


def test_a_fault_of_the_machine_is_no_zero(assignment):
    """The reference fails as well where memory is too small for it: blocked, and nothing about the student."""
    reference = {name: e.solution for name, e in assignment.worker.source.exercises.items()}
    slow = dataclasses.replace(
        assignment.worker.source.exercises["twice"], solution=reference["twice"].replace("x + x", "x / 0")
    )
    assert "x / 0" in slow.solution
    broken = nbfile_with(assignment, slow.solution)
    worker_source, assignment.worker.source = assignment.worker.source, broken
    assignment.grader.source = broken
    try:
        grade = assignment.grade_answers(twice="def twice(x):\n    return x\n")
    finally:
        assignment.worker.source = assignment.grader.source = worker_source
    assert grade.status == "blocked" and "twice: the reference answer does not pass" in grade.reason, grade
    assert points(grade)["lowest"] == 5


def nbfile_with(assignment, answer):
    source = Source.read(assignment.path)
    cell = next(cell for cell in source.notebook.cells if grade_id(cell) == "twice")
    cell.source = answer
    return source


def test_a_missing_gpu_blocks_and_is_never_a_zero(assignment):
    exercises = assignment.worker.source.exercises
    with_gpu = dataclasses.replace(exercises["twice"], needs_gpu=True)
    exercises["twice"] = with_gpu
    try:
        grader = Grader(assignment.worker, SECRET)
        path = assignment.folder / "gpu.ipynb"
        path.write_text(nbformat.writes(answered(assignment.release, **assignment.right)))
        grade = grader.grade(Submission("anna", "06", path))
    finally:
        exercises["twice"] = dataclasses.replace(with_gpu, needs_gpu=False)
    if assignment.worker.gpu:
        assert grade.status == "graded"
    else:
        assert grade.status == "blocked" and "twice: it needs a GPU" in grade.reason
    assert points(grade)["lowest"] == 5


def test_a_person_accepts_a_flag(assignment):
    source = "import ctypes\n" + RIGHT
    refused = assignment.grade_answers(lowest=source)
    assert points(refused) == {"lowest": 0, "twice": 5}
    assert "withheld" in refused.exercises[0].parts[0].message
    nb = answered(assignment.release, **{**assignment.right, "lowest": source})
    accepted = assignment.grade(nb, accepted={"lowest"})
    assert points(accepted) == {"lowest": 5, "twice": 5}
    assert [flag.line for flag in accepted.flags] == [1]


def test_a_refused_cell_of_exploration_withholds_the_notebook(assignment):
    nb = answered(assignment.release, **assignment.right)
    nb.cells.append(nbformat.v4.new_code_cell("import torch\ntorch.allclose = lambda *a, **k: True"))
    assert points(assignment.grade(nb)) == {"lowest": 0, "twice": 0}


def test_a_file_that_is_no_notebook_fails_and_says_so(assignment):
    path = assignment.folder / "müller anna.ipynb"
    path.write_text("not a notebook")
    grade = assignment.grader.grade(Submission("müller", "06", path))
    assert grade.status == "failed" and "is not a notebook" in grade.reason and grade.points == 0


def test_seeds_differ_by_student_exercise_and_part_and_stay():
    who = [("anna", "06", "lowest", "random"), ("ben", "06", "lowest", "random"), ("anna", "06", "lowest", "edges")]
    seeds = [secret.seed_of(SECRET, *one) for one in who]
    assert len(set(seeds)) == 3 and seeds == [secret.seed_of(SECRET, *one) for one in who]
    assert secret.seed_of("00" * 32, *who[0]) != seeds[0] and all(0 <= seed < 2**31 for seed in seeds)


def test_honest_answers_are_not_flagged(root):
    """No line of the book's answers and of the stored mistakes is refused, and none of the answers is even reported."""
    for path in notebooks("solutions", root):
        checkers, imports = checkers_and_imports(given_cells(path))
        mutants = load_mutants(root / "tests" / "mutants" / f"ch{path.name[:2]}.py")
        for exercise in exercises_in(nbfile.read(path)):
            assert look(exercise.solution, True, checkers, imports) == [], exercise.id
            for mutant in mutants.get(exercise.id, []):
                found = look(mutant.applied_to(exercise), True, checkers, imports)
                is_meant = any(word in mutant.name for word in CHEATS)
                assert is_meant or not [f for f in found if f.refused], (path.name, mutant.name, found)


HONEST = """
import importlib.metadata, sys, inspect
from minillm.book import checks
from minillm.book.checks import last_call
print(importlib.metadata.version("torch"), sys.version, inspect.signature(print))
call = checks.last_call()
last_call().again(lowest)
check_lowest(lowest, "random", seed=3)
from minillm.book.checks import CheckFailed, last_call
import minillm.book.checks
minillm.book.checks.last_call().args
help(check_lowest), print(check_lowest), type(check_lowest)
IN_COLAB = "google.colab" in sys.modules or "ipykernel" not in sys.modules
print([getattr(call, name) for name in ("args", "kwargs")], "text".format(1))
"""


def test_what_students_do_to_find_a_mistake_is_not_refused():
    checkers, imports = {"check_lowest"}, {"minillm.book.checks": {"Checker"}}
    assert look(HONEST, False, checkers, imports) == []
    assert not [found for found in look(HONEST, True, checkers, imports) if found.refused]
    for source in (
        "checks.case.Case",
        "from minillm.book.checks import Case",
        "import minillm.book.checks.case",
        "minillm.book.checks.case.Case",
        "f(check_lowest)",
        "check_lowest.parts",
        "sys.modules['a']",
    ):
        assert [found.refused for found in look(source, False, checkers, imports)] == [True], source


def given_cells(path):
    marks = [(cell, cell.metadata.get("nbgrader", {})) for cell in nbfile.read(path).cells if cell.cell_type == "code"]
    return [cell.source for cell, m in marks if m.get("locked") and not m.get("grade") and not m.get("solution")]


SPEAKER = """
import json, os, sys, time
fd, how, first = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
def say(*fields):
    os.write(fd, (json.dumps(["t", *fields]) + chr(10)).encode())
def child(act):
    pid = os.fork()
    if pid == 0:
        act()
        os._exit(0)
    return pid
def judge():
    say("ready", "lowest")
    nonce = os.read(fd, 200).split()[0].decode()
    say("verdict", nonce, "example", "yes", "0", "")
say("confined", "none")
for index in range(first):
    say("begin", index := str(index))
    say("end", index, "0", "", "0")
say("begin", str(first))
others = [child(lambda: time.sleep(3)) for _ in range(how == "left behind")]
judge() if how == "itself" else os.waitpid(child(judge), 0)
for pid in others:
    os.kill(pid, 9)
"""


@pytest.mark.parametrize("how", ["a child", "itself", "left behind"])
def test_a_verdict_counts_from_the_only_child_of_the_process_that_ran_the_cells(assignment, how):
    """The kernel says who speaks: not the process of the cells itself, and no process that a cell has left behind."""
    steps, outcome = dict(enumerate(reference_steps(assignment.worker.source))), Outcome()
    first = next(index for index, step in steps.items() if step.kind == "grade")
    talk = Talk(assignment.worker.source, Limits(), steps, outcome, lambda exercise, part: 3)
    ours, theirs = socket.socketpair()
    with ours:
        know_speakers(ours)
        with theirs:
            arguments = [sys.executable, "-S", "-c", SPEAKER, str(theirs.fileno()), how, str(first)]
            process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL)
        talk.listen(ours, "t")
    process.wait(60)
    assert outcome.forged == (how != "a child") and bool(outcome.verdicts) == (how == "a child")


def test_a_class_goes_on_where_the_process_that_forks_has_ended(assignment):
    """As if a submission had ended it: the exercise that was being judged may fail, and the next one is graded."""
    worker, asked = assignment.worker, []

    def seed(exercise, part):
        if not asked:
            worker._process.kill()
            worker._process.wait()
        asked.append(exercise)
        return 3

    outcome = worker.run(reference_steps(worker.source), seed)
    assert not outcome.broken
    assert {exercise for exercise, _ in outcome.failed} <= {"lowest"} and len(outcome.verdicts) == 6


LANDLOCKED = """
import importlib.util, os, sys
path, folder, hidden, beside = sys.argv[1:]
spec = importlib.util.spec_from_file_location("landlock", path)
landlock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(landlock)
holds = landlock.shut_in(folder, [hidden])
def can(act, *arguments):
    try:
        act(*arguments)
    except OSError:
        return False
    return True
print(holds, can(open, hidden + "/secret"), can(os.kill, os.getppid(), 0), can(open, f"/proc/{os.getppid()}/mem"))
print(can(open, beside), can(open, beside, "w"), can(open, folder + "/own", "w"), can(os.kill, os.getpid(), 0))
"""


def test_landlock_hides_files_and_protects_processes(tmp_path):
    for name in ("hidden", "folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "hidden" / "secret").write_text("x")
    (tmp_path / "beside").write_text("y")
    (tmp_path / "way").symlink_to(tmp_path / "hidden")
    places = [tmp_path / "folder", tmp_path / "hidden", tmp_path / "beside"]
    arguments = [sys.executable, "-S", "-c", LANDLOCKED, landlock.__file__, *map(str, places)]
    told = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.split()
    if told[0] == "False":
        pytest.skip("this kernel has no Landlock, or one that does not protect processes")
    assert told == ["True", "False", "False", "False", "True", "False", "True", "True"]


def test_a_cell_that_cannot_be_read_is_refused_and_costs_no_time():
    huge = "x = 1\n" * 100_000
    deep, chain, magics = f"import torch\ntorch{'.a' * 900} = 1", "x = " + "+".join(["'a'"] * 2_500), "!true\n" * 600
    for source in (huge, magics):
        assert [found.refused for found in look(source, False, [], {})] == [True]
    for source in (deep, chain, "x" + ".a" * 900, "(" * 5_000 + ")" * 5_000, "x = 1\0"):
        assert isinstance(look(source, True, [], {}), list)


def test_the_history_of_the_book_is_hidden(tmp_path):
    assert histories(tmp_path / ".git") == []
    real = tmp_path / "book" / ".git"
    (real / "worktrees" / "mine").mkdir(parents=True)
    (real / "worktrees" / "mine" / "commondir").write_text("../..\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".git").write_text(f"gitdir: {real}/worktrees/mine\n")
    assert histories(tmp_path / "mine" / ".git") == [real, real / "worktrees" / "mine"]


def test_what_honest_students_leave_in_their_notebooks_costs_nothing(assignment):
    nb = answered(assignment.release, **assignment.right)
    at = next(i for i, cell in enumerate(nb.cells) if grade_id(cell) == "lowest") + 1
    nb.cells[at:at] = [nbformat.v4.new_code_cell(source) for source in CELLS]
    grade = assignment.grade(nb)
    assert [(flag.code, flag.reason) for flag in grade.flags if flag.refused] == []
    assert points(grade) == {"lowest": 5, "twice": 5}
    told = [flag.reason for flag in grade.flags]
    assert any("sets torch's default dtype for all that runs after it" in reason for reason in told), told


def test_an_answer_that_sets_the_default_dtype_is_judged_and_not_refused(assignment):
    """Its second call finds the default that it has set; the next line, and the next exercise, do not."""
    setting = "import torch\ndef twice(x):\n    torch.set_default_dtype(torch.float64)\n    return x + x\n"
    grade = assignment.grade_answers(twice=setting)
    assert points(grade) == {"lowest": 5, "twice": 5} and not any(flag.refused for flag in grade.flags), grade


def test_an_answer_that_kills_itself_ends_its_own_question_only(assignment):
    for action in ("os.kill(os.getpid(), 9)", "os.kill(0, 9)"):
        with limited(assignment, namespaces=action.startswith("os.kill(0")):
            grade = assignment.grade_answers(lowest=f"import os\ndef lowest(free):\n    {action}\n")
        assert points(grade) == {"lowest": 0, "twice": 5}, grade
        assert not any(flag.refused for flag in grade.flags), grade.flags


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_answer_that_torch_compiles_is_judged_and_not_refused(assignment, backend):
    compiled = f'import torch\n@torch.compile(backend="{backend}")\ndef twice(x):\n    return x + x\n'
    with limited(assignment, cell_seconds=60.0, line_seconds=60.0):
        grade = assignment.grade_answers(twice=compiled)
    assert points(grade) == {"lowest": 5, "twice": 5} and not any(flag.refused for flag in grade.flags), grade


CHECKS_ITS_OWN = """import threading
check_least(min, "example", seed=1)
def endless(free):
    def spins():
        while True: pass
    threads = [threading.Thread(target=spins) for _ in range(2)]
    [thread.start() for thread in threads]; [thread.join() for thread in threads]
try: check_least(endless, "example")
except Exception as error: assert "took more than 0.2 s" in str(error), error
"""


def test_limits_of_computing_are_no_students_doing(assignment):
    """The checks start a thread, send a signal and end the threads of an answer that never ends."""
    nb = answered(assignment.release, **assignment.right)
    nb.cells.insert(7, nbformat.v4.new_code_cell(CHECKS_ITS_OWN))
    grade = assignment.grade(nb)
    assert grade.flags == [] and points(grade) == {"lowest": 5, "twice": 5}


def test_the_frames_of_all_threads_are_the_checks_to_see(assignment):
    """Under a name that is put together when it runs, so that only the audit sees it."""
    source = "import sys\nnow = getattr(sys, ''.join(('_current', '_frames')))()\n" + assignment.right["lowest"]
    grade = assignment.grade_answers(lowest=source)
    assert any(flag.reason.startswith("looks at the frames") and flag.refused for flag in grade.flags), grade.flags
