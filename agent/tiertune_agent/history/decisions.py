"""Change control in SQL: decisions, what tuners answered, verdicts."""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import Row, and_, func, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session, aliased

from tiertune_agent.history.models import AnswerRow, DecisionRow, ReviewRow, VerdictRow, cut
from tiertune_agent.history.rows import decision_of, decision_row
from tiertune_agent.records import CHANGED, FLEET, Decision, Made, State, Target, parts
from tiertune_agent.tuners.advice import ADVICE
from tiertune_agent.tuners.base import Answer, Proposal
from tiertune_agent.tuners.remote_fetch import FIELD, protects
from tiertune_agent.verdict import Verdict

UNDOABLE = (State.APPLIED, State.SOAKING, State.KEPT, State.INCONCLUSIVE)
"""States of decisions that can be rolled back."""
MOST_OPEN = 10_000
"""Decisions that wait for something at the same time: more than the largest fleet's."""
_FIELD = ("tuner", "store", "tier", "namespace", "field")
"""What two changes of one field have in common."""
_PLACE = (DecisionRow.store, DecisionRow.tier, DecisionRow.namespace, DecisionRow.tuner)
_CHANGE = (
    *(DecisionRow.field, DecisionRow.before, DecisionRow.after, DecisionRow.state),
    *(DecisionRow.applied_at, DecisionRow.updated_at, DecisionRow.evidence["goal"].label("goal")),
)
_MEANT = (*CHANGED, State.APPROVED, State.FAILED)
Place = tuple[str, str, str, str]
"""Who changes what: tuner, store, tier and namespace."""
Where = tuple[str, str, str]
"""Store, tier and namespace."""


_KEY = ("tuner", "store", "tier", "namespace")
"""Of an answer."""
INSERTS: Mapping[str, Callable[..., Any]] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


