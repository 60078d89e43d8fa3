"""``tiertune doctor``: collects the named endpoints, asks them, and reports what is wrong."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from tiertune_agent.credentials import Access, access, from_environment
from tiertune_agent.doctor import gathered, report
from tiertune_agent.doctor.checks import findings
from tiertune_agent.doctor.facts import NOT_ASKED, AllFacts, DatabaseFacts, ServerFacts, StorageFacts, StoreFacts
from tiertune_agent.fields import Json
from tiertune_agent.incidents.detectors import FEW
from tiertune_agent.replay.engine import break_even_tokens, prefill_s
from tiertune_agent.replay.scenario import GPUS, MODELS
from tiertune_agent.settings import AgentSettings
from tiertune_agent.terminal.options import InputError, parsed, result
from tiertune_agent.tuners.base import present
from tiertune_connector.access import Login
from tiertune_connector.addresses import Urls
from tiertune_connector.documents import DocumentError, keys_in
from tiertune_connector.units import format_count, format_size, parse_size

LEAST_MEASURED_BYTES, MOST_MEASURED_BYTES = 64 << 10, 4 << 30
"""Bounds of the chunk that a storage is measured with: it is held in memory."""

UNSHOWN = "it asks for a token, which is shown to stores of a file alone: name the agent's, or its own, by --config"


class Timed(Protocol):
    """What measuring a storage gave; a value is None if ``problem`` says what failed."""

    @property
    def storage(self) -> str: ...
    @property
    def problem(self) -> str: ...
    @property
    def present_s(self) -> float | None: ...
    @property
    def latency_s(self) -> float | None: ...
    @property
    def read_bytes_per_s(self) -> float | None: ...
    @property
    def write_bytes_per_s(self) -> float | None: ...


@dataclass
class Endpoints:
    """Whom to ask, from options and settings files."""

    agent: str | None = None
    stores: dict[str, str] = field(default_factory=dict)
    """Name in the settings, by address."""
    access: Access | None = None
    """The agent's credentials for stores; None: the command line's."""
    engines: list[str] = field(default_factory=list)
    servers: list[ServerFacts] = field(default_factory=list)
    database: DatabaseFacts | None = None
    unknown: list[str] = field(default_factory=list)

    def add_agent(self, settings: AgentSettings) -> None:
        """Add what an agent's file names. DocumentError if a token, a certificate or its stores cannot be read."""
        roster = settings.roster(lambda: datetime.now(UTC))
        self.stores |= {url: store.name for url, store in roster.stores.items()}
        self.unknown += [f"stores: {problem}" for problem in roster.problems().values() if problem]
        if settings.stores_token_file or settings.stores_ca_file:
            self.access = access(settings.stores_token_file, settings.stores_ca_file)
        self.engines += [url for url in settings.engines if url not in self.engines]
        self.database = gathered.database(settings.database, settings.database_password_file)
        if settings.http.port and self.agent is None:
            host = f"[{settings.http.host}]" if ":" in settings.http.host else settings.http.host
            self.agent = _here(f"{settings.http.scheme}://{host}:{settings.http.port}")
        if settings.remote:
            self.add_remote(settings.remote.url, settings.remote, settings.remote.timeout)

    def add_store(self, name: str, state_dir: Path) -> None:
        """Add the store of a file, if it was ever started here."""
        told = state_dir / "http"
        try:
            self.stores[_here(told.read_text(encoding="utf-8").strip())] = name
        except OSError as error:
            self.unknown.append(f"store {name or state_dir}: it has not served on this host ({told}: {error.strerror})")

    def add_remote(self, url: Urls, login: Login, timeout_s: float) -> None:
        """Add the Redis that a file names."""
        known = {one.server for one in self.servers}
        self.servers += [one for one in gathered.servers(url, login, timeout_s) if one.server not in known]


def _here(url: str) -> str:
    """Where this host reaches what serves there: all addresses together are none that a certificate can name."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def examine(asked: Endpoints, storage: StorageFacts | None = None, reader: gathered.Reader | None = None) -> AllFacts:
    """Ask all of them. DocumentError if the environment names an unusable token or CA file."""
    reader = reader or gathered.Reader(from_environment(os.environ))
    agent = reader.agent(asked.agent) if asked.agent else NOT_ASKED
    stores, named = dict(asked.stores), list(asked.servers)
    known: dict[str, Json] = {}
    if agent.answers:
        known = {str(one["url"]): one for one in agent.stores}
        stores |= {url: stores.get(url, "") for url in known}
        named += [one for one in gathered.told_servers(agent) if one.server not in {own.server for own in named}]
    facts = AllFacts(
        version=version("tiertune"),
        agent=agent,
        stores=_once(_with(one, known.get(one.url)) for one in _stores(reader, asked, stores)),
        engines=reader.engines(asked.engines, asked.access),
        servers=named,
        database=asked.database,
        storage=storage,
    )
    return replace(facts, unknown=(*asked.unknown, *_unknown(facts)))


def _stores(reader: gathered.Reader, asked: Endpoints, stores: Mapping[str, str]) -> list[StoreFacts]:
    """Only stores that the settings name get a token: the agent's list may hold addresses of others by now."""
    strangers = {url: name for url, name in stores.items() if url not in asked.stores}
    own = asked.access or reader.access
    told = reader.stores(strangers, own.tokenless)
    return [
        *reader.stores(asked.stores, own),
        *(replace(one, problem=UNSHOWN) if one.closed else one for one in told),
    ]


