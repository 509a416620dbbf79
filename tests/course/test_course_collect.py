"""Submissions from folders and from the zips of Canvas and Moodle: the newest counts, nothing is lost."""

from __future__ import annotations

import datetime as dt
import io
import json
import os
import shutil
import unicodedata
import zipfile

import pytest

from minillm.course import collect, gradebook, settings
from minillm.course.arrivals import MAX_BYTES, arrivals
from tests.course.small_book import as_bytes, cell, solved
from tests.helpers.submitted import through_colab, without_marks

pytest.importorskip("nbgrader", reason="needs nbgrader: pip install -e '.[test]'")
NAME = "06_sample.ipynb"


@pytest.fixture(autouse=True)
def nothing_left(course):
    yield
    for folder in ("submitted", "received", "unknown"):
        shutil.rmtree(course.folder / folder, ignore_errors=True)


@pytest.fixture
def answer(course):
    return as_bytes(solved(course))


def answer_with(course, source: str) -> bytes:
    nb = solved(course)
    cell(nb, "lowest").source = source
    return as_bytes(nb)


def zipped(path, files: dict[str, bytes], when=(2026, 2, 3, 12, 0, 0)):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, when), content)
    return path


def put(folder, name: str, content: bytes, when: str = "2026-02-03T12:00"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    seconds = dt.datetime.fromisoformat(when).timestamp()
    os.utime(path, (seconds, seconds))
    return path


def submitted(course, student: str, name: str = "06"):
    return course.notebook_in("submitted", course.assignments[name], student)


def test_folders_of_students_by_id_login_email_or_name(course, answer, tmp_path):
    for folder in ("jdoe", "K.Mueller@uni.example", "Sam Lee"):
        put(tmp_path, f"{folder}/deep/{NAME}", answer)
    report = collect.collect(course, tmp_path)
    assert report.collected == ["jdoe 06", "lee 06", "mueller 06"] and not report.unknown and not report.missing
    assert (submitted(course, "jdoe").parent / "timestamp.txt").read_text().endswith("UTC\n")
    assert gradebook.receipt_of(course.folder, "lee", "06").path == f"Sam Lee/deep/{NAME}"


def test_canvas_names_tell_user_lateness_and_which_is_newest(course, answer, tmp_path):
    files = {
        f"doejane_101_5001_{NAME}": answer_with(course, "def lowest(free):\n    return 'first'"),
        "doejane_101_5009_06_sample-1.ipynb": answer_with(course, "def lowest(free):\n    return 'second'"),
        unicodedata.normalize("NFD", f"müllerlüdenscheidtkäthe_LATE_102_5002_{NAME}"): answer,
        f"doejane_999_5003_{NAME}": answer,  # another Jane Doe, who is not on the list
        f"anon_aB3x_5004_{NAME}": answer,
    }
    report = collect.collect(course, zipped(tmp_path / "submissions.zip", files), chapter="6")
    assert report.collected == ["jdoe 06", "mueller 06"] and report.late == ["mueller 06"]
    assert "'second'" in submitted(course, "jdoe").read_text()
    assert {path for path, _ in report.unknown} == {f"doejane_999_5003_{NAME}", f"anon_aB3x_5004_{NAME}"}
    assert len(list((course.folder / "unknown" / "06").iterdir())) == 2
    assert report.missing == ["lee 06"]
    # The times in Canvas's zip are those of the download: none is kept.
    assert not (submitted(course, "jdoe").parent / "timestamp.txt").exists()
    assert sorted(p.name for p in (course.folder / "received/jdoe/06").iterdir()) == ["06_sample-1.ipynb", NAME]


def test_moodle_folders_and_flat_names_and_its_worksheet(course, answer, tmp_path):
    composed = "Käthe Müller-Lüdenscheidt"
    files = {
        f"Jane Doe_77_assignsubmission_file/{NAME}": answer,  # as Moodle 4.5 has it
        f"{unicodedata.normalize('NFD', composed)}_78_assignsubmission_file_/Copy of {NAME}": answer,  # before
        "Jane Doe_77_assignsubmission_onlinetext/onlinetext.html": b"<p>see file</p>",
        f"Participant_79_assignsubmission_file_{NAME}": answer,  # flat, and anonymous
    }
    sheet = tmp_path / "Grades.csv"
    sheet.write_text(
        "\ufeffIdentifier,Full name,Email address,Status,Grade\n"
        "Participant 79,Sam Lee,lee@uni.example,Submitted for grading - 3 mins 31 secs late,\n",
        encoding="utf-8",
    )
    report = collect.collect(course, zipped(tmp_path / "C1-Sheet 6-4711.zip", files), "06", sheet)
    assert report.collected == ["jdoe 06", "lee 06", "mueller 06"] and report.late == ["lee 06"]
    assert not report.unknown and not report.problems
    without = collect.collect(course, tmp_path / "C1-Sheet 6-4711.zip", "06")
    assert [path for path, _ in without.unknown] == [f"Participant_79_assignsubmission_file_{NAME}"]


def test_one_in_time_is_displaced_by_a_late_one_only_when_asked_and_a_second_run_changes_nothing(
    course, answer, tmp_path
):
    put(tmp_path / "a", f"jdoe/{NAME}", answer, "2026-02-08T23:58")
    put(tmp_path / "a", f"jdoe/old/{NAME}", b"{}", "2026-02-07T10:00")
    assert collect.collect(course, tmp_path / "a").late == []
    again = collect.collect(course, tmp_path / "a")
    assert (again.collected, again.unchanged) == ([], ["jdoe 06"])
    late = put(
        tmp_path / "b", f"jdoe/{NAME}", answer_with(course, "def lowest(free):\n    return 1"), "2026-02-09T00:01"
    )
    kept = collect.collect(course, tmp_path / "b")
    assert (kept.unchanged, kept.late) == (["jdoe 06"], []) and "return 1" not in submitted(course, "jdoe").read_text()
    [(_, told)] = kept.passed_over
    assert "came after 2026-02-08 23:59" in told and "--last takes the last" in told
    assert collect.collect(course, tmp_path / "b", last=True).late == ["jdoe 06"]
    assert (
        gradebook.receipt_of(course.folder, "jdoe", "06").late and "return 1" in submitted(course, "jdoe").read_text()
    )
    assert collect.collect(course, tmp_path / "a", last=True).unchanged == ["jdoe 06"]  # older than what is there
    assert "return 1" in submitted(course, "jdoe").read_text()
    kept = {p.read_bytes() for p in (course.folder / "received/jdoe/06").iterdir()}
    assert kept == {answer, b"{}", late.read_bytes()}


def test_broken_files_are_named_and_an_older_one_that_opens_counts(course, answer, tmp_path):
    put(tmp_path, f"jdoe/1/{NAME}", answer, "2026-02-03T10:00")
    put(tmp_path, f"jdoe/2/{NAME}", answer[:500], "2026-02-04T10:00")
    put(tmp_path, f"lee/{NAME}", b"", "2026-02-04T10:00")
    put(tmp_path, f"mueller/{NAME}", b"%PDF-1.7 \xe2\xe3", "2026-02-04T10:00")
    report = collect.collect(course, tmp_path)
    problems = dict(report.problems)
    assert "the one before it counts" in problems["jdoe 06"]
    assert problems["lee 06"].endswith("the file is empty")
    assert problems["mueller 06"].endswith("the file is not a notebook but a PDF")
    assert "cut off" in problems["jdoe 06"]
    assert gradebook.receipt_of(course.folder, "jdoe", "06").problem == ""
    assert gradebook.receipt_of(course.folder, "lee", "06").problem == "the file is empty"


def test_a_broken_file_does_not_take_the_place_of_a_good_one(course, answer, tmp_path):
    put(tmp_path / "a", f"jdoe/{NAME}", answer, "2026-02-03T10:00")
    put(tmp_path / "b", f"jdoe/{NAME}", b"{", "2026-02-04T10:00")
    collect.collect(course, tmp_path / "a")
    report = collect.collect(course, tmp_path / "b")
    assert "the one collected before counts" in dict(report.problems)["jdoe 06"]
    assert gradebook.receipt_of(course.folder, "jdoe", "06").problem == ""


def test_a_notebook_is_known_by_its_cells_whatever_its_name(course, tmp_path):
    renamed = as_bytes(without_marks(through_colab(solved(course, "07"))))
    put(tmp_path, "jdoe/homework (3).ipynb", renamed)
    put(tmp_path, "lee/notes.txt", b"hello")
    put(tmp_path, "mueller/06_SAMPLE (1).IPYNB.txt", renamed)
    report = collect.collect(course, tmp_path)
    assert report.renamed == [("jdoe 07", "jdoe/homework (3).ipynb"), ("mueller 07", "mueller/06_SAMPLE (1).IPYNB.txt")]
    assert (
        report.collected == ["jdoe 07", "mueller 07"] and ("jdoe 07", "the mark of smallest was lost") in report.mended
    )
    assert [path for path, _ in report.unknown] == ["lee/notes.txt"]
    wrong = collect.collect(course, tmp_path, chapter="06")
    assert "it holds the exercises of 07, and was handed in for 06" in dict(wrong.unknown)["jdoe/homework (3).ipynb"]
    assert list((course.folder / "unknown").rglob("*IPYNB.txt"))
    again = collect.collect(course, tmp_path)  # without --chapter it is known
    assert again.unchanged == ["jdoe 07", "mueller 07"] and len(again.resolved) == 2
    assert [p.name for p in (course.folder / "unknown").rglob("*.*")] == ["lee__notes.txt"]


def test_a_zip_in_a_zip_rubbish_and_a_folder_around_everything(course, answer, tmp_path):
    inner = io.BytesIO()
    zipped(inner, {f"work/{NAME}": answer})
    files = {
        "submissions/jdoe/my work.zip": inner.getvalue(),
        f"submissions/lee/{NAME}": answer,
        f"submissions/lee/.ipynb_checkpoints/{NAME}": b"{}",
        "__MACOSX/submissions/lee/._x": b"",
        "submissions/.DS_Store": b"",
    }
    report = collect.collect(course, zipped(tmp_path / "all.zip", files))
    assert report.collected == ["jdoe 06", "lee 06"] and not report.unknown


def test_without_a_roster_a_name_is_the_student(course, answer, tmp_path):
    students = course.folder / "students.csv"
    text = students.read_text()
    students.unlink()
    try:
        files = {f"doejane_101_5001_{NAME}": answer, f"doejane_999_5002_{NAME}": answer}
        report = collect.collect(course, zipped(tmp_path / "a.zip", files))
        assert report.collected == ["doejane 101 06", "doejane 999 06"] and report.missing == []
    finally:
        students.write_text(text)


def test_sources_that_are_none(course, tmp_path):
    with pytest.raises(FileNotFoundError, match="neither a folder of submissions nor a zip"):
        collect.collect(course, tmp_path / "nothing")
    (tmp_path / "text.zip").write_text("no zip")
    with pytest.raises(ValueError, match="it must be a folder or a zip"):
        collect.collect(course, tmp_path / "text.zip")
    (tmp_path / "empty").mkdir()
    assert collect.collect(course, tmp_path / "empty").lines()[0] == "0 collected, 0 as before, 0 put aside"


def test_a_file_that_is_too_large_is_not_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"jdoe/{NAME}", b"0" * (MAX_BYTES + 1))
        archive.writestr("../../outside.ipynb", b"{}")
    found = {arrival.path: arrival for arrival in arrivals(tmp_path / "bomb.zip")}
    assert "the limit is 50,000,000" in found[f"jdoe/{NAME}"].problem and not found[f"jdoe/{NAME}"].content


