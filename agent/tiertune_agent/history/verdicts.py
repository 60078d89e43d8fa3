"""What was found of decisions in SQL: the verdicts that ended their soaks, and the weekly ones, which move nothing."""

from collections.abc import Iterable
from datetime import datetime
from operator import attrgetter

from sqlalchemy import select

from tiertune_agent.fields import JsonDict
from tiertune_agent.history.models import VerdictRow
from tiertune_agent.history.rows import verdict_row
from tiertune_agent.history.sessions import OfHistory
from tiertune_agent.records import JUDGED, Decision, grouped
from tiertune_agent.verdicts.verdict import Verdict

_TOLD = ("at", "verdict", "reason", "evidence")


class Verdicts(OfHistory):
    def of(self, decision: int) -> list[JsonDict]:
        """All of a decision's, oldest first."""
        return self._told(select(VerdictRow).filter_by(decision=decision).order_by(VerdictRow.id), *_TOLD)

    def judging(self, decisions: Iterable[int]) -> dict[int, list[JsonDict]]:
        """By decision, for those that were judged; without weekly ones."""
        query = select(VerdictRow).where(VerdictRow.decision.in_(list(decisions)), VerdictRow.verdict.in_(JUDGED))
        found = grouped(self._all(query.order_by(VerdictRow.id)), attrgetter("decision"))
        return {decision: [row.told(*_TOLD) for row in rows] for decision, rows in found.items()}

    def review(self, decision: Decision, stands: str, verdict: Verdict, now: datetime) -> None:
        """Write a weekly one, which says whether the decision still pays."""
        with self._session() as session:
            session.add(verdict_row(decision, stands, verdict.reason, verdict.evidence, now))
