"""vLLM's module of the same name: which adapter a request asks for. Built in chapter 23."""

from minillm.engine.lora_request import LoRARequest

__all__ = ["LoRARequest"]
