"""What requests of one namespace cost on one host, by its store's figures, for simulations of other sizes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from tiertune_agent.fields import Json, read
from tiertune_agent.records import Snapshot, Window, Windows, total
from tiertune_agent.tuners.base import TypicalCandidate, pools

NEVER = (1e9, 0.0)
"""Seconds at which no fetch pays."""


@dataclass(frozen=True)
class Prefill:
    """``overhead_s`` per step, and seconds per FLOP; a token is 2 P FLOPs, n tokens attend with 2 L d n²."""

    overhead_s: float
    seconds_per_flop: float
    params: float
    layers: int
    width: int
    step_tokens: int

    @classmethod
    def told(cls, pool: Json) -> "Prefill | None":
        """From a store's status of a pool. Other versions may report more, or less; None: something is missing."""
        line, names = pool.get("prefill"), cls.__dataclass_fields__
        if not isinstance(line, Mapping) or not names.keys() <= line.keys():
            return None
        return cls(**{name: line[name] for name in names})

    def seconds(self, tokens: int) -> float:
        """Seconds to prefill a whole prompt."""
        steps = max(1.0, tokens / self.step_tokens) if self.step_tokens else 1.0
        flops = 2 * self.params * tokens + 2 * self.layers * self.width * tokens * tokens
        return self.overhead_s * steps + self.seconds_per_flop * flops


@dataclass
class Terms:
    """The size of chunks, and what computing and fetching them costs."""

    chunk_tokens: int
    chunk_bytes: int
    prefill: Prefill
    fetch: Mapping[str, tuple[float, float]]
    """Seconds before the first byte, and per byte, by tier."""
    margin: float

    def prefill_s(self, chunks: int) -> float:
        """Seconds to compute so many leading chunks, beyond the overhead of every prefill."""
        return self.prefill.seconds(chunks * self.chunk_tokens) - self.prefill.overhead_s

    def fetch_s(self, tier: str) -> tuple[float, float]:
        """Seconds before the first byte, and per chunk. Nothing is fetched from a remote that nobody measured."""
        first_s, byte_s = self.fetch.get(tier, NEVER if tier == "remote" else (0.0, 0.0))
        return first_s, byte_s * self.chunk_bytes


class KnownCosts:
    """Keeps the latest of all costs that stores reported."""

    def __init__(self) -> None:
        self._fetch: dict[str, dict[str, tuple[float, float]]] = {}
        self._token_s: dict[str, float] = {}
        self._lines: dict[str, Prefill] = {}
        self._heard: dict[str, datetime] = {}
        """When each store and namespace was last heard of."""

    def hear(self, snapshot: Snapshot) -> None:
        """Take the costs from a store's state and latest windows."""
        for window in snapshot.windows:
            self._fetch.setdefault(snapshot.store, {}).update(_fetch(window))
        token_s = _token_s(snapshot.windows)
        if token_s is not None:
            self._token_s[snapshot.store] = token_s
        for digest, pool in pools(snapshot.status).items():
            if line := Prefill.told(pool):
                self._lines[digest] = line
        self._heard |= dict.fromkeys((snapshot.store, *pools(snapshot.status)), snapshot.at)

    def forget(self, before: datetime) -> set[str]:
        """Drop stores and namespaces not heard of since ``before``, and return their names."""
        gone = {name for name, at in self._heard.items() if at < before}
        for kept in (self._fetch, self._token_s, self._lines, self._heard):
            for name in gone & kept.keys():
                del kept[name]
        return gone

    def terms(self, snapshot: Snapshot, namespace: str) -> Terms | None:
        """Costs of a namespace on a store; None: not known yet."""
        pool = read(snapshot.status, f"pools.{namespace}") or {}
        tokens, nbytes = int(pool.get("chunk_tokens") or 0), int(pool.get("chunk_bytes") or 0)
        prefill = self._lines.get(namespace) or self._by_token(snapshot.store)
        if not tokens or not nbytes or prefill is None:
            return None
        margin = float(read(snapshot.tuning, "tiers.remote.margin") or 1.0)
        return Terms(tokens, nbytes, prefill, dict(self._fetch.get(snapshot.store, {})), margin)

    def _by_token(self, store: str) -> Prefill | None:
        """For engines that do not report their model's shape: every token costs the same."""
        token_s = self._token_s.get(store)
        return None if token_s is None else Prefill(0.0, token_s, 0.5, 0, 0, 0)


def mean_prompt(snapshot: Snapshot, windows: Windows) -> TypicalCandidate | None:
    """A prompt of mean length with all its chunks in one tier, by the store's windows; None: its costs are unknown.

    It stands in for requests that found chunks there until there are some.
    """
    known, every = KnownCosts(), TypicalCandidate(0, 0.0, 0.0)
    known.hear(replace(snapshot, windows=tuple(windows)))
    requests = 0.0
    for namespace in pools(snapshot.status):
        mine = [window for window in windows if window.namespace == namespace and not window.tier]
        asked, terms = total(mine, "requests_total"), known.terms(snapshot, namespace)
        if terms and asked:
            chunks = int(total(mine, "prompt_tokens_total") / asked / terms.chunk_tokens)
            nbytes, recompute_s = asked * chunks * terms.chunk_bytes, asked * terms.prefill_s(chunks)
            every = TypicalCandidate(0, every.nbytes + nbytes, every.recompute_s + recompute_s)
            requests += asked
    return TypicalCandidate(0, every.nbytes / requests, every.recompute_s / requests) if every.nbytes else None


def _fetch(window: Window) -> dict[str, tuple[float, float]]:
    first_s = window.gauge("fetch_estimate_t0_seconds")
    rate = window.gauge("fetch_estimate_bytes_per_second")
    if not window.tier or first_s is None or not rate:
        return {}
    return {window.tier: (first_s, 1 / rate)}


def _token_s(windows: Iterable[Window]) -> float | None:
    """Seconds to recompute a token, by the gates' own predictions."""
    seconds = tokens = 0.0
    for window in windows:
        recompute_s = window.total("gate_candidate_seconds_total", kind="recompute")
        if recompute_s:
            seconds += recompute_s
            tokens += window.total("gate_candidate_tokens_total")
    return seconds / tokens if tokens else None
