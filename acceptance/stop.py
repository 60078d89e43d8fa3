"""A freeze stops every change within a window; a bypass works although the agent is dead."""

import time

from acceptance.fleet import SLOW_BYTES_PER_S, Fleet, command, expect, fleet
from acceptance.gates import SETUP, WITHIN_S
from acceptance.traffic import everyday
from tiertune_agent.demo.world import HOSTS

FROZEN_S = {True: 10.0, False: 30.0}
"""By ``short``: how long nothing may change although the agent wishes a change."""


def prove(*, short: bool) -> str:
    """Freeze by command; then kill the agent and bypass one store directly."""
    with fleet(SETUP, everyday()) as made:
        made.world.until(lambda: made.hits("remote") > 0, "engines find chunks in the remote", WITHIN_S)
        made.serving(20)
        wished = _frozen(made, FROZEN_S[short])
        thawed_s = _thawed(made)
        bypassed = _bypassed(made)
        verified = made.unharmed()
    return (
        f"frozen, nothing changed in {FROZEN_S[short]:g} s although the agent wished fetching {wished}; "
        f"{thawed_s:.1f} s after tiertune unfreeze was called it was made; with the agent killed, {bypassed}; "
        f"all {verified} chunks that were read were right"
    )


def _frozen(made: Fleet, seconds: float) -> str:
    """Freeze, slow the remote, expect no change; returns the change that the agent wished."""
    command("freeze", "--reason", "acceptance", "--agent", made.world.page)
    versions = [made.tuning(host)["version"] for host in HOSTS]
    made.world.limit(SLOW_BYTES_PER_S)
    started = time.monotonic()
    told: list[str] = []

    def over() -> bool:
        expect([made.tuning(host)["version"] for host in HOSTS] == versions, "a tuning changed while frozen")
        answers = made.agent.get("fleet")["answers"]
        told.extend(one["reason"] for one in answers if one["reason"].startswith("frozen"))
        return bool(told) and time.monotonic() - started >= seconds

    made.world.until(over, "the agent wishes a change and says that it is frozen", seconds + WITHIN_S)
    return told[-1].partition("; wished ")[2].partition(":")[0]


def _thawed(made: Fleet) -> float:
    """Seconds from the command to unfreeze until the wished change is made."""
    started = time.monotonic()
    command("unfreeze", "--agent", made.world.page)
    made.world.until(lambda: not any(made.fetching()), "what was wished is made after the freeze", WITHIN_S)
    return time.monotonic() - started


def _bypassed(made: Fleet) -> str:
    """Bypass one host without an agent; returns what that did."""
    made.kill("agent")
    host, other = HOSTS
    started = time.monotonic()
    command("bypass", "on", "--store", made.world.stores[host])
    took_s = time.monotonic() - started
    asked, hits, others = made.counted("requests_total", host), made.hits("dram", host), made.hits("dram", other)
    made.world.until(lambda: made.hits("dram", other) > others, "the other host goes on finding chunks", WITHIN_S)
    made.serving(20)
    missed = made.counted("requests_total", host) - asked
    expect(missed, f"no request came to {host} while it was bypassed")
    found = made.hits("dram", host) - hits
    expect(not found, f"{host} found {found:.0f} tokens although it is bypassed")
    command("bypass", "off", "--store", made.world.stores[host])
    made.world.until(lambda: made.hits("dram", host) > hits, "chunks are found again after the bypass", WITHIN_S)
    return (
        f"tiertune bypass took {took_s:.1f} s, {host} then found nothing for {missed:.0f} requests, the other host "
        "did, and off again it found chunks as before"
    )
