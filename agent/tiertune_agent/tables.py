"""Tables of the command line."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 200


def show(table: Table) -> None:
    """On the terminal; a file or a pipe has room for the sentences."""
    console = Console()
    (console if console.is_terminal else Console(width=PIPE_WIDTH)).print(table)


def decisions_table(decisions: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold")
    for name in ("id", "at", "tuner", "store", "from", "to", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("reason", overflow="fold")
    for decision in decisions:
        moment = str(decision["created_at"])[:19].replace("T", " ")
        cells = (decision["id"], moment, decision["tuner"], decision["store"], decision["from"], decision["to"])
        table.add_row(*map(str, cells), decision["state"], decision["reason"])
    if not decisions:
        table.caption = "no decisions"
    return table


def decision_table(decision: Mapping[str, Any]) -> Table:
    table = Table(box=None, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in decision.items():
        text = json.dumps(value, indent=1) if isinstance(value, dict | list) else str(value)
        table.add_row(name, text)
    return table
