"""Where a process listens, and whom it lets in."""

import socket
from ipaddress import ip_address
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from tiertune_connector.documents import Document
from tiertune_connector.httpd.tokens import TokenFile

_BACKLOG = 128


class Listening(Document):
    """Of the settings of a process that serves HTTP. Relative paths start at the folder of the settings."""

    host: str = "127.0.0.1"
    """Any address other than loopback needs ``tokens_file``."""
    port: int = Field(ge=0, le=65535)
    """0 takes a free port."""
    tokens_file: Path | None = None
    """Lines of ``role name token``. None: anybody who reaches the address may read and write."""
    certificate_file: Path | None = None
    """PEM, with ``key_file``: serve HTTPS. None: nothing is encrypted."""
    key_file: Path | None = None
    """The certificate's key, without a passphrase."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        try:
            self.host.encode("idna")
        except UnicodeError:  # listening would raise it
            raise ValueError(f"{self.host!r} is no host: its parts, between dots, have 1 to 63 characters") from None
        if not self.loopback and self.tokens_file is None:
            raise ValueError(f"{self.host} is no loopback address: name a tokens_file, so that not everybody may call")
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file belong together: name both, or none")
        return self

    @property
    def loopback(self) -> bool:
        """Whether only processes of this host can call."""
        try:
            return self.host == "localhost" or ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def scheme(self) -> str:
        return "https" if self.certificate_file else "http"

    def tokens(self) -> TokenFile | None:
        """Who may call; None: everybody. DocumentError if the file is not valid."""
        return TokenFile(self.tokens_file) if self.tokens_file else None

    def listen(self) -> socket.socket:
        """Bind at once: of two processes on one port, the second fails here. OSError names the address."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # The protocol must be named: asyncio has answers sent at once (TCP_NODELAY) only then. Else each waits for the
        # caller's system to acknowledge its head, 40 ms on a connection that is kept.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.host, self.port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise OSError(f"http {self.host}:{self.port}: {error.strerror}: name another port or host") from error
        return listener

    def address(self, listener: socket.socket) -> str:
        """URL of what is served at ``listener``."""
        host, port = listener.getsockname()[:2]
        return f"{self.scheme}://[{host}]:{port}" if ":" in host else f"{self.scheme}://{host}:{port}"
