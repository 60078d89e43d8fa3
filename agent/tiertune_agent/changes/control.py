"""Change control: turns wishes into decisions, makes or refuses them, and settles them after a crash."""

import uuid
from collections.abc import Container
from datetime import timedelta

from tiertune_agent.changes.actuator import Actuator, ChangeResult
from tiertune_agent.changes.round import Round
from tiertune_agent.fields import Json, in_force
from tiertune_agent.history.store import History
from tiertune_agent.records import STANDING, UNJUDGED, Decision, Now, State, Target, parts
from tiertune_agent.tuners.advice import ADVICE
from tiertune_agent.tuners.base import Mode, Proposal

POLICY, VERDICT = "policy", "verdict"
"""Authors of changes that no person commanded; these obey a freeze."""
LATE = timedelta(minutes=5)
"""A change that has not reached its store after this time is dropped: its evidence is old. So is one approved further
ahead than this, by an agent whose clock was ahead: nobody knows how long ago it was."""
FROZEN = "frozen: "
TOO_LATE = "it did not reach the store in time"


class Refused(Exception):  # noqa: N818 (a refusal, not an error)
    """A command cannot be followed now; the message says why."""


class Unknown(Exception):  # noqa: N818
    """What was asked for does not exist; the message names it."""


class ChangeControl:
    def __init__(self, history: History, actuator: Actuator, now: Now) -> None:
        self._history = history
        self._decisions = history.decisions
        self._actuator = actuator
        self._now = now

    def take(
        self, tuner: str, target: Target, proposal: Proposal, *, mode: Mode, version: int, policy: int
    ) -> Decision:
        """Record a proposal that passed the guard, with the mode, tuning version and policy revision then.

        In mode auto make the change. Raises Refused if somebody has just acted on it.
        """
        now = self._now()
        decision = self._decisions.propose(tuner, target, proposal, mode=mode, version=version, policy=policy, now=now)
        if decision is None:
            raise Refused(f"somebody has just approved or rejected what {tuner} wished for {target}")
        return self._make(decision, POLICY, version) if mode == "auto" else decision

    def approve(self, number: int, who: str) -> Decision:
        """Make a proposed change, if its field still has the value from before.

        Raises Unknown, or Refused if it may not, or can no longer, be made.
        """
        decision = self._proposed(number)
        if why := unmakeable(decision):
            raise Refused(f"decision {number} {why}")
        for part in parts(decision):
            store = self._history.store(part.target.store)
            if store is None or in_force(store.tuning, part.field) != part.before:
                reason = f"{decision.reason}; approved too late: {part.field} of {part.target.store} has changed since"
                self._decisions.move(decision, State.EXPIRED, now=self._now(), reason=reason)
                raise Refused(f"decision {number} has expired: {part.field} is no longer {part.before}")
        return self._make(decision, _person(who), None)

    def reject(self, number: int, who: str) -> Decision:
        """Reject a proposed change, or a verdict's rollback that waits for the end of a freeze: then it stands.

        Raises Unknown, or Refused if there is nothing to reject (any more).
        """
        decision = self._known(number)
        if decision.undo and decision.undo["by"] == VERDICT and FROZEN in decision.waits:
            moved = self._stands(decision, f"rejected by {who}")
        else:
            moved = self._decisions.move(self._proposed(number), State.REJECTED, now=self._now(), approved_by=who)
        if moved is None:
            raise Refused(f"decision {number} has just changed; look at it again")
        return moved

    def rollback(self, number: int, who: str) -> Decision:
        """Undo a change that was made, even if a verdict's rollback of it is waiting.

        Raises Unknown, or Refused if it cannot be undone (any more).
        """
        decision = self._known(number)
        if decision.state not in STANDING:
            raise Refused(f"decision {number} is {decision.state}: there is nothing to roll back")
        rolled, why = self.roll_back(decision, _person(who), f"rolled back by {who}", {})
        if why:
            raise Refused(f"decision {number} cannot be rolled back: {why}")
        return rolled

    def roll_back(
        self, decision: Decision, who: str, reason: str, evidence: Json, *, frozen: str = ""
    ) -> tuple[Decision, str]:
        """Set the field back if it still has the decision's value. Returns the decision then, and why that failed.

        The wish is written before the store is touched, so that it is not lost in a crash in between. ``frozen``: why
        it waits until something may change again; empty: it need not.
        """
        wish = {"key": uuid.uuid4().hex, "by": who, "at": self._now().isoformat(), "reason": reason}
        wished = self._decisions.undo(decision, {**wish, "evidence": dict(evidence)}, anew=who != VERDICT)
        if wished is None:
            raise Refused(f"decision {decision.id} has just changed; look at it again")
        return (self._held(wished, frozen), "") if frozen else self._undo(wished)

    def frozen(self) -> str:
        """Why a command forbids changes now; empty: none does."""
        freeze = self._history.journal.frozen(self._now())
        if freeze is None:
            return ""
        until = f" until {freeze.until:%Y-%m-%d %H:%M} UTC" if freeze.until else ""
        return f"by {freeze.who}{until}: {freeze.reason}"

    def settle(self, this: Round, silent: Container[str]) -> tuple[list[Decision], list[Decision]]:
        """Find out about changes whose outcome is unknown: the agent or the store died, or the network was down.

        Unless people commanded it, a change that they, or the policy, have frozen waits, and one that the policy by now
        forbids is neither made nor set back. Stores that were ``silent`` just now are not asked again. Returns the
        decisions as they were, and those that did not wait: readings of their stores may be outdated.
        """
        went_on = []
        unsettled = [*self._decisions.in_state(State.APPROVED), *self._decisions.undoing()]
        for decision in unsettled:
            by = (decision.undo or {}).get("by", decision.approved_by)
            by_itself = by == (POLICY if decision.state == State.APPROVED else VERDICT)
            if by_itself and (why := self.frozen() or this.frozen(decision, self._now())):
                self._held(decision, why)
                continue
            if any(part.target.store in silent for part in parts(decision)):
                known = "" if FROZEN in decision.waits else decision.waits  # an earlier reason says more
                self._decisions.wait(decision, known or "the store did not answer")
                continue
            went_on.append(decision)
            late = self._late(decision, this, by_itself=by_itself)
            if decision.undo:
                self._undo(decision, late)
            else:
                self._end(decision, self._actuator.apply(decision, late=late))
        return unsettled, went_on

    def _held(self, decision: Decision, frozen: str) -> Decision:
        """Have it wait until something may change again."""
        judged = (decision.undo or {}).get("by") == VERDICT
        verdict = "its verdict is to roll it back; " if judged else ""
        return self._decisions.wait(decision, f"{verdict}{FROZEN}{frozen}")

    def _late(self, decision: Decision, this: Round, *, by_itself: bool) -> str:
        """Why it is too late to make it, or to set it back; empty: it is not."""
        if decision.state == State.APPROVED:
            if decision.undo:  # what was made of it does not stay
                return ""
            if decision.approved_at is None or abs(self._now() - decision.approved_at) > LATE:
                return TOO_LATE
        why = this.disallowed(decision) if by_itself else ""
        if by_itself and not why:
            this.note([decision])  # the room that it takes is no other's
        return why

    def _undo(self, decision: Decision, late: str = "") -> tuple[Decision, str]:
        """Set it back, as its wish says. Returns the decision then, and why it stands if it does."""
        wish, outcome, now = decision.undo or {}, self._actuator.undo(decision, late=late), self._now()
        if outcome.state == State.APPROVED:
            return self._decisions.wait(decision, outcome.reason), ""
        if ends := wish.get("ends"):
            reason = f"{wish['reason']}; what was made of it was set back"
            reason += f", {outcome.reason}" if outcome.reason else ""
            return self._decisions.move(decision, State(ends), now=now, reason=reason, undo=None) or decision, ""
        if outcome.state == State.ROLLED_BACK:
            reason = f"{wish['reason']}; {outcome.reason}" if outcome.reason else wish["reason"]
            done = self._decisions.judge(decision, State.ROLLED_BACK, reason, wish["evidence"], now)
            return done or decision, ""
        return self._stands(decision, outcome.reason) or decision, outcome.reason

    def _stands(self, decision: Decision, why: str) -> Decision | None:
        """It is not rolled back, although somebody, or its verdict, wished it; None if it was moved meanwhile."""
        wish = decision.undo or {}
        told = f"{wish['reason']}; it is not rolled back: {why}"
        stands = State.INCONCLUSIVE if decision.state in UNJUDGED else decision.state
        return self._decisions.judge(decision, stands, told, wish["evidence"], self._now(), undo=None)

    def _known(self, number: int) -> Decision:
        decision = self._decisions.get(number)
        if decision is None:
            raise Unknown(f"there is no decision {number}")
        return decision

    def _proposed(self, number: int) -> Decision:
        decision = self._known(number)
        if decision.state != State.PROPOSED:
            raise Refused(f"decision {number} is {decision.state}, not proposed")
        return decision

    def _make(self, decision: Decision, by: str, expected: int | None) -> Decision:
        """Write approved, then touch the store: after a crash in between, the change is still known."""
        now = self._now()
        approved = self._decisions.move(
            decision, State.APPROVED, now=now, approved_at=now, approved_by=by, expected_version=expected
        )
        if approved is None:
            raise Refused(f"decision {decision.id} has just changed; look at it again")
        return self._end(approved, self._actuator.apply(approved))

    def _end(self, decision: Decision, outcome: ChangeResult) -> Decision:
        now = self._now()
        reason = f"{decision.reason}; {outcome.reason}" if outcome.reason else decision.reason
        if outcome.state == State.APPROVED:
            return self._decisions.wait(decision, outcome.reason)
        if outcome.state == State.EXPIRED and decision.waits:
            reason += f"; the last time {decision.waits}"
        if outcome.state in (State.FAILED, State.EXPIRED) and len(parts(decision)) > 1:
            return self._give_up(decision, outcome.state, reason)
        made = {"applied_at": now, "applied_version": outcome.version} if outcome.state == State.APPLIED else {}
        return self._decisions.move(decision, outcome.state, now=now, reason=reason, **made) or decision

    def _give_up(self, decision: Decision, ends: State, reason: str) -> Decision:
        """Set back the parts that were made, as another could not be. This wish is also written first."""
        wish = {"key": uuid.uuid4().hex, "by": POLICY, "at": self._now().isoformat(), "reason": reason, "ends": ends}
        wished = self._decisions.undo(decision, wish)
        return self._undo(wished)[0] if wished else decision


def _person(who: str) -> str:
    """The author of what a person commanded; whatever a token is called, it is not taken for the agent."""
    return f"{who} (a person)" if who in {POLICY, VERDICT} else who


def unmakeable(decision: Decision) -> str:
    """Why it cannot be made even if people approve it; empty: it can."""
    if decision.mode == "observe":
        return "was made in mode observe: the policy allows no change"
    if decision.field.startswith(ADVICE):
        what = decision.field.removeprefix(ADVICE)
        return f"is advice: {what} is not TierTune's to change; follow it by hand, or reject it"
    return ""
