"""What is claimed, and how each claim is proved: in a process of its own, so here is what that process needs."""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from acceptance import dead, gates, harm, kills, sizes, stop
from acceptance.fleet import NotShownError
from tiertune_agent.demo.world import DemoError

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Claim:
    says: str
    prove: Callable[..., str]
    """Takes ``short``; a sentence of evidence, or NotShownError."""


CLAIMS: Mapping[str, Claim] = {  # the longest first
    "dead": Claim("names dead tiers", dead.prove),
    "sizes": Claim("sizes tiers within the regret bound", sizes.prove),
    "kills": Claim("survives its own kill -9 at every step", kills.prove),
    "harm": Claim("reports or rolls back what harms", harm.prove),
    "stop": Claim("obeys a freeze, and stores a bypass without it", stop.prove),
    "gates": Claim("gates a throttled remote and re-opens it", gates.prove),
}


@dataclass(frozen=True)
class Proof:
    claim: str
    says: str
    holds: bool
    evidence: str
    """A sentence; of one that does not hold, what was missing."""
    seconds: float


def proved(name: str, *, short: bool) -> Proof:
    """One claim; whatever goes wrong is what it lacks."""
    started, claim = time.monotonic(), CLAIMS[name]
    try:
        holds, evidence = True, claim.prove(short=short)
    except (NotShownError, DemoError) as error:
        holds, evidence = False, str(error)
    except Exception as error:  # noqa: BLE001 (the other claims are proved all the same)
        holds, evidence = False, repr(error)
    return Proof(name, claim.says, holds, evidence, round(time.monotonic() - started, 1))


def begin_worker() -> None:
    """In a process that proves: it is interrupted with the one that started it, however that ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


def proved_by_worker(name: str, *, short: bool) -> Proof:
    """As ``proved``; interrupted, the world is gone, and so is the process: it must not take up another claim."""
    try:
        return proved(name, short=short)
    except KeyboardInterrupt:
        os._exit(1)


def failed(name: str, why: str) -> Proof:
    """Of a claim that could not even be tried."""
    return Proof(name, CLAIMS[name].says, holds=False, evidence=why, seconds=0.0)
