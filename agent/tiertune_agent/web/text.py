"""Figures as the page writes them: few digits, a unit, a sign where it matters."""

from datetime import UTC, datetime
from typing import Any

from tiertune_connector.units import format_duration, format_size

NOTHING = "\u2013"
SOON_S = 10.0
POWERS = ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k"))
"""Powers of a thousand, and their suffixes."""


def count(number: float | None) -> str:
    """``950``, ``12.4 k``, ``3.1 M``."""
    if number is None:
        return NOTHING
    for power, unit in POWERS:
        if abs(number) >= 0.9995 * power:  # else it might be written as a thousand of the unit below
            return f"{number / power:.1f}{unit}"
    return f"{number:.0f}"


def share(part: float | None, whole: float | None) -> str:
    """Per cent; a dash if the whole is nothing, or something is not known."""
    return f"{part / whole:.1%}" if whole and part is not None else NOTHING


def seconds(value: float | None) -> str:
    """A cost or an account: ``0``, ``4.2 ms``, ``0.35 s``, ``2m 05s``; a minus sign where it is negative."""
    if value is None:
        return NOTHING
    if not value:
        return "0"
    size, sign = abs(value), "−" if value < 0 else ""  # noqa: RUF001 (a minus sign, as wide as a plus)
    if size < 0.0995:
        return f"{sign}{size * 1e3:.2g} ms"
    return f"{sign}{size:.2f} s" if size < 1 else sign + format_duration(size)


def money(value: float) -> str:
    """In any currency: at least two digits, unless it is hardly anything, and no power of ten."""
    return f"{value:,.0f}" if abs(value) >= 10 else f"{round(value, 4) + 0.0:.2g}"  # 0.0: else "-0"


def signed(value: float | None) -> str:
    """Like ``seconds``, with a plus if something was gained."""
    return f"+{seconds(value)}" if value and value > 0 else seconds(value)


def span(length_s: float) -> str:
    """A round length: ``30 s``, ``2 min``, ``24 h``."""
    for unit_s, name in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if length_s >= 2 * unit_s:
            units = length_s / unit_s
            return f"{units:.0f} {name}" if units >= 10 else f"{units:.2g} {name}"
    return f"{length_s:.2g} s"


def ago(then: datetime, now: datetime) -> str:
    """Coarse, so that a page that refreshes itself stays calm."""
    passed = max(0.0, (now - then).total_seconds())
    if passed < SOON_S:
        return "just now"
    if passed < 60:
        return f"{passed // 10 * 10:.0f} s ago"
    for limit, unit, name in ((3600, 60, "min"), (172800, 3600, "h")):
        if passed < limit:
            return f"{passed // unit:.0f} {name} ago"
    return f"{passed // 86400:.0f} days ago"


def moment(text: str) -> datetime:
    """From ISO 8601, aware."""
    then = datetime.fromisoformat(text)
    return then.replace(tzinfo=UTC) if then.tzinfo is None else then


def figure(name: str, value: Any) -> str:  # noqa: ANN401 (JSON)
    """One value of a decision or its evidence; ``name`` tells the unit."""
    if value is None:
        return NOTHING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _clock(value) if name in ("start", "at") else str(value)
    if name.endswith("_bytes") or name == "bytes":
        return format_size(value)
    if name.endswith("_s") or name == "seconds":
        return signed(value) if name == "gain_s" else seconds(value)
    whole = value == round(value) or abs(value) >= 1000
    return f"{value:,.0f}" if whole else f"{value:.4g}"


def title(name: str) -> str:
    """A field's name as a column's, without its unit, which stands at the values."""
    return name.removesuffix("_bytes").removesuffix("_s").replace("_", " ")


def _clock(value: object) -> str:
    try:
        return f"{moment(str(value)):%H:%M:%S}"
    except ValueError:
        return str(value)
