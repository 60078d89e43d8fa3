"""Change control in SQL: decisions, which move from state to state, with what stores should have; their verdicts.

Also what tuners answered last.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from operator import attrgetter
from typing import Any

from sqlalchemy import ColumnExpressionArgument, select, update
from sqlalchemy.orm import Session

from tiertune_agent.fields import JsonDict, in_force, replaced
from tiertune_agent.history.models import LATELY_ID, LATELY_STATE, AnswerRow, DecisionRow, StoreRow, VerdictRow
from tiertune_agent.history.rows import decision_of, decision_row
from tiertune_agent.history.sessions import OfHistory, Sessions, altered, renew
from tiertune_agent.records import CHANGED, JUDGED, STANDING, Decision, State, Target, grouped, parts
from tiertune_agent.tuners.base import Answer, Proposal
from tiertune_agent.tuners.remote_fetch import FIELD
from tiertune_agent.verdicts.verdict import Verdict

MOST_MOVED = 10_000
"""More decisions than the largest fleet moves in a day."""

_FOUND = ("at", "verdict", "reason", "evidence")
_SWITCH = ("store", "before", "after", "state", "applied_at", "updated_at")


class Decisions(OfHistory):
    def __init__(self, session: Sessions) -> None:
        super().__init__(session)
        self.observer: Callable[[Decision], None] = lambda _: None
        """Called with each decision that entered a state."""

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
        """Add a row in state proposed, or renew the evidence of the open one with the same wish.

        None: somebody has just moved the open one.
        """
        told: dict[str, Any] = {
            "mode": mode,
            "reason": proposal.reason,
            "evidence": dict(proposal.evidence),
            "expected_version": version,
            "policy_revision": policy,
            "updated_at": now,
        }
        with self._session() as session:
            where = {"store": target.store, "tier": target.tier, "namespace": target.namespace}
            mine = select(DecisionRow).filter_by(tuner=tuner, **where, field=proposal.field, state=State.PROPOSED)
            row = session.scalars(mine).first()
            before = decision_of(row) if row else None
            wish = proposal.before, proposal.after, mode
            same = before is not None and (before.before, before.after, before.mode) == wish
            if before:
                why = f"{before.reason}; superseded by another wish"
                ended = {"state": State.EXPIRED, "reason": why, "updated_at": now}
                if not _changed(session, before, told if same else ended):
                    return None
                if same:
                    return replace(before, **told)
            row = decision_row(tuner, target, proposal, told)
            session.add(row)
            session.flush()
            decision = decision_of(row)
        if before:
            self.observer(replace(before, state=State.EXPIRED))
        self.observer(decision)
        return decision

    def move(self, decision: Decision, to: State, *, now: datetime, **changes: Any) -> Decision | None:  # noqa: ANN401
        """Move it to another state if it is still in the one that ``decision`` shows; else None, nothing changes."""
        return self._move(decision, to, {"updated_at": now, **changes})

    def _move(
        self,
        decision: Decision,
        to: State,
        values: Mapping[str, Any],
        *only: ColumnExpressionArgument[bool],
        verdicts: Iterable[VerdictRow] = (),
    ) -> Decision | None:
        """Move it, with other values and verdicts, if it is still in the state that it shows and ``only`` if so."""
        with self._session() as session:
            if not _changed(session, decision, {"state": to, "waits": None, **values}, *only):
                return None
            session.add_all(verdicts)
            if to != decision.state and to in (State.APPLIED, State.ROLLED_BACK):
                for part in sorted(parts(decision), key=lambda part: part.target.store):  # as all writers lock them
                    _expect(session, part, values["updated_at"], undone=to == State.ROLLED_BACK)
            moved = decision_of(session.get_one(DecisionRow, decision.id))
        if to != decision.state:
            self.observer(moved)
        return moved

    def in_state(self, *states: State) -> list[Decision]:
        """All decisions in these states, newest first; meant for states that decisions do not stay in."""
        return self.find(states=states, limit=None)

    def expire(self, decision: Decision, why: str, *, now: datetime) -> None:
        """Expire an open proposal that is no longer wished."""
        self.move(decision, State.EXPIRED, now=now, reason=f"{decision.reason}; no longer wished: {why}")

    def get(self, number: int) -> Decision | None:
        return next(iter(self._decided(select(DecisionRow).filter_by(id=number))), None)

    def switched(self, since: datetime) -> dict[str, list[tuple[datetime, str]]]:
        """By store, when decisions updated since switched remote fetch, and to what; a rollback is a switch too."""
        made = (DecisionRow.updated_at >= since, LATELY_STATE.in_(CHANGED), DecisionRow.applied_at.is_not(None))
        query = select(*(getattr(DecisionRow, name) for name in _SWITCH)).filter_by(field=FIELD).where(*made)
        found: dict[str, list[tuple[datetime, str]]] = {}
        for row in self._rows(query):
            mine = found.setdefault(row.store, [])
            mine.append((row.applied_at, str(row.after)))
            if row.state == State.ROLLED_BACK:
                mine.append((row.updated_at, str(row.before)))
        return {store: sorted(mine) for store, mine in found.items()}

    def waited(self, since: datetime) -> list[Decision]:
        """Wishes outside mode auto, which nobody may act on unasked, updated since; newest first."""
        return self.find(DecisionRow.mode != "auto", limit=MOST_MOVED, since=since)

    def find(
        self,
        *which: ColumnExpressionArgument[bool],
        states: Collection[str] = (),
        limit: int | None = 200,
        since: datetime | None = None,
    ) -> list[Decision]:
        """Decisions, newest first; without ``states``, in any; without ``since``, whenever they were updated."""
        query, state, newest = select(DecisionRow).where(*which), LATELY_STATE, LATELY_ID
        if since is None:
            state, newest = DecisionRow.state.expression, DecisionRow.id.expression
        else:
            query = query.where(DecisionRow.updated_at >= since)
        if states:
            query = query.where(state.in_([str(one) for one in states]))
        return self._decided(query.order_by(newest.desc()).limit(limit))

    def undoing(self) -> list[Decision]:
        """Decisions whose rollback is under way."""
        query = select(DecisionRow).where(DecisionRow.undo.is_not(None), DecisionRow.state.in_(STANDING))
        return self._decided(query)

    def wait(self, decision: Decision, why: str) -> Decision:
        """Remember why what is under way has not ended yet; returns the decision as it is then."""
        if why == decision.waits:
            return decision
        wished = DecisionRow.undo.is_not(None) if decision.undo else DecisionRow.undo.is_(None)
        return self._move(decision, decision.state, {"waits": why}, wished) or decision

    def undo(self, decision: Decision, wish: Mapping[str, Any], *, anew: bool = False) -> Decision | None:
        """Remember the wish to roll it back; None if it is in another state by now, or has such a wish already.

        ``anew``: replace a wish that it has.
        """
        first = () if anew else (DecisionRow.undo.is_(None),)
        return self._move(decision, decision.state, {"undo": dict(wish)}, *first)

    def judge(
        self,
        decision: Decision,
        verdict: State,
        reason: str,
        evidence: Mapping[str, Any],
        now: datetime,
        **changes: Any,  # noqa: ANN401
    ) -> Decision | None:
        """Write a verdict and move the decision to its state, both or neither."""
        told = _verdict_row(decision, verdict, reason, evidence, now)
        return self._move(decision, verdict, {"updated_at": now, **changes}, verdicts=[told])


class Verdicts(OfHistory):
    """What was found of decisions: the verdicts that ended their soaks, and the weekly ones, which move nothing."""

    def of(self, decision: int) -> list[JsonDict]:
        """All of a decision's, oldest first."""
        return self._told(select(VerdictRow).filter_by(decision=decision).order_by(VerdictRow.id), *_FOUND)

    def judging(self, decisions: Iterable[int]) -> dict[int, list[JsonDict]]:
        """By decision, for those that were judged; without weekly ones."""
        query = select(VerdictRow).where(VerdictRow.decision.in_(list(decisions)), VerdictRow.verdict.in_(JUDGED))
        found = grouped(self._all(query.order_by(VerdictRow.id)), attrgetter("decision"))
        return {decision: [row.told(*_FOUND) for row in rows] for decision, rows in found.items()}

    def review(self, decision: Decision, stands: str, verdict: Verdict, now: datetime) -> None:
        """Write a weekly one, which says whether the decision still pays."""
        with self._session() as session:
            session.add(_verdict_row(decision, stands, verdict.reason, verdict.evidence, now))


