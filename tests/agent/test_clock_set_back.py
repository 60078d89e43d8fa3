"""The clock of the agent's host is set back, or was ahead: the agent's own goes on, and nothing waits for the hour."""

from datetime import timedelta

import pytest
from apscheduler.schedulers.background import BackgroundScheduler
from prometheus_client import CollectorRegistry

from agent.agents import looks_of, pass_windows, survey_of, told, views_of
from agent.fakes import DIGEST, FAST, SLOW, Clock, FakeStore, fetch, propose, transport
from agent.sources import VLLM, FakeSource
from tiertune_agent.collector.exported import ObservedRows
from tiertune_agent.collector.observer import Observer
from tiertune_agent.collector.roster import Roster
from tiertune_agent.collector.stores import Collector
from tiertune_agent.collector.targets import ObservedSource, StoreAddress
from tiertune_agent.credentials import Access
from tiertune_agent.records import State, Target
from tiertune_agent.run import Forward, held_up
from tiertune_agent.tuners.base import Proposal

pytestmark = pytest.mark.slow
DAY, YEAR = timedelta(days=1).total_seconds(), timedelta(days=365).total_seconds()


def test_a_clock_that_was_set_back_makes_no_tuner_wait(agent, clock, rounds):
    """Tuners are asked again at once, not when the hour has come again."""
    rounds(3)
    clock.advance(-3600)
    rounds(3)
    asked = {answer["tuner"]: answer["at"] for answer in agent.history.answers.newest()}
    assert asked["remote_fetch"] == agent.now().isoformat()


def test_what_was_changed_before_can_be_changed_again(agent, clock, store, rounds):
    """What is counted since the clock was set back comes after the change."""
    store.bandwidth = SLOW
    rounds(8)
    assert (fetch(store), told(agent)[-1][-1]) == ("off", "kept")
    clock.advance(-3600)
    store.bandwidth = FAST
    rounds(6)
    assert fetch(store) == "on"


def test_the_page_shows_what_is_counted_now(agent, clock, rounds):
    """Windows go on from where the clock was."""
    looks = looks_of(agent, agent)
    rounds(4)
    assert looks.seen().stores["host-a"].sums.prompt_tokens == 40_000
    clock.advance(-3600)
    rounds(3, 20)
    for each in (looks, looks_of(agent, agent)):
        assert each.seen().stores["host-a"].sums.prompt_tokens == 100_000


def test_a_store_that_does_not_answer_is_not_shown_as_one_that_does(agent, clock, store, rounds):
    """Though it was heard at an hour that is to come again."""
    views = views_of(agent, agent)
    assert views.fleet()["stores"][0]["reachable"]
    store.up = False
    clock.advance(-3600)
    rounds(8)
    assert not views.fleet()["stores"][0]["reachable"]


def test_an_agent_that_gets_stuck_is_missed_though_its_own_time_is_ahead(agent, clock):
    """Prometheus compares its clock with the last success, which must not lie in a year to come."""
    for leap_s in (0, YEAR, -YEAR):
        clock.advance(leap_s)
        agent.tick()
    assert agent.now() > clock.now()
    assert agent.metrics.told("agent_last_success_timestamp_seconds") == {("loop",): clock.now().timestamp()}


@pytest.mark.parametrize(("restarted", "end"), [(False, ("soaking", "off")), (True, ("expired", "on"))])
def test_what_was_under_way_does_not_wait_for_its_hour_to_come_again(
    agents, agent, clock, *, store, rounds, restarted, end
):
    """The store takes it soon after the clock was set back; a new agent does not know how soon, and makes it not."""
    rounds(2)
    store.bandwidth, handle = SLOW, store.put_tuning
    store.answers("put_tuning", 503, json={"message": "not now"})
    rounds(2)
    assert told(agent)[-1][-1] == "approved"
    clock.advance(-3600)
    store.put_tuning = handle
    if restarted:
        agents.end()
        agent = agents()
    rounds(1, by=agent)
    decision = agent.history.decisions.get(1)
    assert (decision.state, fetch(store)) == end
    assert ("it did not reach the store in time" in decision.reason) is restarted


def test_a_soak_is_as_long_by_the_clock_that_goes_on(agent, clock, store, rounds):
    """It holds up no other change of its pool for a day, and has its verdict by what was counted since."""
    rounds(2)
    clock.advance(DAY)
    store.bandwidth = SLOW
    rounds(3)
    assert told(agent)[-1][-1] == "soaking"
    clock.advance(-DAY)
    rounds(8)
    assert told(agent)[-1][-1] == "kept"


@pytest.mark.parametrize(("bandwidth", "end"), [(SLOW, "off"), (FAST, "on")])
def test_a_new_agent_does_not_wait_for_an_hour_that_lies_ahead(agents, agent, clock, *, store, rounds, bandwidth, end):
    """It goes by the clock that was mended: a soak begins anew, and what was changed can be changed again."""
    rounds(2)
    clock.advance(YEAR)
    store.bandwidth = SLOW
    rounds(3)
    assert (fetch(store), told(agent)[-1][-1]) == ("off", "soaking")
    clock.advance(-YEAR)
    agents.end()
    new, store.bandwidth = agents(), bandwidth
    assert not views_of(new, new).fleet()["stores"][0]["reachable"]  # it was heard a year ahead
    rounds(12, by=new)
    assert (fetch(store), told(new)[-1][-1]) == (end, "kept")
    assert not new.history.decisions.in_state(State.SOAKING)


