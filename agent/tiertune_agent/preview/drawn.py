"""The committed dashboards with the answers to their queries, as HTML that needs nothing from elsewhere."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path

from tiertune_agent.fields import Json, JsonDict
from tiertune_agent.preview import plot
from tiertune_agent.preview.plot import Frame, figure
from tiertune_agent.preview.prometheus import Prometheus, QueryError
from tiertune_agent.web.charts import Chart, draw
from tiertune_agent.web.templating import STYLES, environment
from tiertune_connector.units import format_duration

ORDER = ("fleet", "tiers", "gate", "whatif", "stages", "decisions")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))")
_LABEL = re.compile(r"{{\s*(\w+)\s*}}")
HERE = Path(__file__).parent
_PACKAGED, _REPOSITORY = HERE / "json", HERE.parents[2] / "dashboards" / "json"
COLUMN_PX, CELL_PX = 58, 38
HEAD_PX, LEGEND_PX, SIDES_PX = 34, 40, 26
POINT_PX = 4.0
"""Between points of a line: closer ones cannot be told apart."""
LEAST_SCRAPES = 4
"""Least number within a rate's range, as in Grafana."""


@dataclass(frozen=True)
class Selection:
    """What is looked at: the ``last_s`` seconds before ``now`` (Unix)."""

    now: float
    last_s: float


@dataclass(frozen=True)
class Drawn:
    """One panel, with one of the drawings at most; ``said``: why there is none. A ``row`` is a heading."""

    panel: Json
    """As its dashboard has it."""
    chart: Chart | None = None
    """For a number: its course."""
    rows: Sequence[tuple[str, Sequence[plot.Stretch]]] = ()
    clock: Sequence[str] = ()
    """Below the rows, each in the middle of an equal part."""
    bars: Sequence[plot.Bar] = ()
    figure: str = ""
    colour: str = ""
    legends: Sequence[tuple[str, str]] = ()
    """Names, and the classes of their colours in the style."""
    said: str = ""


def boards(folder: Path | None = None) -> dict[str, Json]:
    """All dashboards by name, in the order in which they are read. FileNotFoundError if one is missing."""
    folder = folder or (_PACKAGED if _PACKAGED.is_dir() else _REPOSITORY)
    return {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in ORDER}


def write(boards: Mapping[str, Json], source: Prometheus, choice: Selection, folder: Path) -> list[JsonDict]:
    """Write a file per dashboard; returns its path, how many panels it has, and how many of them have data.

    CallError, and no folder, if nobody answers. OSError if the folder cannot be made, before anything is drawn, or a
    file not written.
    """
    scrape_s = source.scrape_s()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, panels in [(name, drawn(board, source, choice, scrape_s)) for name, board in boards.items()]:
        path, asked = folder / f"{name}.html", [one for one in panels if one.panel["type"] != "row"]
        path.write_text(rendered(boards, name, panels, choice), encoding="utf-8")
        written.append({"file": str(path), "panels": len(asked), "with_data": sum(not one.said for one in asked)})
    return written


def rendered(boards: Mapping[str, Json], name: str, panels: Sequence[Drawn], choice: Selection) -> str:
    """One dashboard, with links to the files of the others."""
    until, last = datetime.fromtimestamp(choice.now, UTC), format_duration(choice.last_s)
    page = environment(HERE / "templates", STYLES).get_template("board.html")
    return page.render(boards=boards, name=name, panels=panels, draw=draw, until=until, last=last)


def drawn(board: Json, source: Prometheus, choice: Selection, scrape_s: float) -> list[Drawn]:
    """Run all queries and draw them. CallError if nobody answers; panels tell which are refused, and why."""
    return [_panel(panel, source, choice, scrape_s) for panel in board["panels"]]


def variables(choice: Selection, step_s: float, scrape_s: float) -> dict[str, str]:
    """Values of variables in queries: a rate covers a step and a scrape, or four scrapes if longer, as in Grafana."""
    reach = max(step_s + scrape_s, LEAST_SCRAPES * scrape_s)
    times = {"__rate_interval": f"{reach * 1000:.0f}ms", "__range": f"{choice.last_s:.0f}s"}
    return {"store": ".*", "namespace": ".*", **times}


