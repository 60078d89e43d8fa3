"""Killed between any two steps of a change or its undoing, the next agent goes on; nothing is made twice."""

import pytest

from agent.agents import POLICY
from agent.conftest import both_backends as backend  # noqa: F401
from agent.fakes import FAST, SLOW, drifted, fetch
from agent.fuses import Fuse
from tiertune_agent.records import State

pytestmark = pytest.mark.slow

STEPS = 19


@pytest.fixture
def survive(agents, agent, store, clock, rounds):
    """Runs windows with a fuse before one step; after a death, a new agent on the same database takes over."""

    def run(step, windows):
        fuse, here, handle = Fuse(agent.history._engine, step), agent, store.handle

        def handled(request):
            if request.url.path == "/v1/tuning":
                fuse.step()
            return handle(request)

        store.handle = handled
        for _ in range(windows):
            try:
                rounds(1, by=here)
            except KeyboardInterrupt:
                here.leader.resign()
                here = agents()
        return here, fuse.blown

    return run


def ends(agent):
    return [
        (d.before, d.after, str(d.state), [v["verdict"] for v in agent.history.verdicts.of(d.id)])
        for d in agent.history.decisions.find()
        if d.state not in (State.PROPOSED, State.EXPIRED)
    ]


@pytest.mark.parametrize("step", range(1, STEPS))
def test_a_change_is_made_once_whenever_it_is_killed(survive, store, rounds, step):
    """Whatever step of deciding, applying and judging is the last one, the change ends made once and judged once."""
    rounds(1)
    store.bandwidth = SLOW
    here, _ = survive(step, 9)
    assert (fetch(store), store.tuning["version"], len(store.keys)) == ("off", 2, 1)
    assert ends(here) == [("on", "off", "kept", ["kept"])]
    assert not drifted(here)


@pytest.mark.parametrize("step", range(1, 15))
def test_a_rollback_is_made_once_whenever_it_is_killed(survive, store, rounds, policy_file, step):
    """Whatever step of the verdict, the rollback and its record is the last one, the field is set back once."""
    policy_file.write_text(POLICY.replace("enable_after: 2", "enable_after: 99"))
    rounds(1)
    store.bandwidth = SLOW
    rounds(2)
    store.bandwidth = FAST
    rounds(3)
    assert fetch(store) == "off"
    here, _ = survive(step, 4)
    assert (fetch(store), store.tuning["version"], len(store.keys)) == ("on", 3, 2)
    assert ends(here) == [("on", "off", "rolled_back", ["rolled_back"])]
    assert not drifted(here)


def test_the_steps_tried_are_all_there_are(survive, store, rounds):
    """The last step of the first test lies behind the verdict."""
    rounds(1)
    store.bandwidth = SLOW
    here, blown = survive(STEPS, 7)
    assert ends(here) == [("on", "off", "kept", ["kept"])]
    assert not blown
