"""The gates' margin and floor follow the policy file."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tiertune_agent.fields import read
from tiertune_agent.records import Target, Window
from tiertune_agent.tuners.base import Answer, Current, NoChange, Proposal, Scope, models, present
from tiertune_agent.tuners.remote_fetch import RemoteFetchSettings


class GateSettings:
    """One field at a time; the settings are those of ``remote_fetch``."""

    name: ClassVar = "gate_settings"
    scope: ClassVar[Scope] = "tier"
    advisory: ClassVar = False

    def __init__(self, settings: RemoteFetchSettings) -> None:
        self.settings = settings

    def targets(self, store: str, status: Mapping[str, Any]) -> list[Target]:
        return [Target(store, "remote", models=models(status))] if present(status, "remote") else []

    def evaluate(self, history: Sequence[Window], current: Current) -> Answer:  # noqa: ARG002 (the policy is enough)
        wanted = {"margin": self.settings.margin, "min_fetch_tokens": self.settings.min_fetch_tokens}
        for name, value in wanted.items():
            field = f"tiers.remote.{name}"
            before = read(current.tuning, field)
            if before != value:
                return Proposal(field, before, value, f"the policy says {name} {value:g}, the store has {before}")
        return NoChange(f"as the policy says: margin {wanted['margin']:g}, floor {wanted['min_fetch_tokens']} tokens")
