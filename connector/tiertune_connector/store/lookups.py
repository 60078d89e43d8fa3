"""Where a prompt's chunks are: answering lookups, and counting, using and studying what was asked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from xxhash import xxh3_64_intdigest

from tiertune_connector.cost import GateSettings
from tiertune_connector.protocol.messages import Lookup, LookupReply, Own
from tiertune_connector.sampling.observer import Observer
from tiertune_connector.sessions.session import Prompt, Session
from tiertune_connector.slower.arrivals import Arrivals
from tiertune_connector.store.parts import Parts
from tiertune_connector.tiers.steps import in_steps

AT_ONCE = 1024
"""Chunks used or counted in one step: a third of a millisecond with the lock held."""

HELD, FETCHED = "held", "fetched"


@dataclass(eq=False)
class Lookups(Parts):
    """Thread-safe."""

    observer: Observer
    arrivals: Arrivals

    def lookup(self, session: Session, asked: Lookup, until: float = inf, *, wait: bool) -> LookupReply:
        """Where a prompt's leading chunks are, and what they cost; call ``looked_up`` after the answer.

        The remote is asked only with ``wait``, on a thread that may wait, and waited for until ``until``.
        """
        if self.tuning().bypass:
            with self.dram.lock:
                if asked.defer and not session.ended:  # the engine's own chunks are still found
                    session.chains.put(asked.request, Prompt(asked.keys, [], [], len(asked.keys), deferred=True))
            return LookupReply(asked.id, [], {}, {}, "bypassed")
        digest, keys = session.digest, asked.keys
        readable = wait and self.residency.readable

        def left_s() -> float:
            return max(0.0, until - self.clock()) if readable else 0.0

        tiers = self._may_come(session, asked.tenant, self.residency.leading(digest, keys, left_s))
        if asked.sides:
            allowed = self.residency.allowed(digest, len(tiers), session.chunk_tokens, asked.sides, left_s)
            tiers = tiers[:allowed]
        with self.dram.lock:
            coming = self.arrivals.coming(
                digest, (key for key, tier in zip(keys, tiers, strict=False) if tier != "dram")
            )
            room = self.arrivals.room(digest)
            if not session.ended:  # it waited for the remote: what the client asked went with it
                session.chains.put(asked.request, self._found(asked, tiers))
        remote = self.tuning().tiers.remote
        group = group_of(asked.request, remote.holdout)
        told = group if "remote" in tiers else ""
        fetches = remote.fetch == "on" and group != HELD
        bounds = GateSettings(fetches, remote.margin, remote.min_fetch_tokens, remote.deadline_factor)
        costs = self.health.costs(coming, session.chunk_bytes)
        return LookupReply(asked.id, tiers, costs, {"remote": bounds}, group=told, room=room)

    def looked_up(self, session: Session, asked: Lookup, reply: LookupReply) -> None:
        """Note and count an answered lookup; if it is deferred, ``own`` counts its hits.

        A ``long`` one needs a thread that may wait.
        """
        self.accounts.prompt(session, asked.prompt_tokens, salted=bool(asked.tenant))
        self.observer.prefill(session, asked.prefill)
        self.observer.beside(session, asked.sides)
        if reply.reason:
            return
        self.observer.seen(session, asked.keys, asked.prompt_tokens, asked.tenant)
        for keys in asked.chains:
            for some in in_steps(self.dram.lock, len(keys), AT_ONCE, last_first=True):
                self._use(session.digest, keys[some])
        if not asked.defer:
            found = self._found(asked, reply.tiers)
            for some in in_steps(self.dram.lock, len(found.keys), AT_ONCE):
                self.accounts.lookup(session, Prompt(found.keys[some], found.tiers[some], found.asked))

    def own(self, session: Session, told: Own) -> None:
        """Count a deferred lookup: the engine had the first chunks itself, and needed only the rest."""
        with self.dram.lock:
            asked = session.chains.get(told.request)
            if asked is None:
                return
            found = max(asked.found, told.gpu_chunks + told.staging_chunks)
            session.chains.put(told.request, replace(asked, found=found, deferred=False))
            if asked.deferred:
                self.accounts.lookup(session, asked, told)

    def long(self, asked: Lookup) -> bool:
        """Whether using and counting its chunks takes more than one step."""
        return sum(map(len, asked.chains)) > AT_ONCE

    def needs_remote(self, session: Session, asked: Lookup) -> bool:
        """Whether a lookup would wait for the remote; one that is only reported does not."""
        if not asked.id or self.tuning().bypass or not self.residency.readable:
            return False
        with self.dram.lock:
            return not all(all(self.residency.local(session.digest, keys)) for keys in asked.chains)

    def _may_come(self, session: Session, tenant: bytes, tiers: list[str]) -> list[str]:
        """The tiers up to the first chunk that the tenant's quota has no room for: fetching it would be vain."""
        with self.dram.lock:
            left = self.quotas.left(tenant)
        if left is None:
            return tiers
        coming = [position for position, tier in enumerate(tiers) if tier != "dram"]
        fit = left // session.chunk_bytes
        return tiers[: coming[fit]] if fit < len(coming) else tiers

    def _use(self, digest: str, keys: Sequence[bytes]) -> None:
        """Touch a chain, and write behind what was not wanted at first use."""
        held = self.dram.pools.get(digest)
        if held is None:  # the client has gone, and so has what it used
            return
        held.pool.touch(keys)
        now = self.clock()
        used = held.pool.places(keys)
        for _, slot in used:
            slot.used_at, slot.uses = now, slot.uses + 1
        self.behind.used(digest, used)

    def _found(self, asked: Lookup, tiers: list[str]) -> Prompt:
        """What is counted. A client that looked itself (``id`` 0) asked no remote, whatever has left since."""
        remote = bool(asked.id) and self.residency.readable
        return Prompt(asked.keys, tiers, self.residency.asked(tiers, remote=remote), len(tiers), asked.defer)


def group_of(request: str, share: float) -> str:
    """A request's holdout group, by the hash of its id and fixed while the share is; empty: nothing is held out."""
    if not share:
        return ""
    return HELD if xxh3_64_intdigest(request.encode()) < share * 2**64 else FETCHED
