"""The comparison itself: the peers opened, their outputs checked, all timed in turns. Built in chapter 14."""

from __future__ import annotations

import gc
import importlib.util
import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch

from ...model.checkpoint import load_config
from ...model.config import ModelConfig
from .. import few_bits, llama_cpp, measure
from ..decode import SHAPES, Shape, write_random_checkpoint
from ..measure import Ceilings
from ..record import Record
from . import ceilings
from .ceilings import CPU, best_of
from .checks import OUTPUT_TOKENS, PROMPT_LENGTHS, TOLERANCE, Oracle, check, check_lengths, equal_share
from .child import SCRIPT, ChildPeer, check_interpreter
from .engines import Minillm, Transformers
from .llama_batch import LlamaCppBatch
from .phases import phases_of
from .request import Answer, Peer, Request
from .workloads import DEFAULT, PEERS, QUANTIZATIONS, Case, Workload, random_prompts

BLOCK_SIZE = 16
GGUF_TYPES = {"float32": "F32", "bfloat16": "BF16"}
MAX_POSITIONS = 8192  # a prompt of 4,096 tokens and its answer


def run(
    workload: Workload = DEFAULT,
    vllm: str | None = None,
    command: str = "minillm bench compare",
    shapes: dict[str, Shape] = SHAPES,
    on_run: Callable[[str], None] = lambda what: None,
    keep: Callable[[dict], object] | None = None,
    script: Path = SCRIPT,
) -> dict:
    """Measure `workload` on the CPU; a result for `measure.save`.

    `vllm` is the interpreter of an environment with vLLM, which runs `script`. A peer that is not there is left out,
    with the reason, unless `workload.peers` names it. Raises ValueError for an unknown name, a wrong interpreter or
    nothing to measure, RuntimeError for a peer that fails, OutputsDisagree for wrong tokens.
    """
    workload.check()
    if workload.shape not in shapes:
        raise ValueError(f"shape={workload.shape!r} is unknown; choose one of {', '.join(shapes)}")
    if vllm is not None:
        check_interpreter(vllm)
    left_out = missing_peers(workload, vllm) | skipped_quantizations(workload, vllm)
    if not any(group not in left_out for group in groups_of(workload)):
        raise ValueError(f"only={','.join(workload.only)!r} leaves nothing to measure: {'; '.join(left_out.values())}")
    record = Record(workload.full_name, command, CPU, asdict(workload), keep)
    record.figures |= {"left_out": left_out, "peer_versions": {}, "checks": {}, "cases": {}}
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_checkpoint(shapes[workload.shape], Path(folder) / workload.shape, workload.seed)
        raw = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": MAX_POSITIONS}, indent=1))
        comparison = Comparison(path, load_config(path), workload, record, left_out, on_run, vllm, script)
        comparison.measure_ceilings()
        on_run("ceilings")
        for dtype in workload.dtypes:
            with record.case(dtype):
                comparison.compare_dtype(dtype)
            gc.collect()
        for quantization in (name for name in workload.quantizations if name not in left_out):
            with record.case(quantization):
                comparison.compare_quantized(quantization)
            gc.collect()
    return record.finish()


def missing_peers(workload: Workload, vllm: str | None) -> dict[str, str]:
    """Which peers are left out, and why. Raises ValueError where one of them was asked for by name."""
    reasons = {}
    if importlib.util.find_spec("llama_cpp") is None:
        reasons["llama.cpp"] = "not installed: pip install 'minillm-book[compare]' compiles it"
    if vllm is None:
        reasons |= dict.fromkeys(("vllm", "vllm-eager"), "--vllm PYTHON names no environment that has it")
    for peer in workload.peers:
        if peer in reasons:
            raise ValueError(f"peer={peer!r} cannot be compared with: {reasons[peer]}")
    if workload.peers:
        return {peer: "not chosen" for peer in PEERS if peer not in workload.peers}
    return reasons


def groups_of(workload: Workload) -> set[str]:
    """What the chosen cases measure: a quantization, or decoding, prompts and many requests with plain weights."""
    return {case.quantization or case.group for case in workload.cases(vocab_size=16)}


