"""What a check says."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from tiertune_agent.doctor.facts import AllFacts

Severity = Literal["error", "warning", "note"]
"""Something does not work; it works, but costs or hides something; worth knowing, nothing is wrong."""
OFTEN = 0.05
"""Share of requests or chunks that is worth a finding."""


@dataclass(frozen=True)
class Found:
    """One thing that a check found."""

    where: str
    """A store by its name, else an address or a file."""
    wrong: str
    """What is wrong, with figures."""
    mend: str
    """What to do about it."""


@dataclass(frozen=True)
class Check:
    name: str
    """That of the agent's incident of the same kind, if there is one."""
    severity: Severity
    look: Callable[[AllFacts], Iterator[Found]]


@dataclass(frozen=True)
class Finding:
    check: str
    severity: Severity
    where: str
    wrong: str
    mend: str
