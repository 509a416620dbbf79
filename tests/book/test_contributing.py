"""The contributor's page, the forms for issues, and the files that open or publish the book: what they name exists."""

from __future__ import annotations

import json
import re
import shlex

import jsonschema
import pytest
from typer.testing import CliRunner

from minillm.book import colab
from minillm.book.glossary import TERMS
from minillm.book.paths import repository_root
from minillm.cli import app
from minillm.model.families import FAMILIES

yaml = pytest.importorskip("yaml")
ROOT = repository_root()
GITHUB = ROOT / ".github"
PAGE = (GITHUB / "CONTRIBUTING.md").read_text(encoding="utf-8")
COMMANDS = [
    line for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S) for line in block.splitlines()
] + re.findall(r"`(\.venv/bin/[^`]+)`", PAGE)
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")

TEXT = {"type": "string", "minLength": 1}
FIELD = {
    "type": "object",
    "required": ["type", "attributes"],
    "additionalProperties": False,
    "properties": {
        "type": {"enum": ["markdown", "input", "textarea", "dropdown", "checkboxes"]},
        "id": {"type": "string", "pattern": "^[A-Za-z0-9_-]+$"},
        "validations": {
            "type": "object",
            "properties": {"required": {"type": "boolean"}},
            "additionalProperties": False,
        },
        "attributes": {"type": "object"},
    },
    "allOf": [
        {
            "if": {"properties": {"type": {"const": kind}}},
            "then": {
                "properties": {"attributes": {"required": needed, "additionalProperties": False, "properties": allowed}}
            },
        }
        for kind, needed, allowed in (
            ("markdown", ["value"], {"value": TEXT}),
            ("input", ["label"], dict.fromkeys(("label", "description", "placeholder", "value"), TEXT)),
            ("textarea", ["label"], dict.fromkeys(("label", "description", "placeholder", "value", "render"), TEXT)),
            (
                "dropdown",
                ["label", "options"],
                {
                    "label": TEXT,
                    "description": TEXT,
                    "multiple": {"type": "boolean"},
                    "default": {"type": "integer"},
                    "options": {"type": "array", "minItems": 1, "uniqueItems": True, "items": TEXT},
                },
            ),
            (
                "checkboxes",
                ["label", "options"],
                {
                    "label": TEXT,
                    "description": TEXT,
                    "options": {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "required": ["label"],
                            "additionalProperties": False,
                            "properties": {"label": TEXT, "required": {"type": "boolean"}},
                        },
                    },
                },
            ),
        )
    ],
}
FORM = {
    "type": "object",
    "required": ["name", "description", "body"],
    "additionalProperties": False,
    "properties": {
        "name": TEXT,
        "description": TEXT,
        "title": TEXT,
        "labels": {"type": "array", "items": TEXT},
        "body": {"type": "array", "minItems": 1, "items": FIELD},
    },
}


def minillm(line: str) -> list[str]:
    return shlex.split(line.removeprefix(".venv/bin/minillm "))


def test_every_link_leads_somewhere():
    for file in (GITHUB / "CONTRIBUTING.md", GITHUB / "STATEMENTS.md"):
        for target in re.findall(r"\]\(([^()\s]+)\)", file.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (GITHUB / target).exists(), f"{file.name}: {target}"


def test_every_file_that_the_page_names_exists():
    named = re.findall(r"\b(?:minillm|tests|chapters|solutions)/[\w/.-]+\.(?:py|ipynb)", PAGE)
    assert len(named) > 8
    for name in named:
        assert list(ROOT.glob(name.replace("NN", "06"))), name


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith(".venv/bin/minillm ")])
def test_every_command_of_minillm_has_these_options(line):
    """With --help behind it a command reads its arguments and runs nothing."""
    done = CliRunner().invoke(app, [*minillm(line), "--help"])
    assert done.exit_code == 0, done.output


def test_the_other_commands_name_tests_that_exist():
    seen = 0
    for line in COMMANDS:
        words = shlex.split(line)
        if words[0] != ".venv/bin/pytest":
            assert words[0] in ("python3", ".venv/bin/pip", ".venv/bin/minillm", ".venv/bin/ruff"), line
            continue
        files = [ROOT / word for word in words[1:] if word.startswith("tests/")]
        assert all(file.is_file() for file in files), line
        if "-k" in words:
            wanted, text = words[words.index("-k") + 1], files[0].read_text(encoding="utf-8")
            folder, number = re.fullmatch(r"(chapters-|ch)?(\w+)", wanted).groups()
            seen += 1
            assert (list((ROOT / "chapters").glob(f"{number}_*")) and '"' in text) if folder else f"_{number}" in text
    assert seen >= 3


