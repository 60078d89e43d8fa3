"""Backtests over recorded history: the policy's own tuners over what happened, and nothing changed."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from agent.agents import POLICY, made, pass_windows
from agent.fakes import DIGEST, FAST, SLOW, costs
from tiertune_agent.backtest.run import BacktestError, Rehearsal, backtest, record
from tiertune_agent.fields import replaced
from tiertune_agent.history.database import open_current
from tiertune_agent.history.store import History
from tiertune_agent.policy.document import load
from tiertune_agent.records import Prospect, State, ended

pytestmark = pytest.mark.slow


@pytest.fixture
def day(store, rounds, agent):
    """Two windows in which fetching pays, eight in which it does not, ten in which it pays again."""
    rounds(2)
    store.bandwidth = SLOW
    rounds(8)
    store.bandwidth = FAST
    rounds(10)
    agent.history.close()


@pytest.fixture
def judged(database, tmp_path):
    """The backtest of a policy over all that was recorded."""

    def test(text=POLICY, last_s=86400.0):
        path = tmp_path / "candidate.yaml"
        path.write_text(text)
        return backtest(database, load(path), last_s)

    return test


def told(backtest):
    return [(one.tuner, one.before, one.after) for one in backtest.would]


def test_sizes_are_weighed_with_what_came_before(rounds, agent):
    """Of the last minute, with the prospects of 50 periods before it: as the agent weighed them then."""
    rounds(3)
    newest = max(store.last_seen for store in agent.history.stores())
    agent.history.measured.remember_prospects(
        Prospect("", newest - timedelta(minutes=minutes), 30.0, minutes, {"0/0/0": 1.0}) for minutes in (10, 240, 260)
    )
    recording = record(agent.history, 60.0, 300.0)
    assert [prospect.requests for prospect in recording.prospects] == [240, 10]


@pytest.mark.parametrize(
    ("last_s", "began_with"), [(150, "lru"), (90, "arc"), (30, "lru")], ids=["before both", "between", "after both"]
)
def test_a_span_begins_with_what_a_store_had_then(agent, store, rounds, last_s, began_with):
    """A change that was rolled back a minute later stood in between, whenever it was made."""
    rounds(4)
    decision = made(agent, store, "defaults.eviction", "lru", "arc")
    rounds(4)
    agent.changes.rollback(decision.id, "ops")
    rounds(4)
    recording = record(agent.history, last_s, 300.0)
    assert recording.tuning["host-a"]["defaults"]["eviction"] == began_with
    assert [one.id for one in recording.decisions] == ([decision.id] if last_s == 150 else [])


BUDGETED = """
version: 1
guard: {changes_per_hour: 100, min_requests: 1, soak: 1m}
budgets: {dram: 4GiB}
tuners: {tier_size: {mode: auto, period: 1m, max_step: 1.0}}
prices: {gpu_hour: 1, dram_gib_month: 100}
"""
WORTH = costs({0: 2.0, 1: 1.0, 2: 0.1, 4: 0.1})


@pytest.mark.parametrize(
    ("fleets", "wished", "made"),
    [(("a", "ab"), 0, 0), (("ab", "a", "ab"), 1, 2), (("ab", "a"), 1, 1)],
    ids=["one joins", "one is away", "one leaves"],
)
def test_nothing_grows_while_a_store_is_away(agents, store, other, *, clock, judged, fleets, wished, made):
    """As in an agent's rounds; one that is still to join, or has left for good, is not away."""
    stores = {"a": store, "b": other}
    ends = [clock.now()]
    for number, names in enumerate(fleets):
        fleet = [stores[name] for name in names]
        agent = agents(*fleet)
        agent.loop.run_once()
        for _ in range(8):
            seen = [Prospect(DIGEST, clock.now(), 15.0, 500, WORTH)] if number >= wished else []
            pass_windows(agent, fleet, clock)
            agent.history.measured.remember_prospects(seen)
        ends.append(clock.now())
        agent.close()
    grown = {one.target.store: one.created_at for one in judged(BUDGETED).would if one.tuner == "tier_size"}
    assert ends[made] < grown["host-a"] <= ends[made + 1]


def test_ghosts_are_those_of_the_size_that_a_pool_had_then(store, rounds, judged, agent):
    """It is four times as large by now: what its ghosts told before is weighed at what it was."""
    pool = {"namespace": DIGEST, "model": "llama"}
    store.count("tier_capacity_bytes", 1 << 30, tier="dram", state="effective", **pool)
    effective = f"pools.{DIGEST}.dram.effective.capacity_bytes"
    for size in (1, 4):
        for _ in range(12):
            store.count("tier_evictions_total", 5.0, tier="dram", algorithm="lru", reason="room", **pool)
            for algorithm, hit in (("lru", 200), ("arc", 400 if size == 1 else 200), ("s3fifo", 200)):
                store.simulate(algorithm, hit, size << 30)
            store.simulate("lru", 210, (5 - size) << 30)  # of the curve
            rounds(1)
        store.count("tier_capacity_bytes", 3 << 30, tier="dram", state="effective", **pool)
        store.tells("get_status", lambda told: replaced(told, effective, 4 << 30))
    agent.history.close()
    found = judged(POLICY.replace("tuners: {", "tuners: {eviction: {mode: auto, period: 1m}, "))
    assert ("eviction", "lru", "arc") in told(found)


