"""Which site a call comes from: a page of another one, open in an operator's browser, cannot command."""

from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tiertune_connector.httpd.guarded import READING
from tiertune_connector.httpd.listening import Listening

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
"""By which a server on loopback may be called: another name that leads there is a trick."""
FOREIGN = "this call comes from another site"
REMARK = "Tiertune-Remark"
"""Header of an answer whose body has no place for a sentence."""


def foreign(request: Request) -> bool:
    """Whether a page of another site calls: browsers tell where a writing call comes from."""
    origin = request.headers.get("origin")
    return origin is not None and origin.partition("://")[2] != request.headers.get("host")


def called(listening: Listening) -> tuple[str, ...]:
    """Names that a server may be called by: any where every caller shows a token, which a foreign page has not."""
    return (*LOOPBACK_NAMES, listening.host) if listening.loopback else ("*",)


class SameSite:
    """An application that no page of another site writes to, nor calls by a name of its own where it is on loopback."""

    def __init__(self, app: ASGIApp, listening: Listening) -> None:
        self._app = TrustedHostMiddleware(app, allowed_hosts=list(called(listening)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As every ASGI application."""
        if scope["type"] == "http":
            request = Request(scope)
            if request.method not in READING and foreign(request):
                await JSONResponse({"message": FOREIGN}, status_code=403)(scope, receive, send)
                return
        await self._app(scope, receive, send)
