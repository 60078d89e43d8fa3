"""What the page and the report draw over time: seconds of requests, a share that changes at once. Pure."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from math import ceil, floor, inf, log10

from tiertune_agent.web.charts import Chart, Point, Series, joined, stepped
from tiertune_agent.web.figures import Cost, Span
from tiertune_agent.web.text import ago, span

SHARES = tuple((share, f"{share:.0%}") for share in (0.0, 0.25, 0.5, 0.75, 1.0))
OFF = "off"
"""Series of the times without fetches from the tier."""


def cost_chart(store: str, costs: Sequence[Cost], off: Sequence[Span], now: datetime, fresh: timedelta) -> Chart | None:
    """Two lines up to the newest cost, seconds on a logarithmic axis. None with fewer than two costs: there is no line.

    The chart stays the same until there is a new cost; one that is not ``fresh`` is not called now.
    """
    known = [one for one in costs if 0 < one.fetch_s < inf and 0 < one.recompute_s < inf]
    if len(known) < 2:
        return None
    first, last = known[0].at, known[-1].at
    values = [log10(value) for one in known for value in (one.fetch_s, one.recompute_s)]
    low, high = floor(min(values)), ceil(max(values))
    high = max(high, low + 1)

    def x(at: datetime) -> float:
        return (min(max(at, first), last) - last).total_seconds()

    began, ended = (f"{span(-x(first))} ago", "now") if now - last <= fresh else (ago(first, now), ago(last, now))
    spans = [(x(start), x(end)) for start, end in off]
    areas = joined([(start, low), (start, high), (end, high), (end, low)] for start, end in spans if start < end)
    return Chart(
        label=f"Seconds per request on {store}: fetching from remote against recomputing",
        series=(
            *([Series(OFF, areas, "fetch off")] if areas else ()),
            Series("recompute", tuple((x(one.at), log10(one.recompute_s)) for one in known), "recompute"),
            Series("fetch", tuple((x(one.at), log10(one.fetch_s)) for one in known), "fetch from remote"),
        ),
        x=(x(first), 0.0),
        y=(low, high),
        xs=((x(first), began), (0.0, ended)),
        ys=tuple((float(power), _power(power)) for power in range(low, high + 1)),
        kind="cost",
    )


def step_chart(steps: Sequence[Point], until_s: float, marks: Sequence[tuple[float, str]]) -> Chart:
    """A share (0 to 1) that holds until its next value.

    ``steps``: start and share, the first at 0; ``marks``: time and text.
    """
    until_s = max(until_s, *(at for at, _ in steps), *(at for at, _ in marks), 1.0)
    corners = [*stepped(steps), (until_s, steps[-1][1])]
    found = tuple((at, [share for start, share in steps if start <= at][-1]) for at, _ in marks)
    return Chart(
        label="Remote share over time",
        series=(
            Series("area", ((corners[0][0], 0.0), *corners, (until_s, 0.0))),
            Series("line", tuple(corners)),
            Series("mark", found, line=False, dots=3.5, tips=tuple(name for _, name in marks)),
        ),
        x=(0.0, until_s),
        y=(0.0, 1.0),
        xs=tuple((until_s * part, span(until_s * part)) for part in (0.25, 0.5, 0.75, 1.0)),
        ys=SHARES,
        kind="split",
    )


def _power(power: int) -> str:
    """``10 µs``, ``1 ms``, ``100 s``."""
    for exponent, unit in ((0, "s"), (-3, "ms"), (-6, "µs")):
        if power >= exponent:
            return f"{10 ** (power - exponent)} {unit}"
    return f"1e{power} s"
