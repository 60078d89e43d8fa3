"""A decision's figures side by side, before, promised, after and without it; its evidence as small tables. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiertune_agent.fields import Json
from tiertune_agent.records import UNJUDGED, Decision, State
from tiertune_agent.tuners.evidence import ERRORS
from tiertune_agent.tuners.remote_fetch import Evidence
from tiertune_agent.tuners.tier_size import size_of
from tiertune_agent.verdicts.trials import HELD_OUT, measure
from tiertune_agent.web.charts import Bars, Piece
from tiertune_agent.web.text import figure, title
from tiertune_connector.units import format_size
from tiertune_connector.whatif.chain import Shape

SHOWN_ROWS = 30
SHAPES = ("shape", "best")
"""Keys of evidence that hold the sizes of all tiers, written as a shape."""
OF = {
    "size": "seconds to the first token per request",
    "eviction": "missed share of the prompts",
    "fetch": "cost of what could be fetched, recomputing being 1",
}
"""What a proposal's own figures measure, in its verdict's words."""
OPEN = (State.PROPOSED, *UNJUDGED)
"""States in which only what was before and what is promised are known."""


@dataclass(frozen=True)
class Compared:
    """The figures as the API shows them. Lower is better. None: not known."""

    of: str
    sentence: str
    before: float | None = None
    """Measured before the change, when it was proposed."""
    promised: float | None = None
    after: float | None = None
    """With the new setting, during its soak: simulated or estimated like ``without``, except for ``admission``."""
    without: float | None = None
    """The counterfactual: the old setting on the same requests, or on a holdout's; unknown of different spells."""
    doubt: float | None = None
    """Two standard errors of the change's effect."""
    windows: int | None = None

    @property
    def chart(self) -> Bars:
        spells = self.after is not None and self.without is None
        after = "After, as it is" if spells else "With the change"
        told = {
            "Before the change": self.before,
            "Promised": self.promised,
            after: self.after,
            "Without the change": self.without,
        }
        rows = tuple(f"{name}: {'unknown' if value is None else f'{value:.3g}'}" for name, value in told.items())
        pieces = (
            Piece("column", (self.before, self.promised, None, None)),
            Piece("after", (None, None, self.after, None), (None, None, self.doubt, None)),
            Piece("without", (None, None, None, self.without)),
        )
        against = self.before if self.without is None else self.without
        top = max(0.0, *filter(None, told.values()), (self.after or 0.0) + (self.doubt or 0.0))
        return Bars(f"{self.of}: {', '.join(rows)}", rows, pieces, top or 1.0, against)


def compared(decision: Decision, verdicts: Sequence[Json]) -> Compared | None:
    """The figures; None if there are none to compare: nothing measures the change, or it was never made."""
    kind = measure(decision)
    weighed = next((one["evidence"] for one in verdicts if "before" in one["evidence"]), None)
    before, promised = _promise(decision, kind)
    if weighed is None:
        if not kind or decision.state not in OPEN or (decision.state == State.PROPOSED and promised is None):
            return None
        return Compared(OF.get(kind, "cost"), _soaking(decision), before, promised)
    old, new, of, windows = (weighed[name] for name in ("before", "after", "of", "windows"))
    doubt = ERRORS * weighed["standard_error"]
    if kind == "admission":  # two spells: nobody simulates what a tier would have held
        told = f"{_change(old, new, doubt)} than before; without the change is not known: the requests are others."
        return Compared(of, told, before=old, after=new, doubt=doubt, windows=windows)
    if of != OF.get(kind):
        before = promised = None  # in another unit
    how = "simulated on the same requests" if kind in ("size", "eviction") else "estimated on the same requests"
    if of == HELD_OUT:
        how = "measured on requests drawn by lot: others, but of the same windows"
    told = f"{_change(old, new, doubt)} than without the change, {how}."
    return Compared(of, told, before, promised, after=new, without=old, doubt=doubt, windows=windows)


def _promise(decision: Decision, kind: str) -> tuple[float | None, float | None]:
    """The cost before and the cost promised, by the figures that the proposal rests on."""
    evidence = decision.evidence
    if kind == "size" and {"seconds_before", "seconds_after"} <= set(evidence):
        best = evidence.get("best")  # the promise is for the whole way, without bounds
        whole = best is None or size_of(Shape.parse(best), decision.target.tier) == decision.after
        return float(evidence["seconds_before"]), float(evidence["seconds_after"]) if whole else None
    if kind == "eviction":
        rivals = evidence.get("rivals") or ()
        told = next((one for one in rivals if one.get("algorithm") == decision.after), None)
        return (1 - float(told["present"]), 1 - float(told["hits"])) if told else (None, None)
    if kind == "fetch":
        seen = [_seen(window) for window in evidence.get("windows") or ()]
        recompute_s = sum(one.recompute_s for one in seen)
        if recompute_s > 0:
            fetched = 1 - sum(one.gain_s for one in seen) / recompute_s
            return (fetched, 1.0) if decision.after == "off" else (1.0, fetched)
    return None, None


def _seen(window: Json) -> Evidence:
    told = (window.get(name) or 0.0 for name in ("fetch_s", "recompute_s", "saved_s", "lost_s"))
    return Evidence("", 0, *told)


def _change(old: float, new: float, doubt: float) -> str:
    if old <= 0:
        return f"{new:.3g} instead of {old:.3g} (± {doubt:.2g})"
    return f"{abs(new / old - 1):.1%} {'more' if new > old else 'less'} (± {doubt / old:.1%})"


def _soaking(decision: Decision) -> str:
    if decision.state == State.PROPOSED:
        return "It is not made yet: what it promises is simulated or estimated on the requests before."
    until = f" at {decision.soak_until:%H:%M:%S} UTC" if decision.soak_until else ""
    return f"It is being watched: what it makes of the requests is told with the verdict{until}."


@dataclass(frozen=True)
class Table:
    """``head`` is empty where rows are pairs of a name and a value; ``left_out`` rows are not shown."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left_out: int = 0


def tables(evidence: Json) -> list[Table]:
    """One table of all plain values, and one for each list of objects."""
    lists = {
        name: value
        for name, value in evidence.items()
        if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value)
    }
    plain = [(title(name), _plain(name, value)) for name, value in evidence.items() if name not in lists]
    first = [Table("", (), plain)] if plain else []
    return first + [_table(name, rows) for name, rows in lists.items()]


def _table(name: str, rows: list[Json]) -> Table:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_plain(key, row.get(key)) for key in columns] for row in rows[-SHOWN_ROWS:]]
    return Table(title(name), [title(key) for key in columns], cells, max(0, len(rows) - SHOWN_ROWS))


def _plain(name: str, value: Any) -> str:  # noqa: ANN401 (JSON)
    if name in SHAPES:
        return _shape(str(value))
    if name == "goal" and isinstance(value, int):  # a capacity's: nothing else moves by steps
        return format_size(value)
    if isinstance(value, list) and all(isinstance(item, int | float) for item in value):
        return ", ".join(figure(name, item) for item in value)
    return json.dumps(value) if isinstance(value, list | Mapping) else figure(name, value)


def _shape(text: str) -> str:
    """``10.0 MiB dram, 0 B disk, 320.0 MiB remote``; the text itself where it is no shape."""
    try:
        shape = Shape.parse(text)
    except (TypeError, ValueError):
        return text
    return ", ".join(f"{format_size(size)} {tier}" for tier, size in shape._asdict().items())
