"""A history in which everything that may be named is markup."""

from agent.fakes import START
from tiertune_agent.history.store import History
from tiertune_agent.records import Rates, Snapshot, State, Target
from tiertune_agent.tuners.base import NoChange, Proposal

HOSTILE = "</script><script>alert('x')</script>\"'><img src=x onerror=alert(1)>{{ 7*7 }}"


def hostile_history(history: History):
    """Rows in which everything that a store, a tuner or an operator may name is markup."""
    tiers = {tier: {"health": HOSTILE, "reason": HOSTILE} for tier in ("dram", "remote")}
    status = {"tiers": tiers, "pools": {HOSTILE: {"model": HOSTILE}}}
    tuning = {"version": 3, "tiers": {"remote": {"fetch": HOSTILE}}}
    history.remember([(Snapshot(HOSTILE, HOSTILE, HOSTILE, HOSTILE, START, status, tuning), Rates())])
    target = Target(HOSTILE, HOSTILE, HOSTILE)
    evidence = {HOSTILE: HOSTILE, "list": [{HOSTILE: HOSTILE}], "at": HOSTILE, "deep": {HOSTILE: [HOSTILE]}}
    wish = Proposal(HOSTILE, HOSTILE, HOSTILE, HOSTILE, evidence)
    made = history.decisions.propose(HOSTILE, target, wish, mode=HOSTILE, version=1, policy=1, now=START)
    kept = history.decisions.judge(made, State.KEPT, HOSTILE, {}, START)
    history.decisions.wait(kept, HOSTILE)
    answered = (("remote_fetch", Target(HOSTILE, "remote")), (HOSTILE, target))
    history.answers.remember([(*one, NoChange(HOSTILE)) for one in answered], START)
    history.journal.tell_incidents({(HOSTILE, HOSTILE): HOSTILE}, START)
    history.journal.freeze(HOSTILE, HOSTILE, START, None)
