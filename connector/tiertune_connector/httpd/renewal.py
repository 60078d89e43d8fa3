"""A certificate that is exchanged in place while it is served."""

import logging
import ssl
from pathlib import Path

import uvicorn

from tiertune_connector.documents import plain_file, stamp

log = logging.getLogger(__name__)


def renewing(config: uvicorn.Config, certificate: Path | None, key: Path | None) -> uvicorn.Config:
    """The same ``config``; with HTTPS, every new connection is served what the files hold by then."""
    renewal = _Renewal(certificate, key) if certificate and key else None  # before they are read: none is overlooked
    config.load()
    if config.ssl is not None:
        config.ssl.sni_callback = renewal  # called for each, whether it names a server or not
    return config


class _Renewal:
    """What is no certificate and key, as while one of both is new, is logged; the former pair is served on."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = certificate, key
        self._seen = [*map(stamp, self._files)]
        self._renewed: ssl.SSLContext | None = None
        """None: nothing was exchanged since the start."""

    def __call__(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        if (now := [*map(stamp, self._files)]) != self._seen:
            self._seen = now
            self._read()
        if self._renewed is not None:
            connection.context = self._renewed

    def _read(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            certificate, key = map(plain_file, self._files)
            context.load_cert_chain(certificate, key, password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            told = f"{self._files[0]} and {self._files[1]}: {error.strerror or error}"
            log.error("the certificate stays as it was: %s", told)  # noqa: TRY400 (its message says it all)
            return
        self._renewed = context
        log.info("the certificate was read again from %s", self._files[0])
