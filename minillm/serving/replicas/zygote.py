"""The zygote: a process that has the imports and the model, and forks into replicas. Built in chapter 22.

    front  --a line of JSON-->  zygote  --fork-->  replica  --socket-->  front

Most of a cold start is the import of torch and the reading of weights. A fork shares both: the memory of the weights
is there once, however many replicas read it (copy on write, and no replica writes). The zygote computes nothing, has
one thread, and touches no GPU, so a fork of it is a sound process. On a GPU it shares the imports alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from minillm.engine.config import EngineConfig
from minillm.engine.upkeep import load
from minillm.engine.vllm_names import merged
from minillm.model.checkpoint import load_tokenizer, resolve_model
from minillm.model.decoder import Decoder
from minillm.serving.replicas.replica import run_replica
from minillm.serving.replicas.sizes import arguments_of

# One thread for each library that would start some at its import: only the calling thread lives on in a fork.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def preload(arguments: dict[str, Any], weights: bool) -> Decoder | None:
    """The model that `LLM(**arguments)` would load, if `weights` is set. The tokenizer is read too, and dropped: the
    library behind it takes longer to import than most models take to load."""
    own, options = merged(*arguments_of(arguments))
    config = EngineConfig(**own)
    load_tokenizer(resolve_model(config.model if options.tokenizer is None else options.tokenizer))
    return load(config, options) if weights else None


def main() -> None:
    """Read commands from stdin until it ends; an answer of one line each on stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the front
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a dead replica leaves no zombie
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a replica prints may be taken for an answer
    model: Decoder | None = None
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "preload":
            start = time.monotonic()
            try:
                model = preload(command["arguments"], command["weights"])
                answer = {"seconds": time.monotonic() - start}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
        else:
            began = time.monotonic()
            pid = os.fork()
            if pid == 0:
                _become_replica(command, model, began)
            answer = {"pid": pid}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _become_replica(command: dict[str, Any], model: Decoder | None, began: float) -> None:
    """In the child; does not return."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # SIGINT stays ignored: the front drains
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        address, secret = tuple(command["address"]), bytes.fromhex(command["secret"])
        run_replica(address, secret, command["replica_id"], command["generation"], began, model)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
