"""Credentials from files: a bearer token to send to a server, and certificate authorities to check it by."""

import ssl
from collections.abc import Generator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tiertune_connector.documents import DocumentError, plain_file, read_text

TOKEN_FILE, CA_FILE = "TIERTUNE_TOKEN_FILE", "TIERTUNE_CA_FILE"
"""Environment variables that name the command line's files."""


class Bearer(httpx.Auth):
    """The token in a file, read again when it is refused: a token may be changed in place."""

    def __init__(self, path: Path) -> None:
        """DocumentError where the file cannot be read or is empty."""
        self.path = path
        self._token = _token(path)

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response]:
        """Hook of httpx: sends the token; if that is refused, a newer one from the file."""
        shown = self._token
        request.headers["Authorization"] = f"Bearer {shown}"
        answer = yield request
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            with suppress(DocumentError):
                self._token = _token(self.path)
            if self._token != shown:
                request.headers["Authorization"] = f"Bearer {self._token}"
                yield request


def options(token_file: Path | None, ca_file: Path | None) -> dict[str, Any]:
    """Options of an httpx client. DocumentError names a file that is not what it should be."""
    made: dict[str, Any] = {"auth": Bearer(token_file)} if token_file else {}
    if ca_file:
        try:
            made["verify"] = ssl.create_default_context(cafile=str(plain_file(ca_file)))
        except (OSError, ssl.SSLError) as error:
            raise DocumentError([f"{ca_file}: no PEM certificates: {error.strerror or error}"]) from None
    return made


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Options of the command line's client."""
    token = environment.get(TOKEN_FILE)
    return options(Path(token) if token else None, None) | authority(environment)


def authority(environment: Mapping[str, str]) -> dict[str, Any]:
    """Options of the command line's client of a server that is shown no token of ours, such as an engine."""
    path = environment.get(CA_FILE)
    return options(None, Path(path) if path else None)


def turned_away(http: httpx.Client) -> str:
    """What it means that a server answered this client with 401."""
    if isinstance(http.auth, Bearer):
        return f"refuses the token in {http.auth.path}"
    return f"asks for a token: name a file that has one in {TOKEN_FILE}"


def _token(path: Path) -> str:
    """The first word of a file."""
    words = read_text(path).split()
    if not words or not words[0].isascii():
        raise DocumentError([f"{path}: a token was expected, in ASCII"])
    return words[0]
