"""Changes a store's tuning, exactly once, and looks whether it changed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import httpx

from tiertune_agent.collector.stores import StoreClient
from tiertune_agent.fields import read, replaced
from tiertune_agent.records import Decision, State


@dataclass(frozen=True)
class Outcome:
    """What became of a decision. State approved: not known yet; it stays in flight."""

    state: State
    reason: str = ""
    version: int | None = None


class Actuator(Protocol):
    def apply(self, decision: Decision) -> Outcome:
        """Try to make the change; safe to repeat."""


class NullActuator:
    """Changes nothing: a dry run."""

    def apply(self, decision: Decision) -> Outcome:  # noqa: ARG002
        return Outcome(State.EXPIRED, "dry run: nothing was changed")


class HttpActuator:
    """Through the stores' HTTP interface, with the version that the decision was made on and its idempotency key."""

    def __init__(self, client_of: Callable[[str], StoreClient | None]) -> None:
        self._client_of = client_of

    def apply(self, decision: Decision) -> Outcome:
        client = self._client_of(decision.target.store)
        if client is None:
            return Outcome(State.EXPIRED, "the store is not among those that the agent knows")
        try:
            return self._apply(client, decision)
        except httpx.HTTPError as error:
            return Outcome(State.APPROVED, f"the store did not answer: {error or type(error).__name__}")
        except (KeyError, ValueError) as error:
            return Outcome(State.FAILED, f"the store answers what no store answers: {error!r}")

    def _apply(self, client: StoreClient, decision: Decision) -> Outcome:
        version, tuning = client.tuning()
        if version != decision.expected_version:
            return _someone_was_there(decision, version, read(tuning, decision.field))
        wanted = replaced(tuning, decision.field, decision.after)
        answer = client.put_tuning(wanted, expected=version, key=decision.key)
        if answer.status_code == httpx.codes.PRECONDITION_FAILED:
            version, tuning = client.tuning()
            return _someone_was_there(decision, version, read(tuning, decision.field))
        if answer.status_code in (httpx.codes.CONFLICT, httpx.codes.UNPROCESSABLE_ENTITY, httpx.codes.BAD_REQUEST):
            return Outcome(State.FAILED, f"the store refused: {_message(answer)}")
        answer.raise_for_status()
        version, tuning = client.tuning()
        found = read(tuning, decision.field)
        if found != decision.after:
            return Outcome(State.FAILED, f"accepted without effect: {decision.field} reads back as {found}", version)
        return Outcome(State.APPLIED, version=version)


def _someone_was_there(decision: Decision, version: int, found: object) -> Outcome:
    """The document has another version than expected: ours arrived before its answer was read, or somebody else's."""
    if version == (decision.expected_version or 0) + 1 and found == decision.after:
        return Outcome(State.APPLIED, version=version)
    reason = f"the tuning changed meanwhile: version {version}, expected {decision.expected_version}"
    return Outcome(State.EXPIRED, f"{reason}; {decision.field} is {found}", version)


def _message(answer: httpx.Response) -> str:
    try:
        body = answer.json()
        return f"{body['field']}: {body['message']}" if body.get("field") else str(body["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"status {answer.status_code}"
