"""What an agent is started with; everything that can change while it runs is policy."""

from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, field_validator

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


class RemoteAccess(Document):
    """The Redis whose capacity the agent sets where the policy says ``remote.manage``."""

    url: str
    """``redis://[user@]host:port/db``, ``rediss://`` or ``unix://``; no password."""
    password_file: Path | None = None
    """None: the password, if there is one, is in TIERTUNE_REMOTE_PASSWORD."""
    timeout: Duration = Field(default=2.0, gt=0)
    """No command takes longer."""

    @field_validator("url")
    @classmethod
    def _redis(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme == "file":
            raise ValueError("a directory is not managed: every store bounds what it wrote there itself")
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ValueError("expected a redis://, rediss:// or unix:// address")
        if parts.password or "password=" in parts.query:
            raise ValueError("leave the password out: name a password_file, or set TIERTUNE_REMOTE_PASSWORD")
        if parts.scheme != "unix":
            _ = parts.port  # ValueError where it is not a number
        return url


class AgentSettings(Document):
    """The document of ``tiertune agent run --config``. Relative paths start at the file's folder."""

    http: HttpSettings = HttpSettings()
    database: str = "sqlite:///tiertune.sqlite"
    stores: tuple[StoreAddress, ...] = Field(min_length=1)
    policy: Path | None = None
    """None: the built-in one, which only recommends."""
    remote: RemoteAccess | None = None
    """Needed only where the policy says ``remote.manage``."""
    window: Duration = Field(default=15.0, ge=0.5, le=300)
    keep: Duration = Field(default=14 * 86400.0, gt=0)
    """Windows older than this are dropped; decisions, ledger and audit stay."""

    @field_validator("database")
    @classmethod
    def _sqlite(cls, url: str) -> str:
        prefix, _, path = url.partition(":///")
        if prefix != "sqlite" or not path or path == ":memory:":
            raise ValueError("this version keeps history in an SQLite file: write sqlite:///path")
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
    database = folder / settings.database.removeprefix("sqlite:///")
    policy = folder / settings.policy if settings.policy else None
    remote = settings.remote
    if remote and remote.password_file:
        remote = remote.model_copy(update={"password_file": folder / remote.password_file})
    return settings.model_copy(update={"database": f"sqlite:///{database}", "policy": policy, "remote": remote})


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
