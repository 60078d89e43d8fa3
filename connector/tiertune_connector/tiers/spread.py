"""Several servers as one remote: every chunk is on the server that its key gives the highest weight.

Adding or removing a server moves its own share and no other chunk. One that does not answer costs its own share: only
there are chunks misses.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

import xxhash

from tiertune_connector.chunk import NOBODY, Origin
from tiertune_connector.counters import Counters
from tiertune_connector.threads import Threads
from tiertune_connector.tiers.base import PROBE_NAMESPACE, UNKNOWN, Came, Counted, Outcome, Read, Tier, Usage, unheard
from tiertune_connector.tiers.breaker import Breaker, Breakers

log = logging.getLogger(__name__)
Told = TypeVar("Told")
_FAILED: Counted = (Outcome.ERROR, 0)
_ASKERS = 16
"""Questions asked of one server at a time."""
_OF_PATIENCE = 0.8
"""Share of patience after which silent servers are not waited for: else the asker would take all for silent."""


def ranked(names: Iterable[str]) -> Callable[[bytes], str]:
    """Rendezvous hashing: the server of a key's chunk, the one to which the key gives the most weight. Pure.

    The order of ``names`` does not matter.
    """
    seeds = [(name, xxhash.xxh3_64_intdigest(name.encode())) for name in names]
    return lambda key: max((xxhash.xxh3_64_intdigest(key, seed), name) for name, seed in seeds)[1]


class SpreadTier:
    """One tier per server, by name. Only probes ask a server that failed too often."""

    name = "remote"
    why = ""
    """Empty: each server's breaker has its own."""

    def __init__(self, servers: Mapping[str, Tier], counters: Counters, *, patience_s: float) -> None:
        """``patience_s`` is the most that `present` may take."""
        self._servers = dict(servers)
        self._counters = counters
        self.owner = ranked(servers)
        self.breaker = Breakers({name: Breaker() for name in servers}, self.owner)
        self._wait_s = _OF_PATIENCE * patience_s
        self._lock = threading.Lock()
        # One pool for each: a server that hangs keeps nobody from another.
        self._askers = {name: Threads(_ASKERS, "remote-server") for name in servers}

    def probe_keys(self, stem: bytes) -> list[bytes]:
        """A key for each server."""
        found: dict[str, bytes] = {}
        number = 0
        while len(found) < len(self._servers):
            key = b"%b-%d" % (stem, number)
            found.setdefault(self.owner(key), key)
            number += 1
        return list(found.values())

    def present(self, namespace: str, keys: Sequence[bytes]) -> Counted:
        """The run up to the first chunk that is not there or whose server does not answer; not OK if any server is not.

        A probe's key is asked of its own server, whatever its health.
        """
        if namespace == PROBE_NAMESPACE:
            return self._present(self.owner(keys[0]), namespace, keys)
        shares: dict[str, list[int]] = {}
        for position, key in enumerate(keys):
            shares.setdefault(self.owner(key), []).append(position)
        asked: dict[str, Future[Counted]] = {}
        for name, positions in shares.items():
            share = [keys[position] for position in positions]
            asked[name] = self._askers[name].submit(self._present, name, namespace, share)
        wait(asked.values(), self._wait_s)
        worst, run = Outcome.OK, len(keys)
        for name, future in asked.items():
            outcome, count = future.result() if future.done() else (Outcome.TIMEOUT, 0)
            future.cancel()
            worst = worst if outcome is Outcome.OK else outcome
            if count < len(shares[name]):
                run = min(run, shares[name][count])
        return worst, run

    def read(self, namespace: str, key: bytes, out: memoryview, came: Came = unheard) -> Read:
        name = self.owner(key)
        if self._closed_to(name, namespace):
            return Outcome.ERROR, NOBODY
        failed: Read = (Outcome.ERROR, NOBODY)
        outcome, origin = self._guarded(name, lambda server: server.read(namespace, key, out, came), failed)
        return self._record(name, outcome), origin

    def write(self, namespace: str, key: bytes, payload: memoryview, origin: Origin) -> Outcome:
        name = self.owner(key)
        if self._closed_to(name, namespace):
            return Outcome.ERROR
        wrote = namespace != PROBE_NAMESPACE
        if wrote and self.breaker.servers[name].paused:
            return Outcome.FULL
        outcome = self._guarded(name, lambda server: server.write(namespace, key, payload, origin), Outcome.ERROR)
        return self._record(name, outcome, wrote=wrote)

    def flush(self, namespace: str | None = None, tenant: bytes | None = None) -> Counted:
        """Flush all servers; not OK if one of them does not answer."""
        worst, total = Outcome.OK, 0
        for outcome, count in self._each(self._servers, lambda server: server.flush(namespace, tenant), _FAILED):
            worst, total = (worst if outcome is Outcome.OK else outcome), total + count
        return worst, total

    def usage(self) -> Usage:
        """Bytes of the servers that are asked, if all of them tell; the capacity only if every server tells its own."""
        asked = [name for name in self._servers if not self.breaker.servers[name].open]
        found = self._each(asked, lambda server: server.usage(), UNKNOWN)
        capacities = [usage.capacity_bytes for usage in found if usage.capacity_bytes is not None]
        resident = [usage.resident_bytes for usage in found if usage.resident_bytes is not None]
        return Usage(
            sum(resident) if len(resident) == len(found) else None,
            sum(capacities) if len(capacities) == len(self._servers) else None,
            None,
        )

    def close(self) -> None:
        for askers in self._askers.values():
            askers.shutdown(wait=False, cancel_futures=True)
        for server in self._servers.values():
            server.close()

    def _present(self, name: str, namespace: str, share: Sequence[bytes]) -> Counted:
        if self._closed_to(name, namespace):
            return Outcome.OK, 0  # it was not asked
        silent = self.breaker.servers[name].open
        outcome, count = self._guarded(name, lambda server: server.present(namespace, share), _FAILED)
        self._record(name, outcome)
        # How long a server hangs that no request asks says nothing about a fetch from the others.
        return (Outcome.ERROR if silent and outcome is Outcome.TIMEOUT else outcome), count

    def _closed_to(self, name: str, namespace: str) -> bool:
        return self.breaker.servers[name].open and namespace != PROBE_NAMESPACE

    def _each(self, names: Iterable[str], operation: Callable[[Tier], Told], failed: Told) -> list[Told]:
        """The answers of servers that are asked at once: the slowest is waited for, not one after another."""
        asked = [self._askers[name].submit(self._guarded, name, operation, failed) for name in names]
        return [future.result() for future in asked]

    def _guarded(self, name: str, operation: Callable[[Tier], Told], failed: Told) -> Told:
        """A server's answer. If it raises, which it should not, this server alone has ``failed``."""
        with self._counters.surviving("remote", f"{name} raised"):
            return operation(self._servers[name])
        return failed

    def _record(self, name: str, outcome: Outcome, *, wrote: bool = False) -> Outcome:
        with self._lock:
            told = self.breaker.servers[name].record(outcome, wrote=wrote, why=self._servers[name].why)
        if told:
            log.warning("%s: %s %s", self.name, name, told)
        return outcome
