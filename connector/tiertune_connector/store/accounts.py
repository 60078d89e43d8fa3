"""The store's counts of lookups, gates and evictions, which dashboards and the agent read."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import compress

from tiertune_connector.catalogue import OTHER
from tiertune_connector.chunk import writer_id
from tiertune_connector.cost import Reason
from tiertune_connector.counters import Counters
from tiertune_connector.protocol.messages import FirstToken, Own, Steps, TierReport
from tiertune_connector.protocol.reporting import gained_s
from tiertune_connector.sessions.session import Prompt, Session
from tiertune_connector.tiers.base import FLUSHED, Evicted
from tiertune_connector.tiers.dram import DramTier

LENGTHS = (0, 1024, 4096, 16384)
"""Least tokens of each length class of fetches: short fetches may lose where long ones pay."""
STAGES = 64
"""Stage names counted apart, at most: clients choose them."""
REMEMBERED = 1 << 20
"""Chunks whose engine is known, in 8 MiB; of several with the same place, the latest."""
_NAMED = 1 << 16
"""Engines known by a number, at most. It replaces a digest's lowest bits, which the place tells already."""
_REASONS = frozenset(Reason)


class Accounts:
    """Turns events of the store into metrics of the catalogue."""

    def __init__(self, counters: Counters, store: str, dram: DramTier, model: Callable[[str], str]) -> None:
        """``model`` returns the name of a namespace's model."""
        self._model = model
        self.counters, self._add, self._observe = counters, counters.add, counters.observe
        self.writer = writer_id(store)
        """Of the chunks that this store writes."""
        self._dram = dram
        self._authors = Authors()
        self._stages: set[str] = set()

    def pool_labels(self, namespace: str) -> tuple[str, str]:
        return namespace, self._model(namespace)

    def stage(self, name: str) -> str:
        """A stage's label: its name, or `other` beyond the first many."""
        if name not in self._stages:
            if len(self._stages) >= STAGES:
                return OTHER
            self._stages.add(name)
        return name

    def prompt(self, session: Session, tokens: int, *, salted: bool = False) -> None:
        labels = self.pool_labels(session.digest)
        self._add("prompt_tokens_total", (self.stage(session.stage), *labels), tokens)
        self._add("requests_total", ("yes" if salted else "no", *labels))

    def lookup(self, session: Session, found: Prompt, own: Own | None = None) -> None:
        """Count hits and misses by tier, and in the engine's own memory if it said how many leading chunks it had.

        A slower tier is not asked for a chunk that a faster one has.
        """
        left = len(found.keys)
        for tier, chunks in (("gpu", own.gpu_chunks), ("staging", own.staging_chunks)) if own else ():
            left = self._looked_up(session, tier, left, {"self": min(chunks, left)})
        first = len(found.keys) - left
        keys, tiers = found.keys[first : len(found.tiers)], found.tiers[first:]
        for tier in found.asked:
            if not left:
                break
            hits = keys if tiers.count(tier) == len(keys) else list(compress(keys, map(tier.__eq__, tiers)))
            left = self._looked_up(session, tier, left, self._origins(session, tier, hits))

    def computed(self, session: Session, key: bytes) -> None:
        """An engine stored a chunk: the chunk stays that engine's when it is found in a slower tier."""
        self._authors.wrote(session.digest, key, session.engine)

    def computed_again(self, session: Session, tokens: int) -> None:
        """An engine computed tokens that a tier had, or another engine was computing."""
        if tokens > 0:
            self._add("duplicate_prefill_tokens_total", self.pool_labels(session.digest), tokens)

    def offered(self, session: Session, prompt: Prompt, reasons: Mapping[bytes, str]) -> None:
        """An engine offers chunks of a prompt; ``reasons`` say why DRAM does not want some.

        Chunks that no tier had at the lookup, but that another engine has stored or begun to store since, were computed
        again.
        """
        again = [key for key, reason in reasons.items() if reason in ("present", "busy")]
        missed = set(prompt.keys[prompt.found :]) if again else ()
        pool, own = self._dram.pools[session.digest].pool, session.reservations
        slots = ((pool.get(key), key) for key in again if key in missed)
        count = sum(key not in own if slot is None else slot.engine != session.engine for slot, key in slots)
        self.computed_again(session, count * session.chunk_tokens)

    def first_token(self, _: Session, told: FirstToken) -> None:
        """Add a request's first token to the sums of the group, held out or not, that its lookup put it in."""
        if not told.group:
            return
        seconds, tokens = told.seconds, told.tokens
        sums = {
            "requests": 1.0,
            "seconds": seconds,
            "tokens": tokens,
            "seconds2": seconds * seconds,
            "tokens2": tokens * tokens,
            "seconds_tokens": seconds * tokens,
        }
        for name, value in sums.items():
            self._add("holdout_sums_total", ("remote", told.group, name), value)

    def steps(self, session: Session, told: Steps) -> None:
        """Count what a client's steps took, and note on which GPUs it computes."""
        session.gpus = tuple(told.gpus) or session.gpus
        for step in told.steps:
            labels = (self.stage(step.stage), step.phase)
            self._add("stage_gpu_seconds_total", labels, step.gpu_seconds)
            self._add("stage_tokens_total", labels, step.tokens)

    def over_quota(self, namespace: str) -> None:
        """A chunk was refused because its tenant's quota is full; which tenant is not counted."""
        self._add("quota_refused_chunks_total", self.pool_labels(namespace))

    def evicted(self, tier: str, chunks: Sequence[Evicted], now: float) -> None:
        """Count chunks that left; flushed ones are no evictions."""
        for chunk in chunks:
            if chunk.reason == FLUSHED:
                continue
            labels = self.pool_labels(chunk.namespace)
            self._add("tier_evictions_total", (tier, chunk.algorithm, chunk.reason, *labels))
            if not chunk.used:
                self._add("tier_evicted_unused_total", (tier, *labels))
            if chunk.used_at is not None and chunk.reason == "room":
                self._observe("tier_evicted_idle_seconds", (tier, *labels), max(0.0, now - chunk.used_at))

    def _looked_up(self, session: Session, tier: str, asked: int, hits: Mapping[str, int]) -> int:
        """Count what a tier had of the chunks asked for, by origin, and what it lacked, which is returned."""
        missed = asked - sum(hits.values())
        of = self.stage(session.stage), *self.pool_labels(session.digest)
        for result, origin, chunks in (*(("hit", *had) for had in hits.items()), ("miss", "", missed)):
            if chunks:
                self._add("tier_lookup_tokens_total", (tier, result, origin, *of), chunks * session.chunk_tokens)
        return missed

    def _origins(self, session: Session, tier: str, keys: Sequence[bytes]) -> dict[str, int]:
        """How many of the keys, all held by a tier, come from where."""
        digest, authors = session.digest, self._authors
        if tier == "dram":
            pool, mine = self._dram.pools.get(digest), self.writer
            slots = pool.pool.places(keys) if pool else []
            engines = [slot.engine for _, slot in slots if slot.origin.writer == mine]
            others = len(slots) - len(engines)
            if "" in engines or len(slots) < len(keys):  # they came from other tiers, or have left since
                told = {key for key, slot in slots if slot.engine or slot.origin.writer != mine}
                asked = [key for key in keys if key not in told]
                engines = [*filter(None, engines), *authors.of(digest, asked)]  # an engine may have no name, too
        else:
            engines = authors.of(digest, keys)
            others = len(keys) - len(engines) if tier == "remote" else 0  # the disk keeps what this host held
        own = engines.count(session.engine)
        return {"self": own, "same_host": len(keys) - own - others, "other_host": others}


