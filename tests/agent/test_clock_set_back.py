"""The clock of the agent's host is set back, or was ahead: nothing waits until the hour has come again."""

from datetime import timedelta

import pytest

from agent.agents import looks_of, pass_windows, survey_of, told, views_of
from agent.fakes import FAST, SLOW, Clock, FakeStore, fetch, transport
from agent.sources import VLLM, FakeSource
from tiertune_agent.changes.survey import HOUR, Hours
from tiertune_agent.collector.observer import Observer
from tiertune_agent.collector.roster import Roster
from tiertune_agent.collector.stores import Collector
from tiertune_agent.collector.targets import ObservedSource, StoreAddress
from tiertune_agent.credentials import Access
from tiertune_agent.incidents.seen import SeenWindows
from tiertune_agent.records import Target
from tiertune_agent.run import SetBack

pytestmark = pytest.mark.slow


def test_a_clock_that_was_set_back_makes_no_tuner_wait(agent, clock, rounds):
    """Tuners are asked again at once, not when the hour has come again."""
    rounds(3)
    clock.advance(-3600)
    rounds(3)
    asked = {answer["tuner"]: answer["at"] for answer in agent.history.answers.newest()}
    assert asked["remote_fetch"] == clock.now().isoformat()


@pytest.mark.parametrize("restarted", [False, True])
def test_what_was_changed_at_an_hour_that_lies_ahead_can_be_changed_again(
    agents, agent, clock, *, store, rounds, restarted
):
    """What was counted since the clock was set back came after the change."""
    store.bandwidth = SLOW
    rounds(8)
    assert fetch(store) == "off"
    assert told(agent)[-1][-1] == "kept"
    clock.advance(-3600)
    if restarted:
        agents.end()
        agent = agents()
    store.bandwidth = FAST
    rounds(1, by=agent)
    assert fetch(store) == "off"
    rounds(2, by=agent)
    assert fetch(store) == "on"


def test_the_page_shows_what_is_counted_now(agent, clock, rounds):
    """Windows of hours that lie ahead were counted before the clock was set back: they are not the last ones."""
    looks = looks_of(agent, clock)
    rounds(4)
    assert looks.seen().stores["host-a"].sums.prompt_tokens == 40_000
    clock.advance(-3600)
    assert looks.seen().stores["host-a"].steps == []
    rounds(3, 20)
    for each in (looks, looks_of(agent, clock)):
        assert each.seen().stores["host-a"].sums.prompt_tokens == 60_000


def test_a_store_that_does_not_answer_is_not_shown_as_one_that_does(agent, clock, store, rounds):
    """Though it was heard at an hour that lies ahead."""
    views = views_of(agent, clock)
    assert views.fleet()["stores"][0]["reachable"]
    store.up = False
    clock.advance(-3600)
    rounds(4)
    assert not views.fleet()["stores"][0]["reachable"]


def test_what_was_under_way_does_not_wait_for_its_hour_to_come_again(agent, clock, store, rounds):
    """The store is away for longer than the change is good for: nobody knows how long, so it is not made."""
    rounds(2)
    store.bandwidth, handle = SLOW, store.put_tuning
    store.answers("put_tuning", 503, json={"message": "not now"})
    rounds(2)
    assert told(agent)[-1][-1] == "approved"
    clock.advance(-3600)
    store.put_tuning = handle
    rounds(1)
    (decision,) = agent.history.decisions.find()
    assert (str(decision.state), fetch(store)) == ("expired", "on")
    assert "it did not reach the store in time" in decision.reason


def test_an_hour_that_comes_again_is_no_new_change():
    """What lay ahead when the clock was set back stays before that; what is made afterwards is when it is."""
    hours, clock = Hours(), Clock()
    began = hours.look(clock.now())
    ahead = began + HOUR
    assert hours.of(began - HOUR) == began - HOUR
    hours.look(ahead)
    assert hours.of(ahead) == ahead
    back = hours.look(began + HOUR / 2)
    assert hours.of(ahead) == back
    hours.look(ahead + HOUR)
    assert hours.of(ahead) == back
    assert hours.of(ahead + HOUR / 2) == ahead + HOUR / 2
    hours.look(began - HOUR)
    assert hours.of(ahead) == back
    assert hours.of(began) == began - HOUR


