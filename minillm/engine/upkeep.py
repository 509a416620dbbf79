"""Upkeep of an LLM: prefixes kept and dropped, profiles, counters, sleep. Built in chapter 08."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from minillm.engine.counters import Metric
from minillm.engine.distributed.engine import ParallelEngine
from minillm.engine.distributed.model import RemoteModel
from minillm.engine.engine import CLOSED, Engine
from minillm.engine.inputs import InputProcessor
from minillm.engine.lock import FairLock, locked
from minillm.engine.sizing import max_model_len_of, served_model_len
from minillm.engine.vllm_names import ModelOptions, translated
from minillm.kv_cache import persist
from minillm.model.checkpoint import load_model, resolve_model
from minillm.model.decoder import Decoder
from minillm.model.dummy import dummy_model
from minillm.sampling.checks import check_int
from minillm.sampling.params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from minillm.engine.config import EngineConfig
    from minillm.engine.counters import Counters
    from minillm.trace import Trace

PARTS = ("weights", "kv_cache")
ASLEEP = "this LLM is asleep: its KV cache is freed; call wake_up() first"
# Methods of vLLM's `LLM` that the book does not build.
ABSENT = {
    "classify": "the bundled decoders have no classifier; compare log-probabilities with logprob_token_ids",
    "reward": "the bundled decoders have no reward head; compare log-probabilities with logprob_token_ids",
    "enqueue": "submit() queues one prompt and returns its sink",
    "enqueue_chat": "submit() queues one prompt and returns its sink",
    "wait_for_completion": "call step() until it returns False",
    "reset_mm_cache": "the book serves text",
    "release_kv_cache_memory": "sleep() frees the KV cache",
    "set_tokenizer": "give the tokenizer when the LLM is made: LLM(model, tokenizer=...)",
} | dict.fromkeys(
    (
        "init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_weight_update",
        "start_draft_weight_update", "update_weights", "finish_weight_update", "update_weight_version",
        "get_weight_version",
    ),
    "the weights are those of the folder; write another one and make a new LLM",
)  # fmt: skip


def load(config: EngineConfig, options: ModelOptions) -> Decoder | RemoteModel:
    """The model that an LLM was made for, in this process or in workers. Raises ValueError for dummy weights that are
    quantized or offloaded."""
    path, is_dummy = resolve_model(config.model), options.load_format == "dummy"
    for name in ("quantization", "cpu_offload_bytes") if is_dummy else ():
        if getattr(config, name):
            told = f"{name}={getattr(config, name)!r}"
            raise ValueError(f"load_format='dummy' has plain weights, {told}; leave one out")
    if config.world_size > 1:
        return RemoteModel(config, options)
    if not is_dummy:
        how = (config.dtype, config.device, config.quantization, config.cpu_offload_bytes, config.max_model_len)
        return load_model(path, *how)
    return dummy_model(path, config.dtype, config.device)


def build_engine(model: Decoder | RemoteModel, config: EngineConfig, trace: Trace) -> Engine:
    """The engine of an LLM. Raises what `Engine` does; the workers, if there are any, have ended then."""
    if config.world_size == 1:
        return Engine(model, config=config, trace=trace)
    try:
        engine = ParallelEngine(model, config, trace)
        served_model_len(config, engine.kv_cache, max_model_len_of(config, model))
        return engine
    except BaseException:
        model.close()
        raise


class Upkeep:
    """The methods of an `LLM` that compute no token."""

    engine: Engine
    inputs: InputProcessor
    tokenizer: PreTrainedTokenizerBase
    model: Decoder | RemoteModel | None
    config: EngineConfig
    options: ModelOptions
    counters: Counters
    trace: Trace
    lock: FairLock

    def _load_model(self) -> Decoder | RemoteModel:
        return load(self.config, self.options)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a request that is given none: the model's own defaults (see `generation_config`), as a
        copy, which may be changed."""
        return self.inputs.default_params.clone()

    @locked
    def save_prefix_cache(self, path: str | Path) -> int:
        """Write every block cached on the device to a file; returns how many. See `minillm.kv_cache.persist`. Raises
        NotImplementedError where the parts of a block are in several workers."""
        self._check_one_process("save_prefix_cache")
        return persist.save(path, self.engine.kv_cache, self.engine.runner.cache)

    @locked
    def load_prefix_cache(self, path: str | Path) -> int:
        """Take over the blocks of such a file; returns how many. Raises ValueError if another model wrote it."""
        self._check_one_process("load_prefix_cache")
        return persist.restore(path, self.engine.kv_cache, self.engine.runner.cache)

    def _check_one_process(self, method: str) -> None:
        self.engine.check_open()
        if isinstance(self.model, RemoteModel):
            raise NotImplementedError(
                f"{method}() is not served with {self.config.world_size} workers: each has a part of every block; "
                "use an LLM of one process"
            )

    @locked
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget what is cached of prefixes, in device and host memory; a disk tier keeps its files. False, and nothing
        is forgotten, while requests are under way: `reset_running_requests` aborts them first."""
        self.engine.check_open()
        if reset_connector:
            raise NotImplementedError("reset_connector=True is not served: delete the files of disk_kv_path yourself")
        if reset_running_requests:
            self.engine.abort(*self.engine.scheduler.requests)
        if self.engine.has_unfinished:
            return False
        self.engine.kv_cache.pool.evict_all()
        return True

    @locked
    def get_metrics(self) -> list[Metric]:
        """What this LLM has counted since it was made, with vLLM's names (`minillm.engine.counters`)."""
        return self.counters.metrics(self.engine)

    @locked
    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Record every step from now on, until `stop_profile`."""
        for name, value in (("delay_iterations", delay_iterations), ("max_iterations", max_iterations)):
            if value:
                raise NotImplementedError(f"{name}={value!r} is not served: step yourself between start and stop")
        self._profile_prefix = profile_prefix or "minillm"
        self.trace.clear()
        self.trace.enabled = True

    @locked
    def stop_profile(self) -> Path:
        """Stop recording, and write what there is for https://ui.perfetto.dev. Returns the file, which lies in
        `profiler_config={"torch_profiler_dir": ...}`, or in the working folder."""
        if not self.trace.enabled:
            raise RuntimeError("no profile is being recorded; call start_profile() first")
        self.trace.enabled = False
        self.options.profile_folder.mkdir(parents=True, exist_ok=True)
        return self.trace.to_perfetto(self.options.profile_folder / f"{self._profile_prefix}-trace.json")

    @locked
    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free the KV cache, and at level 2 the weights too; requests under way are aborted. Level 1 leaves the weights
        where they are, and level 2 frees them also of an LLM that sleeps already. A disk tier keeps the prefixes. Parts
        of your own in `engine` are gone after `wake_up`."""
        check_int("level", level, 1, 2)
        if mode != "abort":
            raise NotImplementedError(
                f"mode={mode!r} is not served: requests under way are aborted; wait for them first"
            )
        if not self.is_sleeping():
            engine = self.engine
            engine.check_open()
            engine.close()
            engine.why_closed = ASLEEP
            engine.executor = engine.speculation = None  # the memory of the cache
        self._asleep = set(PARTS)
        if level == 2:
            self._end_workers()
            self.model = None

    @locked
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Make a new KV cache, and load the weights if they are gone. With `tags`, "weights" and "kv_cache", part by
        part: the LLM serves again when both are there."""
        for tag in tags or ():
            if tag not in PARTS:
                raise ValueError(f"tags={tags!r} is not allowed; allowed: a list of {' and '.join(map(repr, PARTS))}")
        if not self.is_sleeping():
            return
        self._asleep -= set(PARTS if tags is None else tags)
        if "weights" not in self._asleep and self.model is None:
            self.model = self._load_model()
        if not self._asleep:
            engine = build_engine(self.model, self.config, self.trace)
            engine.lock = self.engine.lock  # threads may wait for it
            self.engine = engine

    def is_sleeping(self) -> bool:
        return bool(self._asleep)

    @locked
    def reload_weights(self) -> None:
        """Load the weights of the folder again, in the place of dummy or changed ones. Requests under way are aborted,
        and prefixes forgotten. A KV cache that sleeps goes on sleeping."""
        awake = [part for part in PARTS if part == "weights" or part not in self._asleep]
        self.sleep(level=2)
        self.options = replace(self.options, load_format="auto")
        self.wake_up(awake)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """What a function makes of this LLM, in a list of one: it is a process, and its only worker. Where there are
        workers (`minillm.engine.distributed.worker.Worker`), what it makes of each. Of vLLM's workers' own methods
        there is reload_weights, and update_config for the load_format."""
        if callable(method) and isinstance(self.model, RemoteModel):
            with self.lock:
                self.engine.check_open()
                return self.model.workers.call("run", method, tuple(args), dict(kwargs or {}))
        if callable(method):
            return [method(self, *args, **(kwargs or {}))]
        if method == "reload_weights":
            return [self.reload_weights()]
        if method == "update_config":
            given = dict(*args, **(kwargs or {}))
            if given.keys() == {"load_config"} and given["load_config"].keys() == {"load_format"}:
                _, options = translated(given["load_config"])
                self.options = replace(self.options, load_format=options.load_format)
                return [None]
        raise NotImplementedError(
            f"collective_rpc({method!r}) is not served; give a function, which gets the LLM, or each of its workers"
        )

    @locked
    def apply_model(self, func: Callable[[Decoder], Any]) -> list[Any]:
        """What `func` makes of the model, in a list; of each worker's part of it where there are workers, to which a
        function of a module can be sent."""
        self.engine.check_open()
        if isinstance(self.model, RemoteModel):
            return self.model.workers.call("apply_model", func)
        return [func(self.model)]

    def get_world_size(self, include_dp: bool = True) -> int:
        """How many processes compute one step."""
        return self.config.world_size

    @locked
    def close(self) -> None:
        """End what is under way ("abort"), and let the disk tier, if there is one, keep the prefixes that memory holds.
        A second call does nothing, nor does one in a forked child; what computes raises RuntimeError from now on, and
        an LLM that sleeps is not woken any more."""
        if not self.engine.is_forked:
            self._end_workers()  # first: a step under way may take long
            self.engine.close()
            self.engine.why_closed = CLOSED
            self._asleep.clear()

    shutdown = close

    @contextmanager
    def _workers_end_on_error(self) -> Iterator[None]:
        """While an LLM is made: no caller has it yet to close it, and a notebook keeps what a traceback holds."""
        try:
            yield
        except BaseException:  # an interrupt too
            self._end_workers()
            raise

    def _end_workers(self) -> None:
        if isinstance(self.model, RemoteModel):
            self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name in ABSENT:
            raise AttributeError(f"LLM.{name} is not built: {ABSENT[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
