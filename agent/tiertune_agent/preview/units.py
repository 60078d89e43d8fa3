"""Figures with the units that panels name, as Grafana calls them. Pure."""

from collections.abc import Sequence
from decimal import Decimal
from math import ceil, floor, log10

from tiertune_agent.web.text import POWERS

_BYTES = ((2.0**40, " TiB"), (2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB"), (1.0, " B"))
_DECIMAL = (*POWERS, (1.0, " "))
_SCALES: dict[str, Sequence[tuple[float, str]]] = {
    "percentunit": ((0.01, " %"),),
    "s": ((86400.0, " d"), (3600.0, " h"), (60.0, " min"), (1.0, " s"), (1e-3, " ms"), (1e-6, " µs")),
    "bytes": _BYTES,
    "Bps": _BYTES,
}
_SUFFIXES = {"Bps": "/s", "reqps": "req/s", "ops": "ops/s", "watt": "W", "joule": "J"}
_STEPS = 5
"""Of an axis, at most."""


def figure(value: float, unit: str) -> str:
    """``12.4 k``, ``81 %``, ``3.2 ms``, ``10 MiB/s``: three digits or so."""
    scale, name = _scale(float(f"{value:.3g}"), unit)  # 999,999 is 1 M
    digits = Decimal(f"{value / scale + 0.0:.3g}")  # 0.0: else "-0"
    return f"{digits:,f}{name}{_SUFFIXES.get(unit, '')}".rstrip()


def ticks(low: float, high: float, unit: str) -> list[float]:
    """Values between ``low`` and a higher ``high`` that are round in the unit in which they are written."""
    scale, _ = _scale(max(-low, high), unit)
    least = (high - low) / scale / _STEPS
    power = 10.0 ** floor(log10(least))
    step = scale * power * next((each for each in (1, 2, 5) if each * power >= least), 10)
    return [step * place for place in range(ceil(low / step), floor(high / step) + 1)]


def _scale(value: float, unit: str) -> tuple[float, str]:
    """The largest unit of which the value has at least one, else the smallest; for 0 the plain one."""
    scales = _SCALES.get(unit, _DECIMAL)
    return next((each for each in scales if (abs(value) or 1.0) >= each[0]), scales[-1])
