"""Run a server until it is told to stop; or in a thread, for a notebook or a test. Built in chapter 23."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from minillm.engine.async_llm import AsyncLLM
from minillm.engine.slices import ask_for_slices
from minillm.serving.app import create_app
from minillm.serving.config import ServerConfig
from minillm.serving.loading import Loader
from minillm.serving.metrics import watch_loop
from minillm.serving.models import Models
from minillm.serving.repository import Repository

# An idle connection is kept longer than clients keep theirs (httpx 5 s, aiohttp 15 s, many proxies 60 s): otherwise the
# server closes it just while the next request is on its way, and the client sees a reset.
IDLE_SECONDS = 75
LAST_SECONDS = 5.0  # for last pieces to be sent, after the engine has ended everything
WAITING = 2048  # connections that the kernel keeps until the loop accepts them
ACCEPTED = 4  # at once: of many that come together each takes the loop some milliseconds, and streams wait meanwhile


class HttpServer(uvicorn.Server):
    """uvicorn that drains: the first signal closes the door and lets the engine finish, a second one ends it all."""

    def __init__(self, app: FastAPI, config: ServerConfig, access_log: bool):
        self.app, self.settings = app, config
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                http=protocol_of(config),
                ws="none",
                lifespan="off",
                log_level="info" if access_log else "warning",
                access_log=access_log,
                server_header=False,
                backlog=ACCEPTED,
                h11_max_incomplete_event_size=config.max_header_bytes,
                timeout_keep_alive=IDLE_SECONDS,
                timeout_graceful_shutdown=round(config.drain_seconds + LAST_SECONDS),
            )
        )
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        ask_for_slices()  # a step has all cores for milliseconds; a token that is ready shall not wait for one of them
        models = self.app.state.models
        tasks = [asyncio.ensure_future(watch_loop(models.metrics.loop_lag))]
        if models.loader is not None:
            tasks.append(asyncio.ensure_future(models.loader.load_first()))
        try:
            await super().serve(sockets)
        finally:
            for task in tasks:
                task.cancel()
            if models.loader is not None:
                models.loader.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(WAITING)  # asyncio takes one number for what waits and for what is accepted at once

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal."""
        if self.should_exit:
            self.force_exit = True
        self.stop()

    def stop(self) -> None:
        """Take no more requests, finish what is under way, then return from `serve`; from any thread."""
        self.should_exit = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        if self._draining is None:
            models = self.app.state.models
            self._draining = asyncio.ensure_future(models.drain(self.settings.drain_seconds))


def protocol_of(config: ServerConfig) -> type[H11Protocol]:
    """uvicorn's protocol with manners: a client that never ends its request's head, or never reads what is sent, loses
    its connection.

    The parser is h11. With httptools, as uvicorn uses it, the first token comes 0.2 to 0.7 ms earlier, but trailers
    count as headers, a body behind an offer to upgrade as another request, and a client that leaves may go unnoticed.
    """

    class Patient(H11Protocol):
        _head: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            # asyncio leaves it out where the listener names no protocol. Without it a piece waits until the client has
            # acknowledged the one before, which a client delays for 40 ms.
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._expect_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop("_head")
            elif self._head is None:  # the beginning of another request on the same connection
                self._expect_head()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = self.loop.call_later(config.send_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop("_unread")

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop("_head")
            self._stop("_unread")
            super().connection_lost(exc)

        def _expect_head(self) -> None:
            self._head = self.loop.call_later(config.head_seconds, self.transport.abort)

        def _stop(self, name: str) -> None:
            if (timer := getattr(self, name)) is not None:
                timer.cancel()
                setattr(self, name, None)

    return Patient


def run(
    engine: AsyncLLM | None,
    config: ServerConfig,
    access_log: bool = True,
    on_start: Callable[[str], object] = lambda url: None,
    repository: Repository | None = None,
) -> None:
    """Serve one engine, or the models of a repository, until SIGINT or SIGTERM; `on_start` hears of the URL. The engine
    stays open. Raises OSError where the port is in use."""
    with listen(config) as listener:
        server = HttpServer(create_app(models_of(engine, config, repository)), config, access_log)
        on_start(url_of(config, listener))
        # The garbage collector skips what is loaded by now: a pass over half a million objects delays every stream.
        gc.collect()
        gc.freeze()
        try:
            server.run([listener])
        finally:
            gc.unfreeze()


def models_of(engine: AsyncLLM | None, config: ServerConfig, repository: Repository | None = None) -> Models:
    """One model, or those that a repository has."""
    models = Models(config, engine)
    if repository is not None:
        models.loader = Loader(models, repository)
    return models


def listen(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=WAITING)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot listen on {config.host} port {config.port}: {error.strerror}; choose another --host or --port "
            "(0 takes a free one)",
        ) from None


def url_of(config: ServerConfig, listener: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{listener.getsockname()[1]}"


class RunningServer:
    """A server in a thread of its own, on a free port unless the configuration names one.

    with RunningServer(engine) as server:
        print(server.url)                 http://127.0.0.1:PORT

    Leaving it drains. Raises OSError where the port is in use.
    """

    def __init__(
        self, engine: AsyncLLM | None, config: ServerConfig | None = None, repository: Repository | None = None
    ):
        config = config or ServerConfig(port=0)
        self.models = models_of(engine, config, repository)
        self.app = create_app(self.models)
        self.service = self.app.state.service
        self.server = HttpServer(self.app, config, access_log=False)
        self.socket = listen(config)
        self.url = url_of(config, self.socket)
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)

    def start(self) -> Self:
        self._thread.start()
        while not self.server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the HTTP server ended before it began; see its log")
            self._thread.join(0.01)
        return self

    def stop(self) -> None:
        """A second call does nothing."""
        self.server.stop()
        self._thread.join()
        self.socket.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _serve(self) -> None:
        asyncio.run(self.server.serve([self.socket]))
