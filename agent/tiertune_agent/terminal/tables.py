"""Tables of the command line. What others wrote is `Text`: in a str, rich would take brackets for its markup."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from tiertune_agent.fields import Json, JsonDict, shown

PIPE_WIDTH = 200
GAP = 2
"""Between the columns of a listing."""


def terminal() -> Console:
    """Standard output; a file or a pipe is wide enough for the sentences."""
    console = Console(emoji=False)  # else rich would draw :100:, line 100 of a file, as an emoji
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def show(table: RenderableType) -> None:
    terminal().print(table)


def pairs(rows: Iterable[tuple[str, str | Text]]) -> Table:
    """A table of names and their texts."""
    table = Table(box=None, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


@dataclass(frozen=True)
class Listing:
    """Rows that end in a sentence, which stands below the rest: beside it no terminal has room."""

    names: Sequence[str]
    rows: Sequence[Sequence[object]]
    nothing: str = ""
    """Said if there are no rows."""

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        if not self.rows:
            yield Text(self.nothing)
            return
        lines = [[str(one) for one in row[:-1]] for row in (self.names, *self.rows)]
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        while sum(widths) + GAP * (len(widths) - 1) > options.max_width and max(widths[1:]) > 1:
            widths[widths.index(max(widths[1:]), 1)] -= 1  # the first one, an id, stays whole
        yield _line(lines[0], widths, "bold")
        for line, row in zip(lines[1:], self.rows, strict=True):
            yield _line(line, widths)
            yield Padding.indent(Text(str(row[-1])), 4)


def _line(cells: Sequence[str], widths: Sequence[int], style: str = "") -> Table:
    """A line of a listing; a cell that is longer than its column is folded there."""
    table = Table.grid(*(Column(width=width, overflow="fold") for width in widths), padding=(0, GAP, 0, 0))
    table.add_row(*map(Text, cells), style=style)
    return table


def _moment(told: object) -> str:
    return str(told)[:19].replace("T", " ")


def decisions_table(decisions: Sequence[Json]) -> Listing:
    names = ("id", "at (UTC)", "tuner", "store", "tier", "from", "to", "state", "reason")
    rows = []
    for one in decisions:
        change = {name: shown(one["field"], one[name]) for name in ("from", "to")}
        told = {**one, "at (UTC)": _moment(one["created_at"]), **change}
        rows.append([told[name] for name in names])
    return Listing(names, rows, nothing="no decisions")


def audit_table(rows: Sequence[Json]) -> Listing:
    """A command that was refused is called so; its detail says why."""
    told = [
        [
            _moment(row["at"]),
            row["who"],
            row["from"],
            row["what"] + (", refused" if "refused" in row["detail"] else ""),
            json.dumps(row["detail"]),
        ]
        for row in rows
    ]
    return Listing(("at (UTC)", "who", "from", "what", "detail"), told, nothing="no commands")


def decision_table(decision: JsonDict) -> Table:
    """All that is known of a decision; values as in the list, without those that are still empty."""
    change = {
        name: shown(decision["field"], decision[name])
        for name in ("from", "to")
        if not isinstance(decision[name], dict)
    }
    return pairs(
        (name, Text(json.dumps(value, indent=1) if isinstance(value, dict | list) else str(value)))
        for name, value in (decision | change).items()
        if value not in (None, "", [], {})
    )


def curve_table(points: Sequence[Json]) -> Table:
    """A row for each size of the cache."""
    table = Table(box=None, header_style="bold")
    _figures(table, "size", "chunks", "hits %")
    for one in points:
        table.add_row(f"{one['size']:g}", str(one["chunks"]), f"{100 * one['hit_ratio']:.2f}")
    return table


def runs_table(runs: Mapping[str, Json]) -> Table:
    """The runs of a replay."""
    table = Table(box=None, header_style="bold")
    table.add_column("run", no_wrap=True)
    _figures(table, "TTFT mean ms", "p50", "p99", "hits %", "remote %", "fetched GB")
    table.add_column(overflow="fold")  # in a narrow terminal
    for name, run in runs.items():
        table.add_row(*_run(name, run))
    return table


def _run(name: str, run: Json) -> tuple[str, ...]:
    times = [f"{1000 * run[f'ttft_{kind}_s']:.1f}" for kind in ("mean", "p50", "p99")]
    tokens = (sum(run["hit_tokens"].values()), run["hit_tokens"]["remote"])
    shares = [f"{100 * count / run['prompt_tokens']:.2f}" for count in tokens]
    return (name, *times, *shares, f"{run['fetched_bytes'] / 1e9:.1f}", f"= {run['is']}" if "is" in run else "")


def backtest_table(rows: Sequence[Sequence[str]], *by: str) -> Listing:
    """What a policy would have done; a column ``by`` tells it from what was done."""
    return Listing(("at", *by, "tuner", "change", "outcome", "reason"), rows)


def _figures(table: Table, *names: str) -> None:
    """Columns of numbers."""
    for name in names:
        table.add_column(name, no_wrap=True, justify="right")