def place(tuner: str, target: Target) -> Place:
    """As rows tell it."""
    return cut(tuner), cut(target.store), cut(target.tier), cut(target.namespace)


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
    ) -> Decision | None:
        """A new row in state proposed; or the open one with the same wish, with newer evidence.

        None: somebody has just moved the open one.
        """
        told: dict[str, Any] = {"mode": mode, "reason": proposal.reason, "evidence": dict(proposal.evidence)}
        told |= {"expected_version": version, "policy_revision": policy, "updated_at": now}
        with self._session() as session:
            row = session.scalars(_open_of(tuner, target).where(DecisionRow.field == proposal.field)).first()
            before = decision_of(row) if row else None
            same = before is not None and (before.after, before.mode) == (proposal.after, mode)
            if before is not None and not _changed(session, before, told if same else _superseded(before, now)):
                return None
            if before and same:
                decision = replace(before, **told)
            else:
                row = decision_row(tuner, target, proposal, told)
                session.add(row)
                session.flush()
                decision = decision_of(row)
        superseded = before is not None and not same
        for state, entered in ((State.EXPIRED, superseded), (State.PROPOSED, not same)):
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

    def proposed(self) -> list[Decision]:
        """All that are open."""
        return self._select(select(DecisionRow).where(DecisionRow.state == State.PROPOSED))

    def expire(self, decision: Decision, why: str, *, now: datetime) -> None:
        """An open proposal is no longer wished."""
        self.move(decision, State.EXPIRED, now=now, reason=f"{decision.reason}; no longer wished: {why}")

    def get(self, number: int) -> Decision | None:
        with self._session() as session:
            row = session.get(DecisionRow, number)
            return decision_of(row) if row else None

    def find(self, *, states: Collection[str] = (), limit: int = 200) -> list[Decision]:
        """Newest first."""
        query = select(DecisionRow).order_by(DecisionRow.id.desc()).limit(limit)
        return self._select(query.where(DecisionRow.state.in_([str(s) for s in states])) if states else query)

    def waited(self, since: datetime, *, limit: int = MOST_OPEN) -> list[Decision]:
        """Wishes that nobody may act on unasked, and that moved lately, newest first; no advice."""
        query = select(DecisionRow).where(
            DecisionRow.updated_at >= since,
            DecisionRow.mode != "auto",
            ~DecisionRow.field.startswith(ADVICE, autoescape=True),
        )
        newest = (DecisionRow.id + 0).desc()  # by itself SQLite would walk all ids rather than those that moved lately
        return self._select(query.order_by(newest).limit(limit))

    def made_since(self, since: datetime) -> dict[str, list[Decision]]:
        """Those that changed a store or were meant to, and moved lately, by store, oldest first; splits in parts."""
        query = select(DecisionRow).where(DecisionRow.updated_at >= since, DecisionRow.state.in_(_MEANT))
        return _by_store(self._select(query.order_by(DecisionRow.id)))

    def emptied(self, stores: Collection[str]) -> dict[str, list[Decision]]:
        """By store, for every capacity the last change that was made, where it was to zero."""
        sized = (DecisionRow.field.endswith(".capacity_bytes"), DecisionRow.state.in_(CHANGED))
        newest = select(func.max(DecisionRow.id)).where(*sized, DecisionRow.store.in_(stores))
        newest = newest.group_by(DecisionRow.store, DecisionRow.field)
        splits = select(DecisionRow.id).where(*sized, DecisionRow.store == FLEET)
        splits = splits.order_by(DecisionRow.id.desc()).limit(100)
        query = select(DecisionRow).where(or_(DecisionRow.id.in_(newest), DecisionRow.id.in_(splits)))
        found = _by_store(self._select(query.order_by(DecisionRow.id))) if stores else {}
        last = {store: {one.field: one for one in found.get(store, ())}.values() for store in stores}
        return {store: [one for one in mine if one.after == 0] for store, mine in last.items()}

    def last_changes(self) -> dict[Place, Made]:
        """The last one of each tuner to each target; what was rolled back changed the target when it was."""
        newest = select(func.max(DecisionRow.id)).where(DecisionRow.state.in_(CHANGED)).group_by(*_PLACE)
        query = select(*_PLACE, *_CHANGE).where(DecisionRow.id.in_(newest))
        with self._session() as session:
            return {(row.tuner, row.store, row.tier, row.namespace): _made(row) for row in session.execute(query)}

    def undone(self, since: datetime) -> dict[Where, list[Made]]:
        """By what they changed, those that were rolled back, switched off while they soaked, or refused.

        By the store or by a person; each at the time when it was. Of refused changes that protect requests the newest
        alone: the store may only have refused the agent's token.
        """
        ended = (State.ROLLED_BACK, State.FAILED, State.REJECTED)
        overtaken = and_(
            DecisionRow.state == State.INCONCLUSIVE, DecisionRow.field == FIELD, _followed(within_soak=True).exists()
        )
        query = select(*_PLACE, *_CHANGE).where(
            DecisionRow.updated_at >= since, or_(DecisionRow.state.in_(ended), overtaken)
        )
        found: dict[Where, list[Made]] = {}
        refused: dict[Where, Made] = {}
        with self._session() as session:
            for row in session.execute(query.order_by(DecisionRow.updated_at)):
                where = row.store, row.tier, row.namespace
                made = Made(row.field, row.before, row.after, row.updated_at)
                if row.state == State.FAILED and protects(row.field, row.after):
                    refused[where] = made
                elif row.state in ended or protects(row.field, row.before):
                    found.setdefault(where, []).append(made)
        for where, made in refused.items():
            found.setdefault(where, []).append(made)
        return found

    def standing(self, before: datetime) -> list[Decision]:
        """Judged, not rolled back, applied before, not followed by another, and not reviewed since."""
        reviewed = select(ReviewRow.id).where(ReviewRow.decision == DecisionRow.id, ReviewRow.at > before)
        query = select(DecisionRow).where(
            DecisionRow.state.in_((State.KEPT, State.INCONCLUSIVE)),
            DecisionRow.applied_at <= before,
            ~reviewed.exists(),
            ~_followed().exists(),
        )
        return self._select(query)

    def undoing(self) -> list[Decision]:
        """Those to be rolled back whose end is not known."""
        query = select(DecisionRow).where(DecisionRow.undo.is_not(None), DecisionRow.state.in_(UNDOABLE))
        return self._select(query)

    def wait(self, decision: Decision, why: str) -> Decision:
        """Remember why what is under way has not come to its end; as it is then."""
        if why == decision.waits:
            return decision
        wished = DecisionRow.undo.is_not(None) if decision.undo else DecisionRow.undo.is_(None)
        with self._session() as session:
            return _moved(session, decision, decision.state, {"waits": why}, wished) or decision

    def undo(self, decision: Decision, wish: Mapping[str, Any]) -> Decision | None:
        """Remember the wish to roll it back; None if there is one already, or it is in another state by now."""
        with self._session() as session:
            return _moved(session, decision, decision.state, {"undo": dict(wish)}, DecisionRow.undo.is_(None))

    def superseded(self) -> set[int]:
        """Of those that soak, the ones whose field a later decision changed."""
        query = select(DecisionRow.id).where(DecisionRow.state == State.SOAKING, _followed().exists())
        with self._session() as session:
            return set(session.scalars(query))

    def changes_since(self, since: datetime, now: datetime) -> dict[str, int]:
        """How many were made up to now, by store."""
        lately = (DecisionRow.updated_at >= since, DecisionRow.applied_at.between(since, now))  # the first has an index
        query = select(DecisionRow.store, func.count()).where(*lately).group_by(DecisionRow.store)
        with self._session() as session:
            return {store: int(count) for store, count in session.execute(query)}

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
            return [row.told("at", "stands", "reason", "evidence") for row in rows]

    def verdicts(self, decision: int) -> list[dict[str, Any]]:
        return self.verdicts_of([decision]).get(decision, [])

    def verdicts_of(self, decisions: Iterable[int]) -> dict[int, list[dict[str, Any]]]:
        """By decision, of those that were judged."""
        query = select(VerdictRow).where(VerdictRow.decision.in_(list(decisions))).order_by(VerdictRow.id)
        found: dict[int, list[dict[str, Any]]] = {}
        with self._session() as session:
            for row in session.scalars(query):
                found.setdefault(row.decision, []).append(row.told("at", "verdict", "reason", "evidence"))
        return found

    def answer(self, told: Iterable[tuple[str, Target, Answer]], now: datetime) -> None:
        """Remember the newest answers, also where they are no change; of each tuner and target one."""
        rows = [
            {
                "tuner": tuner,
                "store": target.store,
                "tier": target.tier,
                "namespace": target.namespace,
                "at": now,
                "change": isinstance(answer, Proposal),
                "reason": answer.reason,
            }
            for tuner, target, answer in told
        ]
        if rows:
            with self._session() as session:
                newer = INSERTS[session.get_bind().dialect.name](AnswerRow)
                told_now = {name: newer.excluded[name] for name in ("at", "change", "reason")}
                session.execute(newer.on_conflict_do_update(index_elements=_KEY, set_=told_now), rows)

    def answers(self) -> list[dict[str, Any]]:
        query = select(AnswerRow).order_by(AnswerRow.store, AnswerRow.tuner, AnswerRow.tier, AnswerRow.namespace)
        with self._session() as session:
            return [
                {**row.told("tuner", "store", "tier"), "pool": row.namespace, **row.told("at", "change", "reason")}
                for row in session.scalars(query)
            ]

    def _select(self, query: Any) -> list[Decision]:  # noqa: ANN401 (a Select)
        with self._session() as session:
            return [decision_of(row) for row in session.scalars(query)]


