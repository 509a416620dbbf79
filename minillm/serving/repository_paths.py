"""/v2: a model repository over HTTP, with the names of KServe and of Triton's extension. Built in chapter 23."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, ValidationError, model_validator

from minillm import __version__
from minillm.serving.description import refusals
from minillm.serving.errors import ApiError, of_validation
from minillm.serving.fields import Strict
from minillm.serving.known import Admin, Known
from minillm.serving.loading import Loader


class IndexRequest(Strict):
    ready: bool = False  # only those that are


class IndexEntry(BaseModel):
    name: str
    version: str
    state: Literal["READY", "UNAVAILABLE", "LOADING", "UNLOADING"]
    reason: str = ""


class Latest(Strict):
    num_versions: Annotated[int, Field(ge=1)] = 1


class Specific(Strict):
    versions: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]


class VersionPolicy(Strict):
    """Which versions of a model are loaded; as Triton's configuration has it."""

    latest: Latest | None = None
    all: dict[str, Any] | None = None
    specific: Specific | None = None

    @model_validator(mode="after")
    def _is_one(self):
        if sum(one is not None for one in (self.latest, self.all, self.specific)) != 1:
            raise ValueError("version_policy has to be one of latest, all and specific")
        return self

    def choose(self, versions: list[str]) -> Sequence[str]:
        if self.all is not None:
            return versions
        if self.latest is not None:
            return versions[-self.latest.num_versions :]
        return [str(version) for version in self.specific.versions]


class ModelOptions(Strict):
    version_policy: VersionPolicy = VersionPolicy(latest=Latest())


class LoadParameters(Strict):
    config: str | None = None  # JSON of `ModelOptions`


class LoadRequest(Strict):
    parameters: LoadParameters = LoadParameters()

    def options(self) -> ModelOptions:
        """Raises ApiError 400."""
        try:
            return ModelOptions.model_validate_json(self.parameters.config or "{}")
        except ValidationError as error:
            found = [one | {"loc": ("parameters", "config", *one["loc"])} for one in error.errors()]
            raise of_validation(found) from None


class UnloadParameters(Strict):
    unload_dependents: bool = False  # no model here depends on another


class UnloadRequest(Strict):
    parameters: UnloadParameters = UnloadParameters()


class ModelTold(BaseModel):
    name: str
    versions: list[str]  # that are loaded
    platform: str = "minillm"
    inputs: list[Any] = []
    outputs: list[Any] = []


class ServerTold(BaseModel):
    name: str = "minillm"
    version: str = __version__
    extensions: list[str] = ["model_repository"]


def add_repository_paths(app: FastAPI, loader: Loader) -> None:
    changes = refusals(400, 401, 403, 404, 503)
    reads = refusals(401, 404)
    empty = {200: {"content": {"application/json": {"schema": {"type": "object"}}}}}

    @app.get("/v2", response_model=ServerTold)
    async def server() -> Any:
        return ServerTold()

    @app.get("/v2/health/live", response_class=Response, responses=refusals(503))
    async def live() -> Response:
        """200 while every engine can compute."""
        await loader.models.check_health()
        return Response(status_code=200)

    @app.get("/v2/health/ready", response_class=Response, responses=refusals(503))
    async def all_ready() -> Response:
        """200 while requests are taken, and what the server begins with is loaded."""
        loader.models.check_ready()
        return await live()

    @app.post("/v2/repository/index", response_model=list[IndexEntry], responses=refusals(400, 401))
    async def index(client: Known, body: IndexRequest | None = None) -> Any:
        only_ready = body is not None and body.ready
        states = [vars(one) for one in await loader.states()]
        return JSONResponse([one for one in states if one["state"] == "READY" or not only_ready])

    @app.post("/v2/repository/models/{name}/load", responses=changes | empty)
    async def load(name: str, client: Admin, body: LoadRequest | None = None) -> Response:
        """Answers when the model is served."""
        loader.models.check_open()
        await loader.load(name, (body or LoadRequest()).options().version_policy.choose)
        return JSONResponse({})

    @app.post("/v2/repository/models/{name}/unload", responses=changes | empty)
    async def unload(name: str, client: Admin, body: UnloadRequest | None = None) -> Response:
        """Answers when the requests of the model have ended and its memory is free."""
        await loader.unload(name)
        return JSONResponse({})

    @app.get("/v2/models/{name}", response_model=ModelTold, responses=reads)
    async def model(name: str, client: Known) -> Any:
        return {"name": name, "versions": _loaded(loader, name)}

    @app.get("/v2/models/{name}/versions/{version}", response_model=ModelTold, responses=reads)
    async def model_version(name: str, version: str, client: Known) -> Any:
        return {"name": name, "versions": [_one(loader, name, version)]}

    @app.get("/v2/models/{name}/ready", response_class=Response, responses=reads)
    async def ready(name: str, client: Known) -> Response:
        _loaded(loader, name)
        return Response(status_code=200)

    @app.get("/v2/models/{name}/versions/{version}/ready", response_class=Response, responses=reads)
    async def version_ready(name: str, version: str, client: Known) -> Response:
        _one(loader, name, version)
        return Response(status_code=200)


def _loaded(loader: Loader, name: str) -> list[str]:
    if not (versions := loader.loaded(name)):
        raise ApiError(
            404, f"model={name!r} is not loaded; /v2/repository/index lists what is", "model", "model_not_found"
        )
    return versions


def _one(loader: Loader, name: str, version: str) -> str:
    if version not in (versions := _loaded(loader, name)):
        has = ", ".join(versions)
        raise ApiError(
            404, f"version {version!r} of {name!r} is not loaded; loaded: {has}", "version", "model_not_found"
        )
    return version
