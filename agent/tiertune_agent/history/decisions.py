"""Change control in SQL: decisions, what tuners answered, verdicts."""

import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from tiertune_agent.history.models import AnswerRow, DecisionRow, VerdictRow
from tiertune_agent.records import CHANGED, Decision, State, Target
from tiertune_agent.tuners.base import Answer, Proposal

OPEN = (State.PROPOSED, State.APPROVED)


class Decisions:
    """Every method is one transaction. ``observer`` hears of each state that a decision enters."""

    def __init__(
        self,
        session: Callable[[], AbstractContextManager[Session]],
        observer: Callable[[str, State], None] = lambda _tuner, _state: None,
    ) -> None:
        self._session = session
        self.observer = observer

    def propose(
        self,
        tuner: str,
        target: Target,
        proposal: Proposal,
        *,
        mode: str,
        version: int | None,
        policy: int | None,
        now: datetime,
    ) -> Decision:
        """A new row in state proposed; or the open one with the same wish, with newer evidence."""
        with self._session() as session:
            row = session.scalars(_open_of(tuner, target).where(DecisionRow.field == proposal.field)).first()
            superseded = row is not None and (row.after != proposal.after or row.mode != mode)
            if row is not None and superseded:
                row.state, row.updated_at = State.EXPIRED, now
                row.reason = f"{row.reason}; superseded by another wish"
            fresh = row is None or superseded
            if row is None or superseded:
                row = DecisionRow(
                    key=uuid.uuid4().hex,
                    tuner=tuner,
                    store=target.store,
                    tier=target.tier,
                    namespace=target.namespace,
                    target=str(target),
                    models=list(target.models),
                    field=proposal.field,
                    before=proposal.before,
                    after=proposal.after,
                    state=State.PROPOSED,
                    created_at=now,
                    approved_by="",
                )
                session.add(row)
            row.mode, row.reason, row.evidence = mode, proposal.reason, dict(proposal.evidence)
            row.expected_version, row.policy_revision, row.updated_at = version, policy, now
            session.flush()
            decision = _decision(row)
        for state, entered in ((State.EXPIRED, superseded), (State.PROPOSED, fresh)):
            if entered:
                self.observer(tuner, state)
        return decision

    def move(self, decision: Decision, to: State, *, now: datetime, **changes: Any) -> Decision | None:  # noqa: ANN401
        """Into another state, if it is still in the state that ``decision`` shows; else None and nothing changes."""
        with self._session() as session:
            done = session.execute(
                update(DecisionRow)
                .where(DecisionRow.id == decision.id, DecisionRow.state == decision.state)
                .values({"state": to, "updated_at": now, **changes})
                .execution_options(synchronize_session=False)
            )
            if not getattr(done, "rowcount", 0):
                return None
            moved = _decision(session.get_one(DecisionRow, decision.id))
        if to != decision.state:
            self.observer(decision.tuner, to)
        return moved

    def withdraw(self, tuner: str, target: Target, why: str, *, now: datetime) -> None:
        """Open proposals of a tuner that no longer wishes them expire."""
        for decision in self._select(_open_of(tuner, target)):
            self.move(decision, State.EXPIRED, now=now, reason=f"{decision.reason}; no longer wished: {why}")

    def get(self, number: int) -> Decision | None:
        with self._session() as session:
            row = session.get(DecisionRow, number)
            return _decision(row) if row else None

    def find(self, *, states: Collection[str] = (), limit: int = 200) -> list[Decision]:
        """Newest first."""
        query = select(DecisionRow).order_by(DecisionRow.id.desc()).limit(limit)
        return self._select(query.where(DecisionRow.state.in_([str(s) for s in states])) if states else query)

    def last_change(self, tuner: str, target: Target) -> datetime | None:
        """When a decision of the tuner last changed the target."""
        query = select(func.max(DecisionRow.applied_at)).where(*_of(tuner, target), DecisionRow.state.in_(CHANGED))
        with self._session() as session:
            return session.scalar(query)

    def superseded(self, decision: Decision) -> bool:
        """Whether a later decision changed the same field."""
        query = select(DecisionRow.id).where(
            *_of(decision.tuner, decision.target),
            DecisionRow.field == decision.field,
            DecisionRow.id > decision.id,
            DecisionRow.state.in_(CHANGED),
        )
        with self._session() as session:
            return session.scalar(query.limit(1)) is not None

    def changes_since(self, store: str, since: datetime) -> int:
        query = select(func.count()).select_from(DecisionRow)
        query = query.where(DecisionRow.store == store, DecisionRow.applied_at >= since)
        with self._session() as session:
            return int(session.scalar(query) or 0)

    def judge(
        self, decision: Decision, verdict: State, reason: str, evidence: Mapping[str, Any], now: datetime
    ) -> None:
        """A row in verdicts, and the decision into the state that it says."""
        if self.move(decision, verdict, now=now) is None:
            return
        with self._session() as session:
            session.add(
                VerdictRow(decision=decision.id, at=now, verdict=str(verdict), reason=reason, evidence=dict(evidence))
            )

    def verdicts(self, decision: int) -> list[dict[str, Any]]:
        with self._session() as session:
            rows = session.scalars(select(VerdictRow).where(VerdictRow.decision == decision).order_by(VerdictRow.id))
            return [
                {"at": row.at.isoformat(), "verdict": row.verdict, "reason": row.reason, "evidence": row.evidence}
                for row in rows
            ]

    def answer(self, tuner: str, target: Target, answer: Answer, now: datetime) -> None:
        """Remember a tuner's newest answer, also where it is no change."""
        with self._session() as session:
            session.merge(
                AnswerRow(
                    tuner=tuner,
                    store=target.store,
                    tier=target.tier,
                    namespace=target.namespace,
                    at=now,
                    change=isinstance(answer, Proposal),
                    reason=answer.reason,
                )
            )

    def answers(self) -> list[dict[str, Any]]:
        query = select(AnswerRow).order_by(AnswerRow.store, AnswerRow.tuner, AnswerRow.tier, AnswerRow.namespace)
        with self._session() as session:
            return [
                {
                    "tuner": row.tuner,
                    "store": row.store,
                    "tier": row.tier,
                    "pool": row.namespace,
                    "at": row.at.isoformat(),
                    "change": row.change,
                    "reason": row.reason,
                }
                for row in session.scalars(query)
            ]

    def _select(self, query: Any) -> list[Decision]:  # noqa: ANN401 (a Select)
        with self._session() as session:
            return [_decision(row) for row in session.scalars(query)]


def _of(tuner: str, target: Target) -> tuple[Any, ...]:
    return (
        DecisionRow.tuner == tuner,
        DecisionRow.store == target.store,
        DecisionRow.tier == target.tier,
        DecisionRow.namespace == target.namespace,
    )


def _open_of(tuner: str, target: Target) -> Any:  # noqa: ANN401 (a Select)
    return select(DecisionRow).where(*_of(tuner, target), DecisionRow.state == State.PROPOSED)


def _decision(row: DecisionRow) -> Decision:
    return Decision(
        id=row.id,
        key=row.key,
        tuner=row.tuner,
        target=Target(row.store, row.tier, row.namespace, tuple(row.models)),
        field=row.field,
        before=row.before,
        after=row.after,
        mode=row.mode,
        state=State(row.state),
        reason=row.reason,
        evidence=row.evidence,
        expected_version=row.expected_version,
        applied_version=row.applied_version,
        policy_revision=row.policy_revision,
        created_at=row.created_at,
        updated_at=row.updated_at,
        approved_at=row.approved_at,
        approved_by=row.approved_by,
        applied_at=row.applied_at,
    )
