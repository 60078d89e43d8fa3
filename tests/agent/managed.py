"""A fleet whose remote is under change control: two fake stores, a real Redis, prospects made by the test."""

from datetime import timedelta

from agent.fakes import FakeStore
from connector.stores import PATIENCE_S
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


class World:
    """Two hosts with 1 GiB of DRAM each, a remote with 2 GiB, one agent after another over them."""

    def __init__(self, raw, agents, clock, policy, url):
        self.raw, self.clock, self.policy, self.url = raw, clock, policy, url
        self.stores = [FakeStore(clock, name) for name in ("host-a", "host-b")]
        self.agent, self._agents = None, agents

    def start(self):
        """An agent, or the one after one that was killed."""
        if self.agent is not None:
            self.agent.leader.resign()
        remote = {"url": self.url, "timeout": PATIENCE_S} if self.url else None
        self.agent = self._agents(*self.stores, remote=remote)
        return self.agent

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

    def answer(self, tier, tuner="tier_size", store=FLEET):
        answers = self.agent.history.answers.newest()
        return next(a["reason"] for a in answers if (a["tuner"], a["store"], a["tier"]) == (tuner, store, tier))

    def incidents(self):
        told = self.agent.history.journal.incidents()
        return {(one["kind"], one["store"]): one["message"] for one in told if not one["closed_at"]}
