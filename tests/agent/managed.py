"""A fleet whose remote is under change control: two fake stores, a real Redis, prospects made by the test."""

from datetime import timedelta

import pytest
import redis

from agent.fakes import FakeStore, open_incidents
from connector.stores import PATIENCE_S
from e2e.servers import redis_server
from tiertune_agent.records import FLEET, Prospect, State
from tiertune_connector.whatif.chain import Shape

GIB = 2**30
POLICY = """
version: 1
mode: auto
budgets: {total: 4GiB}
remote: {manage: true}
guard: {changes_per_hour: 100, min_requests: 1, soak: 1m}
tuners:
  tier_size: {period: 15s, hold_off: 1m}
  remote_fetch: {mode: observe}
  eviction: {period: 15s}
"""
MORE_DRAM = {(1, 2): 1.0, (1.5, 1): 0.5}
BEFORE, AFTER = ([1, 1], 2), ([1.5, 1.5], 1)
"""What hosts and the remote have at first, and after they followed that."""


class World:
    """Hosts with 1 GiB of DRAM each, a remote with 2 GiB if any, one agent after another over them."""

    def __init__(self, agents, clock, policy, *, raw=None, url="", hosts="ab"):
        self.raw, self.clock, self.policy, self.url = raw, clock, policy, url
        self.stores = [FakeStore(clock, f"host-{name}") for name in hosts]
        self.agent, self._agents = None, agents

    def start(self):
        """An agent, or the one after one that was killed."""
        if self.agent is not None:
            self.agent.leader.resign()
        remote = {"url": self.url, "timeout": PATIENCE_S} if self.url else None
        self.agent = self._agents(*self.stores, remote=remote)
        return self.agent

    def edit(self, *changes):
        """The policy is another one: pairs of what it said and says."""
        text = POLICY
        for was, now in changes:
            text = text.replace(was, now)
        self.policy.write_text(text)

    def rounds(self, count=1):
        for _ in range(count):
            self.clock.advance(15)
            for store in self.stores:
                store.traffic()
            self.agent.loop.run_once()

    def prospects(self, costs):
        """Many requests told what they would cost, by shape in GiB (DRAM per host, remote)."""
        shapes = {str(Shape(int(dram * GIB), 0, int(remote * GIB))): cost for (dram, remote), cost in costs.items()}
        starts = (self.clock.now() - timedelta(seconds=7.5), self.clock.now())  # one spell alone could be chance
        prospects = [Prospect("ab" * 16, start, 7.5, 500, shapes) for start in starts]
        self.agent.history.measured.remember_prospects(prospects)

    def sampled(self, costs):
        """A round that knows of these."""
        self.prospects(costs)
        self.rounds()

    def becomes_worse(self):
        """What was followed costs twice as much by now, until it has its verdict."""
        for cost in (2.0, 2.01, 2.02, 2.03, 2.02, 2.01):
            self.sampled({(1, 2): 1.0, (1.5, 1): cost})

    def drams(self):
        return [store.tuning["tiers"]["dram"]["capacity_bytes"] / GIB for store in self.stores]

    def remote(self):
        return int(self.raw.config_get("maxmemory")["maxmemory"]) / GIB

    def split(self):
        """DRAM of each host and the remote's, in GiB."""
        return self.drams(), self.remote()

    def decisions(self, tuner="tier_size"):
        found = [each for each in self.agent.history.decisions.find() if each.tuner == tuner]
        return [each for each in found[::-1] if each.state not in (State.PROPOSED, State.EXPIRED)]

    def answer(self, tier, store=FLEET):
        """Of the tuner of sizes."""
        answers = self.agent.history.answers.newest()
        return next(a["reason"] for a in answers if (a["tuner"], a["store"], a["tier"]) == ("tier_size", store, tier))

    def incidents(self):
        return open_incidents(self.agent)


@pytest.fixture(scope="session")
def managed_redis():
    """No test stops it."""
    with redis_server() as server:
        yield server


@pytest.fixture
def world(managed_redis, agents, clock, policy_file):
    """A fleet with a managed remote, after its first round."""
    with redis.Redis.from_url(managed_redis.url, decode_responses=True) as raw:
        raw.config_set("maxmemory", 2 * GIB)
        raw.config_set("maxmemory-policy", "allkeys-lru")
        made = World(agents, clock, policy_file, raw=raw, url=managed_redis.url)
        made.policy.write_text(POLICY)
        made.start()
        made.rounds()
        yield made
