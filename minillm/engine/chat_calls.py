"""LLM.chat: conversations, through the model's chat template. Built in chapter 04."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minillm.engine import calls
from minillm.engine.engine import Engine
from minillm.engine.inputs import InputProcessor
from minillm.engine.lora_request import LoRAs
from minillm.engine.outputs import RequestOutput
from minillm.engine.prompt_forms import check_call
from minillm.engine.request import Request
from minillm.engine.vllm_names import ModelOptions
from minillm.sampling.params import SamplingParams


class Chatting:
    """The part of `LLM` that answers conversations."""

    engine: Engine
    inputs: InputProcessor
    options: ModelOptions

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRAs = None,
        *,
        priority: int | Sequence[int] | None = None,
        user: str | Sequence[str] | None = None,
        chat_template: str | Path | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several: lists of {"role": ..., "content": ...}, through the chat template, the
        model's own or `chat_template`. See `minillm.engine.chats.render_chats`."""
        check_call("chat", others)
        requests = self.chat_requests(
            messages,
            sampling_params,
            priority=priority,
            user=user,
            lora_request=lora_request,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return calls.serve(self, requests, use_tqdm)

    def chat_requests(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        user: str | Sequence[str] | None = None,
        lora_request: LoRAs = None,
        chat_template: str | Path | None = None,
        **of_template: Any,
    ) -> list[Request]:
        """Conversations as requests, not added yet; `of_template` is what `chat` hands to `render_chats`."""
        self.engine.check_open()
        template = self.options.chat_template if chat_template is None else chat_template
        prompts = self.inputs.conversations(messages, chat_template=template, **of_template)
        # The template writes the special tokens itself.
        return self.inputs.requests(prompts, sampling_params, False, priority, user, lora_request=lora_request)
