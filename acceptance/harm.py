"""The agent reports harmful changes made by hand, and rolls back one of its own that turned out bad."""

from dataclasses import replace
from typing import Any

from acceptance.fleet import Fleet, NotShownError, fleet
from acceptance.gates import SETUP, WITHIN_S
from acceptance.traffic import everyday
from tiertune_agent.demo.world import DEMO, HOSTS

POLICY = """\
version: 1
mode: observe
guard: {changes_per_hour: 1000, min_requests: 4, soak: 60s}
tuners:
  remote_fetch: {mode: auto, period: 1s, disable_after: 2, enable_after: 240}
"""
"""Fetching goes off within two windows, and on again only by a verdict.

Most of a soak must come after the link is fast again: so each host's link is fast again as soon as that host has
switched off, however long the other one takes.
"""
DEAR_BYTES_PER_S = 6.0 * 2**20
"""Fetching then takes only twice as long as recomputing: windows that still predict so do not outweigh later ones."""
JUDGED_WITHIN_S = 2 * 60.0 + WITHIN_S
"""A soak in which too few windows tell anything is prolonged by its own length."""
PLACES = {"a tenth of the DRAM": "tiers.dram.capacity_bytes", "FIFO": "defaults.eviction"}


def prove(*, short: bool) -> str:
    """Harms by hand, then one that a verdict undoes; in full each host suffers each harm by hand."""
    setup = replace(SETUP, policy=POLICY, dram_bytes=DEMO.dram_bytes)
    with fleet(setup, everyday()) as made:
        made.world.until(lambda: made.hits("remote") > 0, "engines find chunks in the remote", WITHIN_S)
        made.serving(20)
        told = [
            f"{name} by hand on {host} was told as drift {_by_hand(made, host, name):.1f} s later"
            for host in (HOSTS[:1] if short else HOSTS)
            for name in PLACES
        ]
        undone = _by_verdict(made)
        verified = made.unharmed()
    return f"{', '.join(told)}; {undone}; all {verified} chunks that were read were right"


def _by_hand(made: Fleet, host: str, name: str) -> float:
    """Seconds until the agent reports the change as drift; then the change is undone."""
    before = made.tuning(host)

    def harm(tuning: dict[str, Any]) -> None:
        if name == "FIFO":
            tuning["defaults"]["eviction"] = "fifo"
        else:
            tuning["tiers"]["dram"]["capacity_bytes"] //= 10

    def mend(tuning: dict[str, Any]) -> None:
        tuning["defaults"], tuning["tiers"]["dram"] = before["defaults"], before["tiers"]["dram"]

    def told() -> bool:
        return any(PLACES[name] in message for message in made.agent.incidents("tuning_drift", host))

    made.retune(host, harm)
    seconds = made.world.until(told, f"{name} on {host} is told as drift", WITHIN_S)
    made.retune(host, mend)
    made.world.until(lambda: not told(), "the drift is over when it is set back", WITHIN_S)
    return seconds


def _by_verdict(made: Fleet) -> str:
    """The agent switches fetching off on a slow link, which then turns fast: the soak shows that off is worse."""
    slow = set(HOSTS)

    def off() -> bool:
        for host in slow - {host for host, on in zip(HOSTS, made.fetching(), strict=True) if on}:
            made.world.limit(0.0, host)
            slow.remove(host)
        return not slow

    def back() -> bool:
        """Whether both hosts were rolled back; NotShownError for any other verdict."""
        for judged in _judged(made, "kept", "inconclusive"):
            raise NotShownError(f"switching off is not rolled back: {_verdict(made, judged)}")
        return all(made.fetching()) and len(_judged(made, "rolled_back")) >= len(HOSTS)

    made.world.limit(DEAR_BYTES_PER_S)
    made.world.until(off, "fetching is switched off while the remote is slow", WITHIN_S)
    seconds = made.world.until(back, "switching off is rolled back", JUDGED_WITHIN_S)
    return (
        "fetching, switched off just before the link was fast again, was rolled back on both hosts "
        f"{seconds:.1f} s after that ({_verdict(made, _judged(made, 'rolled_back')[0])})"
    )


def _judged(made: Fleet, *states: str) -> list[Any]:
    return [one for one in made.agent.decisions("remote_fetch") if one["state"] in states]


def _verdict(made: Fleet, decision: Any) -> str:  # noqa: ANN401 (JSON)
    reason: str = made.agent.get(f"decisions/{decision['id']}")["verdicts"][-1]["reason"]
    return reason
