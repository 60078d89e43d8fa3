"""``tiertune dashboards preview``."""

# ruff: noqa: PLC0415 (--help is quick)

import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from tiertune_agent.terminal.options import InputError, JsonPath, parsed, result

dashboards_app = typer.Typer(help="The dashboards for Grafana.", no_args_is_help=True)


@dashboards_app.command("preview")
def dashboards_preview(
    prometheus: Annotated[
        str, typer.Option(envvar="TIERTUNE_PROMETHEUS", help="Prometheus's address.")
    ] = "http://127.0.0.1:9090",
    out: Annotated[Path, typer.Option(help="Folder to write the pages into.")] = Path("dashboards-preview"),
    last: Annotated[str, typer.Option(help="How far back to look.")] = "1h",
    until: Annotated[
        str, typer.Option(help="End of the time shown (UTC), such as 2025-03-05T12:00; by default now.")
    ] = "",
    json_path: JsonPath = None,
) -> None:
    """Draw the dashboards with a Prometheus's real results, without Grafana: a page for each."""
    from tiertune_agent.network import web_address
    from tiertune_agent.preview.drawn import Selection, boards, write
    from tiertune_agent.preview.prometheus import Prometheus
    from tiertune_connector.documents import where
    from tiertune_connector.units import parse_duration

    such_as = "Prometheus's address as http://host:port"
    address = parsed("--prometheus", lambda url: web_address(url, such_as, login=None), prometheus)
    last_s = parsed("--last", parse_duration, last)
    if last_s <= 0:
        raise InputError(f"--last: {last} is no time: write it as 30m or 6h")
    with closing(Prometheus(address)) as source:
        try:
            pages = write(boards(), source, Selection(_moment(until), last_s), out)
        except OSError as error:
            raise InputError(f"--out: {where(error)}") from error
    lines = [f"{one['file']}: {one['with_data']} of {one['panels']} panels have data" for one in pages]
    typer.echo("\n".join(lines))
    result({"pages": pages}, json_path)


def _moment(until: str) -> float:
    """Unix seconds of an ISO 8601 time (UTC if it names no zone); empty: of now."""
    from tiertune_agent.web.text import moment

    if not until:
        return time.time()
    try:
        return moment(until).timestamp()
    except ValueError as error:
        raise InputError(f"--until: {until!r} is no time such as 2025-03-05T12:00") from error
