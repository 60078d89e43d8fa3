"""What the panels draw: series in, charts out. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from tiertune_agent.preview import prometheus
from tiertune_agent.preview.units import figure, moments, ticks
from tiertune_agent.web.charts import Chart, Point, Series, Tick, joined, stepped

TICK_PX = 100.0
GAP_STEPS = 1.5
"""A line breaks between points that are more steps apart than this: some are missing there."""
ROW_MOST, ROW_SHARE, ROW_LETTERS = 34.0, 0.42, 26
WORD_PX, WORD_ROOM = 7.0, 0.6
COLOURS, LETTER_PX = 10, 11
Points = Sequence[Point]
Named = Sequence[tuple[str, prometheus.Series]]


@dataclass(frozen=True)
class Frame:
    """Time that a drawing covers, its size in pixels, and its name."""

    start: float
    end: float
    step_s: float
    width: float
    height: float
    label: str = ""


def lines(named: Named, frame: Frame, unit: str, *, stacked: bool, steps: bool) -> Chart:
    """Lines over time; stacked ones each stand on the one before."""
    drawn = _stack([series.points for _, series in named]) if stacked else [(s.points, ()) for _, s in named]
    scale = _scale((value for points, _ in drawn for _, value in points), unit)
    made: list[Series] = []
    for place, ((name, _), (points, floor)) in enumerate(zip(named, drawn, strict=True)):
        kind, below = f"c{place % COLOURS}", dict(floor)
        runs = broken(points, frame.step_s)
        paths = [stepped(run) if steps else run for run in runs if len(run) > 1]
        if stacked:
            areas = ([*run, *((at, below.get(at, 0.0)) for at, _ in reversed(run))] for run in paths)
            made.append(Series(f"area {kind}", joined(areas), name, filled=True))
        made.append(Series(kind, joined(paths), name))
        alone = tuple(run[0] for run in runs if len(run) == 1)
        if alone:
            made.append(Series(kind, alone, name, line=False, dots=2.0))
    return _over_time([one for one in made if one.points], frame, (scale[0].at, scale[-1].at), scale)


def _over_time(series: Sequence[Series], frame: Frame, y: Point, ys: Sequence[Tick]) -> Chart:
    """A chart between the lowest and the highest ``y``."""
    count = max(2, int(frame.width / TICK_PX))
    xs = tuple(Tick(at, label) for at, label in moments(frame.start, frame.end, count))
    return _framed(Chart("", tuple(series), (frame.start, frame.end), y, xs=xs, ys=tuple(ys)), frame)


def _framed(chart: Chart, frame: Frame) -> Chart:
    return replace(chart, label=frame.label, width=int(frame.width), height=int(frame.height), letter=LETTER_PX)


def _scale(values: Iterable[float], unit: str) -> tuple[Tick, ...]:
    """Round ticks whose range holds all values and zero."""
    known = [0.0, *values]
    low, high = min(known), max(known)
    return tuple(Tick(mark, figure(mark, unit)) for mark in ticks(low, high if high > low else low + 1.0, unit))


def _stack(columns: Sequence[Points]) -> list[tuple[Points, Points]]:
    """Each column on top of those before it, and what it stands on."""
    height: dict[float, float] = {}
    stacked: list[tuple[Points, Points]] = []
    for points in columns:
        foot = [(at, height.get(at, 0.0)) for at, _ in points]
        top = [(at, value + under) for (at, value), (_, under) in zip(points, foot, strict=True)]
        height.update(top)
        stacked.append((top, foot))
    return stacked


def broken(points: Points, step_s: float) -> list[list[Point]]:
    """The points in runs without a gap."""
    runs: list[list[Point]] = []
    for point in points:
        if runs and point[0] - runs[-1][-1][0] <= GAP_STEPS * step_s:
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs


def cells(series: prometheus.Series, step_s: float) -> list[tuple[float, float, float]]:
    """Value, begin and end (Unix seconds) of each stretch of one value, up to the next point.

    Before a gap it ends a step beyond its last point.
    """
    found = []
    for run in broken(series.points, step_s):
        ends = [at for at, _ in run[1:]] + [run[-1][0] + step_s]
        for value, held in groupby(zip(run, ends, strict=True), key=lambda point: point[0][1]):
            spans = list(held)
            found.append((value, spans[0][0][0], spans[-1][1]))
    return found


def states(named: Named, frame: Frame, words: Mapping[float, tuple[str, str]]) -> Chart:
    """A row per series, the first at the top; an area in its colour per stretch, with its word if that fits."""
    rows = [(name, cells(series, frame.step_s)) for name, series in named]
    top = len(rows) - 0.5
    y = (top - max(len(rows), frame.height / ROW_MOST), top)
    areas: dict[tuple[str, str], list[list[Point]]] = {}
    written: list[tuple[Point, str]] = []
    for place, (_, held) in enumerate(rows):
        middle = float(len(rows) - 1 - place)
        for value, since, end in held:
            word, colour = words.get(value, (str(value), "text"))
            low, high, until = middle - ROW_SHARE, middle + ROW_SHARE, min(end, frame.end)
            begin = max(since, frame.start)
            corners = [(begin, low), (begin, high), (until, high), (until, low)]
            areas.setdefault((word, colour), []).append(corners)
            room = WORD_ROOM * frame.width * (until - begin) / (frame.end - frame.start)
            if room > WORD_PX * len(word):
                written.append((((begin + until) / 2, middle), word))
    series = [Series(f"state n-{colour}", joined(each), word, filled=True) for (word, colour), each in areas.items()]
    if written:
        series.append(Series("word", tuple(at for at, _ in written), line=False, words=tuple(w for _, w in written)))
    ys = [
        Tick(float(len(rows) - 1 - place), shortened(name, ROW_LETTERS), name) for place, (name, _) in enumerate(rows)
    ]
    return replace(_over_time(series, frame, y, ys), kind="states")


@dataclass(frozen=True)
class Bar:
    name: str
    share: float
    """Share of a full bar."""
    label: str
    colour: int


def bars(named: Sequence[tuple[str, float]], unit: str, full: float | None) -> tuple[Bar, ...]:
    """Bars in the order given. ``full``: value of a full bar; None: the largest. Below 0 there is only a figure."""
    most = full or max((value for _, value in named), default=0.0)
    return tuple(
        Bar(name, min(1.0, max(0.0, value) / most) if most > 0 else 0.0, figure(value, unit), place % COLOURS)
        for place, (name, value) in enumerate(named)
    )


def curve(points: Points, frame: Frame, unit: str, x_unit: str) -> Chart:
    """A line over numbers, from 0 on."""
    points = sorted(points)
    ys, xs = _scale((y for _, y in points), unit), ticks(0.0, max((x for x, _ in points), default=1.0), x_unit)
    named = tuple(Tick(mark, figure(mark, x_unit)) for mark in xs)
    line = Series("c0", tuple(points), dots=3.0)
    return _framed(Chart("", (line,), (0.0, xs[-1]), (ys[0].at, ys[-1].at), xs=named, ys=ys), frame)


def spark(points: Points, frame: Frame) -> Chart | None:
    """The course of a figure, over the whole width and without axes. None for fewer than two points."""
    values = [value for _, value in points]
    if len(values) < 2:
        return None
    low, high = min(0.0, *values), max(0.0, *values)
    foot = [(points[-1][0], low), (points[0][0], low)]
    series = (Series("area", (*points, *foot), filled=True), Series("line", tuple(points)))
    y = (low, high if high > low else low + 1.0)
    return _framed(Chart("", series, (frame.start, frame.end), y, kind="spark"), frame)


def shortened(name: str, letters: int) -> str:
    """A name, cut to ``letters`` if it is longer."""
    return name if len(name) <= letters else f"{name[: letters - 1]}…"
