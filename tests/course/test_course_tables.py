"""Lists as people save them: every encoding and separator is read, or refused with the line and the way out."""

from __future__ import annotations

import pytest

from minillm.course import roster, tables
from minillm.course.roster import Student

SEPARATED = "id;last_name;first_name;email\nlee;Lee;Sam;\nmüller;Müller;Käthe;k@u.example\n"


@pytest.mark.parametrize(
    "content",
    [
        SEPARATED.encode(),
        SEPARATED.encode("utf-8-sig"),
        SEPARATED.replace(";", "\t").encode("utf-16"),
        SEPARATED.replace(";", "\t").encode("utf-16-le"),
        SEPARATED.replace("\n", "\r\n").encode("cp1252"),
        ("sep=;\r\n" + SEPARATED.replace("\n", "\r\n")).encode(),
        SEPARATED.replace(";", ",").replace("ü", "u\u0308").encode(),
    ],
    ids=["semicolons", "BOM", "UTF-16", "UTF-16 without a mark", "cp1252", "sep=", "combining marks"],
)
def test_a_roster_is_read_whatever_program_saved_it(tmp_path, content):
    (tmp_path / "students.csv").write_bytes(content)
    expected = [Student("lee", "Lee", "Sam"), Student("müller", "Müller", "Käthe", "k@u.example")]
    assert roster.read(tmp_path / "students.csv") == expected


MOODLE = '"First name","Last name","Email address",Groups\n'


@pytest.mark.parametrize(
    "text, ids",
    [
        (MOODLE + "Åsa,Ångström,,B\nSam,Lee,lee@u.example,A\n", ["Åsa Ångström", "lee"]),
        (MOODLE + "Ann,A,ann@u.example,A\nAnn,B,ann@student.u.example,B\n", ["ann@u.example", "ann@student.u.example"]),
        ('Student,ID,SIS Login ID\n"A, Ann",7,ann@u\n"B, Ann",8,ann@v\n"Student, Test",9,\n', ["7", "8"]),
        ("Identifier,Full name,ID number,Status\nParticipant 1,Sam Lee,S05,\n", ["S05"]),
    ],
    ids=["no email", "same before the @", "Canvas, same before the @", "a number"],
)
def test_every_student_has_an_id_of_their_own(tmp_path, text, ids):
    (tmp_path / "list.csv").write_text(text, encoding="utf-8")
    assert [student.id for student in roster.read(tmp_path / "list.csv")] == ids


@pytest.mark.parametrize(
    "content, said",
    [
        (MOODLE + "Anna,Schmidt,,A\nAnna,Schmidt,,B\n", r"line 2: student id 'Anna Schmidt' occurs twice \(line 3\)"),
        ("id,last_name\nlee,Lee\n,Doe\n", "line 3: it has no id, email, number or name; give"),
        ("id,last_name\nLee,Lee\nlee,Li\n", r"line 2: student id 'Lee' occurs twice \(line 3\); delete"),
        ("id,last_name,first_name\nlee,Lee, Jr.,Sam\n", "line 2: 4 cells, and the header has 3; a cell with ','"),
        (b"PK\x03\x04...", "is a workbook of Excel or LibreOffice, not a CSV: save it as"),
        (b"id\nlee\nm\x81ller\n", "line 3: byte 0x81 is neither UTF-8 nor Windows-1252"),
        ("Vorname,Nachname\nSam,Lee\n", "the columns are Vorname, Nachname; they must be .* change the first line"),
        ("", "the columns are none"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(tmp_path, content, said):
    (tmp_path / "list.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=said):
        roster.read(tmp_path / "list.csv")


def test_lines_are_those_of_the_file(tmp_path):
    (tmp_path / "a.csv").write_text('sep=,\na,b\n\n"x\ny",1\nz,2\n')
    assert [line for line, _ in tables.read(tmp_path / "a.csv").rows] == [4, 6]
