"""What an agent is started with; everything that can change while it runs is policy."""

from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from tiertune_connector.access import Login
from tiertune_connector.addresses import Urls, listed, parse_addresses
from tiertune_connector.documents import Document, load_yaml
from tiertune_connector.units import Duration


class HttpSettings(Document):
    host: str = "127.0.0.1"
    port: int = Field(default=7420, ge=0, le=65535)
    """0 takes a free port."""

    @field_validator("host")
    @classmethod
    def _loopback(cls, host: str) -> str:
        if host != "localhost" and not _is_loopback(host):
            raise ValueError("only a loopback address: this version has no tokens yet, put a proxy that has in front")
        return host


class StoreAddress(Document):
    url: str
    """``http://host:port`` of the store."""
    name: str = ""
    """Checked against the name that the store gives itself; empty takes that name."""

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise ValueError("write a store's address as http://host:port")
        _ = parts.port  # ValueError where it is not a number
        return url.rstrip("/")


class RemoteAccess(Login):
    """The Redis whose capacity the agent sets where the policy says ``remote.manage``, and whose gauges it exports."""

    url: Urls
    """As in a store's settings: one address, or a list of them. No directory, and no password."""
    timeout: Duration = Field(default=2.0, gt=0)
    """No command takes longer."""

    @field_validator("url")
    @classmethod
    def _redis(cls, url: Urls) -> Urls:
        if any(one.startswith("file:") for one in listed(url)):
            raise ValueError("a directory is not managed: every store bounds what it wrote there itself")
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
    """Of PostgreSQL; None: the password is in the address, in PGPASSFILE, or there is none."""
    stores: tuple[StoreAddress, ...] = Field(min_length=1)
    policy: Path | None = None
    """None: the built-in one, which only recommends."""
    remote: RemoteAccess | None = None
    """Needed where the policy says ``remote.manage``; also without it, its gauges are exported."""
    window: Duration = Field(default=15.0, ge=0.5, le=300)
    keep: Duration = Field(default=6 * 3600.0, ge=6 * 3600.0)
    """Older windows are dropped (tuners read five hours). Hours stay a fortnight, days a year, the rest ever."""

    @field_validator("database")
    @classmethod
    def _history(cls, url: str) -> str:
        scheme, _, rest = url.partition("://")
        if scheme == "sqlite" and rest.startswith("/") and rest not in ("/", "/:memory:"):
            return url
        if scheme not in ("postgresql", "postgresql+psycopg"):
            raise ValueError("write sqlite:///path, or postgresql://user@host:port/name")
        parts = urlsplit(url)
        if not parts.path.strip("/"):
            raise ValueError("name the database: postgresql://user@host:port/name")
        if "password=" in parts.query:
            raise ValueError("no password among the parameters: name a database_password_file")
        return url

    @field_validator("stores")
    @classmethod
    def _once(cls, stores: tuple[StoreAddress, ...]) -> tuple[StoreAddress, ...]:
        urls = [store.url for store in stores]
        twice = sorted({url for url in urls if urls.count(url) > 1})
        if twice:
            raise ValueError(f"{twice[0]} is named twice")
        return stores


def load(path: Path) -> AgentSettings:
    """The settings in a file, paths made absolute; DocumentError names every place to mend."""
    settings = load_yaml(path, AgentSettings)
    folder = path.resolve().parent
    database, remote = settings.database, settings.remote and settings.remote.beside(folder)
    if database.startswith("sqlite:///"):
        database = f"sqlite:///{folder / database.removeprefix('sqlite:///')}"
    policy = folder / settings.policy if settings.policy else None
    secret = folder / settings.database_password_file if settings.database_password_file else None
    changed = {"database": database, "database_password_file": secret, "policy": policy, "remote": remote}
    return settings.model_copy(update=changed)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
