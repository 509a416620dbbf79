"""vLLM's module of the same name: how a text becomes a vector. Built in chapter 02."""

from minillm.engine.pooling import PoolingParams

__all__ = ["PoolingParams"]
