"""The page: one look at the fleet, rendered here, that renews itself."""

from functools import partial
from importlib.metadata import version
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tiertune_agent.web import chart, text
from tiertune_agent.web.look import Looks
from tiertune_agent.web.overview import overview
from tiertune_agent.web.signing import COOKIE
from tiertune_connector.units import format_duration, format_size

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

    def rendered(name: str, *, signed_in: bool) -> Response:
        shown = overview(looks.seen())
        known = {"page": shown, "ago": partial(text.ago, now=shown.now), "signed_in": signed_in}
        html = templates.get_template(name).render(known)
        return HTMLResponse(html, headers=HEADERS)

    @pages.get("/")
    def page(request: Request) -> Response:
        return rendered("page.html", signed_in=COOKIE in request.cookies)

    @pages.get("/live")
    def live() -> Response:
        return rendered("live.html", signed_in=False)

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


def environment() -> Environment:
    """Templates that escape everything, and to which an unknown name is an error."""
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "count": text.count,
        "seconds": text.seconds,
        "signed": text.signed,
        "size": format_size,
        "duration": format_duration,
        "span": text.span,
    }
    made.globals |= {
        "share": text.share,
        "moment": text.moment,
        "chart": chart,
        "refresh_s": REFRESH_S,
        "reload_s": RELOAD_S,
        "version": version("tiertune"),
    }
    return made
