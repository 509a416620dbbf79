"""An LLM and requests for it, one scenario for each way through the engine."""

from __future__ import annotations

import gc
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from .device import Device
from .notes import NOTES, start_notes
from .report import Report
from .tensors import Watch
from .triton_stub import forget_kernels

PROMPTS = (
    "Once upon a time there was a little fox", "Hello",
    "One day, Lily went to the park with her mother. She saw a big red ball and", "The", "Tom had",
    "In a small house by the river there lived a", "A",
)  # fmt: skip


@dataclass
class Scenario:
    settings: dict = field(default_factory=dict)  # of the LLM
    params: Callable[[], list] | None = None  # one SamplingParams a prompt
    drive: Callable | None = None  # what is done with the LLM, if not `generate`
    play: Callable[[Device], dict] | None = None  # another play altogether


def scenarios() -> dict[str, Scenario]:
    from minillm import SamplingParams as P
    from minillm.sampling.grammar.params import StructuredOutputsParams

    from . import shapes

    few = dict(max_tokens=6, ignore_eos=True)

    def greedy():
        return [P(temperature=0.0, **few)] * 3

    def drawn():
        return [
            P(temperature=0.8, seed=1, max_tokens=9, ignore_eos=True),
            P(top_k=20, top_p=0.95, **few),
            P(temperature=0.0, **few),
        ]

    def penalised():
        return [
            P(repetition_penalty=1.2, presence_penalty=0.3, **few),
            P(logit_bias={5: 1.0}, min_tokens=3, max_tokens=6),
            *greedy()[:1],
        ]

    def grammar():
        return [
            P(temperature=0.0, max_tokens=6, structured_outputs=StructuredOutputsParams(regex="[ -~\n]*")),
            *drawn()[1:],
        ]

    def long():
        return [P(temperature=0.0, max_tokens=60, ignore_eos=True)] * 3

    draft = {"method": "draft_model", "model": "tinyworld-draft", "num_speculative_tokens": 3}
    one = dict(max_num_seqs=1, num_kv_blocks=10, max_model_len=150)
    disk = dict(host_kv_bytes=2**20, disk_kv_path="", disk_kv_bytes=2**24, **one)
    swap = dict(
        preemption_mode="swap", host_kv_bytes=2**22, num_kv_blocks=10, max_model_len=150, enable_prefix_caching=False
    )
    return {
        "plain": Scenario(params=greedy),
        "seeded": Scenario(params=drawn),
        "penalties": Scenario(params=penalised),
        "logprobs": Scenario(params=lambda: [P(temperature=0.0, logprobs=3, **few), *drawn()[:2]]),
        "prompt logprobs": Scenario(params=lambda: [P(temperature=0.0, prompt_logprobs=2, **few), *greedy()[:2]]),
        "samples": Scenario(params=lambda: [P(n=3, seed=3, **few), *greedy()[:1]]),
        "chunks": Scenario(dict(max_num_batched_tokens=16), drawn),
        "eager": Scenario(dict(enforce_eager=True), drawn),
        "quantized head": Scenario(dict(quantization="int4", max_num_batched_tokens=256), drawn),
        "fp8 both": Scenario(
            dict(quantization={"weights": "fp8", "activations": "fp8", "group_size": None}, max_num_batched_tokens=256),
            drawn,
        ),
        "8-bit cache": Scenario(dict(kv_cache_dtype="int8"), drawn),
        "sinks": Scenario(dict(kv_retention={"sinks": 4, "window": 60}, max_model_len=4096), drawn),
        "swap": Scenario(swap, long),
        "disk": Scenario(disk, greedy, drive_twice),
        "offload": Scenario(dict(cpu_offload_bytes=9_000_000), greedy),
        "ngram": Scenario(dict(speculative_config={"method": "ngram", "prompt_lookup_min": 1}), greedy),
        "draft model": Scenario(dict(speculative_config=draft), drawn),
        "adaptive draft": Scenario(dict(speculative_config=draft | {"adaptive": True}), drawn),
        "grammar": Scenario(params=grammar),
        "adapters": Scenario(dict(enable_lora=True, max_loras=2), drive=drive_adapters),
        "memory": Scenario(play=shapes.bundled),
        "again": Scenario(play=shapes.again),
        "Qwen3-0.6B": Scenario(play=shapes.qwen3),
        "beams": Scenario(
            drive=lambda llm, params: llm.beam_search(PROMPTS[:2], beam_width=3, max_tokens=5, ignore_eos=True)
        ),
    }


