"""The claims, and how each is proved in a process of its own."""

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
    """Takes ``short``; returns a sentence of evidence. May raise NotShownError."""


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
    """A sentence; if the claim does not hold, what was missing."""
    seconds: float


def proved(name: str, *, short: bool) -> Proof:
    """Prove one claim; any error is evidence that it does not hold."""
    started, claim = time.monotonic(), CLAIMS[name]
    try:
        holds, evidence = True, claim.prove(short=short)
    except (NotShownError, DemoError) as error:
        holds, evidence = False, str(error)
    except Exception as error:  # noqa: BLE001 (the other claims are proved all the same)
        holds, evidence = False, repr(error)
    return Proof(name, claim.says, holds, evidence, round(time.monotonic() - started, 1))


def begin_worker() -> None:
    """Let SIGINT interrupt this process, and let the kernel send it when the parent ends, however that ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


def proved_by_worker(name: str, *, short: bool) -> Proof:
    """As ``proved``. An interrupt ends the world and then the process: it must not take up another claim."""
    try:
        return proved(name, short=short)
    except KeyboardInterrupt:
        os._exit(1)


def failed(name: str, why: str) -> Proof:
    """The proof of a claim whose process broke."""
    return Proof(name, CLAIMS[name].says, holds=False, evidence=why, seconds=0.0)
