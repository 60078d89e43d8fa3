"""A certificate that is exchanged in place while it is served."""

import logging
import ssl
from pathlib import Path
from typing import cast

import uvicorn

from tiertune_connector.documents import plain_file, stamp

log = logging.getLogger(__name__)


def renewing(config: uvicorn.Config, certificate: Path | None, key: Path | None) -> uvicorn.Config:
    """The same ``config``; with HTTPS, every new connection is served what the files hold by then.

    What is no certificate and key, as while one of both is new, is logged; the former pair is served on.
    """
    if not (certificate and key):
        return config
    seen = stamp(certificate), stamp(key)  # before they are read: none is overlooked
    config.load()
    served = cast("ssl.SSLContext", config.ssl)

    def renew(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        nonlocal seen, served
        if (now := (stamp(certificate), stamp(key))) != seen:
            seen, renewed = now, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            try:
                renewed.load_cert_chain(plain_file(certificate), plain_file(key), password=lambda: "")
                served = renewed
                log.info("the certificate was read again from %s", certificate)
            except OSError as error:  # ssl.SSLError is one
                told = f"{certificate} and {key}: {error.strerror or error}"
                log.error("the certificate stays as it was: %s", told)  # noqa: TRY400 (its message says it all)
        connection.context = served

    served.sni_callback = renew  # called for each, whether it names a server or not
    return config
