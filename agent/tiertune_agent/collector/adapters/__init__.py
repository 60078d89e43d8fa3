"""Turns other connectors' metrics into a store's counters, read-only; what they do not report stays unknown."""

from collections.abc import Callable
from typing import Protocol

from tiertune_agent.collector.adapters import lmcache, lmcache_mp, vllm
from tiertune_agent.collector.adapters.exposition import Exposition
from tiertune_agent.collector.adapters.mapped import Hints, Mapped


class Adapter(Protocol):
    """A module that reads a source's Prometheus text and turns it into counters."""

    @property
    def WANTED(self) -> tuple[str, ...]:  # noqa: N802 (a constant of the module)
        """Names of the samples that it reads."""

    @property
    def mapped(self) -> Callable[[Exposition, Hints], Mapped]:
        """Turns what is reported into counters of a store. Pure."""


ADAPTERS: dict[str, Adapter] = {"vllm": vllm, "lmcache_mp": lmcache_mp, "lmcache": lmcache}
"""By the ``kind`` of a source in the agent's settings."""
