"""ServerConfig: how a server listens, whom it lets in, and how much it takes on. Built in chapter 23."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from minillm.engine.tool_calls import tool_parser
from minillm.serving.keys import Key


@dataclass(frozen=True)
class ServerConfig:
    """Raises ValueError naming the field, the value and what is allowed. None as a limit means no limit."""

    host: str = "127.0.0.1"  # this machine alone; 0.0.0.0 listens on every network
    port: int = 8000  # 0 takes a free one
    served_model_name: str | None = None  # the model's name in requests and answers; None: as it was loaded
    keys: tuple[Key, ...] = ()  # none: every client is let in
    max_body_bytes: int = 4 * 2**20  # of a request
    max_header_bytes: int = 64 * 2**10  # of a request's head
    head_seconds: float = 10.0  # until a request's head is complete
    body_seconds: float = 30.0  # until its body is
    send_seconds: float = 30.0  # that a client may leave what is sent to it unread
    request_seconds: float | None = None  # until a request has to be answered whole
    max_queued_requests: int | None = 1024  # under way and waiting, a prompt each
    max_queued_tokens: int | None = None  # that they may still come to: prompts and max_tokens together
    max_prompts: int = 256  # in one request of /v1/completions
    max_choices: int = 128  # n
    drain_seconds: float = 30.0  # after SIGTERM, for what is under way
    load_adapters: bool = False  # over HTTP: a client then names folders of this machine
    adapters: tuple[tuple[str, str], ...] = ()  # name and folder of those that are there from the start
    tool_call_parser: str = "hermes"  # the format in which the model calls tools, named as in vLLM
    page: bool = True  # the chat and the engine room at /

    def __post_init__(self):
        if not self.host:
            raise ValueError(
                "host='' is not allowed; allowed: an address, such as 127.0.0.1, or 0.0.0.0 for all networks"
            )
        tool_parser(self.tool_call_parser)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port} is not allowed; allowed: 0 (a free one) to 65535")
        for field in fields(self):
            value: Any = getattr(self, field.name)
            if not field.name.startswith("max_") and not field.name.endswith("_seconds"):
                continue
            if value is None and "None" in str(field.type):
                continue
            is_count = field.name.startswith("max_")
            allowed = "0 or more" if field.name == "drain_seconds" else "1 or more" if is_count else "over 0"
            least = 1 if is_count else 0
            fits = type(value) in ((int,) if is_count else (int, float)) and value >= least
            if not fits or (value == 0 and allowed == "over 0"):
                raise ValueError(f"{field.name}={value!r} is not allowed; allowed: {allowed}")
        values = [key.value for key in self.keys]
        if len(set(values)) < len(values):
            raise ValueError("two keys are the same; give each client its own")
