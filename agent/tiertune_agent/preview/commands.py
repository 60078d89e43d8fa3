"""``tiertune dashboards preview``."""

# ruff: noqa: PLC0415 (--help is quick)
# ruff: noqa: PLR0917 (typer calls commands by keyword)

import errno
import os
import re
import socket
import time
from functools import partial
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
    out: Annotated[Path | None, typer.Option(help="Write the pages into this folder instead of serving them.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to serve them on.")] = 7430,
    last: Annotated[str, typer.Option(help="How far back to look.")] = "1h",
    until: Annotated[
        str, typer.Option(help="End of the time shown (UTC), such as 2025-03-05T12:00; by default now.")
    ] = "",
    store: Annotated[str, typer.Option(help="Only these stores, such as host-a|host-b; by default all.")] = "",
    namespace: Annotated[str, typer.Option(help="Only these namespaces (digests); by default all.")] = "",
    json_path: JsonPath = None,
) -> None:
    """Show the dashboards with a Prometheus's real results, without Grafana."""
    import uvicorn

    from tiertune_agent.network import web_address
    from tiertune_agent.preview.documents import boards
    from tiertune_agent.preview.drawn import Selection
    from tiertune_agent.preview.page import application, write
    from tiertune_agent.preview.prometheus import Prometheus
    from tiertune_connector.units import parse_duration

    such_as = "Prometheus's address as http://host:port"
    address = parsed("--prometheus", lambda url: web_address(url, such_as, login=None), prometheus)
    last_s = parsed("--last", parse_duration, last)
    if last_s <= 0:
        raise InputError(f"--last: {last} is no time: write it as 30m or 6h")
    choice = Selection(_moment(until), last_s, pattern("--store", store), pattern("--namespace", namespace))
    _possible(out, port)
    with Prometheus(address) as source:
        if out:
            pages = [
                {"file": str(path), "panels": shown.shown, "with_data": shown.with_data}
                for path, shown in write(boards(), source, choice, out)
            ]
            lines = [f"{one['file']}: {one['with_data']} of {one['panels']} panels have data" for one in pages]
            result({"url": None, "pages": pages}, json_path, lambda: typer.echo("\n".join(lines)))
        else:
            source.scrape_s()  # a wrong address fails now
            url = f"http://127.0.0.1:{port}/"
            told = f"the dashboards are on {url} until Ctrl-C"
            result({"url": url, "pages": []}, json_path, lambda: typer.echo(told))
            served = application(boards(), source, choice, partial(_moment, until))
            uvicorn.run(served, host="127.0.0.1", port=port, log_level="warning", access_log=False)


def pattern(option: str, text: str) -> str:
    """A pattern, escaped for the quotes of a query; InputError if it is none."""
    try:
        re.compile(text)
    except re.error as error:
        raise InputError(f"{option}: {text!r} is no pattern such as host-a|host-b: {error}") from error
    return text.replace("\\", r"\\").replace('"', r"\"") or ".*"


def _possible(out: Path | None, port: int) -> None:
    """InputError if the pages cannot be written, or served."""
    from tiertune_connector.documents import where

    try:
        if out:
            _may_be(out)
        else:
            socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        why = f"--out: {where(error)}" if out else f"--port {port}: {os.strerror(error.errno or 0)}: give another one"
        raise InputError(why) from error


def _may_be(folder: Path) -> None:
    """OSError if it cannot be made or written to. It is not made: nobody knows yet what it will hold."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(there))
    if not os.access(there, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))


def _moment(until: str) -> float:
    """Unix seconds of an ISO 8601 time (UTC if it names no zone); empty: of now."""
    from tiertune_agent.web.text import moment

    if not until:
        return time.time()
    try:
        return moment(until).timestamp()
    except ValueError as error:
        raise InputError(f"--until: {until!r} is no time such as 2025-03-05T12:00") from error
