"""vLLM's module of the same name: the forms of a prompt. Built in chapter 04."""

from minillm.engine.prompt_forms import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