def test_a_clock_that_was_set_back_is_noticed_once():
    """By more than a second; slow or quick, or set ahead, it is none of that."""
    steady = [100.0]
    clock = Clock()
    watch = SetBack(clock.now, lambda: steady[0])

    def passes(wall_s, seconds=1.0):
        clock.advance(wall_s)
        steady[0] += seconds
        return watch.noticed()

    assert not any(passes(wall_s) for wall_s in (1.0, 0.6, 1.4, 3600.0, 1.0))
    assert passes(-3600.0)
    assert not passes(1.0)


DAY, YEAR = timedelta(days=1).total_seconds(), timedelta(days=365).total_seconds()


def test_a_soak_that_begins_at_an_hour_that_lies_ahead_begins_anew(agent, clock, store, rounds):
    """It holds up no other change of its pool for a day, and has its verdict by what was counted since."""
    rounds(2)
    clock.advance(DAY)
    store.bandwidth = SLOW
    rounds(3)
    assert told(agent)[-1][-1] == "soaking"
    clock.advance(-DAY)
    rounds(1)
    (decision,) = agent.history.decisions.find()
    assert (decision.applied_at, decision.soak_until) == (clock.now(), clock.now() + timedelta(minutes=1))
    rounds(4)
    assert told(agent)[-1][-1] == "kept"


def test_verdicts_are_found_after_hours_that_lie_ahead_were_summed_up(agent, clock, store, rounds):
    """Of what was counted since windows are read, though all hours of now seem to be summed up."""
    clock.advance(YEAR)
    rounds(2)
    clock.advance(2 * 3600)
    assert agent.history.retention.sum_up(clock.now())
    clock.advance(-YEAR - 2 * 3600)
    store.bandwidth = SLOW
    rounds(10)
    (decision,) = agent.history.decisions.find()
    assert (decision.state, agent.history.decisions.verdicts_of(decision.id)[0]["evidence"]["windows"]) == ("kept", 4)


@pytest.mark.parametrize("restarted", [False, True])
def test_what_was_measured_at_an_hour_that_lies_ahead_tells_nothing_of_now(agents, agent, clock, rounds, restarted):
    """Neither tuners nor detectors read it, for a year."""
    began = clock.now()
    clock.advance(YEAR)
    rounds(30)
    clock.advance(-YEAR)
    if restarted:
        agents.end()
        agent = agents()
    rounds(3, by=agent)
    target = Target("host-a", "remote")
    survey = survey_of(agent, clock.now())
    seen = SeenWindows(agent.history, clock.now)
    clock.advance(15)
    (snapshot,) = agent.collector.collect()
    for read in (
        survey.store_windows("host-a", HOUR),
        survey.pool_windows(target, HOUR),
        survey.tier_windows(target),
        survey.stages,
        seen.heard([snapshot])["host-a"],
        agent.loop.watch._windows.heard([snapshot])["host-a"],
    ):
        assert read
        assert all(began <= window.start <= clock.now() for window in read)


def test_nothing_is_dropped_by_a_clock_that_is_ahead(agents, store, clock, caplog):
    """The stores' clocks tell that it is; when it was set back, what is old goes as ever."""
    mine = Clock()
    agent = agents(now=mine.now)

    def windows():
        return len(agent.history.measured.store_windows("host-a", clock.now() - timedelta(days=1)))

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
    passes(6)
    assert 0 < tidied() < before


@pytest.mark.parametrize("leap_s", [3600, DAY, -3600])
def test_a_window_is_as_long_as_it_was_though_the_clock_was_set(clock, leap_s):
    """Of a store on the agent's own host, which is set with it, what was counted is the next window's."""
    store, source, steady = FakeStore(clock), FakeSource("engine-a", "vllm", VLLM), Clock()
    roster = Roster([StoreAddress(url="http://host-a:7410")], now=clock.now)
    sources = [ObservedSource.model_validate(source.settings)]
    collector, observer = (
        kind(of, clock.now, steady.seconds, Access(transport=transport(one)))
        for kind, of, one in ((Collector, roster, store), (Observer, sources, source))
    )

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
