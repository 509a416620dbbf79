"""vLLM as a child process: one JSON request a line on stdin, one JSON answer a line on stdout. Built in chapter 14.

This file is run as a path by the interpreter of another environment, so it imports nothing of minillm.

    {"load": {"path": ..., "dtype": ..., "eager": ..., "threads": ..., "max_num_seqs": ...}}
        -> {"version": ...}
    {"prompts": [[...], ...], "lengths": [...], "temperature": ...}
        -> {"token_ids": [[...], ...], "seconds": ..., "first_seconds": ..., "first_tokens": ...}

A request that fails is answered with {"error": ...}. The process ends when stdin does.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file: its modules must not stand in for others of the same name

import json
import os
import time

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def load(path, dtype, eager, threads, max_num_seqs):
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import vllm

    llm = vllm.LLM(
        path,
        dtype=dtype,
        enforce_eager=eager,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    return llm.llm_engine, vllm.__version__


def answer(engine, prompts, lengths, temperature):
    """Step until every request has its tokens; the times count from the arrival of the first request."""
    from vllm import SamplingParams

    made, first_seconds, first_tokens = {}, None, 0
    started = time.monotonic()
    for index, (prompt, length) in enumerate(zip(prompts, lengths)):
        params = SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, detokenize=False)
        engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            made[output.request_id] = output.outputs[0].token_ids
        if first_seconds is None and len(made) == len(prompts):
            first_seconds, first_tokens = time.monotonic() - started, sum(map(len, made.values()))
    return {
        "seconds": time.monotonic() - started,
        "first_seconds": first_seconds,
        "first_tokens": first_tokens,
        "token_ids": [list(made[str(index)]) for index in range(len(prompts))],
    }


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print goes to stderr, so that stdout carries answers alone
    engine = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if "load" in asked:
                engine, version = load(**asked["load"])
                reply = {"version": version}
            else:
                reply = answer(engine, **asked)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
