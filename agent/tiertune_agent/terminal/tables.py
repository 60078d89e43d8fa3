"""Tables of the command line. What others wrote is `Text`: in a str, rich would take brackets for its markup."""

import json
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tiertune_agent.fields import Json, JsonDict, shown

PIPE_WIDTH = 200


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


def listing(names: Sequence[str], rows: Iterable[Sequence[object]], nothing: str = "") -> Group:
    """Rows that end in a sentence, which stands below the rest; ``nothing`` is said if there are none."""
    told: list[RenderableType] = []
    for *row, sentence in rows:
        told += Text("  ".join(map(str, row))), Padding.indent(Text(str(sentence)), 4)
    return Group(Text("  ".join(names[:-1]), style="bold"), *told) if told else Group(nothing)


def _moment(told: object) -> str:
    return str(told)[:19].replace("T", " ")


def decisions_table(decisions: Sequence[Json]) -> Group:
    names = ("id", "at (UTC)", "tuner", "store", "tier", "from", "to", "state", "reason")
    told = ({**one, "at (UTC)": _moment(one["created_at"]), **_change(one)} for one in decisions)
    return listing(names, ([one[name] for name in names] for one in told), nothing="no decisions")


def _change(decision: Json) -> dict[str, str]:
    return {name: shown(decision["field"], decision[name]) for name in ("from", "to")}


def audit_table(rows: Sequence[Json]) -> Group:
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
    return listing(("at (UTC)", "who", "from", "what", "detail"), told, nothing="no commands")


def decision_table(decision: JsonDict) -> Table:
    """All that is known of a decision; values as in the list, without those that are still empty."""
    values = {name: decision[name] for name in ("from", "to") if not isinstance(decision[name], dict)}
    change = {name: shown(decision["field"], value) for name, value in values.items()}
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


def backtest_table(rows: Sequence[Sequence[str]], *by: str) -> Group:
    """What a policy would have done; a column ``by`` tells it from what was done."""
    return listing(("at", *by, "tuner", "change", "outcome", "reason"), rows)


def _figures(table: Table, *names: str) -> None:
    """Columns of numbers."""
    for name in names:
        table.add_column(name, no_wrap=True, justify="right")
