"""Durations and sizes as operators write them: ``30s``, ``6h``, ``64GiB``; counts as sentences have them."""

import re
from collections.abc import Callable
from math import isfinite
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_LEAST_SIZE = 4096
"""In fewer bytes no chunk fits."""
_NUMBER_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


Clock = Callable[[], float]
"""Tells monotonic seconds, from any start."""


def _parse(value: Any, units: dict[str, float] | dict[str, int], example: str) -> float:  # noqa: ANN401
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected a number or text such as {example}")  # noqa: TRY004
    if isinstance(value, int | float):
        return _finite(value, example)
    match = _NUMBER_UNIT.fullmatch(value.strip())
    if not match or match[2] not in units:
        raise ValueError(
            f"{value!r} is not understood: write it as {example}; units are {', '.join(filter(None, units))}"
        )
    return _finite(float(match[1]) * units[match[2]], example)


def _finite(number: float, example: str) -> float:
    try:
        if isfinite(number):
            return float(number)
    except OverflowError:  # an integer beyond every float
        pass
    raise ValueError(f"expected a finite number or text such as {example}")


def parse_duration(value: object) -> float:
    """Seconds from ``90``, ``30s``, ``10m``, ``6h`` or ``2d``; ValueError says how to write it."""
    return _parse(value, _SECONDS, "30s, 10m or 6h")


def parse_size(value: object) -> int:
    """Bytes from ``1024``, ``512MiB`` or ``64GiB``; ValueError says how to write it."""
    return int(_parse(value, _BYTES, "512MiB or 64GiB"))


def parse_useful_size(value: object) -> int:
    """As ``parse_size``, but no size in which no chunk fits: it has lost its unit, as ``64`` has."""
    if 0 < _parse(value, _BYTES, "512MiB or 64GiB") < _LEAST_SIZE:
        raise ValueError(
            f"{value} is less than {_LEAST_SIZE} bytes, so that no chunk fits: write it as 512MiB or 64GiB"
        )
    return parse_size(value)


def unit_of(text: str) -> str:
    """Unit of a number written like this: ``seconds`` for 10m, ``bytes`` for 1GiB; empty if it has none."""
    match = _NUMBER_UNIT.fullmatch(text.strip())
    unit = match[2] if match else ""
    return "seconds" if unit in _SECONDS else "bytes" if unit and unit in _BYTES else ""


_TEXT = Annotated[str, Field(pattern=rf"^\s*{_NUMBER_UNIT.pattern}\s*$")]
_YEAR_S = 366 * 86400.0
Duration = Annotated[
    float,
    BeforeValidator(parse_duration, json_schema_input_type=float | _TEXT),
    Field(ge=0, le=_YEAR_S, allow_inf_nan=False),
]
"""Seconds, written as ``30s``; at most a year, so that it can be added to dates."""
Size = Annotated[int, BeforeValidator(parse_useful_size, json_schema_input_type=int | _TEXT), Field(ge=0)]
"""Bytes, written as ``64GiB``; none, or at least 4096."""


def format_count(number: float, noun: str) -> str:
    """``1 window``, ``2 windows``."""
    return f"{number:.0f} {noun}{'s' * (round(number) != 1)}"


def format_size(count: float) -> str:
    """``1.5 GiB`` from bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_duration(seconds: float) -> str:
    """``2m 05s``, ``3h 10m`` or ``0.4 s`` from seconds."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"
