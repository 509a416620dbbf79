"""Damage checkpoints, load each, and print what became of it: a process of its own, whose memory is limited."""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from random import Random

from minillm import LLM, SamplingParams
from minillm.model.errors import CheckpointError
from tests.helpers.corrupt import Damage, damage, sound_folders

MORE = 2 * 2**30  # bytes of data that all cases may take
# What no tensor states: another value is another model, and as good a one.
FREE = {
    *("rope_parameters", "rms_norm_eps", "max_position_embeddings", "original_max_position_embeddings"),
    *("eos_token_id", "hidden_act", "hidden_activation", "sliding_window", "layer_types", "no_rope_layers"),
    *("use_sliding_window", "max_window_layers", "query_pre_attn_scalar", "no_rope_layer_interval"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling", "rope_theta"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
    *("llama.rope.freq_base", "llama.context_length", "llama.attention.layer_norm_rms_epsilon"),
}


def load(folder: Path) -> list[int]:
    """Three greedy tokens of a fixed prompt."""
    file = folder / "model.gguf"
    path = file if os.path.lexists(file) else folder
    with LLM(path, device="cpu", dtype="float32", num_kv_blocks=8, block_size=4, async_scheduling=False) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=3)
        limit = llm.max_model_len - 3  # which may be one of the changed values
        prompt = {"prompt_token_ids": [5, 6, 7][: max(1, min(3, limit))]}
        return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids if limit > 0 else []


def may_differ(done: Damage) -> bool:
    """Whether the damage may make other weights or another shape of rotation, which no reader could tell."""
    if done.file.suffix in (".safetensors", ".gguf") and done.what in BYTES:
        return True
    return any(place in FREE for place in map(str, done.where)) or done.what in TAKEN_AS


BYTES = ("flip", "set", "swap", "cut", "insert", "remove")
TAKEN_AS = ("swapped", "typed", "transposed", "halved")  # the same bytes, in the place or shape of others


def outcome(folder: Path, done: Damage, expected: list[int]) -> str:
    """ "refused" with the folder's path, "loaded" as good as before, or else what happened."""
    try:
        tokens = load(folder)
    except CheckpointError as error:
        return "refused" if str(folder) in str(error) else f"an error without the path: {error}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return "".join(traceback.format_exception(error)[-6:])
    return "loaded" if tokens == expected or may_differ(done) else f"other tokens: {tokens}"


def data_bytes() -> int:
    return 1024 * int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0])


def main(count: int, seed: str) -> None:
    with tempfile.TemporaryDirectory() as top:
        root = Path(top)
        folders = sound_folders(root / "sound")
        expected = {name: load(folder) for name, folder in folders.items()}
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + MORE, resource.RLIM_INFINITY))
        report: dict = {"refused": 0, "loaded": 0, "raw": []}
        case, open_files = root / "damaged", len(os.listdir("/proc/self/fd"))
        for index in range(count):
            for name, folder in folders.items():
                shutil.rmtree(case, ignore_errors=True)
                shutil.copytree(folder, case)
                done = damage(case, Random(f"{name} {seed} {index}"))
                told = outcome(case, done, expected[name])
                if told in report:
                    report[told] += 1
                else:
                    report["raw"].append(f"{name} {seed} {index}: {done.file.name} {done.what} {done.where}: {told}")
        gc.collect()
        report["handles"] = len(os.listdir("/proc/self/fd")) - open_files
        report["mapped"] = Path("/proc/self/maps").read_text().count(str(case))
        report["peak"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
