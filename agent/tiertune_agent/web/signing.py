"""Who may call the agent: tokens of programs, sessions of browsers that signed in with one."""

from math import inf
from secrets import token_urlsafe
from urllib.parse import parse_qs

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp

from tiertune_agent.web.page import COOKIE, HEADERS, environment
from tiertune_connector.httpd.guarded import ERRORS_AT_ONCE, ERRORS_PER_S, READING, Limit, bearer, behind_tokens
from tiertune_connector.httpd.listening import Listening
from tiertune_connector.httpd.tokens import Holder, Role, TokenFile
from tiertune_connector.units import Clock

LAST_S = 12 * 3600.0
"""How long a session lasts."""
SESSIONS = 1000
"""Most sessions at a time; the oldest go."""
OPEN = ("/healthz", "/favicon.ico")
ENTRY = ("/login", "/logout")
TUNING = ("/api/v1/bypass", "/api/v1/flush")
"""Commands that change what stores serve."""


class Sessions:
    """Sessions of signed-in browsers. They end with the process, with their time, or with their token."""

    def __init__(self, tokens: TokenFile, clock: Clock) -> None:
        """``clock`` gives monotonic seconds."""
        self._tokens, self._clock = tokens, clock
        self._begun: dict[str, tuple[str, float]] = {}

    def begin(self, token: str) -> str | None:
        """Begin a session and return its name; None: the token is not valid."""
        if self._tokens.holder(token) is None:
            return None
        session = token_urlsafe(32)
        self._begun[session] = token, self._clock() + LAST_S
        if len(self._begun) > SESSIONS:
            del self._begun[next(iter(self._begun))]
        return session

    def end(self, session: str) -> None:
        self._begun.pop(session, None)

    def holder(self, session: str) -> Holder | None:
        """Who signed in; None: nobody, or no longer."""
        token, until_s = self._begun.get(session, ("", -inf))
        if self._clock() < until_s:
            return self._tokens.holder(token)
        self.end(session)
        return None


def guarded(app: FastAPI, listening: Listening, clock: Clock) -> ASGIApp:
    """The application, with its form; only for callers with a token if the settings name some.

    Reading is free on loopback. DocumentError where the tokens cannot be read.
    """
    tokens = listening.tokens()
    if tokens is None:
        return app
    sessions = Sessions(tokens, clock)
    app.include_router(router(sessions, secure=listening.scheme == "https", clock=clock))

    def holder_of(connection: HTTPConnection) -> Holder | None:
        token = bearer(connection)
        return tokens.holder(token) if token else sessions.holder(connection.cookies.get(COOKIE, ""))

    def role_of(method: str, path: str) -> Role | None:
        if path in ENTRY or (method in READING and (path in OPEN or path.startswith("/static/"))):
            return None
        if method in READING:
            return None if listening.loopback else "read"
        return "tune" if path in TUNING else "approve"

    return behind_tokens(app, holder_of=holder_of, role_of=role_of, refuse=_refused, clock=clock)


def _refused(request: Request, code: int, message: str) -> Response:
    if code == 401 and request.method == "GET" and "text/html" in request.headers.get("accept", ""):
        return RedirectResponse("../" * (request.scope["path"].count("/") - 1) + "login", 303)
    return JSONResponse({"detail": message}, status_code=code)


def router(sessions: Sessions, *, secure: bool, clock: Clock) -> APIRouter:
    """``/login`` and ``/logout``. ``secure``: cookies go over HTTPS alone.

    Addresses are relative, and cookies have the path that the browser sees: a proxy may serve all this below a path.
    Sessions and limits are used on the event loop's thread alone, one call at a time.
    """
    pages = APIRouter(include_in_schema=False)
    errors, form = Limit(ERRORS_PER_S, ERRORS_AT_ONCE, clock), environment().get_template("login.html")

    def shown(message: str, code: int) -> Response:
        return HTMLResponse(form.render(message=message), code, headers=HEADERS)

    @pages.get("/login")
    def login() -> Response:
        return shown("", 200)

    @pages.post("/login")
    async def sign_in(request: Request) -> Response:
        source, body = request.client.host if request.client else "", await request.body()
        session = sessions.begin(parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0].strip())
        if session is None:
            if not errors.admits(source):
                return shown("Too many attempts: wait a few seconds.", 429)
            return shown("That is no token of this agent.", 401)
        answer = RedirectResponse("./", 303)
        private = secure or request.headers.get("origin", "").startswith("https:")  # as to a proxy in front
        answer.set_cookie(COOKIE, session, int(LAST_S), path=None, secure=private, httponly=True, samesite="strict")
        return answer

    @pages.post("/logout")
    async def sign_out(request: Request) -> Response:
        sessions.end(request.cookies.get(COOKIE, ""))
        answer = RedirectResponse("login", 303)
        answer.set_cookie(COOKIE, max_age=0, path=None)
        return answer

    return pages
