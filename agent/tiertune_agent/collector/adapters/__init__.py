"""Turns other connectors' metrics into a store's counters, read-only; what they do not report stays unknown."""

from collections.abc import Callable

from tiertune_agent.collector.adapters import lmcache, lmcache_mp, vllm
from tiertune_agent.collector.adapters.exposition import Exposition
from tiertune_agent.collector.adapters.mapped import Hints, Mapped

Adapter = Callable[[Exposition, Hints], Mapped]
"""Turns what a source reports into counters of a store. Pure."""

ADAPTERS: dict[str, Adapter] = {"vllm": vllm.mapped, "lmcache_mp": lmcache_mp.mapped, "lmcache": lmcache.mapped}
"""By the ``kind`` of a source in the agent's settings."""
