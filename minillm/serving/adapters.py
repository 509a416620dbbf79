"""The adapters of a server: chosen by model=NAME, loaded and unloaded while it serves. Built in chapter 23.

POST /v1/load_lora_adapter reads a folder of the server's own disk, whose path the client names. So it is off unless the
server was started with --enable-lora, and a key without `admin` may not ask for it.
"""

from __future__ import annotations

import asyncio
import time
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from pydantic import Field

from minillm.engine.llm import LLM
from minillm.engine.lora_request import LoRARequest
from minillm.kernels.native_threads import release_team
from minillm.serving.errors import ApiError
from minillm.serving.fields import Strict
from minillm.serving.known import Admin

if TYPE_CHECKING:
    from minillm.serving.models import Models

Name = Annotated[str, Field(min_length=1, max_length=200)]


class ServedAdapters:
    """By name, for one model. The methods belong to one event loop; folders are read in a thread beside it."""

    def __init__(self, llm: LLM, base_name: str, may_load: bool):
        self.llm, self.base_name, self.may_load = llm, base_name, may_load
        self.known: dict[str, LoRARequest] = {}
        self._created: dict[str, int] = {}
        self._ids = count(1)
        self._turn = asyncio.Lock()  # of loading and unloading

    def find(self, name: str | None) -> LoRARequest | None:
        """None for the model itself."""
        return None if name is None else self.known.get(name)

    async def load(self, name: str, path: str, load_inplace: bool = False) -> None:
        """Serve the adapter in the folder `path`. Raises ApiError 400 with what is wrong; then nothing has changed."""
        self._check_may_load()
        async with self._turn:
            try:
                await asyncio.to_thread(self.load_now, name, path, load_inplace)
            except ValueError as error:
                param = "lora_name" if str(error).startswith("lora_name") else "lora_path"
                raise ApiError(400, str(error), param, "adapter_not_loaded") from None

    def load_now(self, name: str, path: str, load_inplace: bool = False) -> None:
        """The same, in the caller's thread. Raises ValueError."""
        known = self.known.get(name)
        if name == self.base_name:
            raise ValueError(f"lora_name={name!r} is the name of the model; choose another")
        if known is not None and not load_inplace:
            raise ValueError(f"lora_name={name!r} is loaded; unload it first, or set load_inplace to true")
        lora_id = next(self._ids) if known is None else known.lora_int_id
        request = LoRARequest(name, lora_id, path)
        self.llm.add_lora(LoRARequest(name, lora_id, path, load_inplace=load_inplace))
        release_team()
        self._created[name] = int(time.time())  # first: the event loop lists what is known at any moment
        self.known[name] = request

    async def unload(self, name: str) -> None:
        """Requests under way are served to their end. Raises ApiError 404."""
        self._check_may_load()
        async with self._turn:
            if (known := self.known.pop(name, None)) is None:
                raise ApiError(404, f"lora_name={name!r} is not loaded", "lora_name", "model_not_found")
            self._created.pop(name, None)
            await asyncio.to_thread(self.llm.remove_lora, known.lora_int_id)

    def cards(self) -> list[dict[str, Any]]:
        """What /v1/models tells of them."""
        most = self.llm.max_model_len
        return [
            {
                "id": name,
                "created": self._created[name],
                "root": str(known.lora_path),
                "parent": self.base_name,
                "max_model_len": most,
            }
            for name, known in tuple(self.known.items())
        ]

    def _check_may_load(self) -> None:
        if not self.may_load:
            raise ApiError(
                403,
                "this server loads no adapters over HTTP, since that reads its own disk; start it with --enable-lora, "
                "or with --lora NAME=PATH for each adapter",
                code="adapters_not_enabled",
            )


class LoadAdapter(Strict):
    """What POST /v1/load_lora_adapter takes."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1)]  # a folder on the server
    load_inplace: bool = False  # in the place of the adapter that has this name
    model: str | None = None  # which model's adapter it is, where the server has several


class UnloadAdapter(Strict):
    """What POST /v1/unload_lora_adapter takes."""

    lora_name: Name
    lora_int_id: int | None = None  # vLLM takes it; the name decides


def add_adapter_paths(app: FastAPI, models: Models, refusals: dict[int | str, Any]) -> None:
    """As vLLM has them."""

    @app.post("/v1/load_lora_adapter", response_class=PlainTextResponse, responses=refusals)
    async def load(body: LoadAdapter, client: Admin) -> Any:
        service = models.find(body.model)
        models.check_free(body.lora_name, service)
        await service.adapters.load(body.lora_name, body.lora_path, body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", response_class=PlainTextResponse, responses=refusals)
    async def unload(body: UnloadAdapter, client: Admin) -> Any:
        service = next((one for one in models if body.lora_name in one.adapters.known), models.default)
        if service is None:
            raise ApiError(404, f"lora_name={body.lora_name!r} is not loaded", "lora_name", "model_not_found")
        await service.adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