def skipped_quantizations(workload: Workload, vllm: str | None) -> dict[str, str]:
    """Which quantizations are chosen and not measured, and why."""
    chosen = [name for name in workload.quantizations if name in groups_of(workload)]
    if "bfloat16" not in workload.dtypes:
        return dict.fromkeys(chosen, "its activations are bfloat16, which --dtype leaves out")
    if "llama.cpp" in missing_peers(workload, vllm):
        return dict.fromkeys(chosen, "llama.cpp alone has formats of as many bits, and it is left out")
    return {}


def num_runs(workload: Workload, vllm: str | None) -> int:
    """How often `run` reports progress."""
    peers = [peer for peer in PEERS if peer not in missing_peers(workload, vllm)]
    cases, skipped = workload.cases(vocab_size=16), skipped_quantizations(workload, vllm)
    plain, rounds = sum(case.quantization is None for case in cases), workload.repeats + 1
    runs = len(workload.dtypes) * (plain * (1 + len(peers)) * rounds + (1 + len(peers) if plain else 0))
    quantized = [case.quantization for case in cases if case.quantization and case.quantization not in skipped]
    runs += 2 * (len(quantized) * rounds + len(set(quantized)))
    return 1 + runs


class Comparison:
    """One model, and everything that is measured on it."""

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        workload: Workload,
        record: Record,
        left_out: dict[str, str],
        on_run: Callable[[str], None],
        vllm: str | None,
        script: Path,
    ):
        self.path, self.config, self.workload, self.record = path, config, workload, record
        self.left_out, self.on_run, self.vllm, self.script = left_out, on_run, vllm, script
        self.cases = workload.cases(config.vocab_size)
        prompts = random_prompts(config.vocab_size, PROMPT_LENGTHS, workload.seed)
        self.checked = Request(prompts, [OUTPUT_TOKENS] * len(prompts))
        requests = [self.checked, *(case.request for case in self.cases)]
        self.max_num_seqs = max(len(request.prompts) for request in requests)
        self.num_kv_blocks = 1 + max(
            sum(-(-(len(prompt) + length) // BLOCK_SIZE) for prompt, length in zip(request.prompts, request.lengths))
            for request in requests
        )

    def compare_dtype(self, dtype: str) -> None:
        """The weights as they are: every peer."""
        if not (cases := [case for case in self.cases if case.quantization is None]):
            return
        with ExitStack() as stack:
            peers = self._open(stack, dtype)
            oracle = Oracle(self.path)
            outputs = {name: peer.answer(self.checked).token_ids for name, peer in peers.items()}
            self.record.figures["checks"][dtype] = {
                name: {
                    "largest_gap": check(f"{name}, {dtype}", self.checked, made, oracle, TOLERANCE[dtype]),
                    "tolerance": TOLERANCE[dtype],
                    "equal_to_minillm": equal_share(made, outputs["minillm"]),
                }
                for name, made in outputs.items()
            }
            del oracle
            for case in cases:
                with self.record.case(f"{dtype}/{case.name}"):
                    self._time(case, f"{dtype}/{case.name}", dtype, peers, {})

    def compare_quantized(self, quantization: str) -> None:
        """Low-bit weights, with activations in bfloat16: of the peers only llama.cpp has formats of as many bits."""
        cases = [case for case in self.cases if case.quantization == quantization]
        if not cases:
            return
        ours, gguf_type = QUANTIZATIONS[quantization]
        with ExitStack() as stack:
            few_bits.check(self.path, ours, torch.bfloat16, CPU)
            peers: dict[str, Peer] = {}
            peers["minillm"] = own = self._minillm(stack, "bfloat16", ours)
            self.on_run(f"{quantization} minillm")
            file = self._gguf(gguf_type)
            peers["llama.cpp"] = self._llama_cpp(stack, file, float32_cache=False)
            made, tolerance = peers["llama.cpp"].answer(self.checked).token_ids, TOLERANCE["bfloat16"]
            gap = check(f"llama.cpp, {gguf_type}", self.checked, made, Oracle(self.path, gguf_type), tolerance)
            self.record.figures["checks"][quantization] = {"llama.cpp": {"largest_gap": gap, "tolerance": tolerance}}
            self.on_run(f"{quantization} llama.cpp")
            weight_bytes = {"minillm": few_bits.weight_bytes_of(own.llm.model), "llama.cpp": file.stat().st_size}
            for case in cases:
                with self.record.case(case.name):
                    self._time(case, case.name, "bfloat16", peers, weight_bytes)

    def _time(self, case: Case, name: str, dtype: str, peers: dict[str, Peer], weight_bytes: dict[str, int]) -> None:
        before = self.measure_ceilings()

        def once(peer: str) -> float:
            answer: Answer = peers[peer].answer(case.request)
            check_lengths(f"{peer}, {name}", case.request, answer.token_ids)
            return case.seconds_per_token(answer)

        times = self.record.interleave(
            {peer: lambda peer=peer: once(peer) for peer in peers},
            self.workload.repeats,
            f"{name}/",
            lambda peer: self.on_run(f"{name} {peer}"),
        )
        nearby = best_of(before, self.measure_ceilings())
        limits = {
            peer: case.limit(self.config, getattr(torch, dtype), nearby, weight_bytes.get(peer)) for peer in times
        }
        self.record.figures["cases"][name] = {
            "counted": case.counted,
            **figures_of(times, limits),
            "ceilings": asdict(nearby),
            "phases": phases_of(
                peers["minillm"], case, getattr(torch, dtype), self.config, nearby, weight_bytes.get("minillm")
            ),
        }

    def measure_ceilings(self) -> Ceilings:
        """Those of now; the record keeps the best of the whole run."""
        dtypes = tuple(getattr(torch, name) for name in self.workload.dtypes)
        now = ceilings.measured(self.config.num_parameters() * 2, dtypes)
        self.record.ceilings = best_of(self.record.ceilings or now, now)
        return now

    def _open(self, stack: ExitStack, dtype: str) -> dict[str, Peer]:
        """minillm first, then every peer that is not left out; compiled vLLM is left out where it fails to start."""
        peers: dict[str, Peer] = {"minillm": self._minillm(stack, dtype)}
        self.on_run(f"{dtype} minillm")
        for name in (name for name in PEERS if name not in self.left_out):
            try:
                if name == "transformers":
                    peers[name] = Transformers(self.path, dtype)
                elif name == "llama.cpp":
                    peers[name] = self._llama_cpp(stack, self._gguf(GGUF_TYPES[dtype]), dtype == "float32")
                else:
                    peers[name] = self._vllm(stack, name, dtype)
                self.record.figures["peer_versions"][name] = peers[name].version
            except RuntimeError as error:
                if name != "vllm" or name in self.workload.peers:
                    raise
                self.left_out[f"{name}, {dtype}"] = str(error)
            self.on_run(f"{dtype} {name}")
        return peers

    def _minillm(self, stack: ExitStack, dtype: str, quantization: str | dict | None = None) -> Minillm:
        engine = Minillm(self.path, dtype, self.max_num_seqs, self.num_kv_blocks, quantization)
        stack.callback(engine.close)
        return engine

    def _llama_cpp(self, stack: ExitStack, file: Path, float32_cache: bool) -> LlamaCppBatch:
        engine = LlamaCppBatch(file, torch.get_num_threads(), float32_cache)
        stack.callback(engine.close)
        return engine

    def _vllm(self, stack: ExitStack, name: str, dtype: str) -> ChildPeer:
        load = {
            "path": str(self.path),
            "dtype": dtype,
            "eager": name == "vllm-eager",
            "threads": torch.get_num_threads(),
            "max_num_seqs": self.max_num_seqs,
        }
        try:
            child = ChildPeer(name, [self.vllm, str(self.script)], load)
        except RuntimeError as error:
            raise RuntimeError(f"{error} (in the environment of {self.vllm})") from error
        stack.callback(child.close)
        return child

    def _gguf(self, gguf_type: str) -> Path:
        return llama_cpp.write_gguf(self.path, self.config, gguf_type, self.path.parent / f"{gguf_type}.gguf")


def figures_of(times: dict[str, measure.Samples], limits: dict[str, tuple[float, str]]) -> dict:
    """The engines' figures, and minillm's ratio to the best of the others."""
    engines = {
        name: {
            "tokens_per_second": 1 / taken.median,
            "spread": taken.spread,
            "limit_tokens_per_second": 1 / limits[name][0],
            "share_of_limit": limits[name][0] / taken.median,
        }
        for name, taken in times.items()
    }
    rates = {name: engine["tokens_per_second"] for name, engine in engines.items()}
    best = max((name for name in rates if name != "minillm"), key=rates.get, default=None)
    ratio = {"best_peer": best, "ratio_to_best_peer": rates["minillm"] / rates[best]} if best else {}
    return {"limited_by": limits["minillm"][1], "engines": engines, **ratio}
