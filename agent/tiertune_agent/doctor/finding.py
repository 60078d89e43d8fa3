"""What a check says."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from tiertune_agent.doctor.facts import AllFacts
from tiertune_agent.incidents.detectors import FEW

Severity = Literal["error", "warning"]
"""Something does not work; it works, but costs or hides something."""
OFTEN = 0.05
"""Share of requests or chunks that is worth a finding."""
Subject = TypeVar("Subject")
Told = Iterator[tuple[str, str]]
"""What is wrong with a subject, with figures, and what to do about it."""
Found = Iterator[tuple[str, str, str]]
"""Where (a store by its name, else an address or a file), and the same."""


@dataclass(frozen=True)
class Finding:
    check: str
    severity: Severity
    where: str
    wrong: str
    mend: str


@dataclass(frozen=True)
class Check:
    name: str
    """That of the agent's incident of the same kind, if there is one."""
    severity: Severity
    look: Callable[[AllFacts], Found]

    def findings(self, facts: AllFacts) -> Iterator[Finding]:
        return (Finding(self.name, self.severity, *found) for found in self.look(facts))


def check(severity: Severity) -> Callable[[Callable[[AllFacts], Found]], Check]:
    """Decorator: makes a check of a function of all facts, by its name."""
    return lambda look: Check(look.__name__, severity, look)


def of_each(
    subjects: Callable[[AllFacts], Iterable[Subject]], where: str
) -> Callable[[Severity], Callable[[Callable[[Subject], Told]], Check]]:
    """Decorator like ``check``, for a function of one subject; ``where`` is the attribute that says where it is."""

    def look(look_at: Callable[[Subject], Told], facts: AllFacts) -> Found:
        return ((getattr(one, where), *told) for one in subjects(facts) for told in look_at(one))

    return lambda severity: lambda look_at: Check(look_at.__name__, severity, partial(look, look_at))


of_agent = of_each(lambda facts: [facts.agent] if facts.agent.url else [], "url")
of_policy = of_each(lambda facts: [facts.agent] if facts.agent.url else [], "file")
of_store = of_each(lambda facts: facts.answering, "name")
of_engine = of_each(lambda facts: facts.engines, "url")
of_server = of_each(lambda facts: facts.servers, "server")
of_storage = of_each(lambda facts: [facts.storage] if facts.storage else [], "storage")


def often(count: float, of: float) -> bool:
    """Whether that many of all are worth a finding."""
    return count >= FEW and count > OFTEN * of
