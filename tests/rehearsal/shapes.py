"""A model of Qwen3-0.6B's shape, which needs no checkpoint since nothing here has memory: launches of a recorded step,
and what is allocated against what `gpu_memory_utilization` allows."""

from __future__ import annotations

import gc
import weakref

import torch

from .device import Device
from .memory import MIB
from .notes import NOTES
from .scenarios import watched

QWEN3 = dict(
    model_type="qwen3", architectures=["Qwen3ForCausalLM"], vocab_size=151_936, hidden_size=1024,
    intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    max_position_embeddings=40_960, rms_norm_eps=1e-6, tie_word_embeddings=True, attention_bias=False,
    rope_theta=1_000_000, hidden_act="silu", eos_token_id=151_645, bos_token_id=151_643, torch_dtype="bfloat16",
)  # fmt: skip
PROMPT_TOKENS = 40  # of each request; 256 of them are more than a step takes


def qwen3(gpu: Device, num_seqs: int = 256) -> dict:
    """Start an engine, compute its largest steps, ask for a second LLM beside it, and take it down."""
    from minillm.engine.config import EngineConfig

    before = settled(gpu)
    config = EngineConfig(model="", max_num_seqs=num_seqs)
    engine = start(config)
    facts = {"graphs MiB": private(gpu)}
    NOTES.phase = "between"
    with watched(engine.runner):
        serve(engine, num_seqs)
    facts |= used(gpu, config.gpu_memory_utilization)
    with NOTES.during("start"):
        facts |= {"second": second_llm()}
    gone = weakref.ref(engine)
    del engine
    return facts | given_back(gpu, before, gone)


def bundled(gpu: Device) -> dict:
    """The same with the bundled model and all defaults, of which a second one fits beside the first."""
    from minillm import LLM, SamplingParams

    before = settled(gpu)
    llm = LLM("tinyworld", device="cuda")
    facts = {"graphs MiB": private(gpu)}
    NOTES.phase = "between"
    with watched(llm.engine.runner):
        llm.generate(
            ["Once upon a time there was a little fox. " * 6] * 256,
            SamplingParams(top_k=20, max_tokens=3, ignore_eos=True),
            use_tqdm=False,
        )
    facts |= used(gpu, llm.config.gpu_memory_utilization)
    with NOTES.during("start"):
        facts |= {"second": second_llm()}
    gone = weakref.ref(llm)
    del llm
    return facts | given_back(gpu, before, gone)


def again(gpu: Device) -> dict:
    """A cell that is run twice: the first engine is garbage, and not collected yet, when the second one measures."""
    from minillm.engine.config import EngineConfig

    gc.disable()
    try:
        config = EngineConfig(model="", enforce_eager=True)
        engine = start(config)
        blocks, engine.myself = engine.kv_cache.pool.num_blocks, engine  # a cycle
        del engine
        try:
            engine = start(config)
        except ValueError as error:
            return {"again": f"refused: {str(error)[:40]}"}
        return {"again": "fits", "fewer blocks": blocks - engine.kv_cache.pool.num_blocks}
    finally:
        gc.enable()


def second_llm() -> str:
    """What comes of one more LLM."""
    from minillm import LLM

    try:
        LLM("tinyworld", device="cuda", max_num_seqs=1)
    except ValueError as error:
        return "fits or is refused" if "bytes are left for the KV cache" in str(error) else str(error)
    return "fits or is refused"


def private(gpu: Device) -> int:
    """MiB that the pools of graphs hold."""
    return -(-sum(pool.reserved for pool in gpu.memory.pools[1:]) // MIB)


def start(config):
    from minillm.device import resolve_dtype
    from minillm.engine.engine import Engine
    from minillm.model import decoder
    from minillm.model.config import ModelConfig

    model = decoder.Decoder(ModelConfig.from_hf(QWEN3), resolve_dtype("auto", "cuda"), torch.device("cuda"))
    decoder.fingerprint = lambda model: "rehearsal"  # the real one samples 200 tensors, one after the other
    return Engine(model.prepare(), config=config)


def serve(engine, num_seqs: int) -> None:
    from minillm import SamplingParams
    from minillm.engine.request import Request

    params = SamplingParams(top_k=20, top_p=0.95, max_tokens=4, ignore_eos=True)
    for number in range(num_seqs):
        prompt = [(7 * number + place) % 1000 for place in range(PROMPT_TOKENS)]
        engine.add_request(Request(str(number), prompt, params, 4, seed=number))
    while engine.has_unfinished:
        engine.step()


def used(gpu: Device, utilization: float) -> dict:
    """The most that the driver would have reported since the scenario began, against what is allowed."""
    allowed = int(utilization * gpu.memory.total)
    return {"over MiB": max(0, -(-(gpu.memory.peak_used - allowed) // MIB)), "used MiB": gpu.memory.peak_used // MIB}


def given_back(gpu: Device, before: int, gone: weakref.ref) -> dict:
    """What an engine still holds after it is gone."""
    return {"kept MiB": -(-(settled(gpu) - before) // MIB), "gone": gone() is None}


def settled(gpu: Device) -> int:
    """What is allocated, without cuBLAS."""
    gc.collect()
    torch.cuda.empty_cache()
    gpu.memory.clear_workspaces()
    return gpu.memory.allocated
