"""Every check, in the order of the report. Pure: facts in, findings out."""

from tiertune_agent.doctor.checks import of_agent, of_backends, of_engines, of_stores, of_traffic
from tiertune_agent.doctor.facts import AllFacts
from tiertune_agent.doctor.finding import Check, Finding, Severity


def checks_of(*modules: object) -> tuple[Check, ...]:
    """Each once, also where a module has imported another's."""
    return tuple(dict.fromkeys(each for one in modules for each in vars(one).values() if isinstance(each, Check)))


SEEN = checks_of(of_agent, of_stores, of_backends, of_traffic, of_engines)
NAMES = {check.name for check in SEEN} | of_agent.MENDS.keys()
"""Of all checks, those of the agent's incidents among them."""
ORDER: tuple[Severity, ...] = ("error", "warning")


def findings(facts: AllFacts) -> list[Finding]:
    """What is wrong, errors first. An incident of the agent is left out where a check of its name found the same."""
    told = [one for check in SEEN for one in check.findings(facts)]
    known = {(one.check, _place(one)) for one in told}
    told += [one for one in of_agent.incidents(facts.agent) if (one.check, _place(one)) not in known]
    return sorted(told, key=lambda one: ORDER.index(one.severity))


def _place(finding: Finding) -> str:
    """The agent calls a store that it never met by host and port."""
    return finding.where.partition("://")[2] or finding.where
