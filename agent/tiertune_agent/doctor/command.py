"""``tiertune doctor``: collects the named endpoints, asks them, and reports what is wrong."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from tiertune_agent.credentials import Access, access, from_environment
from tiertune_agent.doctor import gathered, report
from tiertune_agent.doctor.checks import findings
from tiertune_agent.doctor.facts import NOT_ASKED, AllFacts, ServerFacts, StorageFacts, StoreFacts
from tiertune_agent.fields import Json
from tiertune_agent.replay.engine import break_even_tokens, prefill_s
from tiertune_agent.replay.scenario import GPUS, MODELS
from tiertune_agent.settings import AgentSettings
from tiertune_agent.terminal.options import InputError, result
from tiertune_connector.access import Login
from tiertune_connector.addresses import Urls
from tiertune_connector.documents import DocumentError, keys_in

PROMPT_TOKENS = 8000
"""Length of the prefix that is fetched or recomputed."""

UNSHOWN = "it asks for a token, which is shown to stores of a file alone: name the agent's, or its own, by --config"


@dataclass
class Endpoints:
    """Whom to ask, from options and settings files."""

    agent: str | None = None
    stores: dict[str, str] = field(default_factory=dict)
    """Name in the settings, by address."""
    access: Access | None = None
    """The agent's credentials for stores; None: the command line's."""
    engines: list[str] = field(default_factory=list)
    servers: dict[str, ServerFacts] = field(default_factory=dict)
    """By address."""
    unknown: list[str] = field(default_factory=list)

    def add_agent(self, settings: AgentSettings) -> None:
        """Add what an agent's file names. DocumentError if a token, a certificate or its stores cannot be read."""
        roster = settings.roster(lambda: datetime.now(UTC))
        self.stores |= {url: store.name for url, store in roster.stores.items()}
        self.unknown += [f"stores: {problem}" for problem in roster.problems().values() if problem]
        if settings.stores_token_file or settings.stores_ca_file:
            self.access = access(settings.stores_token_file, settings.stores_ca_file)
        self.engines += settings.engines
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
        self.servers |= {one.server: one for one in gathered.servers(url, login, timeout_s)}


def _here(url: str) -> str:
    """Where this host reaches what serves there: all addresses together are none that a certificate can name."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def examine(asked: Endpoints, storage: StorageFacts | None = None, reader: gathered.Reader | None = None) -> AllFacts:
    """Ask all of them. DocumentError if the environment names an unusable token or CA file."""
    reader = reader or gathered.Reader(from_environment(os.environ))
    agent = reader.agent(asked.agent) if asked.agent else NOT_ASKED
    known = {str(one["url"]): one for one in agent.stores}
    facts = AllFacts(
        version=version("tiertune"),
        agent=agent,
        stores=_once(_stores(reader, asked, known), known),
        engines=reader.engines(dict.fromkeys(asked.engines), asked.access),
        servers=list(asked.servers.values()),
        storage=storage,
    )
    return replace(facts, unknown=(*asked.unknown, *_unknown(facts)))


def _stores(reader: gathered.Reader, asked: Endpoints, known: Iterable[str]) -> list[StoreFacts]:
    """Only stores that the settings name get a token: the agent's list may hold addresses of others by now."""
    own = asked.access or reader.access
    told = reader.stores({url: "" for url in known if url not in asked.stores}, own.tokenless)
    strangers = (replace(one, problem=UNSHOWN) if one.closed else one for one in told)
    return [*reader.stores(asked.stores, own), *strangers]


def _once(stores: Iterable[StoreFacts], known: Mapping[str, Json]) -> list[StoreFacts]:
    """One answer of each store, though it was asked at several addresses, with all that the agent knows of it.

    ``known``: stores in the agent's list, by address.
    """
    found: dict[str, StoreFacts] = {}
    for one in stores:
        which, told = str(one.status.get("boot_id") or one.url), known.get(one.url, {})
        first = found.get(which, one)
        name, heard = str(told.get("name", "")), bool(told.get("reachable"))
        found[which] = replace(first, known=first.known or name, heard=first.heard or heard)
    return list(found.values())


def known(*, model: str, gpu: str) -> None:
    """InputError for a name that is in no table."""
    for option, name, table in (("--model", model, MODELS), ("--gpu", gpu, GPUS)):
        if name not in table:
            raise InputError(f"{option}: unknown name {name!r}: use one of {', '.join(table)}")


def weighed(measured: StorageFacts, *, model: str, gpu: str) -> StorageFacts:
    """Compare what was measured with recomputing, by the closed form of ``tiertune plan``; the names are `known`."""
    if not measured.bytes_per_s:
        return measured
    shape, speed, first_s = MODELS[model], GPUS[gpu], measured.latency_s
    token_s = shape.kv_token_bytes / measured.bytes_per_s
    return replace(
        measured,
        model=model,
        gpu=gpu,
        prompt_tokens=PROMPT_TOKENS,
        fetch_s=first_s + token_s * PROMPT_TOKENS,
        recompute_s=prefill_s(shape, speed, 0, PROMPT_TOKENS) - prefill_s(shape, speed, 0, 0),
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
    report.show(facts, found)
    result(report.document(facts, found), json_path)
    return not found


def _unknown(facts: AllFacts) -> Iterator[str]:
    """What was not checked: nobody was named to ask, or they do not tell it to us."""
    if facts.storage and not (facts.agent.url or facts.stores or facts.engines):
        return
    if not facts.agent.url:
        yield "agent, policy, incidents: no agent is named (--agent, or its settings by --config)"
    if not facts.engines:
        yield "staging, hash algorithm, lost chunks: no engine is named (--engine)"
    if not facts.servers:
        yield "bound and eviction of the remote: no --config names a Redis"
    answering = {store.name for store in facts.answering}  # one may have told all at another of its addresses
    for store in facts.stores:
        if store.name not in answering and (store.closed or (store.heard and not store.answers)):
            heard = "; the agent hears it" if store.heard else ""
            yield f"{store.name}: what it tells by itself: {store.problem}{heard}"
