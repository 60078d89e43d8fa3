"""The thread that serves an application, whose certificate is exchanged in place while it is served."""

import socket
import ssl
import threading

import uvicorn
from starlette.types import ASGIApp

from tiertune_connector.documents import DocumentError, plain_file
from tiertune_connector.httpd.listening import Listening
from tiertune_connector.httpd.renewed import Renewed

KEPT_S = 75
"""How long an idle connection is kept: an agent asks in every window, and closes its own first."""

ANSWERED_S = 5.0
"""How long the end waits for answers under way, as a caller may never read his."""


class Serving(threading.Thread):
    """Serves ``app`` from ``start`` to ``stop``, over HTTPS with a ``certificate``.

    The caller is who holds the connection: anybody could send a proxy's header. A head of more than 64 KiB ends it:
    so h11 has it, and httptools, which vLLM brings and uvicorn would prefer, keeps all that comes.
    """

    def __init__(self, app: ASGIApp, listener: socket.socket, certificate: ssl.SSLContext | None) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            log_level="warning",
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            timeout_keep_alive=KEPT_S,
        )
        config.load()
        config.ssl = certificate
        self._server = uvicorn.Server(config)
        super().__init__(target=self._server.run, args=([listener],), name="http", daemon=True)

    def stop(self) -> None:
        self._server.should_exit = True
        if self.is_alive():
            self.join(ANSWERED_S)


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
