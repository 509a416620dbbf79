"""Models: the services of one HTTP server, each found by the name that a request gives. Built in chapter 23.

A server of one model has one service. A model repository adds and removes services while the server runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from minillm.engine.async_llm import AsyncLLM
from minillm.serving.config import ServerConfig
from minillm.serving.errors import ApiError
from minillm.serving.gate import SHUTTING_DOWN
from minillm.serving.keys import Clients
from minillm.serving.metrics import ServerMetrics
from minillm.serving.service import Service

if TYPE_CHECKING:
    from minillm.serving.loading import Loader


class Models:
    """All methods belong to one event loop. Keys, and the limits of each key, are shared by all models."""

    def __init__(self, config: ServerConfig, engine: AsyncLLM | None = None):
        self.config = config
        self.clients = Clients(config.keys)
        self.services: list[Service] = []
        self.aliases: dict[str, Service] = {}  # other names, of a repository: NAME for NAME/VERSION
        self.loader: Loader | None = None  # of a repository
        self.is_draining = False
        self.is_loading = False  # what the server begins with
        self.metrics = ServerMetrics(self)
        if engine is not None:
            self.add(Service(engine, config))

    def __iter__(self) -> Iterator[Service]:
        return iter(tuple(self.services))

    @property
    def default(self) -> Service | None:
        """The service of a request that names no model: the only one there is."""
        return self.services[0] if len(self.services) == 1 else None

    def add(self, service: Service) -> None:
        self.services.append(service)

    def remove(self, service: Service) -> None:
        self.services.remove(service)

    def find(self, model: str | None) -> Service:
        """Raises ApiError 400 where the name is missing and needed, 404 for a name that is not served."""
        known = [name for service in self.services for name in (service.name, *service.adapters.known)]
        names = ", ".join(map(repr, known)) or "none is loaded"
        if model is None:
            if self.default is None:
                raise ApiError(400, f"model is missing; give one of those that are served: {names}", "model", "missing")
            return self.default
        for service in self.services:
            if service.serves(model):
                return service
        if model in self.aliases:
            return self.aliases[model]
        raise ApiError(404, f"model={model!r} is not served here; served: {names}", "model", "model_not_found")

    def check_free(self, name: str, owner: Service) -> None:
        """Raise ApiError 400 where another model than `owner` answers to `name`, itself or with an adapter, or a
        repository has a model of that name."""
        names = {name, name.partition("/")[0]}
        in_repository = self.loader is not None and not names.isdisjoint(self.loader.repository.names())
        if in_repository or any(one.serves(name) for one in self.services if one is not owner):
            message = f"lora_name={name!r} is the name of another model here, or of its adapter; choose another"
            raise ApiError(400, message, "lora_name", "adapter_not_loaded")

    def cards(self) -> list[dict[str, Any]]:
        """What /v1/models lists: each name that a request may give."""
        named = [service.cards()[0] | {"id": alias} for alias, service in self.aliases.items()]
        return named + [card for service in self.services for card in service.cards()]

    def card(self, model: str) -> dict[str, Any]:
        """Raises ApiError 404."""
        cards = self.find(model).cards()
        return next((card for card in cards if card["id"] == model), cards[0] | {"id": model})

    def check_ready(self) -> None:
        """`check_open`; and 503 until the models that a server begins with are loaded."""
        self.check_open()
        if self.is_loading:
            raise ApiError(503, "the models are being loaded; ask again", code="loading", retry_after=1)

    def check_open(self) -> None:
        """Raise ApiError 503 while the server shuts down."""
        if self.is_draining:
            raise ApiError(503, SHUTTING_DOWN, code="draining", retry_after=5)
        for service in self.services:
            service.gate.check_open()

    async def check_health(self) -> None:
        """Raise ApiError 503 where an engine can compute nothing any more."""
        for service in self:
            try:
                await service.engine.check_health()
            except RuntimeError as error:
                if service in self.services:  # it was not unloaded meanwhile
                    raise ApiError(503, str(error), code="unhealthy") from None

    async def drain(self, seconds: float) -> None:
        """`Service.drain` for all of them."""
        self.is_draining = True
        if self.loader is not None:
            self.loader.give_up()
        await asyncio.gather(*(service.drain(seconds) for service in self.services))
