"""The page: one look at the fleet, rendered by the agent, that renews itself."""

from collections.abc import Callable
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from threading import Lock

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment

from tiertune_agent.policy.document import DEFAULT
from tiertune_agent.web import charts, templating, text
from tiertune_agent.web.evidence import compared, tables
from tiertune_agent.web.look import Looks, Seen, approvable
from tiertune_agent.web.overview import facts, overview
from tiertune_agent.web.unmade import sentence, unmade, values
from tiertune_connector.units import format_size

COOKIE = "tiertune_session"
"""Of a browser that signed in."""
HERE = Path(__file__).parent
REFRESH_S = 2
RELOAD_S = 10
"""Without scripts the whole page is loaded again: less often, as open evidence closes."""
MEDIA = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",  # with no-referrer, browsers tell no origin of a form
    "X-Content-Type-Options": "nosniff",
}


def router(looks: Looks) -> APIRouter:
    """``/``, its live part alone, and the files that it needs."""
    templates = environment()
    pages = APIRouter(include_in_schema=False)

    @once
    def figures(seen: Seen) -> str:
        """The live part, the same for every reader: only the frame depends on who reads."""
        known = {"page": overview(seen), "seen": seen, "ago": partial(text.ago, now=seen.now)}
        return templates.get_template("live.html").render(known)

    @pages.get("/")
    def page(request: Request) -> Response:
        known = {"live": figures(looks.seen()), "signed_in": COOKIE in request.cookies}
        return HTMLResponse(templates.get_template("page.html").render(known), headers=HEADERS)

    @pages.get("/live")
    def live() -> Response:
        return HTMLResponse(figures(looks.seen()), headers=HEADERS)

    static = {path.name: path for path in (HERE / "static").iterdir() if path.suffix in MEDIA}

    @pages.get("/static/{name}")
    def file(name: str) -> Response:
        if name not in static:
            raise HTTPException(404, "there is no such file")
        headers = {"Cache-Control": "max-age=86400", "X-Content-Type-Options": "nosniff"}
        return Response(static[name].read_bytes(), media_type=MEDIA[static[name].suffix], headers=headers)

    @pages.get("/favicon.ico")
    def favicon() -> Response:
        return file("icon.svg")

    return pages


def once(make: Callable[[Seen], str]) -> Callable[[Seen], str]:
    """Make it once per look: later readers get the same, and those who come meanwhile wait for it."""
    lock, kept = Lock(), lru_cache(maxsize=1)(make)

    def made(seen: Seen) -> str:
        with lock:
            return kept(seen)

    return made


def environment() -> Environment:
    """Templates, and what they may call."""
    made = templating.environment(HERE / "templates")
    made.filters |= {
        "count": text.count,
        "seconds": text.seconds,
        "signed": text.signed,
        "money": text.money,
        "size": format_size,
        "span": text.span,
    }
    made.globals |= {
        "share": text.share,
        "moment": text.moment,
        "tables": tables,
        "facts": facts,
        "approvable": approvable,
        "compared": compared,
        "values": values,
        "unmade": unmade,
        "wished": sentence,
        "built_in": DEFAULT.source,
        "draw": charts.draw,
        "draw_bars": charts.draw_bars,
        "refresh_s": REFRESH_S,
        "reload_s": RELOAD_S,
        "version": version("tiertune"),
    }
    return made
