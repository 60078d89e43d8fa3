"""What requests of one namespace cost on one host, by its store's figures, for simulations of other sizes."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from tiertune_agent.fields import Json, read
from tiertune_agent.records import Snapshot, Windows, total
from tiertune_agent.tuners.base import TypicalCandidate, pools
from tiertune_connector.whatif.chain import Costs

UNMEASURED = {"dram": (0.0, 0.0), "disk": (0.0, 0.0), "remote": (1e9, 0.0)}
"""Seconds before the first byte and per chunk, by tier: nothing is fetched from a remote that nobody measured, or that
no request may ask."""
_LINE = ("overhead_s", "seconds_per_flop", "params", "layers", "width", "step_tokens")
Prefill = Callable[[int], float]
"""Seconds to compute so many leading chunks, beyond the overhead of every prefill."""


def prefill(pool: Json) -> Prefill | None:
    """From a store's status of a pool. Other versions may report more, or less; None: something is missing.

    Each step has its overhead; a token is 2 P FLOPs, n tokens attend with 2 L d n².
    """
    told, chunk_tokens = [read(pool, f"prefill.{name}") for name in _LINE], int(pool.get("chunk_tokens") or 0)
    if None in told or not chunk_tokens:
        return None
    overhead_s, flop_s, params, layers, width, step_tokens = told

    def seconds(chunks: int) -> float:
        tokens = chunks * chunk_tokens
        steps = max(1.0, tokens / step_tokens) if step_tokens else 1.0
        flops = 2 * params * tokens + 2 * layers * width * tokens * tokens
        return float(overhead_s * steps + flop_s * flops - overhead_s)

    return seconds


class KnownCosts:
    """Keeps the latest of all costs that stores reported."""

    def __init__(self) -> None:
        self._fetch: dict[str, dict[str, tuple[float, float]]] = {}
        self._lines: dict[str, dict[str, Prefill]] = {}
        """By namespace and store: the GPUs of a fleet may be unlike."""
        self._heard: dict[str, datetime] = {}
        """When each store and namespace was last heard of."""

    def hear(self, snapshot: Snapshot) -> None:
        """Take the costs from a store's state and latest windows."""
        for window in snapshot.windows:
            first_s, rate = (window.gauge(f"fetch_estimate_{name}") for name in ("t0_seconds", "bytes_per_second"))
            if window.tier and first_s is not None and rate:
                self._fetch.setdefault(snapshot.store, {})[window.tier] = first_s, 1 / rate
        for digest, pool in pools(snapshot.status).items():
            if line := prefill(pool):
                self._lines.setdefault(digest, {})[snapshot.store] = line
        self._heard |= dict.fromkeys((snapshot.store, *pools(snapshot.status)), snapshot.at)

    def forget(self, before: datetime) -> set[str]:
        """Drop stores and namespaces not heard of since ``before``, and return their names."""
        gone = {name for name, at in self._heard.items() if at < before}
        every: Sequence[dict[str, Any]] = (self._fetch, self._lines, self._heard, *self._lines.values())
        for kept in every:
            for name in gone & kept.keys():
                del kept[name]
        return gone

    def costs(self, snapshot: Snapshot, namespace: str) -> Costs | None:
        """What requests of a namespace pay on a store, by its own engines or else another's; None: not known yet."""
        lines, pool = self._lines.get(namespace), read(snapshot.status, f"pools.{namespace}") or {}
        nbytes = bytes_each(pool)
        if not lines or not nbytes:
            return None
        prefill_s = lines.get(snapshot.store) or next(iter(lines.values()))
        tuned, measured = read(snapshot.tuning, "tiers.remote") or {}, self._fetch.get(snapshot.store, {})
        fetch_s = UNMEASURED | {tier: (first_s, byte_s * nbytes) for tier, (first_s, byte_s) in measured.items()}
        if tuned.get("fetch") == "off":  # whatever probes say
            fetch_s["remote"] = UNMEASURED["remote"]
        floor = (tuned.get("min_fetch_tokens") or 0) / (pool.get("chunk_tokens") or 1)
        return Costs(prefill_s, fetch_s, float(tuned.get("margin") or 1.0), floor)


def mean_prompt(snapshot: Snapshot, windows: Windows) -> TypicalCandidate | None:
    """A prompt of mean length with all its chunks in one tier, by the store's windows; None: its costs are unknown.

    It stands in for requests that found chunks there until there are some.
    """
    requests = nbytes = recompute_s = 0.0
    for namespace, pool in pools(snapshot.status).items():
        prefill_s, chunk_bytes = prefill(pool), bytes_each(pool)
        mine = [window for window in windows if window.namespace == namespace and not window.tier]
        asked = total(mine, "requests_total")
        if prefill_s and chunk_bytes and asked:
            chunks = int(total(mine, "prompt_tokens_total") / asked / int(pool["chunk_tokens"]))
            requests += asked
            nbytes += asked * chunks * chunk_bytes
            recompute_s += asked * prefill_s(chunks)
    return TypicalCandidate(0, nbytes / requests, recompute_s / requests) if nbytes else None


def bytes_each(pool: Json) -> int:
    """Bytes of a chunk with those of other groups of layers, by a store's status of a pool; 0: not told yet."""
    return round(int(pool.get("chunk_bytes") or 0) * float(pool.get("chunks_each") or 1.0))
