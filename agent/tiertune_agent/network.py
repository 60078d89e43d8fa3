"""HTTP to servers on the fleet's own network."""

import json
import re
import ssl
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from math import inf
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

SERVERS_AT_ONCE = 64
"""This many silent servers take no longer than one: a round over hundreds of stores that lost 64 is within its window.
With more at once, all of which answer, each would wait long for its turn."""
MOST_BYTES = 64 << 20
"""Of an answer."""
PACKED = "gzip"
"""How an answer may be packed, once: 64 KiB are read at a time, and become 64 MiB at most. What is packed twice, or in
another way, may become gigabytes at once."""
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escaped surrogate, half of a character: no database takes it alone, but a name may contain one."""
_PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Trusts nobody, for what is not encrypted: made in no time, where the system's authorities take tens of milliseconds.
Whoever is asked over TLS by it all the same is refused."""
_NO_NAME = re.compile(rb"[^\w.:%-]")
"""What is in no host's name and no IP address."""
Asked = TypeVar("Asked")
Told = TypeVar("Told")


class CallError(RuntimeError):
    """A call failed; the message says why."""


class UnsendableError(ValueError):
    """What is to be sent is no text in UTF-8; the message shows where."""


def http_client(
    trust: ssl.SSLContext | None = None,
    base_url: str = "",
    headers: Mapping[str, str] | None = None,
    **options: Any,  # noqa: ANN401 (httpx's own)
) -> httpx.Client:
    """A client that uses no proxy of the environment, and trusts whom the system trusts if no others are named.

    So does the client of Redis: OpenSSL's own SSL_CERT_FILE and SSL_CERT_DIR hold for both. A client of a plain
    ``base_url`` trusts nobody, and reads no authorities.
    """
    if trust is None:
        plain = base_url.startswith("http://")
        trust = _PLAIN if plain else _authorities(ssl.get_default_verify_paths())
    sent = {"Accept-Encoding": PACKED, **(headers or {})}
    return httpx.Client(trust_env=False, verify=trust, base_url=base_url, headers=sent, **options)


@lru_cache
def _authorities(_paths: ssl.DefaultVerifyPaths) -> ssl.SSLContext:
    """The system's, which lie at these paths: read once, as that takes tens of milliseconds."""
    return ssl.create_default_context()


def web_address(url: str, such_as: str, *, login: str | None, path: bool | None = None, query: bool = False) -> str:
    """Returns ``url``; ValueError unless it is ``http://`` or ``https://`` with a host, and a port or none.

    ``path``: whether a path must or must not follow; None: it may. ``query``: whether one may. Everybody sees
    addresses, so none may hold a password: ``login`` says where that belongs, or why not; None: this one may.
    """
    wrong = ValueError(f"write {such_as}")
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
    except ValueError:  # half an IPv6 address, or a name that nobody can look up
        raise wrong from None
    named = parts.scheme in ("http", "https") and host and not _NO_NAME.search(host)
    clean = url.isprintable() and not url.startswith(" ")
    wanted = path in (None, bool(parts.path.strip("/"))) and (query or not (parts.query or parts.fragment))
    if not (named and clean and wanted):
        raise wrong
    if login is not None and "@" in parts.netloc:
        raise ValueError(f"no user and no password in an address: {login}")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError("a port is a number from 1 to 65535")
    try:
        httpx.URL(url)
    except httpx.InvalidURL:  # it understands fewer hosts
        raise wrong from None
    return url


def at_once(ask: Callable[[Asked], Told], those: Collection[Asked]) -> list[Told]:
    """Ask all at once; the answers in their order. A slow one holds up no other."""
    if not those:
        return []
    with ThreadPoolExecutor(max_workers=min(SERVERS_AT_ONCE, len(those))) as pool:
        return list(pool.map(ask, those))


def read_whole(http: httpx.Client, url: str, **options: Any) -> httpx.Response:  # noqa: ANN401 (of ``asked_whole``)
    """GET ``url``; httpx.HTTPError also if the answer's status is an error."""
    return asked_whole(http, "GET", url, **options).raise_for_status()


def asked_whole(
    http: httpx.Client,
    method: str,
    url: str,
    *,
    within_s: float | None = None,
    **options: Any,  # noqa: ANN401 (httpx's own)
) -> httpx.Response:
    """The answer, whatever its status. httpx.HTTPError if there is none, or it takes too long or exceeds MOST_BYTES.

    The timeout bounds each operation, so a body that trickles would never end: the whole answer has ``within_s``, else
    twice the timeout. Headers that trickle have no bound but the timeout.
    """
    if within_s is None:
        within_s = 2 * (httpx.Timeout(options.get("timeout", http.timeout)).read or inf)
    until, parts, size = time.monotonic() + within_s, [], 0
    with http.stream(method, url, **options) as answer:
        if (packed := answer.headers.get("Content-Encoding", "identity").lower()) not in (PACKED, "identity"):
            raise httpx.DecodingError(f"the answer is packed by {packed}, not by {PACKED}", request=answer.request)
        for part in answer.iter_bytes():
            parts.append(part)
            size += len(part)
            if size > MOST_BYTES:
                raise httpx.ReadError(f"the answer has more than {MOST_BYTES} bytes")
            if time.monotonic() > until:
                raise httpx.ReadTimeout(f"the answer took more than {within_s:g} s")
        former = (b"content-encoding", b"content-length")  # of a body that is decoded by now
        headers = [(name, value) for name, value in answer.headers.raw if name.lower() not in former]
        return httpx.Response(answer.status_code, headers=headers, content=b"".join(parts), request=answer.request)


def json_of(answer: httpx.Response) -> Any:  # noqa: ANN401 (JSON)
    """The JSON of an answer, with ``?`` for half a character, and ``\ufffd`` for bytes that are none.

    ValueError if it is no JSON: ``NaN`` is not.

    httpx.HTTPStatusError if it is none because something else failed, as a proxy that reaches nobody.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number")

    try:
        document = json.loads(answer.content.decode("utf-8-sig", "replace"), parse_constant=refuse)
        if _HALF.search(answer.content):
            document = json.loads(json.dumps(document, ensure_ascii=False).encode(errors="replace"))
    except (RecursionError, ValueError) as error:
        answer.raise_for_status()
        raise ValueError(f"it is no JSON: {error}") from error
    return document


@contextmanager
def calling(what: str, url: str = "") -> Iterator[None]:
    """Turn failures to ask a ``what`` within into CallError. ``url``: where it is, unless it is shown beside.

    UnsendableError for a text in another encoding.
    """
    at = url and f" at {url}"
    try:
        yield
    except UnicodeEncodeError as error:
        told = error.object[error.start : error.end]
        raise UnsendableError(f"what is to be sent is no text in UTF-8: {told!a} is none of its letters") from None
    except httpx.HTTPError as error:
        raise CallError(f"no {what} answers{at}: {said(error)}") from error
    except ValueError as error:
        raise CallError(f"what answers{at} is no {what}") from error


def said(error: Exception) -> str:
    """The error's message; its type if it has none. Of an answer its status: httpx adds a link on a second line."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"it answers {error.response.status_code} {error.response.reason_phrase}".rstrip()
    return str(error) or type(error).__name__
