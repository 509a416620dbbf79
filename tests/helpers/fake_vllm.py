"""A stand-in for vLLM, and interpreters of environments that have it or lack it."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import torch

# As much of vLLM as the child uses; it generates the last token of the prompt, then that plus one, and so on, or
# what transformers generates.
FAKE_VLLM = """
import os
from types import SimpleNamespace as N
__version__ = "0.0-fake"
print("vLLM prints this to stdout")

class SamplingParams:
    def __init__(self, **settings):
        self.__dict__ |= settings

class LLM:
    def __init__(self, path, **settings):
        assert not settings["enable_prefix_caching"] and os.environ["OMP_NUM_THREADS"] == NUM_THREADS_HERE
        if not settings["enforce_eager"]:
            raise RuntimeError("no compiler")
        self.llm_engine, self.path, self.requests = self, path, {}

    def add_request(self, name, prompt, params):
        assert params.ignore_eos and not params.detokenize
        self.requests[name] = (prompt["prompt_token_ids"], params, [])

    def has_unfinished_requests(self):
        return any(len(made) < params.max_tokens for _, params, made in self.requests.values())

    def step(self):
        outputs = []
        for name, (prompt, params, made) in list(self.requests.items()):
            if name == "1" and params.temperature == 0.5 and len(self.requests["0"][2]) < 2:
                continue  # its first token comes a step later
            made.append(self.next_token(prompt, made))
            outputs.append(N(request_id=name, outputs=[N(token_ids=list(made))]))
            if len(made) == params.max_tokens:
                del self.requests[name]
        return outputs
"""
COUNTS = "    def next_token(self, prompt, made):\n        return prompt[-1] + len(made)\n"
AGREES = """
    def next_token(self, prompt, made):
        import torch, transformers
        if not hasattr(self, "model"):
            self.model = transformers.AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        with torch.inference_mode():
            return int(self.model(torch.tensor([prompt + made])).logits[0, -1].argmax())
"""


def interpreter(folder: Path, *arguments: str, **environment: str) -> str:
    """A program that starts this Python with more arguments and another environment."""
    path = folder / "python"
    exports = "".join(f"export {name}='{value}'\n" for name, value in environment.items())
    path.write_text(f'#!/bin/sh\n{exports}exec "{sys.executable}" {" ".join(arguments)} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def with_vllm(folder: Path, body: str) -> str:
    """An interpreter that finds the fake vLLM."""
    (folder / "packages" / "vllm").mkdir(parents=True)
    text = FAKE_VLLM.replace("NUM_THREADS_HERE", repr(str(torch.get_num_threads()))) + body
    (folder / "packages" / "vllm" / "__init__.py").write_text(text)
    return interpreter(folder, PYTHONPATH=str(folder / "packages"))
