"""LLM: a model you can ask, with vLLM's names. Built in chapter 04.

prompts -> InputProcessor -> Request -> Engine -> tokens -> OutputProcessor -> RequestOutput
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from minillm.engine import calls
from minillm.engine.beam_calls import BeamSearching
from minillm.engine.chat_calls import Chatting
from minillm.engine.config import EngineConfig
from minillm.engine.counters import Counters
from minillm.engine.defaults import default_sampling_params
from minillm.engine.deltas import TokenDelta
from minillm.engine.engine import Engine
from minillm.engine.inputs import InputProcessor, Prompt
from minillm.engine.lock import FairLock, locked
from minillm.engine.lora_calls import Adapters, Adapting
from minillm.engine.lora_request import LoRARequest, LoRAs
from minillm.engine.output_processor import OutputProcessor
from minillm.engine.outputs import RequestOutput, StreamDelta
from minillm.engine.pooling import Pooling
from minillm.engine.prompt_forms import check_call, check_callback
from minillm.engine.request import Request
from minillm.engine.sink import OutputSink
from minillm.engine.sizing import max_model_len_of, served_model_len
from minillm.engine.upkeep import Upkeep, build_engine
from minillm.engine.vllm_names import merged
from minillm.model.checkpoint import load_tokenizer, resolve_model
from minillm.sampling.params import SamplingParams
from minillm.trace import Trace

if TYPE_CHECKING:
    from minillm.engine.llm_engine import EngineArgs


class LLM(Chatting, BeamSearching, Pooling, Adapting, Upkeep):
    """Loads a model and answers prompts.

    `model` is a bundled name, a folder in Hugging Face layout, a GGUF file, or a hub id. `dtype="auto"` is float32 on a
    CPU, bfloat16 on a GPU from sm_80 on, float16 below. `max_model_len` bounds prompt and answer together, in tokens.
    `enforce_eager` does without recorded steps (CUDA graphs); `async_scheduling` plans a step while the last one still
    runs, None does so on a GPU. `seed` seeds the requests that bring no seed of their own.

    A request without SamplingParams uses `get_default_sampling_params()`. With `generation_config="auto"` these are the
    temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens (here max_tokens) that the model's
    generation_config.json sets, and the defaults of `SamplingParams` for what it leaves out; with "vllm" they are the
    defaults of `SamplingParams` alone. The bundled models set none. Given SamplingParams are never mixed with them.

    `quantization` writes the low-bit weights: "int8", "int4", "fp8", "fp4", "gptq", "awq", "smoothquant",
    "llm_int8", or a dict (`minillm.quantization.config`). `kv_cache_dtype="int8"` or "fp8" keeps keys and values in 8
    bits, "int4" in 4. `kv_retention={"sinks": 4, "window": 1020}` keeps no more of a text than those tokens, so that it
    may grow past what the model was made for; nothing of it enters the prefix cache (`minillm.kv_cache.retention`).

    `speculative_config={"method": "ngram"}`, or "draft_model", "eagle" or "eagle3" with a "model", drafts several
    tokens a step and verifies them all: fewer steps, and the text stays as it was (`minillm.speculative.config`).
    Only with a draft model or a draft head a request without a seed is drawn anew, from the same distribution.

    `host_kv_bytes` of host memory take swapped requests and prefixes that the device has no room for; `disk_kv_bytes`
    of the folder `disk_kv_path` take what falls out of it, and bound the folder, whichever model wrote there;
    `close`, or the end of `with LLM(...) as llm:`, adds what memory still holds. Beside `host_kv_bytes`,
    blocks being read from disk take up to half as much (8 blocks at least), and up to 64 wait to be written.
    `cpu_offload_bytes` of the last layers' weights stay in host memory and are streamed.

    `enable_lora` serves adapters, each request with its own (`minillm.lora.request`): at most `max_loras` different
    ones in a step, of a rank up to `max_lora_rank`, and `max_cpu_loras` of them in host memory.

    Several threads may use one LLM: they take turns (`minillm.engine.lock`). `tensor_parallel_size` times
    `pipeline_parallel_size` processes compute it, and its tokens stay the same (`minillm.engine.distributed.support`).

    vLLM's names for some of these are taken too (`minillm.engine.vllm_names`), and None stands for the default. What
    cannot be served raises NotImplementedError, a wrong value ValueError or TypeError.
    """

    def __init__(
        self,
        model: str | Path = "tinyworld",
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        scheduling_policy: str = "fcfs",
        attention_backend: str = "auto",
        preemption_mode: str = "recompute",
        quantization: str | dict[str, Any] | None = None,
        kv_cache_dtype: str = "auto",
        kv_retention: dict[str, int] | None = None,
        speculative_config: dict[str, Any] | None = None,
        host_kv_bytes: int = 0,
        disk_kv_path: str | Path | None = None,
        disk_kv_bytes: int = 0,
        cpu_offload_bytes: int = 0,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        distributed_executor_backend: str = "mp",
        enable_expert_parallel: bool = False,
        enforce_eager: bool = False,
        async_scheduling: bool | None = None,
        seed: int = 0,
        generation_config: str = "auto",
        enable_lora: bool = False,
        max_loras: int = 8,
        max_lora_rank: int = 16,
        max_cpu_loras: int | None = None,
        **of_vllm: Any,
    ):
        own = {name: value for name, value in locals().items() if name not in ("self", "of_vllm")}
        own, self.options = merged(own, of_vllm)
        self.config = config = EngineConfig(**own)
        path = resolve_model(config.model)
        default_params = default_sampling_params(
            path, config.generation_config, self.options.override_generation_config
        )
        self.model = self._load_model()
        with self._workers_end_on_error():
            self.tokenizer = load_tokenizer(path if (given := self.options.tokenizer) is None else resolve_model(given))
            self.trace, self.counters = Trace(enabled=False), Counters()
            self._asleep: set[str] = set()  # parts that `sleep` has freed
            model_len = max_model_len_of(config, self.model)
            self.engine = build_engine(self.model, config, self.trace)
            self.max_model_len = served_model_len(config, self.engine.kv_cache, model_len)
            limits = (self.model.config.vocab_size, self.max_model_len, frozenset(self.model.config.eos_token_ids))
            self.inputs = InputProcessor(self.tokenizer, *limits, config.seed, self.engine.clock, default_params)
            self.adapters = Adapters(self)
            self.inputs.adapters = self.adapters.each

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """The LLM that vLLM's `EngineArgs` describe."""
        return cls(**engine_args.arguments)

    @property
    def engine(self) -> Engine:
        """May be replaced by one with parts of your own, while nothing is under way."""
        return self._engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self._engine, self.outputs = engine, OutputProcessor(engine, self.tokenizer)
        engine.use_grammars(lambda params: self.inputs.compile(params))

    @property
    def lock(self) -> FairLock:
        """Held by the thread whose turn it is; reentrant."""
        return self._engine.lock

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRAs = None,
        priority: int | Sequence[int] | None = None,
        user: str | Sequence[str] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Continue each prompt; results in the order of the prompts.

        A prompt is a string, a list of token ids, or a dictionary (`minillm.inputs`). `sampling_params` is one for all,
        or one each; None stands for `get_default_sampling_params()`. So is `lora_request`; None stands for the model
        without an adapter. `use_tqdm` shows a progress bar, or is called to make one, as `tqdm` is. Every prompt is
        checked before the first is computed; see `InputProcessor` for what is raised.
        """
        check_call("generate", others)
        self.engine.check_open()
        options = dict(priority=priority, user=user, lora_request=lora_request)
        return calls.serve(self, self.inputs.requests(prompts, sampling_params, **options), use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int | None = None,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[StreamDelta]:
        """Continue one prompt, yielding each token as it is made. The joined texts of a sample (`index`) are
        `generate`'s text.

        The text of a delta may be empty: half a character, or what may become a stop string, has to wait.
        """
        return calls.stream(self, self.one_request("stream", prompt, sampling_params, priority, user, lora_request))

    @locked
    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        on_delta: Callable[[OutputSink, StreamDelta], None] | None = None,
        streaming: bool = False,
        priority: int | None = None,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> OutputSink:
        """Queue one prompt and return at once; it goes on with every `step`, and with every other call's steps.

        `on_delta` is called for each token; only `streaming` makes text of each at once. See `OutputSink`.
        """
        check_callback(on_delta)
        request = self.one_request("submit", prompt, sampling_params, priority, user, lora_request)
        return self.outputs.add(request, on_delta=on_delta, streaming=streaming)

    @locked
    def step(self) -> bool:
        """Compute one step for all that is under way; whether anything is left to do. A step that fails raises,
        and ends the requests in it."""
        self.step_once()
        return self.engine.has_unfinished

    def one_request(
        self,
        caller: str,
        prompt: Prompt,
        params: SamplingParams | None,
        priority: int | None,
        user: str | None,
        lora_request: LoRARequest | None,
    ) -> Request:
        """One prompt as a request, not added yet; `caller` is the name of the method that takes no more than one."""
        self.engine.check_open()
        requests = self.inputs.requests(prompt, params, priority=priority, user=user, lora_request=lora_request)
        if len(requests) != 1:
            raise ValueError(f"{caller}() takes 1 prompt, not {len(requests)}; use generate() for several")
        return requests[0]

    @locked
    def step_once(self) -> list[TokenDelta]:
        """One step of the engine, for all callers that have requests under way. Returns the tokens that it made."""
        self.outputs.check_may_step()
        deltas = self.engine.step()
        failed = self.outputs.process(deltas)
        self.counters.take(deltas)
        if failed is not None:
            raise failed
        return deltas