def test_nbgraders_timestamp_is_the_time_of_a_submission(course, answer, tmp_path):
    put(tmp_path, f"jdoe/06/{NAME}", answer, "2026-02-03T12:00")
    put(tmp_path, "jdoe/06/timestamp.txt", b"2026-02-20 10:00:00.123456 UTC\n")
    put(tmp_path, f"lee/06/{NAME}", answer, "2026-02-03T12:00")
    put(tmp_path, "lee/06/timestamp.txt", b"yesterday")
    report = collect.collect(course, tmp_path)
    assert report.collected == ["jdoe 06", "lee 06"] and report.late == ["jdoe 06"]
    assert gradebook.receipt_of(course.folder, "jdoe", "06").submitted == "2026-02-20T10:00:00+00:00"


def test_hostile_files_keep_nothing_from_being_collected(course, answer, tmp_path):
    nb = solved(course)
    cell(nb, "lowest").metadata.nbgrader.grade_id = ["not", "a", "name"]
    put(tmp_path, f"jdoe/{NAME}", as_bytes(nb))
    put(tmp_path, f"mueller/{NAME}", b"[" * 100_000)
    put(tmp_path, f"lee/{NAME}", answer)
    with zipfile.ZipFile(tmp_path / "long.zip", "w") as archive:
        archive.writestr(f"lee/{'x' * 300}.ipynb", b"{}")
        archive.writestr(f"{'y' * 300}_5_6_06_a.ipynb", b"{}")
    report = collect.collect(course, tmp_path)
    assert report.collected == ["jdoe 06", "lee 06", "mueller 06"]
    assert "mueller 06" in dict(report.problems) and "jdoe 06" not in dict(report.problems)
    assert len(collect.collect(course, tmp_path / "long.zip").unknown) == 2