def test_the_cheap_commands_run():
    for line in COMMANDS:
        if line.endswith("--lint") or line == ".venv/bin/minillm course changes":
            done = CliRunner().invoke(app, minillm(line))
            assert done.exit_code == 0, done.output


def test_where_to_start_is_true():
    """Where one of these fails, the last but one section of the page promises what has been done."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert ".github/CONTRIBUTING.md" in readme
    measured = (ROOT / "chapters" / "92_measured.ipynb").read_text(encoding="utf-8")
    assert "Not tried: Python 3.13" in measured and "Versions that were tried" in measured
    assert sum(not term.sglang for term in TERMS) >= 10
    assert not {"starcoder2", "stablelm", "cohere"} & FAMILIES.keys()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_one_that_github_accepts(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    jsonschema.validate(form, FORM)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert fields, "a form asks for something"
    for key in (lambda field: field["id"], lambda field: field["attributes"]["label"]):
        assert len({key(field) for field in fields}) == len(fields)
    assert len(form["description"]) <= 200


def test_the_page_and_the_forms_know_each_other():
    assert len(FORMS) == 4
    for name in re.findall(r"ISSUE_TEMPLATE/([\w.]+)\)", PAGE):
        assert (GITHUB / "ISSUE_TEMPLATE" / name) in FORMS
    (link,) = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "config.yml").read_text())["contact_links"]
    assert set(link) == {"name", "url", "about"} and f"/{colab.REPOSITORY}/" in link["url"]


def test_a_fork_gets_its_own_address(tmp_path):
    folder = tmp_path / ".github" / "ISSUE_TEMPLATE"
    folder.mkdir(parents=True)
    (folder / "config.yml").write_text((GITHUB / "ISSUE_TEMPLATE" / "config.yml").read_text())
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    colab.rewrite_badges("someone/fork", tmp_path)
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "mybinder.org/v2/gh/someone/fork/main?" in readme and colab.REPOSITORY not in readme
    assert "github.com/someone/fork/blob" in (folder / "config.yml").read_text()


def test_every_way_to_open_the_book_has_the_same_python():
    container = re.sub(r"^\s*//.*$", "", (ROOT / ".devcontainer" / "devcontainer.json").read_text(), flags=re.M)
    container = json.loads(container)
    workflows = {name: yaml.safe_load((GITHUB / "workflows" / name).read_text()) for name in ("ci.yml", "site.yml")}
    version = (ROOT / ".binder" / "runtime.txt").read_text().strip().removeprefix("python-")
    assert f"python:{version}-" in container["image"]
    for workflow in workflows.values():
        jobs = [step.get("with", {}) for job in workflow["jobs"].values() for step in job["steps"]]
        assert [given["python-version"] for given in jobs if "python-version" in given] == [version]
    assert f'requires-python = ">={version}"' in (ROOT / "pyproject.toml").read_text()
    assert "minillm lab --no-browser --port 8888" in container["postAttachCommand"]
    assert container["forwardPorts"] == [8888] and "8888" in container["portsAttributes"]
    requirements = (ROOT / ".binder" / "requirements.txt").read_text()
    assert "\n-e .\n" in requirements and "chapters/00_start_here.ipynb" in requirements


def test_the_workflows_test_every_push_and_publish_main_alone():
    ci, pages = (yaml.safe_load((GITHUB / "workflows" / name).read_text()) for name in ("ci.yml", "site.yml"))
    assert [step.get("run") for step in ci["jobs"]["test"]["steps"]][-1] == ".ci/run"
    runs = [step.get("run", "") for step in pages["jobs"]["build"]["steps"]]
    assert "minillm course site --to build/site" in runs and "pytest tests/course/test_course_site.py" in runs
    publish = pages["jobs"]["publish"]
    assert publish["needs"] == "build" and "refs/heads/main" in publish["if"] and "pull_request" in publish["if"]
    assert pages["permissions"] == {"contents": "read"}
    assert set(publish["permissions"]) == {"pages", "id-token"}
