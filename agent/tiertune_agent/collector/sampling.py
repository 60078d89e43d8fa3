"""One seed, rate and hot set for all stores of a fleet: derived from what they report, and handed out to them."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import floor, inf, log2
from operator import itemgetter

import httpx

from tiertune_agent.collector.samples import Answer
from tiertune_agent.collector.stores import ClientOf
from tiertune_agent.fields import JsonDict
from tiertune_agent.network import at_once

HOT_KEYS = 64
SEED = 0
"""Seed of the hash that chooses blocks: the same for every fleet."""
REFRESH = timedelta(minutes=5)
GHOST_KEYS = 8192
"""A simulated fleet of the present size follows about this many keys, if there are more."""
DRAM_KEYS = 64
"""Of these at least half of so many are in a host's DRAM, so that smaller DRAMs still differ from each other."""
MOST_KEYS = 8 * GHOST_KEYS
"""Unless the fleet would have to follow more than this for it."""
SAMPLES_PER_S = 1000.0
"""Most samples of the whole fleet per second."""
LEAST_RATE = 2.0**-14
NEWEST = 1 << 59
"""A store that tells this version or a later one is not followed: soon nobody could read a store that has ours."""
SLACK = 4
"""A rate that is off by less than this factor stays, as a new rate restarts the simulations."""


@dataclass(frozen=True)
class FleetSampling:
    """How every store of the fleet must sample."""

    rate: float
    hot: tuple[bytes, ...]
    version: int

    def document(self) -> JsonDict:
        return {**vars(self), "seed": SEED, "hot": [key.hex() for key in self.hot]}


NOTHING = FleetSampling(rate=0.0, hot=(), version=0)
"""No store samples so, and every version is newer."""


class Handout:
    """Decides how the fleet samples, and instructs every store that samples otherwise."""

    def __init__(self, client: ClientOf) -> None:
        self.current = NOTHING
        """What was handed out last."""
        self._client = client
        self._refreshed = datetime.min.replace(tzinfo=UTC)

    def round(
        self, answers: Sequence[Answer], at: datetime, *, wanted: float, least: float = 1.0, chunks_per_s: float | None
    ) -> None:
        """Hand out what is due, given the stores' answers.

        ``wanted``, ``least``: the highest and the lowest rate that a namespace needs; ``chunks_per_s``: how many chunks
        the fleet looks up, None: not known yet.
        """
        if not answers:
            return
        headers = (answer.header for answer in answers)
        told = [(one.hot_version, one.rate) for one in headers if 0 < one.hot_version < NEWEST]
        newest, known = max(told, key=itemgetter(0), default=(0, 0.0))
        rate = self._rate(wanted, chunks_per_s, known)
        self.current = self._renewed(answers, at, rate, newest, hot=rate < 1 or rate >= SLACK * least)
        at_once(self._tell, [answer.url for answer in answers if answer.header.hot_version != self.current.version])

    def agrees(self, answer: Answer) -> bool:
        """Whether a store's samples are of the fleet's rate and seed."""
        header = answer.header
        return (header.rate, header.seed) == (self.current.rate, SEED)

    def _rate(self, wanted: float, chunks_per_s: float | None, told: float) -> float:
        """The rate, a power of two, for a fleet that is not too busy for what is ``wanted``.

        The present one, or one ``told`` before this agent (0: none), stays if not far off.
        While nobody knows how busy the fleet is, the earlier rate may also be far lower.
        """
        rate = _power(min(wanted, SAMPLES_PER_S / max(chunks_per_s or 0.0, 1e-9)))
        before = self.current.rate or told
        most = inf if chunks_per_s is None else SLACK
        return before if before and 1 / SLACK < rate / before < most else rate

    def _renewed(self, answers: Sequence[Answer], at: datetime, rate: float, told: int, *, hot: bool) -> FleetSampling:
        """The sampling from now on: the current one unless its rate or hot set changes, or a newer one was ``told``.

        That was handed out by another agent, or by this one before a restart. ``hot``: whether anybody simulates only a
        part of the keys, and so needs a hot set.
        """
        now = self.current if told <= self.current.version else None
        fresh = not hot or (now and now.hot and at < self._refreshed + REFRESH)
        if now and rate == now.rate and fresh:
            return now
        told_of = [each for answer in answers for each in answer.header.namespaces.values()] if hot else ()
        keys = hot_set([namespace.hot_candidates for namespace in told_of], self.current.hot)
        self._refreshed = at
        if now and (rate, set(keys)) == (now.rate, set(now.hot)):
            return now
        return FleetSampling(rate, keys, max(told, self.current.version) + 1)

    def _tell(self, url: str) -> None:
        client = self._client(url)
        if client is not None:
            with suppress(httpx.HTTPError):  # one that refuses shows its version in the next round
                client.put_sampling(self.current.document())


def wanted_rate(chunks: float, dram_chunks: float) -> float:
    """The rate at which a namespace is simulated in its share of the tiers, a power of two.

    If it had the tiers alone, the fleet's would hold so many of its ``chunks``, a host's DRAM ``dram_chunks``. If that
    is a small part of the tiers, as beside large disks, more are simulated.
    """
    return _power(
        max(GHOST_KEYS / max(chunks, 1.0), min(DRAM_KEYS / max(dram_chunks, 1.0), MOST_KEYS / max(chunks, 1.0)))
    )


def _power(rate: float) -> float:
    return max(LEAST_RATE, 2.0 ** floor(log2(min(1.0, rate))))


def hot_set(
    candidates: Iterable[Mapping[bytes, int]], before: Collection[bytes], number: int = HOT_KEYS
) -> tuple[bytes, ...]:
    """The ``number`` most frequent keys of the fleet; those of ``before`` stay while among the first 2 ``number``."""
    counts = Counter[bytes]()
    for told in candidates:
        counts.update(told)
    often = sorted(counts, key=lambda key: (-counts[key], key))
    kept = [key for key in often[: 2 * number] if key in before]
    new = [key for key in often[:number] if key not in before]
    return tuple((kept + new)[:number])
