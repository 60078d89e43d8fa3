"""How servers are asked: which bearer token they are shown, who may have signed their certificates. Both from files."""

import ssl
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tiertune_agent.network import http_client
from tiertune_connector.documents import DocumentError, plain_file, read_text

TOKEN_FILE, CA_FILE = "TIERTUNE_TOKEN_FILE", "TIERTUNE_CA_FILE"
"""Environment variables that name the command line's files."""
Read = TypeVar("Read")


class Bearer(httpx.Auth):
    """The token in a file, read again when it is refused, or its role is too low: it may be changed in place."""

    def __init__(self, path: Path) -> None:
        """DocumentError where the file cannot be read or is empty."""
        self.path = path
        self._token = _token(path)

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response]:
        """Hook of httpx: sends the token; if that is refused, a newer one from the file."""
        shown = self._token
        request.headers["Authorization"] = f"Bearer {shown}"
        answer = yield request
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            with suppress(DocumentError):
                self._token = _token(self.path)
            if self._token != shown:
                request.headers["Authorization"] = f"Bearer {self._token}"
                yield request


@dataclass(frozen=True)
class Access:
    """What clients of some servers have in common."""

    bearer: Bearer | None = None
    """None: they are shown no token."""
    trust: ssl.SSLContext | None = None
    """Who may have signed their certificates; None: the system's authorities."""
    transport: httpx.BaseTransport | None = None
    """Replaces the network; None: nothing does."""

    @property
    def tokenless(self) -> "Access":
        """For servers that are shown no token of ours, such as engines."""
        return Access(None, self.trust, self.transport)

    def client(self, **options: Any) -> httpx.Client:  # noqa: ANN401 (httpx's own)
        """A client of one of them; whoever asks for it closes it."""
        return http_client(auth=self.bearer, trust=self.trust, transport=self.transport, **options)


PLAIN = Access()


def access(token_file: Path | None, ca_file: Path | None, transport: httpx.BaseTransport | None = None) -> Access:
    """Access by these files. DocumentError names a file that is not what it should be."""
    return Access(Bearer(token_file) if token_file else None, _trust(ca_file) if ca_file else None, transport)


def from_environment(environment: Mapping[str, str], *, token: bool = True) -> Access:
    """The command line's access; without ``token`` to a server that is shown none of ours, such as an engine."""
    return Access(_named(TOKEN_FILE, environment, Bearer) if token else None, _named(CA_FILE, environment, _trust))


def turned_away(http: httpx.Client) -> str:
    """What it means that a server answered this client with 401."""
    if isinstance(http.auth, Bearer):
        return f"refuses the token in {http.auth.path}"
    return f"asks for a token: name a file that has one in {TOKEN_FILE}"


def _named(variable: str, environment: Mapping[str, str], read: Callable[[Path], Read]) -> Read | None:
    """What is in the file that a variable names, if it is set; DocumentError names both."""
    try:
        return read(Path(path)) if (path := environment.get(variable)) else None
    except DocumentError as error:
        raise DocumentError([f"{variable}: {error}"]) from None


def _trust(ca_file: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(plain_file(ca_file)))
    except (OSError, ssl.SSLError) as error:
        raise DocumentError([f"{ca_file}: no PEM certificates: {error.strerror or error}"]) from None


def _token(path: Path) -> str:
    """The first word of a file."""
    words = read_text(path).split()
    if not words or not (words[0].isascii() and words[0].isprintable()):
        raise DocumentError([f"{path}: a token was expected, in ASCII"])
    return words[0]
