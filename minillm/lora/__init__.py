"""vLLM's package of the same name: adapters. Built in chapter 23."""
