"""What a model repository refuses: broken folders, names that lead elsewhere, keys that may not, what does not fit."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from click.testing import Result
from safetensors.torch import load_file
from typer.testing import CliRunner

from minillm import LLM
from minillm.cli import app
from minillm.serving.keys import Key
from minillm.serving.memory import Memory, Needs, NoRoom, needs_of, parse_bytes
from minillm.serving.repository import Repository, UnknownModel

from .conftest import MODEL, OPTIONS, ROOM


def test_what_does_not_fit_is_refused_with_the_numbers(start, folder):
    needs = needs_of(folder / "small" / "1", OPTIONS)
    server = start(memory=needs.least + needs.weights)
    assert server.change("small").status_code == 200
    (folder / "other").mkdir()
    (folder / "other" / "1").symlink_to(folder / "small" / "1")
    answer = server.change("other")
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "no_room"
    assert f"{needs.weights / 1e6:.1f} MB for its weights" in message and "held: small/2" in message
    assert server.change("small", "unload").status_code == 200 and server.change("other").status_code == 200


def test_memory_is_shared_out():
    memory, needs = Memory(1000, share=0.4), Needs(weights=100, block=10, least_blocks=5, most_blocks=1000)
    assert memory.take("a", needs) == 30  # 400: a share
    assert memory.take("b", Needs(500, 10, 5, 1000)) == 5  # more than its share, and no more than it needs
    with pytest.raises(NoRoom, match=r"c needs 0\.0 MB .* raise --memory"):
        memory.take("c", needs)
    assert memory.free == 50
    memory.give_back("a")
    assert memory.take("c", Needs(100, 10, 5, 7)) == 7 and memory.free == 280  # no more than its steps could fill
    assert [parse_bytes(text) for text in ("7", "2 KB", "1.5GiB")] == [7, 2000, 3 * 2**29]
    for wrong in ("", "GB", "-1", "5 parsecs", "nan"):
        with pytest.raises(ValueError, match="memory="):
            parse_bytes(wrong)


def test_the_cache_of_a_model_has_the_size_that_was_taken(start):
    server = start(load=("small",))
    pool = server.loader.services["small", "2"].llm.engine.kv_cache.pool
    needs = needs_of(server.loader.repository.folder("small", "2"), OPTIONS)
    assert ROOM - server.loader.memory.free == needs.weights + pool.num_blocks * needs.block <= ROOM / 4


def test_adapters_and_a_draft_model_are_counted(folder):
    options = OPTIONS | {
        "enable_lora": True,
        "max_loras": 2,
        "max_cpu_loras": 3,
        "max_lora_rank": 8,
        "num_kv_blocks": 9,
    }
    llm = LLM(folder / "small" / "1", **options)
    plain, adapted = (needs_of(folder / "small" / "1", OPTIONS | some) for some in ({}, options))
    assert adapted.weights - plain.weights == llm.model.lora.num_bytes * 5 // 2  # 2 on the device, 3 in host memory
    assert plain.weights == sum(4 * one.numel() for one in load_file(folder / "small/1/model.safetensors").values())
    assert (adapted.most_blocks, adapted.least_blocks) == (9, 9)
    spec = {"speculative_config": {"method": "draft_model", "model": MODEL, "num_speculative_tokens": 2}}
    drafted = needs_of(folder / "small" / "1", OPTIONS | spec)
    assert drafted.weights == 2 * plain.weights and drafted.block == 2 * plain.block


def test_changes_need_a_key_that_may(start):
    server = start(keys=(Key("sk-user"), Key("sk-admin", admin=True)))
    statuses = {}
    for key in ("none", "sk-user", "sk-admin"):
        server.http.headers["Authorization"] = f"Bearer {key}"
        statuses[key] = [server.change("small", what).status_code for what in ("load", "unload")]
        statuses[key].append(server.http.post("/v2/repository/index").status_code)
    assert statuses == {"none": [401] * 3, "sk-user": [403, 403, 200], "sk-admin": [200] * 3}


def test_a_repository_lists_names_and_numbers_only(folder):
    for odd in (".hidden", "with space", "café"):
        (folder / odd / "1").mkdir(parents=True)
    for odd in ("0", "01", "v1", "1.5", "-1"):
        (folder / "small" / odd).mkdir()
    (folder / "small" / "3").write_text("a file")
    (folder / "small" / "10").mkdir()
    repository = Repository(folder)
    assert repository.names() == ["broken", "small"] and repository.versions("small") == ["1", "2", "10"]
    with pytest.raises(UnknownModel, match="'other'; it has broken, small"):
        repository.versions("other")
    with pytest.raises(ValueError, match="is no folder"):
        Repository(folder / "nothing")


def test_the_command_line_makes_the_repository(folder, monkeypatch):
    seen = []
    monkeypatch.setattr("minillm.serving.run.run", lambda *arguments: seen.append(arguments))

    def serve(*options: str) -> Result:
        return CliRunner().invoke(app, ["serve", *options, "--model-repository", str(folder), "--device", "cpu"])

    assert (
        serve("--memory", "1GiB", "--model-share", "0.5", "--load-model", "small", "--max-num-seqs", "4").exit_code == 0
    )
    assert serve("--load-model", "none").exit_code == 0
    [(engine, *_, first), (*_, second)] = seen
    assert engine is None and first.path == folder and (first.memory.total, first.memory.share) == (2**30, 0.5)
    assert first.load == ("small",) and first.options["max_num_seqs"] == 4 and second.load == ()
    for wrong, words in (
        (["tinyworld"], "MODEL 'tinyworld' and --model-repository exclude each other"),
        (["--served-model-name", "x"], "--served-model-name 'x' and --model-repository exclude each other"),
        (["--memory", "much"], "memory='much' is not allowed"),
        (["--model-share", "2"], "model_share=2.0 is not allowed"),
    ):
        refused = serve(*wrong)
        assert refused.exit_code == 1 and words in " ".join(refused.output.split())
    assert len(seen) == 2


def test_a_name_cannot_leave_the_repository(start, folder, tmp_path):
    outside = tmp_path / "outside" / "1"
    shutil.copytree(folder / "small" / "1", outside)
    (folder / "link").symlink_to(outside.parent)
    (folder / "inner").mkdir()
    (folder / "inner" / "1").symlink_to(outside)
    shutil.copytree(folder / "small" / "1", folder / "file" / "1")
    (folder / "file" / "1" / "config.json").unlink()
    (folder / "file" / "1" / "config.json").symlink_to(outside / "config.json")
    (folder / "loop").mkdir()
    (folder / "loop" / "1").symlink_to(folder / "loop" / "1")
    shutil.copytree(folder / "small" / "1", folder / "pipe" / "1")
    (folder / "pipe" / "1" / "model.safetensors").unlink()
    os.mkfifo(folder / "pipe" / "1" / "model.safetensors")  # reading it never ends
    server = start()
    assert "neither a file nor a folder" in server.change("pipe").json()["error"]["message"]
    for name in ("link", "inner", "file"):
        answer = server.change(name)
        assert answer.status_code == 400 and "leads out of the repository" in answer.json()["error"]["message"], name
    for name in (
        "..",
        ".",
        "%2e%2e",
        "..%2foutside",
        "%2fetc",
        "small%2f1",
        "small%00",
        "small%0a",
        "~",
        "*",
        "a" * 300,
    ):
        for what in ("load", "unload"):
            assert server.change(name, what).status_code in (400, 404, 405), name
    assert server.change("loop").status_code == 404  # no folder
    assert server.states()["small/2"] == "UNAVAILABLE"
    assert Repository(folder, follow_links=True).folder("inner", "1").samefile(outside)


def test_a_broken_folder_is_refused_and_the_others_go_on(start, folder, once):
    weights = (folder / "small" / "1" / "model.safetensors").read_bytes()
    broken = {
        "no_config": {"model.safetensors": weights},
        "not_json": {"config.json": b"{"},
        "list": {"config.json": b"[]"},
        "cut": {"model.safetensors": weights[: len(weights) // 2]},
        "noise": {"model.safetensors": bytes(range(256)) * 40},
        "no_tokenizer": {"tokenizer.json": b"null"},
        "huge": {
            "config.json": json.dumps({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 10**9}).encode()
        },
        "negative": {"config.json": b'{"architectures": ["LlamaForCausalLM"], "vocab_size": -3, "hidden_size": "x"}'},
    }
    for name, files in broken.items():
        target = folder / name / "1"
        if name == "no_config":
            target.mkdir(parents=True)
        else:
            shutil.copytree(folder / "small" / "1", target)
        for file, content in files.items():
            (target / file).write_bytes(content)
    server = start(load=None)  # all: the broken ones are logged, and the server begins
    assert server.ask("small").json()["choices"][0]["text"] == once
    for name in ("broken", *broken):
        answer = server.change(name)
        assert answer.status_code == 400, (name, answer.text)
        error = answer.json()["error"]
        assert f"{name}/1 cannot be loaded: " in error["message"] and str(folder) not in error["message"]
    assert list(server.loader.memory.held) == ["small/2"]
    assert server.states() == {"small/1": "UNAVAILABLE", "small/2": "READY", "broken/1": "UNAVAILABLE"} | {
        f"{name}/1": "UNAVAILABLE" for name in broken
    }
    reasons = {one["name"]: one["reason"] for one in server.http.post("/v2/repository/index").json()}
    assert all("cannot be loaded" in reasons[name] for name in broken)
    assert server.ask("small").json()["choices"][0]["text"] == once
