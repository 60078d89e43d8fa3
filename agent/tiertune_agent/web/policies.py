"""The policy as the agent reads it, and what lint says of it. Pure."""

from dataclasses import dataclass
from datetime import datetime

from tiertune_agent.policy.document import DEFAULT
from tiertune_agent.policy.lint import Finding
from tiertune_agent.web.look import Seen
from tiertune_agent.web.text import moment


@dataclass(frozen=True)
class PolicyView:
    source: str
    """Empty: no file, the built-in policy."""
    revision: int | None
    since: datetime | None
    """When this revision was first in force."""
    sound: bool
    """Whether the file as it is now is in force."""
    findings: tuple[Finding, ...]
    text: list[str]
    """Lines of what is in force."""


def policy_view(seen: Seen) -> PolicyView:
    policy = seen.policy
    newest = policy["revisions"][0] if policy["revisions"] else None
    return PolicyView(
        source="" if policy["source"] == DEFAULT.source else policy["source"],
        revision=newest["id"] if newest else None,
        since=moment(newest["loaded_at"]) if newest else None,
        sound=policy["problem"] is None,
        findings=tuple(Finding(**one) for one in policy["lint"]),
        text=policy["text"].splitlines(),
    )
