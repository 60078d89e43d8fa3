"""Reads the stores' samples, resuming where it was. Skips stores that do not answer, or answer nonsense."""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import httpx

from tiertune_agent.collector.schema import NUMBER, SAMPLES, check
from tiertune_agent.collector.stores import StoreHttp
from tiertune_agent.fields import Json, JsonDict
from tiertune_agent.network import at_once
from tiertune_connector.units import Clock
from tiertune_connector.whatif.sampler import Pick

log = logging.getLogger(__name__)
PAGES, PAGES_S = 8, 5.0
"""Most pages and seconds per store and round; the rest is left to the next. A page may take as long as any answer."""
Totals = Mapping[str, Mapping[str, int]]
"""Counts by namespace."""
COUNTED = ("requests", "chunks")
"""Which of a namespace's totals are read."""


@dataclass(frozen=True)
class SampledRequest:
    """A request with a sampled chunk."""

    age_s: float
    """At the store's answer, because clocks of different hosts need not agree."""
    namespace: str
    chunks: int
    """Of its whole prompt."""
    samples: tuple[Pick, ...]


@dataclass(frozen=True)
class Header:
    """What a store sends before its samples."""

    boot_id: str
    next: int
    rate: float
    seed: int
    hot_version: int
    dropped: int
    behind: int
    time_s: float
    totals: Totals
    """Counts of all lookups since the boot, by namespace."""
    candidates: Mapping[str, Mapping[bytes, int]]
    """Frequent keys by namespace, with their counts."""
    cleared: int = 0
    """Samples before this number were dropped on purpose, when the store's way of sampling changed."""


@dataclass(frozen=True)
class Answer:
    """All that one store reported in one round."""

    store: str
    url: str
    header: Header
    requests: Sequence[SampledRequest]
    grown: Totals
    """Growth of the totals since the last round, by namespace; empty: the store was not read before."""
    missed: int
    """Samples that were dropped for lack of room before they were read."""


class SampleReader:
    """Reads samples; keeps for each store where to go on."""

    def __init__(self, client: Callable[[str], StoreHttp | None], clock: Clock = time.monotonic) -> None:
        """``client`` returns the client of a store by its address, ``clock`` monotonic seconds."""
        self.missed = 0
        """Samples of all stores that were dropped for lack of room before they were read."""
        self._client = client
        self._clock = clock
        self._nonsense: set[str] = set()
        """Addresses whose last answer was nonsense: it is logged once."""
        self._known: dict[str, tuple[str, Header]] = {}
        """Which store answered last at each address, and its header, which says where to go on."""

    def read(self, urls: Mapping[str, str]) -> list[Answer]:
        """Answers of the stores that give one; ``urls``: addresses by the stores' names."""
        told = list(filter(None, at_once(lambda one: self._read(*one), urls.items())))
        self._known = {url: known for url, known in self._known.items() if self._client(url)}
        self._nonsense = {url for url in self._nonsense if self._client(url)}
        self.missed += sum(answer.missed for answer in told)
        return told

    def _read(self, store: str, url: str) -> Answer | None:
        client = self._client(url)
        if client is None:
            return None
        try:
            answer = self._pages(client, store, url)
        except httpx.HTTPError:  # the collector of its counters reports a store that is away
            return None
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            if url not in self._nonsense:
                log.warning("%s/v1/samples answers what no store answers, sizes are weighed without it: %r", url, error)
            self._nonsense.add(url)
            return None
        self._nonsense.discard(url)
        return answer

    def _pages(self, client: StoreHttp, store: str, url: str) -> Answer:
        known, until = self._known.get(url), self._clock() + PAGES_S
        last = known[1] if known and known[0] == store else None
        since = last.next if last else 0
        header, lines = _parse(client.samples(since))
        again = last is not None and last.boot_id == header.boot_id
        if since and not again:
            header, lines = _parse(client.samples(0))
        missed = max(0, header.dropped - max(since if again else 0, header.cleared))
        for _ in range(PAGES - 1):
            if not header.behind or self._clock() > until:
                break
            header, more = _parse(client.samples(header.next))
            lines += more
        requests = list(_requests(lines, header.time_s))
        grown = _grown(last.totals if again else {}, header.totals) if last else {}
        self._known[url] = store, header
        return Answer(store, url, header, requests, grown, missed if last else 0)


def _parse(text: str) -> tuple[Header, list[JsonDict]]:
    head, *lines = [json.loads(line) for line in text.removesuffix("\n").split("\n")]
    check(head, SAMPLES, "their header")
    namespaces: Mapping[str, Json] = head["namespaces"]
    header = Header(
        boot_id=str(head["boot_id"]),
        seed=int(head["hash_seed"]),
        cleared=int(head.get("cleared", 0)),
        **{name: int(head[name]) for name in ("next", "hot_version", "dropped", "behind")},  # null is nonsense
        rate=float(head["rate"]),
        time_s=float(head["time_s"]),
        totals={digest: {name: int(told[name]) for name in COUNTED} for digest, told in namespaces.items()},
        candidates={
            digest: {bytes.fromhex(key): int(count) for key, count in told["hot_candidates"].items()}
            for digest, told in namespaces.items()
        },
    )
    return header, lines


def _requests(lines: Sequence[Json], now_s: float) -> Iterator[SampledRequest]:
    """Group the samples by request; those of one request come one after another."""
    for _, group in groupby(lines, key=lambda line: line["req"]):
        told = list(group)
        one, chunks = told[0], int(told[0]["chain_len"])
        check(chunks, NUMBER, "chain_len")
        check(one["t"], NUMBER, "t")
        samples = tuple(Pick(int(line["pos"]), bytes.fromhex(line["key"]), bool(line["hot"])) for line in told)
        if not all(0 <= sample.position < chunks for sample in samples):
            raise ValueError(f"a sample of no place in its prompt of {chunks} chunks")
        yield SampledRequest(now_s - float(one["t"]), str(one["namespace"]), chunks, samples)


def _grown(before: Totals, now: Totals) -> dict[str, dict[str, int]]:
    grown = {}
    for digest, totals in now.items():
        known = before.get(digest)
        if known is None or totals["requests"] < known["requests"]:  # the store forgot the namespace meanwhile
            known = dict.fromkeys(COUNTED, 0)
        grown[digest] = {name: count - known[name] for name, count in totals.items()}
    return grown
