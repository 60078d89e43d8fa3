"""Judgements of decisions, in SQL: verdicts on changes that were watched, reviews of those that stand."""

from collections.abc import Iterable
from datetime import datetime
from operator import attrgetter

from sqlalchemy import select

from tiertune_agent.fields import JsonDict
from tiertune_agent.history.models import ReviewRow, VerdictRow
from tiertune_agent.history.sessions import OfHistory
from tiertune_agent.records import Decision, grouped
from tiertune_agent.verdicts.verdict import Verdict


class Verdicts(OfHistory):
    """Verdicts, which `Decisions` writes with their states, and reviews."""

    def of(self, decision: int) -> list[JsonDict]:
        return self.by_decision([decision]).get(decision, [])

    def by_decision(self, decisions: Iterable[int]) -> dict[int, list[JsonDict]]:
        """Verdicts by decision, for those that were judged."""
        query = select(VerdictRow).where(VerdictRow.decision.in_(list(decisions))).order_by(VerdictRow.id)
        found = grouped(self._all(query), attrgetter("decision"))
        return {
            decision: [row.told("at", "verdict", "reason", "evidence") for row in rows]
            for decision, rows in found.items()
        }

    def review(self, decision: Decision, stands: str, verdict: Verdict, now: datetime) -> None:
        """Write a row that says whether it still pays."""
        told = {"stands": stands, "reason": verdict.reason, "evidence": dict(verdict.evidence)}
        with self._session() as session:
            session.add(ReviewRow(decision=decision.id, at=now, **told))

    def reviews(self, decision: int) -> list[JsonDict]:
        query = select(ReviewRow).where(ReviewRow.decision == decision).order_by(ReviewRow.id)
        return self._told(query, "at", "stands", "reason", "evidence")
