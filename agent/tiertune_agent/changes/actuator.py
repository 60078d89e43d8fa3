"""Changes the tuning of a store or of the remote, exactly once, and reads back whether it changed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import httpx

from tiertune_agent.fields import Json, JsonDict, in_force, replaced
from tiertune_agent.network import json_of, said
from tiertune_agent.records import Decision, State, parts

PASSING = (httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS)
"""Statuses of refusals after which another attempt may succeed."""


@dataclass(frozen=True)
class ChangeResult:
    """What became of a decision. State approved: not known yet, still in flight."""

    state: State
    reason: str = ""
    version: int | None = None


class Tuned(Protocol):
    """A store, or anything that answers like one. Methods raise httpx.HTTPError if it does not answer."""

    def tuning(self) -> JsonDict:
        """The document, with its version."""

    def put_tuning(self, document: Json, *, expected: int, key: str) -> httpx.Response:
        """Change it if it still has the expected version. Returns the answer, whatever it is."""


@dataclass
class Actuator:
    """Uses the stores' HTTP interface, with the version that the decision rests on and its idempotency key.

    Parts of a split are made one after another, each once the one before is known to be made.
    """

    client_of: Callable[[str], Tuned | None]
    unknown: Callable[[], Sequence[str]]
    """Names not resolved to stores yet."""
    fence: Callable[[], None]
    """Is called before each change, and may raise: the agent may have been paused since, and another lead."""

    def apply(self, decision: Decision, *, late: str = "") -> ChangeResult:
        """Make the change, unless an earlier attempt did. ``late``: why it is too late to make it; empty: it is not."""
        for part in parts(decision):
            outcome = self._told(part, State.APPLIED, late)
            if outcome.state != State.APPLIED:
                return _named(outcome, part, decision)
        return outcome

    def undo(self, decision: Decision, *, late: str = "") -> ChangeResult:
        """Set the field back if it still has the decision's value; rolled_back also if it was set back already.

        Approved: not known yet. Anything else: it is not rolled back. A part of a split that has a different value by
        now stays; the others are set back, and the reason says so. ``late`` as in ``apply``.
        """
        stuck, outcomes = [], []
        for part in reversed(parts(decision)):  # what grew shrinks first
            outcome = self._told(part, State.ROLLED_BACK, late)
            if outcome.state == State.APPROVED:
                return _named(outcome, part, decision)
            outcomes.append(outcome)
            if outcome.state != State.ROLLED_BACK:
                stuck.append(f"{part.target}: {outcome.reason}")
        if len(outcomes) == 1 or not stuck:
            return outcomes[-1]
        if len(stuck) == len(outcomes):
            return ChangeResult(State.EXPIRED, "; ".join(stuck))
        return ChangeResult(State.ROLLED_BACK, f"but not {'; '.join(stuck)}")

    def _told(self, decision: Decision, state: State, late: str) -> ChangeResult:
        client = self.client_of(decision.target.store)
        if client is None:
            if unknown := ", ".join(self.unknown()):
                return ChangeResult(State.APPROVED, f"where the store is is not known yet: {unknown} is not resolved")
            return ChangeResult(State.EXPIRED, "the store is not among those that the agent knows")
        try:
            return self._set(client, decision, state, late)
        except httpx.HTTPStatusError as error:
            return ChangeResult(State.APPROVED, f"the store answers {_message(error.response)}")
        except httpx.HTTPError as error:
            return ChangeResult(State.APPROVED, f"the store did not answer: {said(error)}")
        except (KeyError, TypeError, ValueError) as error:
            return ChangeResult(State.APPROVED, f"the store answers what no store answers: {error!r}")

    def _set(self, client: Tuned, decision: Decision, state: State, late: str) -> ChangeResult:
        """Set the field to its value in ``state``, unless it has it."""
        tuning, making = client.tuning(), state == State.APPLIED
        version, found, expected = tuning["version"], in_force(tuning, decision.field), decision.expected_version
        if found == (decision.after if making else decision.before):
            return ChangeResult(state, version=version)
        if not making and found != decision.after:
            return ChangeResult(State.EXPIRED, f"{decision.field} has changed since: it is {found}", version)
        if late:
            return ChangeResult(State.EXPIRED, late, version)
        other = found != decision.before
        if expected is not None:  # one never tuned has version 1 after each start, whatever its settings say by then
            other = version != expected or found not in (None, decision.before)
        if making and other:
            return _meanwhile(decision, tuning)
        return self._put(client, decision, tuning, state)

    def _put(self, client: Tuned, decision: Decision, tuning: Json, state: State) -> ChangeResult:
        """Change what was just read; ``state`` if it reads back so, failed if it was accepted, but reads otherwise."""
        making, wanted, key = state == State.APPLIED, decision.after, decision.key
        if not making:
            wanted, key = decision.before, (decision.undo or {}).get("key", f"{key}-undo")
        self.fence()
        answer = client.put_tuning(replaced(tuning, decision.field, wanted), expected=tuning["version"], key=key)
        stale = answer.status_code == httpx.codes.PRECONDITION_FAILED
        if stale and making and decision.expected_version is not None:
            return _meanwhile(decision, client.tuning())
        if stale:
            return ChangeResult(State.APPROVED, "the tuning changed meanwhile")
        if answer.is_client_error and answer.status_code not in PASSING:
            return ChangeResult(State.FAILED, f"the store refused: {_message(answer)}")
        answer.raise_for_status()  # what became of it is unknown
        tuning = client.tuning()
        version, found = tuning["version"], in_force(tuning, decision.field)
        if found != wanted:
            told = f"accepted without effect: {decision.field} reads back as {found}"
            return ChangeResult(State.FAILED, told, version)
        return ChangeResult(state, version=version)


def _named(outcome: ChangeResult, part: Decision, whole: Decision) -> ChangeResult:
    """The outcome; for one part of several, the reason names the part."""
    return outcome if part is whole else replace(outcome, reason=f"{part.target}: {outcome.reason}")


def _meanwhile(decision: Decision, tuning: Json) -> ChangeResult:
    version, expected, found = tuning["version"], decision.expected_version, in_force(tuning, decision.field)
    versions = "" if expected is None else f"version {version}, expected {expected}; "
    reason = f"the tuning changed meanwhile: {versions}{decision.field} is {found}"
    return ChangeResult(State.EXPIRED, reason, version)


def _message(answer: httpx.Response) -> str:
    """The field to blame, or else the status, and the store's own words."""
    try:
        body = json_of(answer)
        return f"{body.get('field') or answer.status_code}: {body['message']}"
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
        return f"status {answer.status_code}"
