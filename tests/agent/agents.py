"""Agents over fake stores: how one is made, what passes, and what it tells."""

from fastapi.testclient import TestClient

from agent.fakes import DIGEST, SLOW, transport
from tiertune_agent.changes.survey import Survey, TierWindows
from tiertune_agent.records import Target
from tiertune_agent.run import Agent
from tiertune_agent.settings import AgentSettings
from tiertune_agent.tuners.base import Proposal
from tiertune_agent.web.look import Looks
from tiertune_agent.web.views import Views

POLICY = """
version: 1
guard: {changes_per_hour: 100, min_requests: 1, soak: 1m}
tuners: {remote_fetch: {mode: auto, period: 15s, disable_after: 2, enable_after: 2}}
"""

EVICTION = f"pools.{DIGEST}.dram.eviction"


def make_agent(database, policy_file, now, stores=(), /, *, network=None, **settings):
    """An agent over fake stores, or the real ones of its settings, which leads where no other one does.

    Who made it closes it. ``network`` is in place of the fake stores'.
    """
    addresses = [{"url": f"http://{store.name[:63]}:7410"} for store in stores]  # the longest part of a host's name
    settings = AgentSettings(**{"database": database, "stores": addresses, "policy": policy_file, **settings})
    network = network or (transport(*stores) if stores else None)
    agent = Agent(settings, wall=now, transport=network)
    agent.leader.leads()
    return agent


def pass_windows(agent, stores, clock, count=1, requests=10, *, seconds=15, tick=False):
    """Windows with traffic at a store or several, each with a round, or with what the scheduler would start."""
    for _ in range(count):
        clock.advance(seconds)
        for store in stores if isinstance(stores, list | tuple) else [stores]:
            store.traffic(requests)
        agent.tick() if tick else agent.loop.run_once()


def client_of(agent):
    """Its API, asked from this host."""
    return TestClient(agent.app, base_url="http://127.0.0.1:7420", client=("127.0.0.1", 5000))


def told(agent):
    """Decisions, oldest first."""
    return [(d.tuner, d.before, d.after, str(d.state)) for d in reversed(agent.history.decisions.find())]


def answer(agent, tuner="remote_fetch"):
    """Of the last time the tuner was asked."""
    return next(a for a in agent.history.answers.newest() if a["tuner"] == tuner)


def made(agent, store, field, before, after, evidence=None, mode="auto", namespace="", **target):  # noqa: PLR0917
    """A decision as a tuner would have made it."""
    proposal = Proposal(field, before, after, "because", evidence or {})
    tuner, target = target.get("tuner", "eviction"), Target("host-a", target.get("tier", "dram"), namespace)
    return agent.changes.take(tuner, target, proposal, mode=mode, version=store.tuning["version"], policy=1)


def views_of(agent, clock):
    """What stands, by an agent's history alone."""
    return Views(agent.history, agent.policy, leads=lambda: True, now=clock.now, window_s=15, stores=dict, sources={})


def survey_of(agent, now, stores=("host-a",)):
    """What a round of now reads."""
    return Survey(agent.history, now, TierWindows(agent.history), stores)


def looks_of(agent, clock):
    return Looks(views_of(agent, clock))


def busy(agent, store, clock):
    """Two windows in which fetching pays, eight in which it does not: one decision, kept after its soak."""
    store.held = {"dram": {"resident_bytes": 3 << 28, "capacity_bytes": 1 << 30}}
    agent.leader.leads()
    agent.loop.run_once()
    for _ in range(2):
        store.larger_pays()
        pass_windows(agent, store, clock)
    store.larger_pays()
    store.bandwidth = SLOW
    pass_windows(agent, store, clock, 8)
