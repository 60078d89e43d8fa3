"""A dashboard with the answers to its queries: what the page shows of each panel."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import itemgetter

from tiertune_agent.preview import plot
from tiertune_agent.preview.documents import Board, Panel, Target, filled, named
from tiertune_agent.preview.plot import Frame
from tiertune_agent.preview.prometheus import Prometheus, QueryError
from tiertune_agent.preview.units import figure
from tiertune_agent.web.charts import Chart

COLUMN_PX, CELL_PX = 58.0, 38.0
HEAD_PX, LEGEND_PX, SIDES_PX = 34.0, 40.0, 26.0
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
class Legend:
    name: str
    colour: str
    """Its class in the style."""


@dataclass(frozen=True)
class Drawn:
    """One panel, with one of the drawings at most; ``said``: why there is none."""

    panel: Panel
    chart: Chart | None = None
    """For a number: its course."""
    rows: tuple[tuple[str, tuple[plot.Stretch, ...]], ...] = ()
    clock: tuple[str, ...] = ()
    """Below the rows, each in the middle of an equal part."""
    bars: tuple[plot.Bar, ...] = ()
    figure: str = ""
    colour: str = ""
    legends: tuple[Legend, ...] = ()
    said: str = ""


@dataclass(frozen=True)
class Page:
    board: Board
    choice: Selection
    panels: tuple[Drawn, ...]

    @property
    def until(self) -> str:
        return datetime.fromtimestamp(self.choice.now, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

    @property
    def with_data(self) -> int:
        return sum(not one.said for one in self.panels if one.panel.kind != "row")

    @property
    def shown(self) -> int:
        return sum(one.panel.kind != "row" for one in self.panels)


def page(board: Board, source: Prometheus, choice: Selection, scrape_s: float) -> Page:
    """Run all queries and draw them. CallError if nobody answers; the page tells which are refused, and why."""
    return Page(board, choice, tuple(_panel(panel, source, choice, scrape_s) for panel in board.panels))


def variables(choice: Selection, step_s: float, scrape_s: float) -> dict[str, str]:
    """Values of variables in queries: a rate covers a step and a scrape, or four scrapes if longer, as in Grafana."""
    reach = max(step_s + scrape_s, LEAST_SCRAPES * scrape_s)
    times = {"__rate_interval": f"{reach * 1000:.0f}ms", "__range": f"{choice.last_s:.0f}s"}
    return {"store": ".*", "namespace": ".*", **times}


def _panel(panel: Panel, source: Prometheus, choice: Selection, scrape_s: float) -> Drawn:
    if panel.kind == "row":
        return Drawn(panel)
    width = panel.width * COLUMN_PX - SIDES_PX
    height = panel.height * CELL_PX - HEAD_PX
    step_s = max(scrape_s, choice.last_s / (width / POINT_PX))
    frame = Frame(choice.now - choice.last_s, choice.now, step_s, width, height, panel.title)
    values = variables(choice, step_s, scrape_s)
    try:
        answers = [one for target in panel.targets for one in _ask(target, source, frame, values)]
    except QueryError as error:
        return Drawn(panel, said=f"refused: {error}")
    if not answers:
        return Drawn(panel, said="no data")
    return _drawn(panel, answers, frame)


def _drawn(panel: Panel, answers: plot.Named, frame: Frame) -> Drawn:
    match panel.kind:
        case "timeseries":
            return _lines(panel, answers, frame)
        case "state-timeline":
            return _states(panel, answers, frame)
        case "stat":
            return _number(panel, answers[0][1].points, frame)
        case "bargauge":
            values = [(name, series.points[-1][1]) for name, series in answers]
            return Drawn(panel, bars=plot.bars(values, panel.unit, panel.most))
        case "trend":
            points = [(float(series.labels[panel.x_label]), series.points[-1][1]) for _, series in answers]
            return Drawn(panel, plot.curve(points, frame, panel.unit))
        case other:
            return Drawn(panel, said=f"a preview knows no panels of the kind {other}")


def _ask(target: Target, source: Prometheus, frame: Frame, values: Mapping[str, str]) -> plot.Named:
    """What is known, lines by name and instant values in the order of the answer."""
    expression = filled(target.expr, values)
    start = frame.start // frame.step_s * frame.step_s  # as Grafana: the same moments whenever one looks
    if target.instant:
        found = source.at(expression, frame.end)
    else:
        found = source.over(expression, start, frame.end, frame.step_s)
    told = [(named(target.legend, series.labels), series) for series in found if series.points]
    return told if target.instant else sorted(told, key=itemgetter(0))


def _lines(panel: Panel, named: plot.Named, frame: Frame) -> Drawn:
    made = plot.lines(named, replace(frame, height=frame.height - LEGEND_PX), panel.unit, steps=panel.steps)
    legends = (Legend(name, plot.colour(place)) for place, (name, _) in enumerate(named))
    return Drawn(panel, made, legends=tuple(legends))


def _states(panel: Panel, named: plot.Named, frame: Frame) -> Drawn:
    rows = ((name, plot.stretches(series, frame, panel.words)) for name, series in named)
    legends = (Legend(word, f"n-{colour}") for word, colour in panel.words.values())
    clock = (tick.label for tick in frame.clock())
    return Drawn(panel, rows=tuple(rows), clock=tuple(clock), legends=tuple(legends))


def _number(panel: Panel, points: plot.Points, frame: Frame) -> Drawn:
    value = points[-1][1]
    colour = [colour for least, colour in panel.thresholds if value >= least]
    shown = figure(value, panel.unit)
    return Drawn(panel, plot.spark(points, frame), figure=shown, colour=colour[-1] if colour else "text")
