"""What the agent's metrics tell of changes and money: the same as history."""

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.agents import client_of, pass_windows
from agent.fakes import SLOW, START, after, ledger_rows, window
from agent.test_actuator import DECISION
from tiertune_agent import loop
from tiertune_agent.catalogue import AgentMetrics
from tiertune_agent.published import Published, changes
from tiertune_agent.records import Rates, State, sum_known
from tiertune_agent.verdicts.ledger import entry

FETCH = replace(
    DECISION,
    state=State.SOAKING,
    applied_version=2,
    updated_at=after(seconds=30),
    applied_at=after(seconds=1),
)
OFF = ("remote_fetch", "host-a", "remote", "fetch", "off", "applied")


def samples(metrics, name):
    """Labels and values of one family, as a scrape reads them."""
    text = metrics.render().decode()
    return [
        (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    ]


def test_a_change_is_told_with_the_moment_at_which_the_store_had_it():
    """Neither when it was wished nor when it was judged, and the value that the setting has since."""
    assert changes([FETCH]) == {OFF: after(seconds=1)}


@pytest.mark.parametrize("state", sorted({*State} - {State.APPLIED, State.SOAKING, State.KEPT, State.ROLLED_BACK}))
def test_what_was_not_changed_is_no_change(state):
    """Only an inconclusive verdict leaves a change behind: wishes and failures change nothing."""
    assert (changes([replace(FETCH, state=state)]) == {}) is (state != "inconclusive")


def test_a_roll_back_is_a_second_change_the_other_way():
    """It stands at the time of the roll back, with the value that came back."""
    back = ("remote_fetch", "host-a", "remote", "fetch", "on", "rolled_back")
    rolled = replace(FETCH, state=State.ROLLED_BACK)
    assert changes([rolled]) == {OFF: after(seconds=1), back: after(seconds=30)}


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [(10, 20, "up"), (20, 10, "down"), ("lru", "arc", "arc"), (10, None, "default"), (0, 0, "same")],
)
def test_figures_go_up_or_down_so_that_labels_stay_few(before, after, change):
    """A size has as many values as there are bytes; a word has itself."""
    ((*_, said, _),) = changes([replace(FETCH, before=before, after=after)])
    assert said == change


def test_the_last_of_equal_changes_counts_whatever_the_order():
    """Decisions come newest first; an older one never hides a newer one."""
    later = replace(FETCH, id=2, applied_at=after(hours=1))
    assert changes([later, FETCH]) == changes([FETCH, later]) == {OFF: later.applied_at}


def test_what_was_told_of_a_newer_change_stands():
    """The older of two pools' changes is read again when its soak ends, and the newer one is long out of sight."""
    metrics = AgentMetrics()
    published, later = Published(metrics), replace(FETCH, id=2, applied_at=after(hours=1))
    for told in ([later, FETCH], [FETCH]):
        published.changed(told)
        ((_, at),) = samples(metrics, "tiertune_agent_change_timestamp_seconds")
        assert at == later.applied_at.timestamp()
    published.leave_out({"host-b"})
    published.changed([FETCH])
    ((_, at),) = samples(metrics, "tiertune_agent_change_timestamp_seconds")
    assert at == FETCH.applied_at.timestamp()


def test_a_move_looks_at_no_other_change(monkeypatch):
    """There are as many as stores and settings, and a round may move as many decisions."""
    metrics = AgentMetrics()
    monkeypatch.setattr(metrics, "told", lambda _: pytest.fail("all of them were looked at"))
    Published(metrics).moved(FETCH)
    ((_, at),) = samples(metrics, "tiertune_agent_change_timestamp_seconds")
    assert at == FETCH.applied_at.timestamp()


def test_a_split_is_a_change_of_each_store_that_it_sets():
    """One decision of the fleet, told where it took effect."""
    step = {"store": "host-b", "tier": "dram", "field": "tiers.dram.capacity_bytes", "from": 2, "to": 1}
    other = {"store": "fleet", "tier": "remote", "field": "remote.capacity_bytes", "from": 1, "to": 2}
    told = changes([replace(FETCH, tuner="tier_size", evidence={"split": [step, other]})])
    assert set(told) == {
        ("tier_size", "host-b", "dram", "capacity_bytes", "down", "applied"),
        ("tier_size", "fleet", "remote", "capacity_bytes", "up", "applied"),
    }