def test_how_busy_gpus_were_is_told_again(agents, store, other, *, clock, policy_file, judged):
    """Prefill's were, decode's were not: the policy's advice rests on the same GPUs as the agent's did."""
    advised = POLICY.replace("tuners: {", "tuners: {advice: {period: 2m}, ")
    policy_file.write_text(advised)
    agent = agents(store, other)
    agent.loop.run_once()
    for _ in range(11):
        for one, stage, busy in ((store, "prefill", 0.92), (other, "decode", 0.31)):
            for gpu in "ab":
                one.count("gpu_utilization_ratio", 0.0, gpu=gpu, stage=stage)
            one.count("stage_gpu_seconds_total", 2 * busy * 60, stage=stage, phase=stage)
        pass_windows(agent, (store, other), clock, seconds=60)
    (done,) = [one.reason for one in agent.history.decisions.find() if one.tuner == "balance"]
    agent.close()
    (would,) = [one.reason for one in judged(advised).would if one.tuner == "balance"]
    assert would == done
    assert done.startswith("prefill GPUs are busy 92% (2), decode 31% (2): move one")


@pytest.fixture
def both(agents, store, other, clock):
    """The history of an agent of two stores, and what lets a window with traffic of both pass."""
    agent = agents(store, other)
    agent.loop.run_once()
    return agent.history, lambda seconds: pass_windows(agent, (store, other), clock, seconds=seconds)


def apart(history, tmp_path, policy, *, later_s, every_s):
    """What a policy would have done, had the second store told of itself so much later."""
    told, later = record(history, 86400, every_s), timedelta(seconds=later_s)
    windows = [replace(one, start=one.start + later) if one.store == "host-b" else one for one in told.windows]
    path = tmp_path / "policy.yaml"
    path.write_text(policy)
    scratch = History(open_current(f"sqlite:///{tmp_path / 'scratch.sqlite'}"))
    found = Rehearsal(replace(told, windows=sorted(windows, key=ended)), load(path), scratch).run()
    scratch.close()
    return found


def test_windows_that_became_longer_are_no_silence(both, clock, tmp_path):
    """Stores tell at times of their own, so of each the others' last window is nearly as old as its own is long."""
    history, window = both
    for seconds in [15] * 12 + [60] * 8:
        seen = [Prospect(DIGEST, clock.now(), 60.0, 500, WORTH)] if seconds == 60 else []
        window(seconds)
        history.measured.remember_prospects(seen)
    found = apart(history, tmp_path, BUDGETED, later_s=8.0, every_s=60.0)
    assert "host-a" in {one.target.store for one in found.would if one.tuner == "tier_size"}


def test_the_first_round_knows_the_whole_fleet(both, tmp_path):
    """What is asked once an hour is asked of all stores, though each told of itself at a moment of its own."""
    history, window = both
    for _ in range(3):
        window(15)
    found = apart(history, tmp_path, "version: 1", later_s=0.02, every_s=300.0)
    (routing,) = (answer["reason"] for answer in found.answers if answer["tuner"] == "routing")
    assert "no samples tell yet what routing by prefix would do" in routing


def test_the_calendar_of_the_policy_is_kept(store, rounds, agent, judged):
    """Frozen all day, while fetching does not pay: nothing is made, and the answer says by what."""
    rounds(2)
    store.bandwidth = SLOW
    rounds(8)
    agent.history.close()
    frozen = 'freeze: [{from: "00:00", to: "00:00"}]'
    found = judged(POLICY.replace("soak: 1m", f"soak: 1m, {frozen}"))
    assert [one for one in found.would if one.state is not State.PROPOSED] == []
    assert any("frozen: by the policy's calendar" in answer["reason"] for answer in found.answers)


