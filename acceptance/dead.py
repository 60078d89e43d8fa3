"""The agent reports tiers that cost and serve nothing, each with what is wrong with it."""

from typing import Any

from acceptance.fleet import Fleet, fleet
from acceptance.gates import WITHIN_S
from acceptance.traffic import Phase, shifting
from tiertune_agent.demo.world import HOSTS, Setup

POLICY = "version: 1\nmode: observe\n"
SMALL, AMPLE = HOSTS
"""SMALL has too little DRAM and a disk of capacity 0; AMPLE has all it needs and a disk that it never reads."""
SETUP = Setup(
    players=2,
    window_s=1,
    chunk_bytes=16 << 10,
    requests_per_s=4.0,
    policy=POLICY,
    settings={
        SMALL: {"dram": {"capacity": 1 << 20, "segment": 1 << 20}, "disk": {"path": "small.disk", "capacity": 0}},
        AMPLE: {
            "dram": {"capacity": 256 << 20, "segment": 16 << 20},
            "disk": {"path": "ample.disk", "capacity": 2**30},
        },
    },
)
TEN_MINUTES_S = 600.0
"""Only after this time does a tier count as never read."""


def prove(*, short: bool) -> str:
    """Five kinds of fault; in short four, since one takes ten minutes."""
    trace = shifting([Phase(4000, 40)], 10.0, seed=3)
    with fleet(SETUP, trace, plays=False) as made:
        made.retune(SMALL, _never_long_enough)
        made.retune(AMPLE, _write_all)
        made.world.play(trace)
        kinds = [
            _named(made, "tier_unused", SMALL, "its capacity is 0"),
            _named(made, "tier_unused", SMALL, "were under min_fetch_tokens"),
        ]
        if not short:
            kinds.append(_named(made, "tier_unused", AMPLE, "disk is dead weight", TEN_MINUTES_S + WITHIN_S))
        made.kill("remote")
        kinds.append(_named(made, "tier_dead", SMALL, "remote: "))
        made.kill(AMPLE)
        kinds.append(_named(made, "store_unreachable", AMPLE, "http://"))
        verified = made.unharmed()
    told = "; ".join(f"{number}. {kind}" for number, kind in enumerate(kinds, 1))
    return f"{len(kinds)} kinds named: {told}; all {verified} chunks that were read were right"


def _never_long_enough(tuning: dict[str, Any]) -> None:
    tuning["tiers"]["remote"]["min_fetch_tokens"] = 10**6


def _write_all(tuning: dict[str, Any]) -> None:
    tuning["tiers"]["disk"]["write"] = "commit"


def _named(made: Fleet, kind: str, host: str, words: str, within_s: float = WITHIN_S) -> str:
    """Wait for an incident with ``words``; returns the host and that part of the message."""

    def told() -> list[str]:
        parts = [part for message in made.agent.incidents(kind, host) for part in message.split("; ")]
        return [part for part in parts if words in part]

    made.world.until(told, f"{kind} of {host} says {words!r}", within_s)
    return f"{host}: {told()[0]}"
