"""Change control in SQL: decisions, what tuners answered, verdicts."""

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session, aliased

from tiertune_agent.history.models import AnswerRow, DecisionRow, ReviewRow, VerdictRow
from tiertune_agent.records import CHANGED, FLEET, Decision, Made, State, Target, parts
from tiertune_agent.tuners.base import Answer, Proposal
from tiertune_agent.verdict import Verdict

UNDOABLE = (State.APPLIED, State.SOAKING, State.KEPT, State.INCONCLUSIVE)
"""States of decisions that can be rolled back."""
_FIELD = ("tuner", "store", "tier", "namespace", "field")
"""What two changes of one field have in common."""


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
            moved = _moved(session, decision, to, {"updated_at": now, **changes})
        if moved and to != decision.state:
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

    def of_store(self, store: str, since: datetime) -> list[Decision]:
        """Those that moved lately, oldest first; of the fleet's, what concerns the store."""
        query = select(DecisionRow).where(DecisionRow.store.in_((store, FLEET)), DecisionRow.updated_at >= since)
        return _concerning(store, self._select(query.order_by(DecisionRow.id)))

    def emptied(self, store: str) -> list[Decision]:
        """For every capacity of the store the last change that was made, where it was to zero."""
        query = select(DecisionRow).where(
            DecisionRow.store.in_((store, FLEET)),
            DecisionRow.field.endswith(".capacity_bytes"),
            DecisionRow.state.in_(CHANGED),
        )
        found = self._select(query.order_by(DecisionRow.id.desc()).limit(100))[::-1]
        last = {decision.field: decision for decision in _concerning(store, found)}
        return [decision for decision in last.values() if decision.after == 0]

    def last_change(self, tuner: str, target: Target) -> Made | None:
        """The last one of the tuner; what was rolled back changed the target when it was."""
        query = select(DecisionRow).where(*_of(tuner, target), DecisionRow.state.in_(CHANGED))
        found = self._select(query.order_by(DecisionRow.id.desc()).limit(1))
        return _made(found[0]) if found else None

    def undone(self, target: Target, since: datetime) -> list[Made]:
        """Changes of the target that were rolled back, or that the store refused."""
        query = select(DecisionRow).where(
            DecisionRow.store == target.store,
            DecisionRow.tier == target.tier,
            DecisionRow.namespace == target.namespace,
            DecisionRow.state.in_((State.ROLLED_BACK, State.FAILED)),
            DecisionRow.updated_at >= since,
        )
        return [_made(decision) for decision in self._select(query)]

    def watched(self, target: Target) -> Decision | None:
        """A change of the same pool, or of its whole tier, that is not judged yet; for the fleet, in any store."""
        query = select(DecisionRow).where(
            DecisionRow.tier == target.tier,
            DecisionRow.state.in_((State.APPLIED, State.SOAKING)),
        )
        if target.store != FLEET:
            query = query.where(DecisionRow.store.in_((target.store, FLEET)))
        if target.namespace:
            query = query.where(DecisionRow.namespace.in_(("", target.namespace)))
        return next(iter(self._select(query.order_by(DecisionRow.id.desc()).limit(1))), None)

    def standing(self, before: datetime) -> list[Decision]:
        """Judged, not rolled back, applied before, not followed by another, and not reviewed since."""
        reviewed = select(ReviewRow.id).where(ReviewRow.decision == DecisionRow.id, ReviewRow.at > before)
        later = aliased(DecisionRow)
        same = (getattr(later, name) == getattr(DecisionRow, name) for name in _FIELD)
        followed = select(later.id).where(*same, later.id > DecisionRow.id, later.state.in_(CHANGED))
        query = select(DecisionRow).where(
            DecisionRow.state.in_((State.KEPT, State.INCONCLUSIVE)),
            DecisionRow.applied_at <= before,
            ~reviewed.exists(),
            ~followed.exists(),
        )
        return self._select(query)

    def undoing(self) -> list[Decision]:
        """Those to be rolled back whose end is not known."""
        query = select(DecisionRow).where(DecisionRow.undo.is_not(None), DecisionRow.state.in_(UNDOABLE))
        return self._select(query)

    def undo(self, decision: Decision, wish: Mapping[str, Any]) -> Decision | None:
        """Remember the wish to roll it back; None if there is one already, or it is in another state by now."""
        with self._session() as session:
            return _moved(session, decision, decision.state, {"undo": dict(wish)}, DecisionRow.undo.is_(None))

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
        self,
        decision: Decision,
        verdict: State,
        reason: str,
        evidence: Mapping[str, Any],
        now: datetime,
        **changes: Any,  # noqa: ANN401
    ) -> Decision | None:
        """A row in verdicts and the decision into the state that it says, both or neither."""
        with self._session() as session:
            moved = _moved(session, decision, verdict, {"updated_at": now, **changes})
            if moved:
                session.add(
                    VerdictRow(
                        decision=decision.id, at=now, verdict=str(verdict), reason=reason, evidence=dict(evidence)
                    )
                )
        if moved and verdict != decision.state:
            self.observer(decision.tuner, verdict)
        return moved

    def review(self, decision: Decision, stands: str, verdict: Verdict, now: datetime) -> None:
        """A row that says whether it still pays."""
        with self._session() as session:
            session.add(
                ReviewRow(
                    decision=decision.id,
                    at=now,
                    stands=stands,
                    reason=verdict.reason,
                    evidence=dict(verdict.evidence),
                )
            )

    def reviews(self, decision: int) -> list[dict[str, Any]]:
        with self._session() as session:
            rows = session.scalars(select(ReviewRow).where(ReviewRow.decision == decision).order_by(ReviewRow.id))
            return [
                {"at": row.at.isoformat(), "stands": row.stands, "reason": row.reason, "evidence": row.evidence}
                for row in rows
            ]

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


def _moved(
    session: Session,
    decision: Decision,
    to: State,
    changes: Mapping[str, Any],
    *further: Any,  # noqa: ANN401
) -> Decision | None:
    """Into a state with other values, if it is still in the state that ``decision`` shows; else None."""
    done = session.execute(
        update(DecisionRow)
        .where(DecisionRow.id == decision.id, DecisionRow.state == decision.state, *further)
        .values({"state": to, **changes})
        .execution_options(synchronize_session=False)
    )
    return _decision(session.get_one(DecisionRow, decision.id)) if getattr(done, "rowcount", 0) else None


def _concerning(store: str, decisions: Iterable[Decision]) -> list[Decision]:
    return [part for decision in decisions for part in parts(decision) if part.target.store == store]


def _made(decision: Decision) -> Made:
    back = decision.state == State.ROLLED_BACK
    at = decision.updated_at if back else decision.applied_at or decision.updated_at
    goal = None if back else decision.evidence.get("goal")
    return Made(decision.field, decision.before, decision.after, at, goal)


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
        soak_until=row.soak_until,
        undo=row.undo,
    )