@pytest.mark.usefixtures("day")
class TestHistory:
    def test_the_same_policy_does_what_was_done(self, judged):
        """Off in the slow windows and on again after, at the times at which it was done."""
        found = judged()
        assert told(found) == [("remote_fetch", "on", "off"), ("remote_fetch", "off", "on")]
        assert [one.after for one in found.recording.decisions] == ["off", "on"]
        assert found.would[0].applied_at == found.recording.decisions[0].applied_at
        (told_of,) = found.sentences()
        assert "would have made 2 changes and proposed 0; 2 were made." in told_of
        rows = [row for row in found.rows() if row[3]]
        assert [(by, change) for _, by, _, change, _, _ in rows] == [
            ("policy", "on → off"), ("agent", "on → off"), ("policy", "off → on"), ("agent", "off → on")
        ]  # fmt: skip
        assert all("fetching cost more than recomputing" in row[5] for row in rows[:2])

    def test_a_slower_policy_would_not_have_done_it(self, judged):
        """With a patience of fifty windows nothing is switched; what was done is told, and its last answer."""
        found = judged(POLICY.replace("disable_after: 2", "disable_after: 50"))
        assert told(found) == []
        assert [one["to"] for one in found.document()["done"]] == ["off", "on"]
        assert {row[1] for row in found.rows() if row[3]} == {"agent"}
        assert any(row[1] == "policy" and row[5].startswith("stays on") for row in found.rows())

    def test_a_policy_that_recommends_only_proposes(self, judged):
        """The wish is told as proposed, and the tuning stays."""
        found = judged(POLICY.replace("mode: auto", "mode: recommend"))
        assert [(one.tuner, one.after) for one in found.would][:1] == [("remote_fetch", "off")]
        assert {one.state for one in found.would} <= {"proposed", "expired"}
        assert "would have made 0 changes and proposed 1" in found.sentences()[0]

    def test_tuners_without_settings_of_their_own_are_tested_too(self, judged):
        """A share to hold out is another tuner's change, at the period of remote_fetch."""
        found = judged(POLICY.replace("soak: 1m", "soak: 1m, holdout: 0.05"))
        assert ("holdout", 0.0, 0.05) in told(found)

    def test_nothing_is_changed(self, judged, database):
        """The database's content is the same after it."""
        path = Path(database.removeprefix("sqlite:///"))
        before = path.read_bytes()
        judged()
        assert path.read_bytes() == before

    def test_only_the_last_seconds_are_asked_for(self, judged):
        """The switch-off lies before the last two minutes; the switch-on may lie in them."""
        assert ("remote_fetch", "on", "off") not in told(judged(last_s=120))

    def test_the_command(self, tiertune, database, tmp_path):
        """The sum and a table for people, the same in --json; exit 0."""
        (tmp_path / "p.yaml").write_text(POLICY)
        done, document = tiertune.json("policy", "backtest", tmp_path / "p.yaml", "--history", database)
        code, text, _ = done
        assert code == 0
        head, _, rows = text.partition("\n")
        assert head == document["sentences"][0]
        for one in document["would"]:
            assert f"{one['tuner']} of {one['store']}" in rows
            assert one["reason"] in " ".join(rows.split())
        assert rows.count(" agent ") == len(document["done"]) == 2


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a policy in it, to work in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.yaml").write_text(POLICY)
    return tmp_path


class TestWrongInput:
    def test_an_empty_history_is_told(self, judged):
        """There is nothing to test on."""
        with pytest.raises(BacktestError, match="the history holds no window of the last 24h 00m"):
            judged()

    def test_a_file_that_no_agent_has_written_is_told(self, here):
        """It is empty, and not of an older version."""
        (here / "none.sqlite").touch()
        with pytest.raises(BacktestError, match=r"none\.sqlite is empty: no agent has recorded anything there"):
            backtest("sqlite:///none.sqlite", load(here / "p.yaml"), 3600)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ("", "give either --trace and --scenario, or --history"),
            ("--trace lmcache_agents", "give either"),
            ("--history sqlite:///absent.sqlite", "database: there is no file absent.sqlite"),
            ("--history nothing", "no address such as sqlite:///"),
            ("--history sqlite:///absent.sqlite --last=", "--last: '' is not understood"),
            ("--history sqlite:///absent.sqlite --last 2moons", "--last: '2moons' is not understood"),
            ("--history sqlite:///absent.sqlite --last 999999d", "--last: more than nothing, and at most"),
            ("--history sqlite:///absent.sqlite --last 0s", "--last: more than nothing"),
            ("--trace lmcache_agents --scenario s.yaml --last 1h", "or --history and, if wanted"),
        ],
    )
    def test_wrong_arguments_say_what_to_mend(self, tiertune, here, arguments, said):
        """Wrong input is exit 2, a database that is not there as well, and none is made."""
        status, _, err = tiertune("policy", "backtest", "p.yaml", *arguments.split())
        assert (status, said in err) == (2, True), err
        assert [path.name for path in here.iterdir() if "absent" in path.name] == []


@pytest.mark.usefixtures("agent")
def test_what_stores_call_themselves_commands_no_terminal(store, rounds, database, policy_file, tiertune):
    """Their names come from history, which others wrote; its letters are told, and nothing else of it."""
    store.name = "host-\x1b]52;c;cm0gLXJm\x07\x9b2J\ra"
    rounds(3)
    code, out, _ = tiertune("policy", "backtest", policy_file, "--history", database)
    assert (code, {letter for letter in out if not letter.isprintable()}) == (0, {"\n"})
    assert "host-\N{REPLACEMENT CHARACTER}]52;" in out