class Authors:
    """Which engine computed a chunk here, so that it is still that engine's when it returns from a slower tier.

    Guarded by the store's lock. Chunks it does not know, as after a restart, are nobody's.
    """

    def __init__(self) -> None:
        self._places = array("q", bytes(8 * REMEMBERED))
        """Per place, the higher bits of a chunk's digest, then its engine's number."""
        self._engines = [""]
        self._numbers: dict[str, int] = {}

    def wrote(self, namespace: str, key: bytes, engine: str) -> None:
        """An engine stored a chunk that it had computed."""
        number = self._numbers.get(engine)
        if number is None:
            if len(self._engines) == _NAMED:
                return
            number = self._numbers[engine] = len(self._engines)
            self._engines.append(engine)
        digest = hash(namespace) ^ hash(key)
        self._places[digest & REMEMBERED - 1] = digest & -_NAMED | number

    def of(self, namespace: str, keys: Sequence[bytes]) -> list[str]:
        """The engines of the chunks, unknown ones left out."""
        places, engines, inner, mask = self._places, [], hash(namespace), REMEMBERED - 1
        for key in keys:
            digest = inner ^ hash(key)
            found = places[digest & mask]
            if 0 <= found ^ digest < _NAMED:
                engines.append(self._engines[found & _NAMED - 1])
        return engines


def count_gate(counters: Counters, tier: TierReport, chunk_bytes: int) -> None:
    """Count what a gate decided about one tier for one request, and what became of it."""
    add, observe, name = counters.add, counters.observe, (tier.tier,)
    decision = "fetch" if tier.fetched_tokens else "recompute"
    add("gate_requests_total", (tier.tier, decision, tier.reason if tier.reason in _REASONS else OTHER))
    add("gate_outcomes_total", (tier.tier, tier.outcome))
    add("gate_candidate_requests_total", name)
    add("gate_candidate_tokens_total", name, tier.tokens)
    add("gate_candidate_bytes_total", name, tier.chunks * chunk_bytes)
    told = {"fetch": tier.fetch_s, "recompute": tier.recompute_s}
    known = {kind: max(0.0, seconds) for kind, seconds in told.items() if seconds is not None}
    for kind, seconds in known.items():
        observe("gate_predicted_seconds", (tier.tier, kind), seconds)
        if len(known) == len(told):  # the two sums are compared, so they must cover the same requests
            add("gate_candidate_seconds_total", (tier.tier, kind), seconds)
    if tier.actual_s is None:  # chosen but never begun: nothing was fetched
        return
    add("gate_fetched_tokens_total", name, tier.fetched_tokens)
    observe("gate_actual_seconds", (tier.tier, "fetch"), tier.actual_s)
    gain_s = gained_s(tier)
    if gain_s is not None:
        add("saved_seconds_total" if gain_s > 0 else "lost_seconds_total", name, abs(gain_s))
        length = str(max(least for least in LENGTHS if least <= tier.fetched_tokens))
        add("gate_length_requests_total", (tier.tier, length))
        add("gate_length_seconds_total", (tier.tier, length, "saved" if gain_s > 0 else "lost"), abs(gain_s))
