"""What an agent is started with; everything that can change while it runs is policy."""

import re
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from tiertune_agent.collector.roster import Roster
from tiertune_agent.collector.targets import ObservedSource, Stores, each_once
from tiertune_agent.engines import address
from tiertune_agent.network import web_address
from tiertune_agent.records import Now
from tiertune_connector.access import Login
from tiertune_connector.addresses import Urls, listed, parse_addresses
from tiertune_connector.documents import Document, load_yaml
from tiertune_connector.httpd.listening import Listening
from tiertune_connector.units import Duration

EngineUrl = Annotated[str, AfterValidator(address)]


class HttpSettings(Listening):
    port: int = Field(default=7420, ge=0, le=65535)
    """0 takes a free port."""


class RemoteAccess(Login):
    """The Redis whose gauges the agent exports, whose rent it books, and which it sizes where the policy says so."""

    url: Urls
    """As in a store's settings: one address, or a list of them. No directory, and no password."""
    timeout: Duration = Field(default=2.0, gt=0)
    """No command takes longer."""

    @field_validator("url")
    @classmethod
    def _redis(cls, url: Urls) -> Urls:
        if any(one.startswith("file:") for one in listed(url)):
            raise ValueError("leave a directory out: every store bounds by itself what it wrote there")
        parse_addresses(listed(url))
        return url

    @model_validator(mode="after")
    def _fits(self) -> "RemoteAccess":
        self.fits(self.url)
        return self


class AgentSettings(Document):
    """The document of ``tiertune agent run --config``. Relative paths start at the file's folder."""

    http: HttpSettings = HttpSettings()
    database: str = Field(default="sqlite:///tiertune.sqlite", repr=False)
    """``sqlite:///path``, or ``postgresql://user@host:port/name``."""
    database_password_file: Path | None = None
    """File with PostgreSQL's password; None: it is in the address, in PGPASSFILE, or there is none."""
    stores: Stores = ()
    """Stores of the fleet, each once. With no store here, in a file or at a name, there must be sources to observe."""
    stores_file: Path | None = None
    """More stores, as ``stores`` in a separate YAML file, which is read again in each window."""
    stores_dns: tuple[str, ...] = ()
    """Further ones: every address of ``http://name:port`` is a store, and is looked up again in each window.

    An address that disappears from its name is kept for an hour, unless its store appears at another one.
    """
    stores_token_file: Path | None = None
    """File with the token that the agent sends to stores, of the role tune. None: they ask for none."""
    stores_ca_file: Path | None = None
    """Who signed the certificates of ``https://`` stores, engines and observed sources, as PEM.

    Only these are trusted then; one file may hold several. None: the system's authorities.
    """
    engines: tuple[EngineUrl, ...] = ()
    """``http://host:port`` of engines whose own prefix caches ``tiertune flush --engines`` resets.

    vLLM has the endpoint only if started with VLLM_SERVER_DEV_MODE=1.
    """
    observe: tuple[ObservedSource, ...] = ()
    """Engines and caches that keep their own connector: observed and advised on, never tuned."""
    policy: Path | None = None
    """None: the built-in one, which only recommends."""
    remote: RemoteAccess | None = None
    """Needed if the policy says ``remote.manage``; its gauges are exported also without that."""
    window: Duration = Field(default=15.0, ge=0.5, le=300)
    """How often the stores' counters are collected."""
    keep: Duration = Field(default=6 * 3600.0, ge=6 * 3600.0)
    """Older windows are dropped (tuners read five hours). Hours stay a fortnight, days a year, the rest for ever."""

    def roster(self, now: Now) -> Roster:
        """The stores that there are. DocumentError where ``stores_file`` cannot be used."""
        return Roster(self.stores, self.stores_file, self.stores_dns, now=now)

    @field_validator("database")
    @classmethod
    def _history(cls, url: str) -> str:
        if not re.match(r"sqlite:///(?!:memory:$).|postgresql(\+psycopg)?://[^/]*/[^?]", url):
            raise ValueError("write sqlite:///path, or postgresql://user@host:port/name")
        return url

    @field_validator("stores_dns")
    @classmethod
    def _names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            such_as = "a name that has the stores' addresses as http://name:port"
            web_address(name, such_as, login="a token stands in stores_token_file", path=False)
            if not name.startswith("http://"):
                raise ValueError("a certificate is for a name, not for its addresses: list them in a stores_file")
            if not urlsplit(name).port:
                raise ValueError(f"write {such_as}")
        each_once(names)
        return names

    @field_validator("observe")
    @classmethod
    def _apart(cls, sources: tuple[ObservedSource, ...]) -> tuple[ObservedSource, ...]:
        each_once(source.name for source in sources)
        each_once(f"{source.url} ({source.kind})" for source in sources)
        return sources

    @model_validator(mode="after")
    def _something(self) -> "AgentSettings":
        if not (self.stores or self.stores_file or self.stores_dns or self.observe):
            raise ValueError("name a store in stores, stores_file or stores_dns, or a source in observe")
        both = sorted({store.name for store in self.stores} & {source.name for source in self.observe})
        if both:
            raise ValueError(f"{both[0]} is the name of a store and of an observed source: rename one of them")
        return self


def load(path: Path) -> AgentSettings:
    """The settings in a file, paths made absolute; DocumentError names every place to mend."""
    folder = path.absolute().parent
    settings = load_yaml(path, AgentSettings).beside(folder)
    if not settings.database.startswith("sqlite:///"):
        return settings
    database = f"sqlite:///{folder / settings.database.removeprefix('sqlite:///')}"
    return settings.model_copy(update={"database": database})
