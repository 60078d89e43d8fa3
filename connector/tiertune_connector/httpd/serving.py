"""The server of an application, whose certificate is exchanged in place while it is served."""

import ssl

import uvicorn
from starlette.types import ASGIApp

from tiertune_connector.documents import DocumentError, plain_file
from tiertune_connector.httpd.listening import Listening
from tiertune_connector.httpd.renewed import Renewed

KEPT_S = 75
"""How long an idle connection is kept: an agent asks in every window, and closes its own first."""


def server(app: ASGIApp, certificate: ssl.SSLContext | None) -> uvicorn.Server:
    """Serves ``app``, over HTTPS with a ``certificate``.

    The caller is who holds the connection: anybody could send a proxy's header.
    """
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", proxy_headers=False, timeout_keep_alive=KEPT_S
    )
    config.load()
    config.ssl = certificate
    return uvicorn.Server(config)


def certificate(listening: Listening) -> ssl.SSLContext | None:
    """What HTTPS needs; None: nothing is encrypted. DocumentError if certificate and key are not valid.

    Every new connection is served what the files hold by then. What is no certificate and key, as while one of both is
    new, is logged; the former pair is served on.
    """
    first, key = listening.certificate_file, listening.key_file
    if not (first and key):
        return None

    def read() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(plain_file(first), plain_file(key), password=lambda: "")
        except OSError as error:  # ssl.SSLError is one
            told = f"{first} and {key} are no certificate and key: {error.strerror or error}"
            raise DocumentError([f"http.certificate_file: {told}"]) from None
        return context

    def renew(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = pair.now()

    pair = Renewed("the certificate stays as it was", read, first, key)
    served = pair.now()
    served.sni_callback = renew  # called for each, whether it names a server or not
    return served
