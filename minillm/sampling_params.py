"""vLLM's module of the same name: what a request asks for. Built in chapter 01."""

from minillm.sampling.grammar.params import StructuredOutputsParams
from minillm.sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
