"""Which site a call comes from: a page of another site in an operator's browser cannot give commands."""

from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tiertune_connector.httpd.guarded import READING, Refuse
from tiertune_connector.httpd.listening import Listening

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
"""Names by which a server on loopback may be called: another name that leads there is an attack (DNS rebinding)."""
FOREIGN = "this call comes from another site, or a proxy in between does not pass its Host on"
REMARK = "Tiertune-Remark"
"""Header for a sentence that an answer's body has no place for."""


def same_site(app: ASGIApp, listening: Listening, refuse: Refuse) -> ASGIApp:
    """Keeps other sites' pages from writing to an application and, on loopback, from calling it by their own names.

    Off loopback callers show a token, which a foreign page lacks.
    """
    names = [*LOOPBACK_NAMES, listening.host] if listening.loopback else ["*"]
    app = TrustedHostMiddleware(app, allowed_hosts=names)

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = app
        if scope["type"] == "http" and scope["method"] not in READING:
            request = Request(scope)
            origin = request.headers.get("origin")  # which browsers name
            if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
                answer = refuse(request, 403, FOREIGN)
        await answer(scope, receive, send)

    return checked
