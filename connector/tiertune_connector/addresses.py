"""Addresses of a Redis: one server by TCP, TLS or a unix socket, or the master that Sentinels know. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

PORT, SENTINEL_PORT = 6379, 26379
_SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel")
_EXPECTED = (
    "expected a redis://, rediss://, unix://, redis+sentinel:// or rediss+sentinel:// address; "
    "a store's remote may also be file:///directory"
)
_NO_PASSWORD = "leave the password out: name a password_file, or set TIERTUNE_REMOTE_PASSWORD"  # noqa: S105 (advice)
Host = tuple[str, int]
Urls = str | tuple[str, ...]
"""One address, or several, as a document's field has them."""


@dataclass(frozen=True)
class Address:
    """Where one Redis is. Its text is the address without user; a password is never part of it."""

    tls: bool = False
    user: str | None = None
    hosts: tuple[Host, ...] = ()
    """The server, or with a ``service`` its Sentinels; empty for a unix socket."""
    service: str = ""
    """The master's name among Sentinels; empty: no Sentinel is asked."""
    path: str = ""
    """A unix socket's path; else empty."""
    db: int = 0

    @property
    def server(self) -> str:
        """Names the server without database and user: all of these share its ``maxmemory``."""
        if self.path:
            return self.path
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"{hosts}/{self.service}" if self.service else hosts

    @property
    def place(self) -> str:
        """Server and database, by which chunks are spread over servers. Turning TLS on moves no chunk."""
        return f"{self.server}?db={self.db}" if self.path else f"{self.server}/{self.db}"

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.place}"
        return f"redis{'s' if self.tls else ''}{'+sentinel' if self.service else ''}://{self.place}"


def parse_address(url: str) -> Address:
    """ValueError says what to mend, and repeats nothing that may be a password."""
    try:
        parts = urlsplit(url)
    except ValueError:  # its message may repeat a password
        raise ValueError("the address cannot be understood: write it as redis://host:6379/0") from None
    if "@" in parts.path:
        raise ValueError(_NO_PASSWORD)
    if parts.fragment:
        raise ValueError("an address has no part after #: write such a character of a user as %23")
    if parts.scheme == "unix":
        return _unix(parts.netloc, parts.path, parts.query)
    if parts.scheme not in _SCHEMES:
        raise ValueError(_EXPECTED)
    if parts.query:
        raise ValueError(_NO_PASSWORD if "password=" in parts.query else "an address has no options after a ?")
    tls, sentinel = parts.scheme.startswith("rediss"), parts.scheme.endswith("sentinel")
    user, netloc = _user(parts.netloc)
    hosts = tuple(_host(host, SENTINEL_PORT if sentinel else PORT) for host in netloc.split(","))
    segments = parts.path.strip("/").split("/")
    service = segments.pop(0) if sentinel else ""
    if sentinel and not service:
        raise ValueError("name the service that the Sentinels watch: redis+sentinel://host:26379,other:26379/service")
    if not sentinel and len(hosts) > 1:
        raise ValueError("several servers are several addresses: write them as a list")
    return Address(tls, user, hosts, service, db=_db("/".join(segments)))


def _unix(netloc: str, path: str, query: str) -> Address:
    user, host = _user(netloc)
    if host or not path.strip("/"):
        raise ValueError("write a unix socket as unix:///absolute/path")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if options.keys() - {"db"}:
        raise ValueError(_NO_PASSWORD if "password" in options else "the only option of a unix socket is ?db=")
    return Address(user=user, path=unquote(path), db=_db(options.get("db", "")))


def _user(netloc: str) -> tuple[str | None, str]:
    userinfo, _, rest = netloc.rpartition("@")
    if ":" in userinfo:
        raise ValueError(_NO_PASSWORD)
    return unquote(userinfo) or None, rest


def _host(text: str, default: int) -> Host:
    parts = urlsplit(f"//{text}")
    try:
        port = default if parts.port is None else parts.port
    except ValueError:
        port = 0
    if not port:
        raise ValueError("a port is a number from 1 to 65535")
    if not parts.hostname or any(letter.isspace() for letter in text):
        raise ValueError("an address needs a host, and has no spaces")
    try:
        parts.hostname.encode("idna")
    except UnicodeError:  # connecting would raise it
        raise ValueError("a host's name has parts of 1 to 63 characters between its dots") from None
    return parts.hostname, port


def _db(text: str) -> int:
    if not re.fullmatch(r"[0-9]*", text):
        raise ValueError("what follows the host is the number of a database, such as /0")
    return int(text or 0)


def parse_addresses(urls: Sequence[str]) -> tuple[Address, ...]:
    """The address of every server; ValueError also if one is named twice, as its memory would count twice."""
    if not urls:
        raise ValueError("name at least one address")
    found: dict[str, Address] = {}
    for number, url in enumerate(urls, 1):
        try:
            address = parse_address(url)
        except ValueError as error:
            raise ValueError(f"{error} (address {number} of {len(urls)})" if len(urls) > 1 else str(error)) from None
        if address.server in found:
            raise ValueError(f"{address.server} is named twice, and its databases share one maxmemory: name it once")
        found[address.server] = address
    return tuple(found.values())


def listed(urls: Urls) -> tuple[str, ...]:
    """One address, or several, as a tuple."""
    return (urls,) if isinstance(urls, str) else urls
