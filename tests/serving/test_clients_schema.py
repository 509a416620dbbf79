"""schemathesis sends what the OpenAPI description allows, and what it forbids: every answer is a declared one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from minillm import zoo
from minillm.serving.config import ServerConfig
from minillm.serving.keys import Key
from minillm.serving.memory import Memory
from minillm.serving.repository import Repository
from minillm.serving.run import RunningServer

from .conftest import MODEL, PATIENCE

pytest.importorskip("schemathesis", reason="schemathesis is not installed; the extra `test` has it")

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,unsupported_method"
)
EXAMPLES = os.environ.get("MINILLM_SCHEMA_EXAMPLES", "5")  # that are drawn for each path


def examine(url: str, *options: str, checks: str = CHECKS, phases: str = "coverage,fuzzing") -> None:
    """Fails where a check does."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks", checks, "--no-color"]
    command += ["--max-examples", EXAMPLES, "--seed", "1", "--no-shrink", "--generation-database", "none"]
    command += ["--request-timeout", str(PATIENCE), "--phases", phases, "--warnings", "off", *options]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]


def test_every_answer_is_declared(server):
    examine(server.url)


def test_every_answer_is_declared_where_keys_are_needed(serve):
    server = serve(keys=(Key("sk-a"),))
    examine(server.url, "-H", "Authorization: Bearer sk-a", checks=f"{CHECKS},ignored_auth", phases="fuzzing")
    examine(server.url, phases="fuzzing")  # 401 everywhere


def test_every_answer_of_a_repository_is_declared(tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "1").symlink_to(zoo.bundled()[MODEL])
    repository = Repository(tmp_path, {"dtype": "float32", "device": "cpu"}, Memory(200_000_000))
    with RunningServer(None, ServerConfig(port=0), repository) as server:
        examine(server.url, "--include-path-regex", "/v2")
