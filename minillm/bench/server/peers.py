"""The servers that are compared: each started on a free port, each asked in its own dialect. Built in chapter 24."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...model.config import ModelConfig
from .. import llama_cpp
from ..decode import Shape, write_random_checkpoint
from ..load.plan import Prompts, load_vocabulary
from ..load.target import Target, own_server, server_process

FILLER = "Ġ#"  # begins the text of a token that no tokenizer makes
TRANSFORMERS = "from transformers.cli.transformers import app; app()"
ONLY_ITS_FIELDS = {"ignore_eos": None, "stream_options": None}  # it refuses those that it does not know
PARALLEL, CONTEXT = 16, 1024  # llama.cpp's server: sequences at once, and tokens of each
PEERS = ("transformers", "transformers, continuous batching", "llama.cpp")


@dataclass(frozen=True)
class Server:
    """One that runs, and how its prompts are written. `pid` leads the group of its processes."""

    target: Target
    prompts: Prompts
    pid: int

    def pause(self) -> None:
        """Let it stand still until `resume`: some servers poll while they wait, and take a core from the others."""
        os.killpg(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # on a busy machine it takes a while

    def resume(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)


@dataclass(frozen=True)
class Programs:
    """What runs the peers; None leaves one out. `only` names the peers that are measured; empty, all that can be."""

    transformers: str | None = None  # a Python interpreter with transformers[serving]
    llama_server: str | None = None  # llama.cpp's own server
    only: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises ValueError for a program that is not there, and for a peer that none of them runs."""
        for name, program, hint in (
            ("transformers", self.transformers, "an interpreter with transformers[serving]"),
            ("llama_server", self.llama_server, "llama.cpp's llama-server, built for this machine"),
        ):
            if program is not None and shutil.which(program) is None:
                raise ValueError(f"{name}={program!r} is no program; give the path of {hint}")
        for name in self.only:
            if name not in PEERS:
                raise ValueError(f"peer={name!r} is unknown; choose of {', '.join(map(repr, PEERS))}")
            if name not in self._there:
                option = "--llama-server" if name == PEERS[2] else "--transformers"
                raise ValueError(f"peer={name!r} has no program to run it; give {option}, or leave it out")

    @property
    def peers(self) -> list[str]:
        return [name for name in self._there if not self.only or name in self.only]

    @property
    def _there(self) -> list[str]:
        found = list(PEERS[:2]) if self.transformers else []
        return found + ([PEERS[2]] if self.llama_server else [])


def write_checkpoint(shape: Shape, folder: Path, seed: int = 0) -> Path:
    """Random weights, with a vocabulary in which each of the model's tokens has a text: servers that send text alone
    would be silent about the others."""
    path = write_random_checkpoint(shape, folder, seed)
    file = path / "tokenizer.json"
    told = json.loads(file.read_text())
    vocabulary = told["model"]["vocab"]
    vocabulary |= {f"{FILLER}{index}": index for index in range(len(vocabulary), shape.vocab_size)}
    file.write_text(json.dumps(told))
    return path


@contextmanager
def running(name: str, path: Path, config: ModelConfig, dtype: str, programs: Programs, options=()) -> Iterator[Server]:
    """Start minillm or a peer on the checkpoint `path`, and wait until it answers."""
    started: list[int] = []  # the id of its process
    if name == "minillm":
        with own_server(str(path), ["--device", "cpu", "--dtype", dtype, *options], started.append) as target:
            yield Server(target, prompts_of(path, target.model), *started)
        return
    port = free_port()
    if name == "llama.cpp":
        kind, cache = {"float32": ("F32", "f32"), "bfloat16": ("BF16", "f16")}[dtype]
        file = path.parent / f"{kind}.gguf"
        if not file.exists():
            llama_cpp.write_gguf(path, config, kind, file, with_vocabulary=True)
        command = [programs.llama_server, "-m", str(file), "--port", str(port), "--parallel", str(PARALLEL)]
        command += ["--ctx-size", str(PARALLEL * CONTEXT), "--cache-type-k", cache, "--cache-type-v", cache]
        threads = str(torch.get_num_threads())
        command += ["--threads", threads, "--threads-batch", threads]
        model, prompts = "any", {"extra_body": {"cache_prompt": False}}
    else:
        command = [programs.transformers, "-c", TRANSFORMERS, "serve", str(path), "--port", str(port)]
        command += ["--device", "cpu", "--dtype", dtype] + (["--continuous-batching"] if "batching" in name else [])
        # An end of sequence that no token is: generate() puts in the model's own where none is given.
        endless = json.dumps({"eos_token_id": config.vocab_size, "pad_token_id": 0, "do_sample": False})
        model = str(path)
        prompts = {"as_text": True, "extra_body": ONLY_ITS_FIELDS | {"generation_config": endless}}
    url = f"http://{'127.0.0.1' if name == 'llama.cpp' else 'localhost'}:{port}"
    health = f"{url}/health"
    with server_process(command, lambda log: url if answers(health) else None, own_environment(), started.append):
        target = Target(url, model, max_model_len=CONTEXT)
        yield Server(target, prompts_of(path, model, **prompts), *started)


def prompts_of(path: Path, model: str, **how: Any) -> Prompts:
    """Prompts of those tokens that a tokenizer makes, for the server's `model`."""
    tokenizer, token_ids = load_vocabulary(str(path))
    token_ids = [one for one in token_ids if not tokenizer.convert_ids_to_tokens(one).startswith(FILLER)]
    return Prompts(model, token_ids, tokenizer, **how)


def own_environment() -> dict[str, str]:
    """Without the path to this interpreter's packages: a peer has its own."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def answers(url: str) -> bool:
    """Whether there is a server, and it is ready (llama.cpp's says 503 while it loads)."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except urllib.error.HTTPError as error:
        return error.code == 404
    except OSError:
        return False


def ask(server: Server, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The greedy token ids of one prompt, from minillm's server."""
    body = {"model": server.target.model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        server.target.endpoint(chat=False), json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)["choices"][0]["token_ids"]