class Answers(OfHistory):
    """The tuners' latest answers."""

    def remember(self, told: Iterable[tuple[str, Target, Answer]], now: datetime) -> None:
        """Keep the newest answer of each tuner and target, even if it is no change."""
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
        with self._session() as session:
            renew(session, AnswerRow, rows)

    def newest(self) -> list[JsonDict]:
        query = select(AnswerRow).order_by(AnswerRow.store, AnswerRow.tuner, AnswerRow.tier, AnswerRow.namespace)
        columns = ("tuner", "store", "tier", "at", "change", "reason")
        return [{"pool": row.namespace, **row.told(*columns)} for row in self._all(query)]


def _verdict_row(
    decision: Decision, verdict: str, reason: str, evidence: Mapping[str, Any], at: datetime
) -> VerdictRow:
    return VerdictRow(decision=decision.id, at=at, verdict=verdict, reason=reason, evidence=dict(evidence))


def _expect(session: Session, part: Decision, now: datetime, *, undone: bool) -> None:
    """From now on the store should have what was decided; or, undone, what was before, unless that changed since."""
    row = session.get(StoreRow, part.target.store, with_for_update=True)
    if row and row.expected and (not undone or in_force(row.expected, part.field) == part.after):
        row.expected = replaced(row.expected, part.field, part.before if undone else part.after)
        row.expected_at = now


def _changed(session: Session, decision: Decision, values: Mapping[str, Any], *further: Any) -> bool:  # noqa: ANN401
    """Set the values if it is still in the state that ``decision`` shows; returns whether it was."""
    mine = update(DecisionRow).filter_by(id=decision.id, state=decision.state).where(*further)
    return bool(altered(session, mine.values(values)))
