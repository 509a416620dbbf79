"""Metrics of a server, with vLLM's names, for Prometheus. Built in chapter 23."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest

from minillm.engine.sink import OutputSink

if TYPE_CHECKING:
    from minillm.serving.service import Service


class ServerMetrics:
    """What `/metrics` shows of one service."""

    def __init__(self, service: Service):
        self.service, self.registry = service, CollectorRegistry()

    def refused(self) -> None:
        """A request that was not admitted, or was wrong."""

    def ended(self, sink: OutputSink) -> None:
        """A request has left the engine, or is leaving it."""

    def text(self) -> bytes:
        return generate_latest(self.registry)
