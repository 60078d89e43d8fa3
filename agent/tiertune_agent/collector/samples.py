"""Reads the stores' samples, resuming where it was. Skips stores that do not answer, or answer nonsense."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Annotated

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tiertune_agent.collector.schema import MOST
from tiertune_agent.collector.stores import ClientOf, StoreHttp
from tiertune_agent.network import at_once
from tiertune_connector.documents import FieldError
from tiertune_connector.units import Clock
from tiertune_connector.whatif.chain import SampledRequest
from tiertune_connector.whatif.sampler import Pick

log = logging.getLogger(__name__)
PAGES, PAGES_S = 8, 5.0
"""Most pages and seconds per store and round; the rest is left to the next. A page may take as long as any answer."""
Count = Annotated[int, Field(ge=0, lt=MOST)]
Number = Annotated[float, Field(ge=0, lt=MOST)]


class _Told(BaseModel):
    """A line of a store's answer, as far as it is read; other versions may send more. Keys are hexadecimal there."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, val_json_bytes="hex")


class Lookups(_Told):
    """All of a namespace since the boot, sampled or not."""

    requests: Count
    chunks: Count
    hot_candidates: dict[bytes, Count]
    """Frequent keys, with their counts."""


NONE = Lookups(requests=0, chunks=0, hot_candidates={})


class Header(_Told):
    """What a store sends before its samples."""

    boot_id: str
    next: Count
    rate: Number
    seed: int = Field(alias="hash_seed")
    hot_version: Count
    dropped: Count
    behind: Count
    time_s: Number
    namespaces: dict[str, Lookups]
    cleared: Count = 0
    """Samples before this number were dropped on purpose, when the store's way of sampling changed."""


class _Sample(_Told):
    t: Number
    req: int
    key: bytes
    pos: Count
    chain_len: Count
    namespace: str
    hot: bool


@dataclass(frozen=True)
class Answer:
    """All that one store reported in one round."""

    store: str
    url: str
    header: Header
    requests: Sequence[tuple[float, str, SampledRequest]]
    """Those with a sampled chunk, each with its namespace, and before it how many seconds old it was when the store
    answered, because clocks of different hosts need not agree."""
    grown: Mapping[str, Mapping[str, int]]
    """New ``requests`` and ``chunks`` since the last round, by namespace; empty: the store was not read before."""
    missed: int
    """Samples that were dropped for lack of room before they were read."""


class SampleReader:
    """Reads samples; keeps for each store where to go on."""

    def __init__(self, client: ClientOf, clock: Clock = time.monotonic) -> None:
        """``clock`` gives monotonic seconds."""
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
        except ValueError as error:
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
        requests = list(_requests(store, lines, header.time_s))
        grown = _grown(last.namespaces if again else {}, header.namespaces) if last else {}
        self._known[url] = store, header
        return Answer(store, url, header, requests, grown, missed if last else 0)


def _parse(text: str) -> tuple[Header, list[_Sample]]:
    """FieldError if it is no answer of a store."""
    head, *lines = text.removesuffix("\n").split("\n")
    try:
        return Header.model_validate_json(head), [_Sample.model_validate_json(line) for line in lines]
    except ValidationError as error:
        raise FieldError.of(error) from error


def _requests(store: str, lines: Sequence[_Sample], now_s: float) -> Iterator[tuple[float, str, SampledRequest]]:
    """Group the samples by request; those of one request come one after another."""
    for _, group in groupby(lines, key=attrgetter("req")):
        told = list(group)
        one = told[0]
        if any(sample.pos >= one.chain_len for sample in told):
            raise ValueError(f"a sample of no place in its prompt of {one.chain_len} chunks")
        picks = tuple(Pick(sample.pos, sample.key, sample.hot) for sample in told)
        yield now_s - one.t, one.namespace, SampledRequest(store, one.chain_len, picks)


def _grown(before: Mapping[str, Lookups], now: Mapping[str, Lookups]) -> dict[str, dict[str, int]]:
    grown = {}
    for digest, told in now.items():
        known = before.get(digest, NONE)
        if told.requests < known.requests:  # the store forgot the namespace meanwhile
            known = NONE
        grown[digest] = {"requests": told.requests - known.requests, "chunks": told.chunks - known.chunks}
    return grown
