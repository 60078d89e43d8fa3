"""Change of a running store: the one place where its tuning is replaced, persisted and told."""

import threading
from typing import Any, Literal

from tiertune_connector.pool import Pool
from tiertune_connector.state import State, body_digest, latest
from tiertune_connector.store import TieredStore
from tiertune_connector.tiers.breaker import Breaker, Breakers
from tiertune_connector.tuning import Tuning, TuningError, parse_tuning


class VersionConflictError(Exception):
    """The change was made for another version of the tuning."""


class KeyReusedError(Exception):
    """The idempotency key belongs to another change."""


class Control:
    """Applies tunings to a store, whole or not at all, and keeps them over restarts."""

    def __init__(self, store: TieredStore, state: State) -> None:
        self._store = store
        self._state = state
        self._lock = threading.Lock()
        _, self._changes = state.load()

    @property
    def tuning(self) -> Tuning:
        return self._store.tuning

    def put(self, document: Any, *, expected_version: int, key: str) -> Tuning:  # noqa: ANN401 (JSON)
        """Apply a tuning document made for ``expected_version``; returns the tuning in force.

        The same change under the same ``key`` is applied once, however often it is sent. TuningError names the field
        that is wrong; nothing is changed then, nor with the other errors.
        """
        digest = body_digest([expected_version, document])
        with self._lock:
            if key in self._changes:
                if self._changes[key] != digest:
                    raise KeyReusedError(key)
                return self.tuning
            if expected_version != self.tuning.version:
                raise VersionConflictError(f"the tuning is at version {self.tuning.version}")
            if not isinstance(document, dict):
                raise TuningError("", "expected a JSON object")
            tuning = parse_tuning(document | {"version": expected_version + 1})
            self._store.check(tuning)
            self._apply(tuning, {key: digest})
            return tuning

    def bypass(self, *, on: bool) -> Tuning:
        """Answer miss to everything, or serve again."""
        with self._lock:
            if self.tuning.bypass != on:
                self._apply(self.tuning.model_copy(update={"bypass": on, "version": self.tuning.version + 1}), {})
            return self.tuning

    def _apply(self, tuning: Tuning, change: dict[str, str]) -> None:
        changes = latest(self._changes | change)
        self._state.save(tuning, changes)
        self._changes = changes
        self._store.retune(tuning)


def status(store: TieredStore) -> dict[str, Any]:
    """What ``/v1/status`` tells: tiers with health and reason, pools with desired, applied and effective, quotas."""
    tiers: dict[str, dict[str, Any]] = {}
    for name in ("dram", "disk", "remote"):
        state, reason = store.health(name)
        tier = store.dram if name == "dram" else store.lanes[name].tier if name in store.lanes else None
        usage = tier.usage() if tier and state not in ("dead", "recovering") else None
        tiers[name] = {"health": state, "reason": reason} | (
            {"resident_bytes": usage.resident_bytes, "capacity_bytes": usage.capacity_bytes, "chunks": usage.chunks}
            if usage
            else {}
        )
        if lane := store.lanes.get(name):
            tiers[name] |= _servers(lane.breaker)
    return {
        "store": store.name,
        "bypass": store.tuning.bypass,
        "tuning_version": store.tuning.version,
        "tiers": tiers,
        "pools": {digest: _pool(store, digest) for digest in list(store.dram.pools)},
        "tenants": store.tenants(),
    }


def _servers(breaker: Breaker | Breakers) -> dict[str, Any]:
    """Each server's own health, where a tier has several."""
    if isinstance(breaker, Breaker):
        return {}
    named = breaker.servers.items()
    return {"servers": [{"server": name, "health": one.state, "reason": one.reason} for name, one in named]}


def _pool(store: TieredStore, digest: str) -> dict[str, Any]:
    dram = store.dram.pools[digest]
    told = {
        "model": store.accounts.models.get(digest, ""),
        "chunk_bytes": dram.chunk_bytes,
        **store.observer.terms(digest),
        "dram": _sizes(
            store.tuning, digest, "dram", dram.pool,
            chunk_bytes=dram.stride, applied=dram.allowed, effective=min(dram.allowed, dram.provisioned),
        ),
    }  # fmt: skip
    slab = store.disk.slabs.get(digest) if store.disk else None
    if slab is not None:
        room = slab.pool.capacity
        told["disk"] = _sizes(
            store.tuning, digest, "disk", slab.pool, chunk_bytes=slab.slot_bytes, applied=room, effective=room
        )
    return told


def _sizes(
    tuning: Tuning,
    digest: str,
    tier: Literal["dram", "disk"],
    pool: Pool[Any],
    *,
    chunk_bytes: int,
    applied: int,
    effective: int,
) -> dict[str, Any]:
    """Desired, applied and effective of one pool, the latter in chunks that take ``chunk_bytes`` each."""
    return {
        "desired": {
            "capacity_bytes": tuning.pool(digest, tier).capacity_bytes,
            "eviction": tuning.algorithm(digest, tier),
        },
        "applied": {"capacity_bytes": applied * chunk_bytes, "eviction": pool.algorithm},
        "effective": {"capacity_bytes": effective * chunk_bytes, "eviction": pool.algorithm},
        "resident_bytes": len(pool) * chunk_bytes,
        "chunks": len(pool),
    }