def _panel(panel: Json, source: Prometheus, choice: Selection, scrape_s: float) -> Drawn:
    if panel["type"] == "row":
        return Drawn(panel)
    width = panel["gridPos"]["w"] * COLUMN_PX - SIDES_PX
    height = panel["gridPos"]["h"] * CELL_PX - HEAD_PX
    step_s = max(scrape_s, choice.last_s / (width / POINT_PX))
    frame = Frame(choice.now - choice.last_s, choice.now, step_s, width, height, panel["title"])
    values = variables(choice, step_s, scrape_s)
    try:
        answers = [one for target in panel["targets"] for one in _ask(target, source, frame, values)]
    except QueryError as error:
        return Drawn(panel, said=f"refused: {error}")
    if not answers:
        return Drawn(panel, said="no data")
    return _drawn(panel, answers, frame)


def _drawn(panel: Json, answers: plot.Named, frame: Frame) -> Drawn:
    looks = panel["fieldConfig"]["defaults"]
    match panel["type"]:
        case "timeseries":
            return _lines(panel, looks, answers, frame)
        case "state-timeline":
            return _states(panel, looks, answers, frame)
        case "stat":
            return _number(panel, looks, answers[0][1].points, frame)
        case "bargauge":
            values = [(name, series.points[-1][1]) for name, series in answers]
            return Drawn(panel, bars=plot.bars(values, looks["unit"], looks.get("max")))
        case _:  # a trend, over the bytes in a label
            label = panel["options"]["xField"]
            points = [(float(series.labels[label]), series.points[-1][1]) for _, series in answers]
            return Drawn(panel, plot.curve(points, frame, looks["unit"]))


def _ask(target: Json, source: Prometheus, frame: Frame, values: Mapping[str, str]) -> plot.Named:
    """What is known, lines by name and instant values in the order of the answer."""
    expression = filled(target["expr"], values)
    if target["instant"]:
        found = source.query(expression, time=frame.end)
    else:
        start = frame.start // frame.step_s * frame.step_s  # as Grafana: the same moments whenever one looks
        found = source.query(expression, start=start, end=frame.end, step=frame.step_s)
    told = [(named(target["legendFormat"], series.labels), series) for series in found if series.points]
    return told if target["instant"] else sorted(told, key=itemgetter(0))


def _lines(panel: Json, looks: Json, answers: plot.Named, frame: Frame) -> Drawn:
    steps, frame = looks["custom"].get("lineInterpolation"), replace(frame, height=frame.height - LEGEND_PX)
    made = plot.lines(answers, frame, looks["unit"], steps=steps == "stepAfter")
    return Drawn(panel, made, legends=[(name, plot.colour(place)) for place, (name, _) in enumerate(answers)])


def _states(panel: Json, looks: Json, answers: plot.Named, frame: Frame) -> Drawn:
    words = {
        float(value): (word["text"], word["color"])
        for mapping in looks["mappings"]
        for value, word in mapping["options"].items()
    }
    rows = [(name, plot.stretches(series, frame, words)) for name, series in answers]
    legends = [(word, f"n-{colour}") for word, colour in words.values()]
    return Drawn(panel, rows=rows, clock=[label for _, label in frame.clock()], legends=legends)


def _number(panel: Json, looks: Json, points: plot.Points, frame: Frame) -> Drawn:
    value, steps = points[-1][1], looks["thresholds"]["steps"]
    *_, colour = (step["color"] for step in steps if step["value"] is None or value >= step["value"])
    return Drawn(panel, plot.spark(points, frame), figure=figure(value, looks["unit"]), colour=colour)


def filled(expression: str, values: Mapping[str, str]) -> str:
    """The query with its variables replaced. KeyError for one that has no value."""
    return _VARIABLE.sub(lambda match: values[match[1] or match[2]], expression)


def named(legend: str, labels: Mapping[str, str]) -> str:
    """A legend with its labels filled in; absent ones are left empty."""
    return _LABEL.sub(lambda match: labels.get(match[1], ""), legend).strip()
