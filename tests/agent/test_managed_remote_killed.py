"""An agent that is killed at any step of a split, of its undoing or its rollback: the next one ends it."""

from contextlib import contextmanager

import pytest

from agent.fakes import drifted
from agent.fuses import Fuse
from agent.managed import AFTER, BEFORE, GIB, MORE_DRAM


class SplitFuse(Fuse):
    """A call to a store's or the Redis's tuning is a step, too, and so is its answer."""

    def __init__(self, world, step):
        super().__init__(world.agent.history._engine, step)
        self.set = []
        for store in world.stores:
            store.handle = self._guarded(store.handle)
        self._sets(world.agent._remote)

    def follow(self, agent):
        """The Redis of the next agent is watched, too, for what is set there."""
        self._sets(agent._remote)

    def _guarded(self, handle):
        def handled(request):
            if request.method == "PUT":
                self.step()
                answer = handle(request)
                self.step()
                return answer
            return handle(request)

        return handled

    def _sets(self, remote):
        (server,) = remote._servers
        config_set = server._redis.config_set

        def counted(name, value):
            self.step()
            self.set.append((name, value))
            answer = config_set(name, value)
            self.step()
            return answer

        server._redis.config_set = counted


@contextmanager
def killed(world, step):
    fuse = SplitFuse(world, step)

    def run(count):
        for _ in range(count):
            try:
                world.rounds()
            except KeyboardInterrupt:
                fuse.follow(world.start())

    yield fuse, run


SPLIT_STEPS, REFUSED_STEPS, ROLLBACK_STEPS = 17, 16, 15
"""The first step that lies behind the end."""


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, SPLIT_STEPS + 1))
def test_a_split_is_made_once_whenever_it_is_killed(world, step):
    """Whatever step is the last one, the next agent ends with all parts made, each exactly once."""
    world.prospects(MORE_DRAM)
    with killed(world, step) as (fuse, run):
        run(3)
    assert fuse.blown is (step < SPLIT_STEPS)
    assert world.split() == AFTER
    assert [store.tuning["version"] for store in world.stores] == [2, 2]
    assert fuse.set == [("maxmemory", GIB)]
    assert [str(each.state) for each in world.decisions()] in (["applied"], ["soaking"])
    assert not drifted(world.agent)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, REFUSED_STEPS + 1))
def test_a_refused_split_is_undone_once_whenever_it_is_killed(world, step):
    """A host refuses, and the agent is killed anywhere around that: nothing stays made, nothing is made twice."""
    world.stores[1].answers("put_tuning", 422, json={"field": "tiers", "message": "no room"})
    world.prospects(MORE_DRAM)
    with killed(world, step) as (fuse, run):
        run(3)
    assert fuse.blown is (step < REFUSED_STEPS)
    assert world.split() == BEFORE
    assert fuse.set == [("maxmemory", GIB), ("maxmemory", 2 * GIB)]
    assert [str(each.state) for each in world.decisions()] == ["failed"]
    assert not drifted(world.agent)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(2, ROLLBACK_STEPS + 1))
def test_a_rollback_of_a_split_is_made_once_whenever_it_is_killed(world, step):
    """From the written wish on, the next agent sets back what is left to be set back, and nothing else."""
    world.sampled(MORE_DRAM)
    (made,) = world.decisions()
    with killed(world, step) as (fuse, run):
        try:
            world.agent.changes.rollback(made.id, "anna")
        except KeyboardInterrupt:
            fuse.follow(world.start())
        run(2)
    assert fuse.blown is (step < ROLLBACK_STEPS)
    assert world.split() == BEFORE
    assert [store.tuning["version"] for store in world.stores] == [3, 3]
    assert fuse.set == [("maxmemory", 2 * GIB)]
    assert [str(each.state) for each in world.decisions()] == ["rolled_back"]
    assert not drifted(world.agent)
