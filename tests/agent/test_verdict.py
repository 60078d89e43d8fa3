"""Verdicts: two standard errors, or inconclusive."""

from dataclasses import replace

import pytest

from agent.fakes import remote_window
from agent.test_actuator import DECISION
from tiertune_agent.records import State
from tiertune_agent.tuners.base import Candidate
from tiertune_agent.verdict import judge

TYPICAL = Candidate(requests=10, nbytes=100e6, recompute_s=0.5)
ON = replace(DECISION, before="off", after="on")


def probes(*bandwidths):
    return [remote_window(i, bandwidth=bandwidth, age=1.0) for i, bandwidth in enumerate(bandwidths)]


def outcomes(*saved):
    return [
        remote_window(i, requests=5, fetch=1, recompute=4, saved=max(s, 0), lost=max(-s, 0))
        for i, s in enumerate(saved)
    ]


@pytest.mark.parametrize(
    ("decision", "soak", "state"),
    [
        (DECISION, probes(1e8, 1.1e8, 0.9e8, 1e8), State.KEPT),
        (DECISION, probes(1e9, 1e9, 1e9), State.INCONCLUSIVE),
        (DECISION, probes(1e8, 1e9, 1e8, 1e9), State.INCONCLUSIVE),
        (DECISION, probes(1e8, 1e8), State.INCONCLUSIVE),
        (ON, outcomes(3, 2.8, 3.1), State.KEPT),
        (ON, outcomes(-3, -2.8, -3.1), State.INCONCLUSIVE),
        (ON, outcomes(3, -3, 2), State.INCONCLUSIVE),
        (ON, [], State.INCONCLUSIVE),
        (replace(DECISION, field="tiers.remote.margin"), probes(1e8, 1e8, 1e8), State.INCONCLUSIVE),
    ],
)
def test_only_a_clear_soak_keeps(decision, soak, state):
    """A change is kept if its soak confirms it by two standard errors; everything else is inconclusive."""
    verdict = judge(decision, soak, TYPICAL)
    assert verdict.state == state
    assert verdict.reason
