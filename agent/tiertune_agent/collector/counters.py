"""Differences of two readings of a store's counters. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from tiertune_agent.collector.schema import NUMBER, SQUARE, check
from tiertune_agent.fields import Json
from tiertune_agent.records import OBSERVED, Histogram, StageWindow, Value, Window, cut, series
from tiertune_connector.catalogue import BY_NAME

FASTEST = 2.0**43
"""No counter of a store but ``SQUARED`` grows by as much per second: bytes do not, and nothing is counted as often."""
SQUARED = "sum", "tokens2"
"""The label of squares: that of one long prompt is above a million millions."""
Labels = tuple[tuple[str, str], ...]
Rows = dict[tuple[str, Labels], Value]
Place = tuple[str, str, str]
"""Namespace, model and tier, which say to which window a row belongs."""
OF_STAGE = {
    ("stage_gpu_seconds_total", ""): "gpu_seconds",
    ("stage_tokens_total", ""): "tokens",
    ("gpu_utilization_ratio", ""): "utilization",
    ("gpu_memory_bytes", "used"): "memory_used_bytes",
    ("gpu_memory_bytes", "free"): "memory_free_bytes",
    ("gpu_power_watts", ""): "power_watts",
    ("gpu_energy_joules_total", ""): "energy_joules",
}
"""Fields of a stage's window, by metric and state."""
SOMEWHERE = "unknown"
"""The tier for hits that a source does not report by tier, so that shares of the prompts stay right."""


class Leapt(ValueError):  # noqa: N818 (what it did)
    """A counter grew by more than is possible; the message says which."""


@dataclass(frozen=True)
class Reading:
    """``GET /v1/counters`` of one store, parsed."""

    store: str
    boot_id: str
    time_s: float
    rows: Rows


def parse(document: Json) -> Reading:
    """The reading in an answer; KeyError, TypeError or ValueError if it holds none."""
    rows: Rows = {}
    for name, table in document["metrics"].items():
        names = table["labels"]
        "".join(names)  # TypeError where one is no text
        for row in table["rows"]:
            "".join(row[: len(names)])
            labels = tuple(zip(names, row[: len(names)], strict=True))
            rows[name, labels] = _value(name, row[len(names) :], SQUARE if SQUARED in labels else NUMBER)
    store, time_s = document["store"], document["time_s"]
    if not isinstance(store, str) or not cut(store):
        raise TypeError(f"its name is {store!r:.50}")
    check(time_s, NUMBER, "its time")
    return Reading(cut(store), str(document["boot_id"]), float(time_s), rows)


def _value(name: str, cells: list[Any], most: float) -> Value:
    if len(cells) == 1:
        check(cells[0], most, name)
        return float(cells[0])
    buckets, total, count = cells
    for told in (*buckets, total, count):
        check(told, NUMBER, name)
    return Histogram(float(count), float(total), {index: float(n) for index, n in enumerate(buckets) if n})


def windows(
    before: Reading, after: Reading, at: datetime, *, still: bool = False
) -> tuple[tuple[Window, ...], tuple[StageWindow, ...]]:
    """What was counted between two readings, the later one taken ``at``.

    After another boot everything since then counts (the counters began at 0). ``still``: for observed sources, whose
    windows are marked as such; includes what did not move, as 0, because what is missing there counts as unknown.
    Raises Leapt if a counter grew by more than is possible.
    """
    seconds = after.time_s - before.time_s
    known = before.rows if before.boot_id == after.boot_id else {}
    start = at - timedelta(seconds=seconds)
    places: dict[Place, dict[str, Value]] = {}
    marks: dict[str, Value] = {OBSERVED: 1.0} if still else {}
    stages: dict[tuple[str, str, str], dict[str, Any]] = {}
    for name, labels, value in _moved(known, after.rows, seconds, still):
        if name.startswith(("stage_", "gpu_")) and not isinstance(value, Histogram):
            of = dict(labels)
            place = of.get("stage", ""), of.get("phase", ""), of.get("gpu", "")
            told = stages.setdefault(place, {"gpu_seconds": 0.0, "tokens": 0.0})
            if field := OF_STAGE.get((name, of.get("state", ""))):
                told[field] = int(value) if field.endswith("_bytes") else value
        else:
            where, called = _placed(name, labels)
            places.setdefault(where, dict(marks))[called] = value
    return (
        tuple(Window(after.store, *place, start, seconds, values) for place, values in places.items()),
        tuple(StageWindow(after.store, *place, start, seconds, **values) for place, values in stages.items()),
    )


@lru_cache(maxsize=16_384)
def _placed(name: str, labels: Labels) -> tuple[Place, str]:
    """Which window a row belongs to, and its name there; cached, as every store has the same few hundred.

    An empty label is the same as none: what concerns a whole tier is one window.
    """
    told = dict(labels)
    place = cut(told.get("namespace", "")), told.get("model", ""), cut(told.get("tier", ""))
    return place, series(name, ((label, text) for label, text in labels if label not in ("namespace", "model", "tier")))


def _moved(before: Rows, after: Rows, seconds: float, still: bool) -> Iterator[tuple[str, Labels, Value]]:
    """Gauges as they are; the growth of counters and histograms, if they grew or ``still`` ones count too.

    Raises Leapt if a counter grew by more than is possible in so many seconds.
    """
    for (name, labels), value in after.items():
        earlier = before.get((name, labels))
        if is_gauge(name):
            yield name, labels, value
        elif still and before and earlier is None and ("tier", SOMEWHERE) in labels:
            continue  # so far its tokens were reported by tier, and counted there
        elif isinstance(value, Histogram):
            grown = _grown(earlier, value)
            if grown.count or still:
                yield name, labels, grown
        else:
            old = earlier if isinstance(earlier, float) else 0.0
            grown_by = value - old if value >= old else value  # a counter that fell was reset
            fastest = FASTEST**2 if SQUARED in labels else FASTEST
            if grown_by > fastest * max(1.0, seconds):
                raise Leapt(f"{name} grew by {grown_by:.3g} in {seconds:.3g} s")
            if grown_by or still:
                yield name, labels, grown_by


def is_gauge(name: str) -> bool:
    """Whether a store's metric is a value at one time rather than a count."""
    metric = BY_NAME.get(name)
    return metric.kind == "gauge" if metric else not name.endswith("_total")


def _grown(earlier: Value | None, now: Histogram) -> Histogram:
    if not isinstance(earlier, Histogram) or earlier.count > now.count:
        return now
    buckets = {index: count - earlier.buckets.get(index, 0.0) for index, count in now.buckets.items()}
    moved = {index: count for index, count in buckets.items() if count}
    return Histogram(now.count - earlier.count, now.sum - earlier.sum, moved)
