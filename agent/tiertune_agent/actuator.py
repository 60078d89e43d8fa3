"""Changes a store's tuning, exactly once, and looks whether it changed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from tiertune_agent.collector.stores import StoreClient
from tiertune_agent.fields import in_force, replaced
from tiertune_agent.records import Decision, State

REFUSALS = (httpx.codes.BAD_REQUEST, httpx.codes.CONFLICT, httpx.codes.UNPROCESSABLE_ENTITY)


@dataclass(frozen=True)
class Outcome:
    """What became of a decision. State approved: not known yet; it stays in flight."""

    state: State
    reason: str = ""
    version: int | None = None


class Actuator(Protocol):
    def apply(self, decision: Decision) -> Outcome:
        """Make the change."""

    def resume(self, decision: Decision, *, late: bool) -> Outcome:
        """Find out what became of an attempt; make the change if it did not arrive, unless it is too late for that."""

    def undo(self, decision: Decision) -> Outcome:
        """Set the field back, if it still has the decision's value; rolled_back also where it was set back already.

        Approved: not known yet. Anything else: it cannot be rolled back.
        """


class NullActuator:
    """Changes nothing: a dry run. What it is given stays proposed."""

    def apply(self, decision: Decision) -> Outcome:  # noqa: ARG002
        return Outcome(State.PROPOSED, "dry run: nothing was changed")

    def resume(self, decision: Decision, *, late: bool) -> Outcome:  # noqa: ARG002
        return self.apply(decision)

    def undo(self, decision: Decision) -> Outcome:  # noqa: ARG002
        return Outcome(State.FAILED, "dry run: nothing was changed")


class HttpActuator:
    """Through the stores' HTTP interface, with the version that the decision was made on and its idempotency key."""

    def __init__(self, client_of: Callable[[str], StoreClient | None]) -> None:
        self._client_of = client_of

    def apply(self, decision: Decision) -> Outcome:
        return self._told(decision, _apply)

    def resume(self, decision: Decision, *, late: bool) -> Outcome:
        def look(client: StoreClient, decision: Decision) -> Outcome:
            version, tuning = client.tuning()
            if in_force(tuning, decision.field) == decision.after:
                return Outcome(State.APPLIED, version=version)
            if late:
                return Outcome(State.EXPIRED, "it did not reach the store in time", version)
            return _apply(client, decision)

        return self._told(decision, look)

    def undo(self, decision: Decision) -> Outcome:
        return self._told(decision, _undo)

    def _told(self, decision: Decision, act: Callable[[StoreClient, Decision], Outcome]) -> Outcome:
        client = self._client_of(decision.target.store)
        if client is None:
            return Outcome(State.EXPIRED, "the store is not among those that the agent knows")
        try:
            return act(client, decision)
        except httpx.HTTPError as error:
            return Outcome(State.APPROVED, f"the store did not answer: {error or type(error).__name__}")
        except (KeyError, ValueError) as error:
            return Outcome(State.FAILED, f"the store answers what no store answers: {error!r}")


def _apply(client: StoreClient, decision: Decision) -> Outcome:
    version, tuning = client.tuning()
    if in_force(tuning, decision.field) == decision.after:
        return Outcome(State.APPLIED, version=version)
    if version != decision.expected_version:
        return _meanwhile(decision, version, tuning)
    wanted = replaced(tuning, decision.field, decision.after)
    answer = client.put_tuning(wanted, expected=version, key=decision.key)
    if answer.status_code == httpx.codes.PRECONDITION_FAILED:
        return _meanwhile(decision, *client.tuning())
    if answer.status_code in REFUSALS:
        return Outcome(State.FAILED, f"the store refused: {_message(answer)}")
    answer.raise_for_status()
    version, tuning = client.tuning()
    found = in_force(tuning, decision.field)
    if found != decision.after:
        return Outcome(State.FAILED, f"accepted without effect: {decision.field} reads back as {found}", version)
    return Outcome(State.APPLIED, version=version)


def _undo(client: StoreClient, decision: Decision) -> Outcome:
    version, tuning = client.tuning()
    found = in_force(tuning, decision.field)
    if found == decision.before:
        return Outcome(State.ROLLED_BACK, version=version)
    if found != decision.after:
        return Outcome(State.EXPIRED, f"{decision.field} has changed since: it is {found}", version)
    key = (decision.undo or {}).get("key", f"{decision.key}-undo")
    answer = client.put_tuning(replaced(tuning, decision.field, decision.before), expected=version, key=key)
    if answer.status_code == httpx.codes.PRECONDITION_FAILED:
        return Outcome(State.APPROVED, "the tuning changed meanwhile")
    if answer.status_code in REFUSALS:
        return Outcome(State.FAILED, f"the store refused: {_message(answer)}")
    answer.raise_for_status()
    version, tuning = client.tuning()
    found = in_force(tuning, decision.field)
    if found != decision.before:
        return Outcome(State.FAILED, f"accepted without effect: {decision.field} reads back as {found}", version)
    return Outcome(State.ROLLED_BACK, version=version)


def _meanwhile(decision: Decision, version: int, tuning: Mapping[str, Any]) -> Outcome:
    expected, found = decision.expected_version, in_force(tuning, decision.field)
    reason = f"the tuning changed meanwhile: version {version}, expected {expected}; {decision.field} is {found}"
    return Outcome(State.EXPIRED, reason, version)


def _message(answer: httpx.Response) -> str:
    try:
        body = answer.json()
        return f"{body['field']}: {body['message']}" if body.get("field") else str(body["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"status {answer.status_code}"
