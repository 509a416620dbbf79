"""vLLM as a peer, where it is installed: the same requests, in a process of its own that gives its memory back.
Built in chapter 14."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

SECONDS = 300  # at most, its start and its own compilation among them


def installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def seconds_of(path: Path, prompts: list[list[int]], lengths: list[int], dtype: str, temperature: float) -> float:
    """Seconds for all requests at once, after a warm-up. Raises RuntimeError where vLLM fails or takes too long."""
    asked = json.dumps(
        {"path": str(path), "prompts": prompts, "lengths": lengths, "dtype": dtype, "temperature": temperature}
    )
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(asked, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"vLLM had no answer after {SECONDS} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers too
    found = [line for line in out.splitlines() if line.startswith("seconds ")]
    if process.returncode or not found:
        raise RuntimeError(f"vLLM ended with status {process.returncode}: {' '.join(errors.split())[-300:]}")
    return float(found[-1].split()[1])


def main() -> None:
    import time

    from vllm import LLM, SamplingParams

    asked = json.loads(sys.stdin.read())
    llm = LLM(
        asked["path"], dtype=asked["dtype"], max_model_len=4096, enable_prefix_caching=False, skip_tokenizer_init=True
    )
    params = [
        SamplingParams(temperature=asked["temperature"], max_tokens=length, ignore_eos=True, detokenize=False)
        for length in asked["lengths"]
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    llm.generate(prompts[:1], params[:1], use_tqdm=False)
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    print(f"seconds {time.perf_counter() - started}")


if __name__ == "__main__":
    main()