def _with(store: StoreFacts, told: Json | None) -> StoreFacts:
    """The store, and how the agent knows it."""
    return replace(store, known=str(told["name"]), heard=bool(told.get("reachable"))) if told else store


def _once(stores: Iterable[StoreFacts]) -> list[StoreFacts]:
    """Merge one process's facts: it may have several addresses, such as its host's name and 127.0.0.1."""
    found: dict[tuple[str, ...], StoreFacts] = {}
    for one in stores:
        boot = str(one.status.get("boot_id") or "")
        misnamed = one.called if one.called != one.name else ""
        place = (one.name, boot, misnamed) if boot else (one.url,)
        first = found.get(place, one)
        found[place] = replace(first, known=first.known or one.known, heard=first.heard or one.heard)
    return list(found.values())


def chunk_size(text: str) -> int:
    """Bytes to measure a storage with; InputError if too few to see more than latency, or too many for memory."""
    size = parsed("--chunk", parse_size, text)
    if not LEAST_MEASURED_BYTES <= size <= MOST_MEASURED_BYTES:
        least, most = format_size(LEAST_MEASURED_BYTES), format_size(MOST_MEASURED_BYTES)
        raise InputError(f"--chunk: at least {least}, less tells no bandwidth, and at most {most}")
    return size


def known(*, model: str, gpu: str) -> None:
    """InputError for a name that is in no table."""
    for option, name, table in (("--model", model, MODELS), ("--gpu", gpu, GPUS)):
        if name not in table:
            raise InputError(f"{option}: unknown name {name!r}: use one of {', '.join(table)}")


def weighed(timed: Timed, *, model: str, gpu: str, prompt_tokens: int) -> StorageFacts:
    """Compare the measurement with recomputing, by the closed form of ``tiertune plan``; the names are `known`."""
    rate, first_s = timed.read_bytes_per_s, timed.latency_s
    if not rate or first_s is None:
        return StorageFacts(timed.storage, problem=timed.problem)
    shape, speed = MODELS[model], GPUS[gpu]
    token_s = shape.kv_token_bytes / rate
    return StorageFacts(
        storage=timed.storage,
        problem=timed.problem,
        latency_s=first_s,
        present_s=timed.present_s or 0.0,
        bytes_per_s=rate,
        write_bytes_per_s=timed.write_bytes_per_s or 0.0,
        model=model,
        gpu=gpu,
        prompt_tokens=prompt_tokens,
        fetch_s=first_s + token_s * prompt_tokens,
        recompute_s=prefill_s(shape, speed, 0, prompt_tokens) - prefill_s(shape, speed, 0, 0),
        break_even_tokens=break_even_tokens(shape, speed, token_s, first_s),
    )


def is_store(path: Path) -> bool:
    """Whether a settings file is a store's; else it is read as an agent's."""
    try:
        return not {"dram", "socket", "state_dir"}.isdisjoint(keys_in(path))
    except DocumentError:
        return False  # whoever reads it reports the error with its place


def tell(facts: AllFacts, json_path: Path | None) -> bool:
    """Show the findings; returns whether nothing is wrong."""
    found = findings(facts)
    result(report.document(facts, found), json_path, lambda: report.show(facts, found))
    return report.healthy(found)


def _unknown(facts: AllFacts) -> Iterator[str]:
    """What was not checked: nobody was named to ask, or those who were do not tell it yet."""
    if facts.storage and not (facts.agent.url or facts.stores or facts.engines or facts.database):
        return
    if not facts.agent.url:
        yield "agent, policy, incidents: no agent is named (--agent, or its settings by --config)"
    if not facts.engines:
        yield "staging, hash algorithm, lost chunks: no engine is named (--engine)"
    if not facts.servers:
        yield "bound and eviction of the remote: no --config names a Redis, and no agent that was asked manages one"
    if facts.database is None:
        yield "schema of the database: no agent's settings are named (--config)"
    for store in facts.stores:
        yield from (f"{store.name}: {why}" for why in _unknown_of(store))


def _unknown_of(store: StoreFacts) -> Iterator[str]:
    if store.closed or (store.heard and not store.answers):
        yield f"what it tells by itself: {store.problem}" + ("; the agent hears it" if store.heard else "")
    if not store.answers:
        return
    if "clients" not in store.status or (store.clients and "namespaces" not in store.status):
        yield "who shares with whom: a store of its version does not tell"
    if not present(store.status, "remote"):
        return
    found = store.counted.total("gate_candidate_requests_total", tier="remote")
    if found < FEW:
        yield f"whether its remote pays: only {format_count(found, 'request')} found chunks there"
    elif not any(store.prefill(digest) for digest in store.pools):
        yield "whether its remote pays: its engines have not told what computing costs"
