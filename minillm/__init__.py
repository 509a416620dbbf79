"""minillm: a runnable textbook on LLM inference engines, and the engine it builds. Built in chapter 00.

`import minillm` loads nothing heavy; torch comes with the first use of `LLM`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minillm.engine.llm import LLM
    from minillm.sampling.grammar.params import StructuredOutputsParams
    from minillm.sampling.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputsParams", "__version__"]


def __getattr__(name: str):
    if name == "LLM":
        from minillm.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from minillm.sampling.params import SamplingParams

        return SamplingParams
    if name == "StructuredOutputsParams":
        from minillm.sampling.grammar.params import StructuredOutputsParams

        return StructuredOutputsParams
    raise AttributeError(f"module 'minillm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