def test_money_is_counted_by_kind_and_never_falls():
    """Worth and cost stand apart, so that each is a counter; a store's nonsense takes nothing away."""
    metrics, gib = AgentMetrics(), 2.0**30
    values = {"saved_seconds_total": 7200.0, "lost_seconds_total": 3600.0, "tier_transfer_bytes_total": 2 * gib}
    remote = window("remote", {**values, "tier_resident_bytes": 4 * gib}, seconds=1800.0)
    rates = Rates(gpu_hour=2.0, gib_hour={"remote": 0.5}, network_gib=0.25)

    def entries(*windows):
        return [(one, booked) for one in windows if (booked := entry(one, rates))]

    Published(metrics).booked(entries(remote, replace(remote, tier="")))
    told = {labels["kind"]: value for labels, value in samples(metrics, "tiertune_agent_money_total")}
    assert told == {"saved": 4.0, "lost": 2.0, "rent": 1.0, "network": 0.5}
    Published(metrics).booked(entries(replace(remote, values={"saved_seconds_total": -1e9})))
    assert dict(told) == {labels["kind"]: value for labels, value in samples(metrics, "tiertune_agent_money_total")}


def test_a_running_agent_tells_its_change_and_the_ledgers_money(agent, store, rounds, clock):
    """The change carries the agent's clock; the counters' difference is the money of the ledger's rows."""
    store.count("tier_resident_bytes", 2.0**30, tier="remote", namespace="", model="")
    rounds(2)
    store.bandwidth = SLOW
    pass_windows(agent, store, clock, 3, tick=True)
    made = [one for one in agent.history.decisions.find() if one.applied_at]
    ((labels, at),) = samples(agent.metrics, "tiertune_agent_change_timestamp_seconds")
    assert (labels["store"], labels["setting"], labels["change"]) == ("host-a", "fetch", "off")
    assert at == made[0].applied_at.timestamp()
    money = {"saved": 1, "lost": -1, "rent": -1, "network": -1}
    told = sum(money[labels["kind"]] * value for labels, value in samples(agent.metrics, "tiertune_agent_money_total"))
    rows = ledger_rows(agent.history, START)
    assert rows
    assert told == pytest.approx(sum_known(row["money"] for row in rows))
    with client_of(agent) as http:
        assert "tiertune_agent_change_timestamp_seconds{" in http.get("/metrics").text


def test_a_round_that_changes_many_stores_tells_each(agents, store, other, clock, monkeypatch):
    """A fleet makes more changes in a round, after an edit of the policy, than are looked through again and again."""
    monkeypatch.setattr(loop, "LATEST", 1)
    agent = agents(store, other)
    agent.tick()
    store.bandwidth = other.bandwidth = SLOW
    pass_windows(agent, [store, other], clock, 3, tick=True)
    told = samples(agent.metrics, "tiertune_agent_change_timestamp_seconds")
    assert {labels["store"] for labels, _ in told} == {"host-a", "host-b"}


def test_the_leader_alone_tells_changes(agents, store, clock):
    """Who lost the lead exports no change nor incident of former times; who has it by now tells it from history."""
    leader, second = agents(), agents()
    for agent in (leader, second):
        agent.tick()
    store.bandwidth = SLOW
    pass_windows(leader, store, clock, 4, tick=True)
    told = samples(leader.metrics, "tiertune_agent_change_timestamp_seconds")
    assert told
    assert samples(second.metrics, "tiertune_agent_change_timestamp_seconds") == []
    leader.leader.resign()
    clock.advance(15)
    second.tick()
    leader.stand()
    assert samples(second.metrics, "tiertune_agent_change_timestamp_seconds") == told
    assert samples(leader.metrics, "tiertune_agent_change_timestamp_seconds") == []


def test_a_store_that_is_silent_when_the_agent_starts_has_its_changes(agents, store, other, clock):
    """Before it has told its name, too, and though others answer first."""
    agent = agents(store, other)
    store.bandwidth = other.bandwidth = SLOW
    pass_windows(agent, [store, other], clock, 4, tick=True)
    agents.end()
    agent = agents(store, other)

    def told():
        clock.advance(15)
        agent.tick()
        return {labels["store"] for labels, _ in samples(agent.metrics, "tiertune_agent_change_timestamp_seconds")}

    store.up = other.up = False
    assert told() == {"host-a", "host-b"}
    for one in (store, other):
        one.up = True
        assert told() == {"host-a", "host-b"}


def test_an_incident_is_over_for_whom_it_was_open_when_it_lost_the_lead(agents, store, clock):
    """An alert on it would never end: who stands by does not look whether the store is back."""
    leader, store.up = agents(), False
    leader.tick()
    assert samples(leader.metrics, "tiertune_agent_incidents")
    leader.leader.resign()
    agents()
    leader.stand()
    assert samples(leader.metrics, "tiertune_agent_incidents") == []


def test_a_row_that_no_catalogue_has_takes_no_others_away():
    """An adapter's mistake: the whole answer would fail."""
    metrics = AgentMetrics()
    metrics.observed.rows = {"engine-a": {("unheard_of_total", ()): 2.0, ("requests_total", (("salted", "no"),)): 3.0}}
    text = metrics.render().decode()
    assert 'tiertune_unheard_of_total{store="engine-a"} 2.0' in text
    assert 'tiertune_requests_total{salted="no",store="engine-a"} 3.0' in text
