"""Which site a call comes from: a page of another site in an operator's browser cannot give commands."""

from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tiertune_connector.httpd.guarded import READING
from tiertune_connector.httpd.listening import Listening

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
"""Names by which a server on loopback may be called: another name that leads there is an attack (DNS rebinding)."""
FOREIGN = "this call comes from another site, or a proxy in between does not pass its Host on"
REMARK = "Tiertune-Remark"
"""Header for a sentence that an answer's body has no place for."""


def foreign(request: Request) -> bool:
    """Whether a page of another site calls: browsers name the origin of a writing call."""
    origin = request.headers.get("origin")
    return origin is not None and origin.partition("://")[2] != request.headers.get("host")


def same_site(app: ASGIApp, listening: Listening, told: str = "message") -> ASGIApp:
    """Keeps other sites' pages from writing to an application and, on loopback, from calling it by their own names.

    Off loopback any name will do: callers show a token, which a foreign page lacks. ``told``: the field of its errors
    that says why.
    """
    app = TrustedHostMiddleware(app, allowed_hosts=[*LOOPBACK_NAMES, listening.host] if listening.loopback else ["*"])
    refused = JSONResponse({told: FOREIGN}, status_code=403)

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        writes = scope["type"] == "http" and scope["method"] not in READING
        await (refused if writes and foreign(Request(scope)) else app)(scope, receive, send)

    return checked
