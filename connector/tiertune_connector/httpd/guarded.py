"""Asks every caller for a token, and how much a caller may ask. An ASGI middleware."""

from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tiertune_connector.httpd.tokens import Holder, Role

READING = ("GET", "HEAD")
WRITES_PER_S, WRITES_AT_ONCE = 10.0, 100.0
"""Of one holder."""
ERRORS_PER_S, ERRORS_AT_ONCE = 0.2, 10.0
"""Tokens that are none, of one source."""
CALLERS = 4096
"""Remembered at most."""
HOLDER = "tiertune.holder"
"""Of an ASGI scope: who calls."""

RoleOf = Callable[[str, str], Role | None]
"""What a method and a path ask for; None: nothing."""
Refuse = Callable[[Request, int, str], Response]
"""The answer to who may not: status and message."""


@dataclass
class _Bucket:
    left: float
    at_s: float


class Limit:
    """So many a second of each caller, and so many at once: a token bucket each."""

    def __init__(self, per_s: float, at_once: float, clock: Callable[[], float]) -> None:
        """``clock`` gives monotonic seconds."""
        self._per_s, self._at_once, self._clock = per_s, at_once, clock
        self._buckets: dict[str, _Bucket] = {}

    def exceeded(self, caller: str) -> bool:
        """Whether nothing is left for the caller."""
        return self._bucket(caller).left < 1

    def take(self, caller: str) -> None:
        """One of them."""
        self._bucket(caller).left -= 1

    def _bucket(self, caller: str) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.pop(caller, None) or _Bucket(self._at_once, now)
        bucket.left = min(self._at_once, bucket.left + (now - bucket.at_s) * self._per_s)
        bucket.at_s = now
        self._buckets[caller] = bucket  # last: the one that called longest ago goes first
        if len(self._buckets) > CALLERS:
            del self._buckets[next(iter(self._buckets))]
        return bucket


class Guarded:
    """An application behind tokens: 401 without one, 403 with too low a role, 429 for too many calls."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        holder_of: Callable[[HTTPConnection], Holder | None],
        role_of: RoleOf,
        refuse: Refuse,
        clock: Callable[[], float],
    ) -> None:
        self._app = app
        self._holder_of, self._role_of, self._refuse = holder_of, role_of, refuse
        self._writes = Limit(WRITES_PER_S, WRITES_AT_ONCE, clock)
        self._errors = Limit(ERRORS_PER_S, ERRORS_AT_ONCE, clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As every ASGI application."""
        if scope["type"] == "http":
            request = Request(scope)
            refused = self._refused(request)
            if refused is not None:
                await refused(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refused(self, request: Request) -> Response | None:
        # As routes are found: by the path alone, without what Host says, and with no line's end behind it.
        path, source = request.scope["path"].rstrip("\r\n"), request.client.host if request.client else ""
        role = self._role_of(request.method, path)
        if role is None:
            return None
        holder = self._holder_of(request)
        if holder is None:
            if self._errors.exceeded(source):
                return self._slow(request, "too many calls without a token that is one: wait a minute")
            self._errors.take(source)
            answer = self._refuse(request, 401, "send a token: Authorization: Bearer ...")
            answer.headers.setdefault("WWW-Authenticate", "Bearer")
            return answer
        if not holder.may(role):
            return self._refuse(request, 403, f"{holder.name} has the role {holder.role}; this asks for {role}")
        if request.method not in READING:
            if self._writes.exceeded(holder.name):
                return self._slow(request, f"more than {WRITES_PER_S:g} writing calls a second of {holder.name}")
            self._writes.take(holder.name)
        request.scope[HOLDER] = holder
        return None

    def _slow(self, request: Request, message: str) -> Response:
        answer = self._refuse(request, 429, message)
        answer.headers["Retry-After"] = str(round(1 / ERRORS_PER_S))
        return answer


def bearer(connection: HTTPConnection) -> str:
    """The token that is shown; empty: none."""
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def called_by(connection: HTTPConnection) -> tuple[str, str]:
    """Who calls, as ``Guarded`` found, and from where; where nobody is asked for a token, that is all there is."""
    source = connection.client.host if connection.client else ""
    holder: Holder | None = connection.scope.get(HOLDER)
    if holder is not None:
        return holder.name, source
    return "local" if source in ("127.0.0.1", "::1", "") else source, source
