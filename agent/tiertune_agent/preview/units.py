"""Figures with the units that panels name, as Grafana calls them. Pure."""

from collections.abc import Sequence
from datetime import UTC, datetime
from math import ceil, floor, log10

from tiertune_agent.web.text import POWERS

_SUFFIXES = {"Bps": "/s", "reqps": " req/s", "ops": " ops/s"}
_BINARY = ((2.0**40, " TiB"), (2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB"), (1.0, " B"))
_DECIMAL = (*POWERS, (1.0, " "))
_PREFIXED = {"watt": "W", "joule": "J"}
_SECONDS = ((86400.0, " d"), (3600.0, " h"), (60.0, " min"), (1.0, " s"), (1e-3, " ms"), (1e-6, " µs"))
_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_TICKS = 4


def figure(value: float, unit: str) -> str:
    """``12.4 k``, ``81 %``, ``3.2 ms``, ``10.0 MiB/s``: three digits or so."""
    if unit == "percentunit":
        return f"{_digits(value * 100)} %"
    if unit == "s":
        return _scaled(value, _SECONDS) if value else "0 s"
    if unit in ("bytes", "Bps"):
        return _scaled(value, _BINARY) + _SUFFIXES.get(unit, "")
    return (_scaled(value, _DECIMAL) + _PREFIXED.get(unit, "")).rstrip() + _SUFFIXES.get(unit, "")


def _scaled(value: float, scales: Sequence[tuple[float, str]]) -> str:
    """The value in the largest unit of which it has at least one; else in the last."""
    scale, name = next((each for each in scales if abs(value) >= each[0]), scales[-1])
    return f"{_digits(value / scale)}{name}"


def _digits(value: float) -> str:
    """Three significant digits, without zeros at the end."""
    if not value:
        return "0"
    places = max(0, 2 - floor(log10(abs(value))))
    text = f"{value:.{min(places, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ticks(low: float, high: float, unit: str) -> list[float]:
    """Round values from at most ``low`` to at least ``high``, in about four steps."""
    span = (high - low) or 1.0
    base = 2.0 if unit in ("bytes", "Bps") else 10.0
    steps = (1.0,) if base == 2.0 else (1.0, 2.0, 5.0, 10.0)
    power = base ** floor(log10(span / _TICKS) / log10(base))
    step = next((power * each for each in steps if power * each * _TICKS >= span), power * base)
    first = floor(low / step)
    found = [first * step]
    while found[-1] < high - step * 1e-9:
        found.append((first + len(found)) * step)
    return found


def moments(start: float, end: float, count: int) -> list[tuple[float, str]]:
    """Round times (Unix seconds, UTC) within a range, ``count`` or one more, and how a clock shows them."""
    days = _TIME_STEPS[-1] * ceil((end - start) / count / _TIME_STEPS[-1])
    step = next((each for each in _TIME_STEPS if (end - start) / each <= count), days)
    form = "%H:%M:%S" if step < 60 else "%H:%M" if step < 43200 else "%d %b"
    first = floor(start / step) + 1
    return [
        (float(place * step), datetime.fromtimestamp(place * step, UTC).strftime(form))
        for place in range(first, floor(end / step) + 1)
    ]
