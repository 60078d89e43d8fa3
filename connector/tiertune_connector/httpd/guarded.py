"""ASGI middleware: keeps other sites' pages out, asks callers for a token, limits writes and wrong tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tiertune_connector.httpd.listening import Listening
from tiertune_connector.httpd.tokens import Holder, Role
from tiertune_connector.units import Clock

READING = ("GET", "HEAD")
WRITES_PER_S, WRITES_AT_ONCE = 10.0, 100.0
"""Writing calls of one holder."""
ERRORS_PER_S, ERRORS_AT_ONCE = 0.2, 10.0
"""Calls without a valid token from one source."""
CALLERS = 4096
"""Callers remembered, at most."""
HOLDER = "tiertune.holder"
"""Key in an ASGI scope: who calls."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
"""Names by which a server on loopback may be called: another name that leads there is an attack (DNS rebinding)."""
FOREIGN = "this call comes from another site, or a proxy in between does not pass its Host on"
REMARK = "Tiertune-Remark"
"""Header for a sentence that an answer's body has no place for."""

RoleOf = Callable[[str, str], Role | None]
"""The role that a method and a path need; None: no token."""
Refuse = Callable[[Request, int, str], Response]
"""Makes the answer to a refused call, of status and message."""


@dataclass(eq=False)
class Limit:
    """Limits each caller to ``per_s`` calls a second, and ``at_once`` in a burst: a token bucket each.

    ``clock`` gives monotonic seconds.
    """

    per_s: float
    at_once: float
    clock: Clock

    def __post_init__(self) -> None:
        self._buckets: dict[str, tuple[float, float]] = {}
        """What was left to each caller, and when; the one that called longest ago comes first."""

    def admits(self, caller: str) -> bool:
        """Whether one more call is within the limit; if so, it is counted."""
        now = self.clock()
        left, at_s = self._buckets.pop(caller, (self.at_once, now))
        left = min(self.at_once, left + (now - at_s) * self.per_s)
        self._buckets[caller] = left - (left >= 1), now
        if len(self._buckets) > CALLERS:
            del self._buckets[next(iter(self._buckets))]
        return left >= 1


def behind_tokens(
    app: ASGIApp, *, holder_of: Callable[[HTTPConnection], Holder | None], role_of: RoleOf, refuse: Refuse, clock: Clock
) -> ASGIApp:
    """The application behind tokens: 401 without one, 403 with too low a role, 429 for too many calls."""
    writes, errors = Limit(WRITES_PER_S, WRITES_AT_ONCE, clock), Limit(ERRORS_PER_S, ERRORS_AT_ONCE, clock)

    def slow(request: Request, per_s: float, message: str) -> Response:
        answer = refuse(request, 429, message)
        answer.headers["Retry-After"] = str(ceil(1 / per_s))
        return answer

    def refused(request: Request) -> Response | None:
        # As routes are found: by the path alone, whatever Host says, and without a line's end behind it.
        path, source = request.scope["path"].rstrip("\r\n"), request.client.host if request.client else ""
        role = role_of(request.method, path)
        if role is None:
            return None
        holder = holder_of(request)
        if holder is None:
            if not errors.admits(source):
                return slow(request, ERRORS_PER_S, "too many calls without a token that is one: wait a moment")
            answer = refuse(request, 401, "send a token: Authorization: Bearer ...")
            answer.headers.setdefault("WWW-Authenticate", "Bearer")
            return answer
        if not holder.may(role):
            return refuse(request, 403, f"{holder.name} has the role {holder.role}; this asks for {role}")
        if request.method not in READING and not writes.admits(holder.name):
            told = f"more than {WRITES_PER_S:g} writing calls a second of {holder.name}"
            return slow(request, WRITES_PER_S, told)
        request.scope[HOLDER] = holder
        return None

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        answer = refused(Request(scope)) if scope["type"] == "http" else None
        await (answer or app)(scope, receive, send)

    return checked


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


def bearer(connection: HTTPConnection) -> str:
    """The caller's token; empty: none."""
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def called_by(connection: HTTPConnection) -> tuple[str, str]:
    """Who calls, and from where; where no token was asked for, the source, or ``local``, stands for who."""
    source = connection.client.host if connection.client else ""
    holder: Holder | None = connection.scope.get(HOLDER)
    if holder is not None:
        return holder.name, source
    return "local" if source in ("127.0.0.1", "::1", "") else source, source