def drive_once(llm, params) -> list:
    return llm.generate(list(PROMPTS[: len(params)]), params, use_tqdm=False)


def drive_adapters(llm, params) -> list:
    """Both bundled adapters and none in one batch: a few tokens a step, then more than fill a tile."""
    from minillm import LoRARequest, SamplingParams

    adapters = [LoRARequest("pirate", 1, "tinyworld-pirate"), None, LoRARequest("news", 2, "tinyworld-news")]
    few = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for prompts in (PROMPTS[:3], [prompt * 20 for prompt in PROMPTS[:3]]):
        answers = llm.generate(list(prompts), few, use_tqdm=False, lora_request=adapters)
    return answers


def drive_twice(llm, params) -> list:
    """The first prompts again, after others took their place; then all that memory holds goes to the disk."""
    for prompts in (PROMPTS[:3], PROMPTS[3:6], PROMPTS[:3]):
        answers = llm.generate(list(prompts), params, use_tqdm=False)
    llm.close()
    return answers


def rehearse(name: str, scenario: Scenario, gpu: Device, verbose: bool = False) -> Report:
    def play():
        from minillm import LLM

        with tempfile.TemporaryDirectory() as folder:
            settings = dict(max_num_seqs=8, max_num_batched_tokens=64) | scenario.settings  # few sizes to record
            if "disk_kv_path" in settings:
                settings["disk_kv_path"] = folder
            llm = LLM("tinyworld", device="cuda", **settings)
            NOTES.phase = "between"
            with watched(llm.engine.runner):
                answers = (scenario.drive or drive_once)(llm, scenario.params and scenario.params())
        return {"made up": tokens_made_up(answers)}

    return performed(name, gpu, partial(scenario.play, gpu) if scenario.play else play, verbose)


def performed(name: str, gpu: Device, play: Callable[[], dict], verbose: bool = False) -> Report:
    """Play a scenario with everything watched; what it raises becomes its error."""
    forget_kernels()
    gc.collect()
    gpu.memory.empty_cache()
    gpu.memory.peak_used = gpu.memory.used
    notes, report = start_notes(), Report(name, gpu.name)
    begin = time.process_time()
    try:
        with Watch(gpu):
            report.facts = play()
    except Exception as error:
        report.error = f"{type(error).__name__}: {str(error)[:500]} at {lines_of(error)}"
        if verbose:
            traceback.print_exc()
    finally:
        notes.capture = gpu.memory.current = None
    report.seconds = time.process_time() - begin
    report.take(notes)
    return report


def lines_of(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/minillm/" in frame.filename]
    return " < ".join(f"{frame.filename.rsplit('/minillm/', 1)[1]}:{frame.lineno}" for frame in reversed(frames[-3:]))


@contextmanager
def watched(runner):
    """Names the phase of what happens in a step:

    prompt     the step computes tokens of a prompt
    changed    it decodes, and other requests than in the step before (one has joined, left, or split),
               or blocks are moved
    steady     it decodes for the same requests
    tokens     the host waits for the step's tokens
    between    all that the engine does outside of launch and wait
    """
    launch, before = runner.launch, [None]

    def launch_in_phase(output):
        with NOTES.during(phase := phase_of(output, before)):
            step = launch(output)
        NOTES.steps[phase] += 1
        wait = step.wait

        def wait_in_phase():
            with NOTES.during("tokens"):
                NOTES.steps["tokens"] += 1
                return wait()

        step.wait = wait_in_phase
        return step

    runner.launch = launch_in_phase
    try:
        yield
    finally:
        runner.launch = launch


def phase_of(output, before: list) -> str:
    rows = [(row.request_id, row.samples, bool(row.draft)) for row in output.rows]
    last, before[0] = before[0], rows
    if output.arrived or any(row.num_tokens > 1 + len(row.draft) or not row.samples for row in output.rows):
        return "prompt"
    return "changed" if rows != last or moved(output.moves) else "steady"


def moved(moves) -> bool:
    return any(getattr(moves, kind) for kind in ("to_disk", "swap_out", "from_disk", "copies", "swap_in"))


def tokens_made_up(answers) -> bool:
    """Whether every token is one that was made up, and none was read before it had arrived."""
    return all(0 <= token_id for answer in answers for output in answer.outputs for token_id in output.token_ids)
