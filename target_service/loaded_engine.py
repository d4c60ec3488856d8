"""An engine that is loaded, with what the process needs to serve it, and to end it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol

from prometheus_client.registry import Collector

from target_service.engine.identity import EngineUsage, TargetIdentity
from target_service.engine.interface import RequestT, TargetEngine


class ServedEngine(TargetEngine[RequestT], EngineUsage, Protocol[RequestT]):
    """An engine whose load and memory are reported."""


@dataclass(frozen=True, slots=True)
class LoadedEngine(Generic[RequestT]):
    """An engine, or a part of one that another process leads.

    Attributes:
        engine: not started yet.
        identity: of its model.
        close: releases its resources, once its thread has ended.
        collectors: of metrics of its own.
    """

    engine: ServedEngine[RequestT]
    identity: TargetIdentity
    close: Callable[[], object] = lambda: None
    collectors: Sequence[Collector] = ()