def _moved(
    session: Session,
    decision: Decision,
    to: State,
    changes: Mapping[str, Any],
    *further: Any,  # noqa: ANN401
) -> Decision | None:
    """Into a state with other values, if it is still in the state that ``decision`` shows; else None."""
    moved = _changed(session, decision, {"state": to, "waits": None, **changes}, *further)
    return decision_of(session.get_one(DecisionRow, decision.id)) if moved else None


def _changed(session: Session, decision: Decision, values: Mapping[str, Any], *further: Any) -> bool:  # noqa: ANN401
    """Whether it was still in the state that ``decision`` shows, and has these values now."""
    done = session.execute(
        update(DecisionRow)
        .where(DecisionRow.id == decision.id, DecisionRow.state == decision.state, *further)
        .values(values)
        .execution_options(synchronize_session=False)
    )
    return bool(getattr(done, "rowcount", 0))


def _superseded(decision: Decision, now: datetime) -> dict[str, Any]:
    return {"state": State.EXPIRED, "reason": f"{decision.reason}; superseded by another wish", "updated_at": now}


def _by_store(decisions: Iterable[Decision]) -> dict[str, list[Decision]]:
    found: dict[str, list[Decision]] = {}
    for decision in decisions:
        for part in parts(decision):
            found.setdefault(part.target.store, []).append(part)
    return found


def _followed(*, within_soak: bool = False) -> Any:  # noqa: ANN401 (a Select)
    """Later decisions that changed the same field; within the soak: before it had its verdict."""
    later = aliased(DecisionRow)
    same = (getattr(later, name) == getattr(DecisionRow, name) for name in _FIELD)
    query = select(later.id).where(*same, later.id > DecisionRow.id, later.state.in_(CHANGED))
    return query.where(later.applied_at <= DecisionRow.updated_at) if within_soak else query


def _made(row: Row[Any]) -> Made:
    """Of a row with ``_CHANGE``."""
    back = row.state == State.ROLLED_BACK
    at = row.updated_at if back else row.applied_at or row.updated_at
    return Made(row.field, row.before, row.after, at, None if back else row.goal)


def _of(tuner: str, target: Target) -> tuple[Any, ...]:
    return (
        DecisionRow.tuner == tuner,
        DecisionRow.store == target.store,
        DecisionRow.tier == target.tier,
        DecisionRow.namespace == target.namespace,
    )


def _open_of(tuner: str, target: Target) -> Any:  # noqa: ANN401 (a Select)
    return select(DecisionRow).where(*_of(tuner, target), DecisionRow.state == State.PROPOSED)