def test_what_was_changed_or_undone_at_an_hour_that_lies_ahead_is_over(agent, clock):
    """Nobody knows how long ago it was; what is of now counts."""
    target, decisions = Target("host-a", "dram", DIGEST), agent.history.decisions
    one = propose(agent.history, "eviction", target, Proposal("x", 1, 2, "it pays"), at=clock.now())
    decisions.move(one, State.APPLIED, now=clock.now(), applied_at=clock.now())
    decisions.move(decisions.get(one.id), State.ROLLED_BACK, now=clock.now())

    def found(now):
        survey = survey_of(agent, now)
        return survey.last_change("eviction", target) is not None, len(survey.undone(target))

    assert found(clock.now()) == (True, 1)
    assert found(clock.now() - timedelta(seconds=1)) == (False, 0)


def test_time_never_goes_back_and_is_caught_up_with():
    """By the clock that was set back half a second passes in one, until that is no longer behind."""
    steady, clock = [100.0], Clock()
    now, began = Forward(clock.now, lambda: steady[0]), clock.now()

    def passes(wall_s, seconds):
        clock.advance(wall_s)
        steady[0] += seconds
        return (now() - began).total_seconds()

    assert [passes(10, 10), passes(3600, 10)] == [10, 3610]
    assert [passes(-3600, 0), passes(20, 20), passes(0, 0)] == [3610, 3620, 3620]
    assert [passes(7170, 7170), passes(10, 10), passes(10, 10)] == [7205, 7210, 7220]


def test_a_job_that_would_wait_for_a_clock_that_was_set_back_is_found():
    """For over a second longer than from one run to the next; by a slow, quick or later clock none does."""
    clock = Clock()
    due = clock.now() + timedelta(seconds=15)
    job = BackgroundScheduler(timezone="UTC").add_job(print, "interval", seconds=15, next_run_time=due)

    def passes(wall_s):
        clock.advance(wall_s)
        return held_up([job], clock.now())

    assert not any(passes(wall_s) for wall_s in (0.0, 1.0, 0.6, -2.4, 3600.0))
    assert passes(-3601.0) == [job]


def test_nothing_is_dropped_by_a_clock_that_is_ahead(agents, store, clock, caplog):
    """The stores' clocks tell that it is; an agent that starts when it was set back drops what is old as ever."""
    mine = Clock()
    agent = agents(now=mine.now)

    def windows():
        return len(agent.history.measured.fleet_windows(["host-a"], clock.now() - timedelta(days=1)))

    def passes(hours):
        mine.advance(3600 * hours)
        pass_windows(agent, store, clock, seconds=3600 * hours)

    def tidied():
        agent.sum_up()
        agent.prune()
        return windows()

    for _ in range(5):
        passes(1)
    before = windows()
    mine.advance(YEAR)
    passes(1)
    assert tidied() > before > 0
    assert "nothing is pruned: the clock is 31536000 s ahead of every store's" in caplog.text
    mine.advance(-YEAR)
    agents.end()
    agent = agents(now=mine.now)
    passes(6)
    assert 0 < tidied() < before


@pytest.mark.parametrize("leap_s", [3600, DAY, -3600])
def test_a_window_is_as_long_as_it_was_though_the_clock_was_set(clock, leap_s):
    """Of a store on the agent's own host, which is set with it, what was counted is the next window's."""
    store, source, steady = FakeStore(clock), FakeSource("engine-a", "vllm", VLLM), Clock()
    roster = Roster([StoreAddress(url="http://host-a:7410")], now=clock.now)
    sources = [ObservedSource.model_validate(source.settings)]
    to_store, to_source = (Access(transport=transport(one)) for one in (store, source))
    collector = Collector(roster, clock.now, steady.seconds, to_store)
    observer = Observer(sources, clock.now, steady.seconds, to_source, ObservedRows(CollectorRegistry()))

    def passes(leap_s=0.0):
        clock.advance(15 + leap_s)
        steady.advance(15)
        store.traffic(10)
        source.set("process_cpu_seconds_total", steady.seconds())
        return collector.collect()[0], observer.collect()[0]

    passes()
    found = [passes(), passes(leap_s), passes()]
    observed = [{window.seconds for window in snapshot.windows} for _, snapshot in found]
    assert observed == [{15.0}] * 3
    assert [getattr(of_store, "kind", "") for of_store, _ in found] == ["", "stale_counters", ""]
    (remote,) = (one for one in found[-1][0].windows if (one.tier, one.namespace) == ("remote", ""))
    assert (remote.seconds, remote.total("gate_candidate_requests_total")) == (15.0, 20.0)
