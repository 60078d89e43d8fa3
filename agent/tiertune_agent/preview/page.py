"""Drawn dashboards as self-contained HTML: no script, no font, no picture from elsewhere."""

from collections.abc import Sequence
from pathlib import Path

from tiertune_agent.preview.documents import Board
from tiertune_agent.preview.drawn import Page, Selection, page
from tiertune_agent.preview.prometheus import Prometheus
from tiertune_agent.web import charts
from tiertune_agent.web.templating import STYLES, environment
from tiertune_connector.units import format_duration

HERE = Path(__file__).parent


def rendered(shown: Page, boards: Sequence[Board]) -> str:
    """One dashboard, with links to the files of the others."""
    templates = environment(HERE / "templates", STYLES)
    last = format_duration(shown.choice.last_s)
    return templates.get_template("board.html").render(page=shown, boards=boards, draw=charts.draw, last=last)


def write(boards: Sequence[Board], source: Prometheus, choice: Selection, folder: Path) -> list[tuple[Path, Page]]:
    """Write a file per dashboard; returns paths and pages. CallError, and no folder, if nobody answers.

    OSError if the folder cannot be made, before anything is drawn, or a file not written.
    """
    scrape_s = source.scrape_s()
    folder.mkdir(parents=True, exist_ok=True)
    written = [(folder / f"{board.name}.html", page(board, source, choice, scrape_s)) for board in boards]
    for path, shown in written:
        path.write_text(rendered(shown, boards), encoding="utf-8")
    return written
