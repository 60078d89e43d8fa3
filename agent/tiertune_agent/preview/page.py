"""Drawn dashboards as self-contained HTML: no script, no font, no picture from elsewhere."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from tiertune_agent.network import CallError
from tiertune_agent.preview.documents import Board
from tiertune_agent.preview.drawn import Page, Selection, page
from tiertune_agent.preview.prometheus import Prometheus
from tiertune_agent.web import charts
from tiertune_agent.web.templating import STYLES, environment
from tiertune_connector.httpd.sites import LOOPBACK_NAMES
from tiertune_connector.units import format_duration

HERE = Path(__file__).parent
REFRESH_S = 30
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def rendered(shown: Page, boards: Sequence[Board], *, suffix: str = "", refresh_s: int = 0) -> str:
    """One dashboard; links to the others end in ``suffix``. ``refresh_s``: seconds until it reloads; 0: never."""
    templates = environment(HERE / "templates", STYLES)
    return templates.get_template("board.html").render(
        page=shown,
        boards=boards,
        suffix=suffix,
        refresh_s=refresh_s,
        draw=charts.draw,
        last=format_duration(shown.choice.last_s),
    )


def write(boards: Sequence[Board], source: Prometheus, choice: Selection, folder: Path) -> list[tuple[Path, Page]]:
    """Write a file per dashboard; returns paths and pages. CallError, and no file, if nobody answers."""
    scrape_s = source.scrape_s()
    written = [(folder / f"{board.name}.html", page(board, source, choice, scrape_s)) for board in boards]
    folder.mkdir(parents=True, exist_ok=True)
    for path, shown in written:
        path.write_text(rendered(shown, boards, suffix=".html"), encoding="utf-8")
    return written


def application(boards: Sequence[Board], source: Prometheus, choice: Selection, now: Callable[[], float]) -> Starlette:
    """Every dashboard under its name, the first one at ``/``; each load asks anew, up to ``now`` (Unix seconds).

    Answers only to names of this host: else another site's page could read it by a name that leads here.
    """
    by_name = {"": boards[0]} | {board.name: board for board in boards}

    def answer(request: Request) -> Response:
        board = by_name.get(request.path_params.get("name", ""))
        if board is None:
            return PlainTextResponse("there is no such dashboard\n", 404)
        try:
            shown = page(board, source, replace(choice, now=now()), source.scrape_s())
        except CallError as error:
            return PlainTextResponse(f"{error}\n", 502)
        return HTMLResponse(rendered(shown, boards, refresh_s=REFRESH_S), headers=HEADERS)

    known = Middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK_NAMES))
    return Starlette(routes=[Route("/", answer), Route("/{name}", answer)], middleware=[known])
