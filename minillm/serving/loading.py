"""Loader: models of a repository come and go while others are served. Built in chapter 23.

load     folder checked -> memory taken -> LLM made in a thread, one at a time -> its service answers
unload   its service takes nothing new -> requests end, or are aborted at the limit -> memory freed
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from minillm.engine.async_llm import AsyncLLM
from minillm.engine.llm import LLM
from minillm.serving.errors import ApiError
from minillm.serving.gate import SHUTTING_DOWN
from minillm.serving.memory import Memory, NoRoom, default_memory, needs_of
from minillm.serving.models import Models
from minillm.serving.repository import Repository, UnknownModel
from minillm.serving.service import Service

LAST_SECONDS = 5.0  # for clients to hear that their request was aborted
log = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class State:
    """Of one version; `state` is one of KServe's READY, UNAVAILABLE, LOADING, UNLOADING."""

    name: str
    version: str
    state: str
    reason: str = ""


class Loader:
    """All methods belong to one event loop, except `close`."""

    def __init__(self, models: Models, repository: Repository):
        self.models, self.repository, self.options = models, repository, repository.options
        self.memory = repository.memory or Memory(default_memory(self.options.get("device", "auto")))
        models.is_loading = True
        self.services: dict[tuple[str, str], Service] = {}  # loaded, by name and version
        self._changing: dict[tuple[str, str], str] = {}  # LOADING or UNLOADING
        self._reasons: dict[tuple[str, str], str] = {}  # why one is not loaded
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by name: one change at a time
        self._building = asyncio.Lock()
        self._builds: set[asyncio.Future[AsyncLLM]] = set()  # under way

    async def load(self, name: str, choose: Callable[[list[str]], Sequence[str]] = lambda found: found[-1:]) -> None:
        """Serve the versions that `choose` takes out of those there are; by default the highest. Others of this name
        are unloaded once these are ready; a version that is loaded is not read again. Raises ApiError 400 for one that
        cannot be loaded, 404 for one that is not there; versions before it stay loaded."""
        await self._check_known(name)
        async with self._locks[name]:
            chosen = choose(await self._versions(name))
            for version in chosen:
                if (name, version) not in self.services:
                    await self._load(name, version)
            for version in self.loaded(name):
                if version not in chosen:
                    await self._unload(name, version)

    async def unload(self, name: str) -> None:
        """All versions of a model. Raises ApiError 404 for a model that is not in the repository and is not loaded."""
        await self._check_known(name)
        async with self._locks[name]:
            for version in self.loaded(name):
                await self._unload(name, version)

    async def load_first(self) -> None:
        """What a server begins with. A model that cannot be loaded is logged."""
        names = self.repository.load
        try:
            for name in await asyncio.to_thread(self.repository.names) if names is None else names:
                try:
                    await self.load(name)
                except ApiError as error:
                    log.warning("%s", error.message)
                if self.models.is_draining:
                    break
        finally:
            self.models.is_loading = False

    def loaded(self, name: str) -> list[str]:
        """The versions that are served, the lowest first."""
        return sorted((version for other, version in self.services if other == name), key=int)

    async def _check_known(self, name: str) -> None:
        """Before anything is kept of a name. Raises ApiError 404."""
        if not self.loaded(name):
            await self._versions(name)

    async def _versions(self, name: str) -> list[str]:
        """Those in the repository, at least one. Raises ApiError."""
        with _refused():
            if found := await asyncio.to_thread(self.repository.versions, name):
                return found
            raise UnknownModel(f"the model {name!r} has no version; it needs a folder such as {name}/1")

    async def states(self) -> list[State]:
        """Every version in the repository, and every one that is loaded though its folder is gone."""
        listed: dict[tuple[str, str], str] = {}
        with _refused("the repository cannot be read: ", self.repository.path):
            names = await asyncio.to_thread(self.repository.names)
        for name in names:
            try:
                found = await asyncio.to_thread(self.repository.versions, name)
                listed |= {(name, version): "" for version in found} or {(name, ""): "it has no version"}
            except (ValueError, LookupError, OSError) as error:
                listed[name, ""] = str(error)
        listed |= dict.fromkeys(self.services, "")
        return [
            self._state(key, why) for key, why in sorted(listed.items(), key=lambda one: (one[0][0], _number(one[0])))
        ]

    def give_up(self) -> None:
        """Load nothing more: the server shuts down. A model that is being read is closed when it is there."""
        for made in self._builds:
            if not made.done():
                made.set_exception(ApiError(503, SHUTTING_DOWN, code="draining", retry_after=5))

    def close(self) -> None:
        """End every engine."""
        for service in self.services.values():
            service.engine.shutdown()

    def _state(self, key: tuple[str, str], why: str) -> State:
        if (changing := self._changing.get(key)) is not None:
            return State(*key, changing)
        if key in self.services:
            return State(*key, "READY")
        return State(*key, "UNAVAILABLE", why or self._reasons.get(key, ""))

    async def _load(self, name: str, version: str) -> None:
        key, full_name = (name, version), f"{name}/{version}"
        self._changing[key] = "LOADING"
        try:
            with _refused(f"{full_name} cannot be loaded: ", self.repository.path):
                folder = await asyncio.to_thread(self.repository.folder, name, version)
                num_blocks = self.memory.take(full_name, await asyncio.to_thread(needs_of, folder, self.options))
                async with self._building:
                    self.models.check_open()
                    engine = await self._build(folder, num_blocks)
        except BaseException as error:
            self.memory.give_back(full_name)
            self._reasons[key] = str(error)
            raise
        finally:
            del self._changing[key]
        self._reasons.pop(key, None)
        self.services[key] = Service(engine, self.models.config, full_name)
        self.models.add(self.services[key])
        self._name_default(name)
        log.info("loaded %s", full_name)

    async def _unload(self, name: str, version: str) -> None:
        key, full_name = (name, version), f"{name}/{version}"
        service = self.services.pop(key)
        self._changing[key] = "UNLOADING"
        self.models.remove(service)
        self._name_default(name)
        try:
            why = f"the model {full_name!r} is being unloaded; ask for another one"
            await service.drain(self.models.config.drain_seconds, why)
            for _ in range(int(LAST_SECONDS / 0.05)):
                if not service.calls:
                    break
                await asyncio.sleep(0.05)
            await asyncio.to_thread(_free, service.engine)
        finally:
            del self._changing[key]
            self.memory.give_back(full_name)
        log.info("unloaded %s", full_name)

    def _name_default(self, name: str) -> None:
        """A name without a version stands for the highest that is loaded."""
        self.models.aliases.pop(name, None)
        if versions := self.loaded(name):
            self.models.aliases[name] = self.services[name, versions[-1]]

    async def _build(self, folder: Path, num_blocks: int) -> AsyncLLM:
        """In a daemon thread: a server that is told to end does not wait for a model that is being read."""
        loop = asyncio.get_running_loop()
        made: asyncio.Future[AsyncLLM] = loop.create_future()

        def deliver(engine: AsyncLLM | None, error: BaseException | None) -> None:
            if made.done():  # given up
                if engine is not None:
                    engine.shutdown()
            elif error is not None:
                made.set_exception(error)
            else:
                made.set_result(engine)

        def run() -> None:
            engine, error = None, None
            try:
                engine = AsyncLLM(LLM(folder, **self.options | {"num_kv_blocks": num_blocks}))
            except BaseException as failure:
                error = failure
            try:
                loop.call_soon_threadsafe(deliver, engine, error)
            except RuntimeError:  # the loop is closed, the server has ended
                if engine is not None:
                    engine.shutdown()

        threading.Thread(target=run, name="loader", daemon=True).start()
        self._builds.add(made)
        try:
            return await made
        finally:
            self._builds.discard(made)


def _free(engine: AsyncLLM) -> None:
    """The weights and the KV cache at once, whatever still refers to the `LLM`; then the rest of it."""
    if engine.llm.engine.is_open:
        engine.llm.sleep(level=2)
    engine.shutdown()
    gc.collect()  # quick: what the server began with is frozen, see `run`
    torch.cuda.empty_cache()


def _number(key: tuple[str, str]) -> int:
    return int(key[1] or 0)


@contextmanager
def _refused(before: str = "", root: Path | None = None) -> Iterator[None]:
    """What a folder raises as the answer to a client, without the path of the repository."""
    try:
        yield
    except ApiError:
        raise
    except UnknownModel as error:
        raise ApiError(404, str(error), "model", "model_not_found") from None
    except NoRoom as error:
        raise ApiError(400, f"{before}{error}", "model", "no_room") from None
    except Exception as error:  # a broken folder can raise anything
        said = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        said = said.replace(f"{root}/", "") if root is not None else said
        raise ApiError(400, f"{before}{said}", "model", "model_not_loaded") from None