def test_names_in_a_zip_are_read_where_their_encoding_is_not_stated(tmp_path):
    written = zipped(tmp_path / "a.zip", {f"Käthe/{NAME}": b"{}"}).read_bytes()
    local, central = b"PK\x03\x04\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x00"
    assert local + b"\x08" in written and central + b"\x08" in written  # "the names are UTF-8"
    unsaid = written.replace(local + b"\x08", local + b"\x00").replace(central + b"\x08", central + b"\x00")
    (tmp_path / "a.zip").write_bytes(unsaid)
    assert [arrival.author for arrival in arrivals(tmp_path / "a.zip")] == ["Käthe"]


def test_what_was_put_there_by_hand_is_restored_in_place(course, tmp_path):
    path = submitted(course, "lee")
    put(course.folder, path.relative_to(course.folder), as_bytes(without_marks(through_colab(solved(course)))))
    found = collect.restore_submissions(course, course.chosen("06"))
    assert ("lee 06", "the mark of highest was lost") in found and (course.folder / "received/lee/06" / NAME).is_file()
    assert collect.restore_submissions(course, course.chosen("06")) == []
    put(course.folder, path.relative_to(course.folder), b"{")
    assert "the file is not a notebook" in collect.restore_submissions(course, course.chosen(None))[0][1]


