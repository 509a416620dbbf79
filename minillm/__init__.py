"""minillm: a runnable textbook on LLM inference engines, and the engine it builds. Built in chapter 00.

`import minillm` loads nothing heavy; torch comes with the first use of `LLM`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minillm.engine.async_llm import AsyncLLM, AsyncLLMEngine
    from minillm.engine.llm import LLM
    from minillm.engine.llm_engine import AsyncEngineArgs, EngineArgs, LLMEngine
    from minillm.inputs import PromptType, TextPrompt, TokensPrompt
    from minillm.lora.request import LoRARequest
    from minillm.outputs import (
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from minillm.pooling_params import PoolingParams
    from minillm.sampling.grammar.params import StructuredOutputsParams
    from minillm.sampling.params import BeamSearchParams, SamplingParams

__version__ = "0.1.0"

# Every public name, and the module that it is loaded from when it is first used.
_MODULES = {
    "LLM": "engine.llm",
    "SamplingParams": "sampling.params",
    "StructuredOutputsParams": "sampling.grammar.params",
    "BeamSearchParams": "sampling.params",
    "PoolingParams": "pooling_params",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "PoolingOutput": "outputs",
    "PoolingRequestOutput": "outputs",
    "EmbeddingOutput": "outputs",
    "EmbeddingRequestOutput": "outputs",
    "ScoringOutput": "outputs",
    "ScoringRequestOutput": "outputs",
    "PromptType": "inputs",
    "TextPrompt": "inputs",
    "TokensPrompt": "inputs",
    "LLMEngine": "engine.llm_engine",
    "EngineArgs": "engine.llm_engine",
    "AsyncLLM": "engine.async_llm",
    "AsyncLLMEngine": "engine.async_llm",
    "AsyncEngineArgs": "engine.llm_engine",
    "LoRARequest": "lora.request",
}
# vLLM's names that the book does not build.
_ABSENT = {
    "ModelRegistry": "one decoder serves every family; minillm.model.config says which",
    "ClassificationOutput": "the bundled decoders have no classifier",
    "ClassificationRequestOutput": "the bundled decoders have no classifier",
    "initialize_ray_cluster": "LLM(distributed_executor_backend='ray') joins the cluster, or starts one",
}
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "LoRARequest",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"minillm.{_MODULES[name]}"), name)
    if name in _ABSENT:
        raise ImportError(f"minillm has no {name}: {_ABSENT[name]}")  # `from minillm import` keeps its text
    raise AttributeError(f"module 'minillm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
