"""Prometheus rules as typed values; ``alerting`` and ``recording`` have the rules themselves."""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import dedent
from typing import Any, Literal

RUNBOOKS = "docs/runbooks"
LOOK_BACK = "6h"
"""To look for a counter's earlier value: longer than most gaps in scraping."""
Severity = Literal["critical", "warning", "info"]
"""Somebody is needed now; somebody is needed in working hours; good to know."""


@dataclass(frozen=True)
class Alert:
    """One alert; ``lasting`` is how long its expression must hold, as a Prometheus duration."""

    name: str
    severity: Severity
    lasting: str
    expr: str
    summary: str
    """One line; may use ``{{ $labels.store }}`` and the like."""
    description: str

    def document(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": _text(self.expr),
            "for": self.lasting,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": " ".join(self.description.split()),
                "runbook_url": f"{RUNBOOKS}/{self.name}.md",
            },
        }


@dataclass(frozen=True)
class Record:
    """One recording rule."""

    name: str
    expr: str

    def document(self) -> dict[str, Any]:
        return {"record": self.name, "expr": _text(self.expr)}


@dataclass(frozen=True)
class Group:
    """Rules that are evaluated one after the other, for the same moment."""

    name: str
    rules: Sequence[Alert | Record]
    interval: str = ""
    """How often they are evaluated, as a Prometheus duration; empty: as Prometheus is told for all."""

    def document(self) -> dict[str, Any]:
        interval = {"interval": self.interval} if self.interval else {}
        return {"name": self.name, **interval, "rules": [rule.document() for rule in self.rules]}


def grown(counter: str, window: str, by: str, *, job: str = "") -> str:
    """How much a counter grew, summed by labels, if it did; also if it appeared with its first event.

    ``increase`` alone takes the first value that it sees for the start: it misses a single event, and of a burst all
    that the first scrape brought. A counter's earlier value is looked for further back, so that it does not look new
    after a failed scrape; in steps, as there are many series. ``job``: of processes that export it from its first event
    on. Where one answered without it, it began anew with a restart, though it may be as high again as before.
    """
    before = f"last_over_time({counter}[{LOOK_BACK}:5m] offset {window})"
    ways = [f"({counter} unless {before})", f"increase({counter}[{window}]) > 0"]
    ways += [f"{counter} - {before} > 0", f"{counter} < {before}"]
    if job:
        answers = f'max by (job, instance) (sum_over_time(up{{job="{job}"}}[{window}]))'
        ways.append(f"{counter} and count_over_time({counter}[{window}]) < on (job, instance) group_left () {answers}")
    return "sum by ({}) (\n  {}\n)".format(by, "\n    or ".join(ways))


def _text(expr: str) -> str:
    """Without the indentation that it has in Python."""
    return dedent(expr).strip()