def test_a_receipt_that_was_edited_is_named(course, answer, tmp_path):
    put(tmp_path, f"jdoe/{NAME}", answer)
    collect.collect(course, tmp_path)
    path = course.folder / "submitted/jdoe/06/receipt.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "late": "yes"}))
    with pytest.raises(ValueError, match=r"receipt.json: receipt.late='yes': must be bool"):
        collect.collect(course, tmp_path)


def test_two_of_one_name_are_asked_about_and_told_apart_by_the_worksheet(course, answer, tmp_path):
    other = answer_with(course, "def lowest(free):\n    return 2")
    files = {f"Jane Doe_{n}_assignsubmission_file/{NAME}": c for n, c in ((77, answer), (78, other))}
    archive = zipped(tmp_path / "moodle.zip", files)
    report = collect.collect(course, archive, "06")
    assert not report.collected and len(report.unknown) == 2
    assert all("several are called 'Jane Doe' (numbers 77, 78): give Moodle's" in told for _, told in report.unknown)
    zipped(tmp_path / "one.zip", dict(list(files.items())[:1]))
    zipped(tmp_path / "two.zip", dict(list(files.items())[1:]))
    assert collect.collect(course, tmp_path / "one.zip", "06").collected == ["jdoe 06"]
    [(_, told)] = collect.collect(course, tmp_path / "two.zip", "06").unknown
    assert "is participant 78, and participant 77's file was collected for jdoe" in told
    sheet = tmp_path / "sheet.csv"
    sheet.write_text(
        "Identifier;Full name;Email address;ID number;Status\nParticipant 77;Jane Doe;jdoe@uni.example;;\n"
        "Participant 78;Jane Doe;jane.doe@uni.example;lee;\n",
        encoding="utf-16",
    )
    assert collect.collect(course, archive, "06", sheet).collected == ["lee 06"]
    assert (
        "return 2" in submitted(course, "lee").read_text() and "return 2" not in submitted(course, "jdoe").read_text()
    )


def test_a_changed_date_and_what_the_lms_says_now_reach_what_is_collected(course, answer, tmp_path):
    put(tmp_path, f"jdoe/{NAME}", answer, "2026-02-08T20:00")
    collect.collect(course, tmp_path)
    path = course.folder / "course.toml"
    text = path.read_text()
    try:
        path.write_text(text.replace("2026-02-08T23:59:00", "2026-02-08T12:00:00"))
        assert collect.collect(settings.load(course.folder), tmp_path).late == ["jdoe 06"]
    finally:
        path.write_text(text)
    for late, said in (("LATE_", ["lee 06"]), ("", [])):  # the date was moved in Canvas, and the zip fetched again
        collected = collect.collect(course, zipped(tmp_path / "c.zip", {f"leesam_{late}103_5_{NAME}": answer}), "06")
        assert collected.late == said and gradebook.receipt_of(course.folder, "lee", "06").late == bool(said)
