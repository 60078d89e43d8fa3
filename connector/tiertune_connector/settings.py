"""What a store is started with; everything that can change while it runs is tuning."""

from collections.abc import Collection
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pydantic import Field, field_validator, model_validator

from tiertune_connector.access import Login
from tiertune_connector.addresses import Urls, listed, parse_addresses
from tiertune_connector.codec import missing
from tiertune_connector.documents import Document, load_yaml
from tiertune_connector.httpd.listening import Listening
from tiertune_connector.tiers.media import MEDIA
from tiertune_connector.tuning import (
    MOST_BYTES,
    SLOWER,
    Algorithm,
    Defaults,
    DiskTuning,
    DramTuning,
    SlowerTier,
    TierTunings,
    Tuning,
)
from tiertune_connector.units import Duration, Size

MAX_SOCKET_PATH_BYTES = 100


class HttpSettings(Listening):
    port: int = Field(default=7410, ge=0, le=65535)
    """0 takes a free port; the chosen one is in the state directory's ``http``."""


class DramSettings(Document):
    capacity: Size = Field(le=MOST_BYTES)
    """The first tuning's ``tiers.dram.capacity_bytes``."""
    segment: Size = Field(default=64 * 2**20, gt=0)
    """Memory is taken in pieces of this size."""


class DiskSettings(Document):
    path: Path
    """Folder of the slab files."""
    capacity: Size = Field(default=0, le=MOST_BYTES)
    """The first tuning's ``tiers.disk.capacity_bytes``."""


class RemoteSettings(Login):
    url: Urls
    """``redis://[user@]host:port/db``, ``rediss://``, ``unix://``, ``redis+sentinel://host,other/service/db``, or a
    list of them, over which chunks are spread: the same list on every host. Or ``file:///directory``.
    """
    timeout: Duration = Field(default=1.0, gt=0)
    """No command to the remote takes longer; an operation of several ends within twice this, and as long again for
    every 16 MiB of its chunk.
    """
    probe_every: Duration = Field(default=30.0, gt=0)
    """Time between small background fetches that measure the remote."""
    capacity: Size | None = None
    """Bound of what this store may hold in a directory; Redis has its own maxmemory."""

    @property
    def medium(self) -> str:
        """Scheme of a medium that a path names; empty: a Redis."""
        return _medium(listed(self.url)[0])

    @property
    def path(self) -> Path | None:
        """Path of such a medium; None: a Redis."""
        return Path(unquote(urlsplit(listed(self.url)[0]).path)) if self.medium else None

    @field_validator("url")
    @classmethod
    def _understood(cls, url: Urls) -> Urls:
        if isinstance(url, str) and (scheme := _medium(url)):
            parts = urlsplit(url)
            if parts.netloc or not parts.path.startswith("/") or "%00" in parts.path:
                raise ValueError(f"write a path as {scheme}:///absolute/path")
            if {*"?#"} & {*url}:  # else another path would be used
                raise ValueError("write ? in a path as %3F, and # as %23")
        elif any(_medium(one) for one in listed(url)):
            raise ValueError("a path stands alone: name no other, as chunks are spread over Redis servers only")
        else:
            parse_addresses(listed(url))
        return url

    @model_validator(mode="after")
    def _fits(self) -> "RemoteSettings":
        if not self.medium:
            if self.capacity is not None:
                raise ValueError("capacity bounds what a path names: leave it out, as Redis has its own maxmemory")
            self.fits(self.url)
        elif self.password_file or self.sentinel_password_file or self.tls:
            raise ValueError("what a path names has neither passwords nor tls: leave them out")
        return self


class StoreSettings(Document):
    """The document of ``tiertune store serve --config``; capacities and eviction are only the first tuning."""

    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]{0,64}$")
    """Label of every metric; empty takes an id that is kept in the state directory."""
    socket: Path
    """Unix socket that engines of the same user open, in a folder that is there."""
    state_dir: Path
    """Folder for this store's name, tuning and HTTP address; no other store may use it."""
    http: HttpSettings = HttpSettings()
    dram: DramSettings
    disk: DiskSettings | None = None
    """None: no disk tier."""
    remote: RemoteSettings | None = None
    """None: no remote tier."""
    eviction: Algorithm = "lru"
    """The first tuning's ``defaults.eviction``."""
    lease: Duration = Field(default=30.0, gt=0)
    """A client that holds a slot for longer loses it."""
    idle_exit: Duration | None = Field(default=None, gt=0)
    """The store ends by itself after this long without a client; by default never."""

    @field_validator("name")
    @classmethod
    def _free(cls, name: str) -> str:
        if name == "fleet":
            raise ValueError("fleet stands for the whole fleet: choose another name")
        return name

    @field_validator("socket")
    @classmethod
    def _fits(cls, path: Path) -> Path:
        if len(str(path).encode()) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"the path of a unix socket has at most {MAX_SOCKET_PATH_BYTES} bytes: name a shorter one")
        return path

    @property
    def slower(self) -> tuple[SlowerTier, ...]:
        """The tiers that it has beside DRAM."""
        return tuple(tier for tier in SLOWER if getattr(self, tier) is not None)

    def first_tuning(self) -> Tuning:
        """The tuning of a store that never had another."""
        fitted = self.fit(Tuning(tiers=self._first_tiers(), defaults=Defaults(eviction=self.eviction)))
        return fitted.model_copy(update={"version": 1})

    def fit(self, tuning: Tuning, new: Collection[SlowerTier] = ()) -> Tuning:
        """A tuning without what this store lacks, and with ``new`` tiers as in a first one.

        If that changes the tuning, its version is the next one.
        """
        first: dict[str, Document] = {tier: getattr(self._first_tiers(), tier) for tier in new}
        fitted = tuning.model_copy(update={"tiers": tuning.tiers.model_copy(update=first)})
        if self.disk is None:
            fitted = fitted.without("disk")
        if self.remote is None:
            fitted = fitted.without("remote")
        elif self.remote.path is not None or missing(fitted.tiers.remote.codec):
            raw = fitted.tiers.remote.model_copy(update={"codec": "raw"})
            fitted = fitted.model_copy(update={"tiers": fitted.tiers.model_copy(update={"remote": raw})})
        return tuning if fitted == tuning else fitted.model_copy(update={"version": tuning.version + 1})

    def _first_tiers(self) -> TierTunings:
        disk = DiskTuning(capacity_bytes=self.disk.capacity if self.disk else 0)
        return TierTunings(dram=DramTuning(capacity_bytes=self.dram.capacity), disk=disk)


def load(path: Path | str) -> StoreSettings:
    """The settings in a file; DocumentError names every place to mend. Further files lie beside it."""
    settings, folder = load_yaml(path, StoreSettings), Path(path).absolute().parent
    moved = {"http": settings.http.beside(folder), "remote": settings.remote and settings.remote.beside(folder)}
    return settings.model_copy(update=moved)


def _medium(url: str) -> str:
    """The scheme, if it is one of a medium that a path names; else empty."""
    scheme = url.partition(":")[0]
    return scheme if scheme in MEDIA else ""
