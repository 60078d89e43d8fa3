"""Every incident is provoked, told with its figures, and over when its cause is."""

import ast
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from inspect import getsource
from unittest.mock import Mock

import pytest

from agent.agents import made
from agent.fakes import DIGEST, START, Clock, FakeStore, after, histogram, wrong
from agent.fakes import propose as proposed
from agent.fakes import window as told_of
from agent.test_actuator import DECISION
from connector.lanes import total as counted
from connector.memory_tier import MemoryTier
from pages import ROOT
from tiertune_agent.fields import replaced
from tiertune_agent.history.database import DatabaseError
from tiertune_agent.incidents import detectors
from tiertune_agent.incidents.detectors import PROBE_BYTES, Sight, incidents
from tiertune_agent.incidents.seen import SeenWindows
from tiertune_agent.incidents.watch import TROUBLES
from tiertune_agent.records import Snapshot, State, Target, total
from tiertune_agent.tuners.base import Proposal
from tiertune_connector.catalogue import BY_NAME
from tiertune_connector.counters import Counters
from tiertune_connector.slower.lane import MAX_PROBE_BYTES, Lane

pytestmark = pytest.mark.slow

GIB = float(2**30)
TUNING = FakeStore(None).tuning
STATUS = {
    "tiers": {"dram": {"health": "ok"}, "remote": {"health": "ok"}, "disk": {"health": "absent"}},
    "pools": {DIGEST: {"model": "llama", "dram": {"effective": {"capacity_bytes": 1 << 30, "eviction": "lru"}}}},
}
NOW = after(hours=1)
MADE = replace(DECISION, state=State.KEPT, applied_at=START, updated_at=START)


def window(tier, seconds=1800.0, **values):
    """Names without braces are figures; ``name__label__value`` is a series."""
    named = {}
    for name, value in values.items():
        head, *labels = name.split("__")
        inner = ",".join("=".join(pair) for pair in zip(labels[::2], labels[1::2], strict=True))
        named[f"{head}{{{inner}}}" if inner else head] = value
    return told_of(tier, named, START, seconds, namespace="" if tier == "remote" else DIGEST)


def told(*windows, decisions=(), tuning=TUNING, status=STATUS, emptied=(), served=False):
    answer = Snapshot("host-a", "http://host-a", "b1", "1", NOW, status, tuning)
    found = incidents(Sight(answer, windows, decisions, NOW, emptied, served))
    return {kind: message for kind, message in found.items() if message}


def test_all_is_well():
    """A store that serves from every tier gives no incident."""
    served = {"tier_lookup_tokens_total__result__hit": 5e5, "tier_transfer_bytes_total__operation__write": GIB}
    assert told(window("remote", **served), window("dram", **served), decisions=[MADE]) == {}


def test_windows_keep_all_that_detectors_read():
    """A metric that is missing in READ is 0 to its detector, though not in the detector's own test."""
    functions = [one for one in ast.walk(ast.parse(getsource(detectors))) if isinstance(one, ast.FunctionDef)]
    named = {node.value for one in functions for node in ast.walk(one) if isinstance(node, ast.Constant)}
    assert named & BY_NAME.keys() == detectors.READ & BY_NAME.keys()


def test_every_kind_is_in_the_manual():
    """An operator who sees one looks it up."""
    manual = (ROOT / "docs" / "change-control.md").read_text()
    assert [kind for kind in (*detectors.DETECTORS, *TROUBLES, "tuning_drift") if f"`{kind}`" not in manual] == []


class TestUnusedTiers:
    WRITTEN = window("remote", tier_transfer_bytes_total__operation__write=3 * GIB)

    def test_written_and_never_read(self):
        """A tier that takes bytes for long and gives none is named with them."""
        assert told(self.WRITTEN) == {
            "tier_unused": "remote is dead weight: 3.0 GiB were written in 30m 00s, nothing was read"
        }

    def test_it_is_over_with_the_first_read(self):
        """One hit, or one read, and the tier is alive; few windows prove nothing."""
        read = window("remote", tier_transfer_bytes_total__operation__read=1.0)
        assert told(self.WRITTEN, read) == {}
        assert told(replace(self.WRITTEN, seconds=300.0)) == {}

    def test_what_a_store_probes_with_is_not_read_by_anybody(self):
        """Nor written: a remote is probed all the time, and is dead weight all the same, or merely idle."""
        assert PROBE_BYTES == MAX_PROBE_BYTES
        moved = {"read": 120.0 * PROBE_BYTES, "write": 60.0 * PROBE_BYTES}
        some = {f"tier_transfer_bytes_total__operation__{name}": nbytes for name, nbytes in moved.items()}
        probed = window("remote", probes_total__outcome__ok=60.0, **some)
        assert told(probed) == {}
        assert "remote is dead weight: 3.0 GiB were written" in told(self.WRITTEN, probed)["tier_unused"]
        assert told(self.WRITTEN, probed, window("remote", tier_transfer_bytes_total__operation__read=1.0)) == {}

    @pytest.mark.parametrize("nbytes", [100, 1 << 17, 1 << 25])
    def test_what_a_real_lane_probes_with_is_not_read_by_anybody(self, nbytes):
        """Whatever the size of chunks is; of two reads it measures the second."""
        counters, tier = Counters(), MemoryTier()
        with closing(Lane(tier, counters, Clock().seconds)) as lane:
            for _ in range(9):
                lane.probe(nbytes)
        moved = "tier_transfer_bytes_total"
        some = {f"{moved}__operation__{name}": counted(counters, moved, "remote", name) for name in ("read", "write")}
        probed = window("remote", probes_total__outcome__ok=counted(counters, "probes_total", "remote", "ok"), **some)
        assert (probed.total("probes_total"), probed.total(moved, operation="read") > 0) == (9, True)
        assert told(probed) == {}
        assert "remote is dead weight: 3.0 GiB were written" in told(self.WRITTEN, probed)["tier_unused"]

    def test_written_while_fetch_is_off(self):
        """The reason that is known is told."""
        message = told(self.WRITTEN, tuning=replaced(TUNING, "tiers.remote.fetch", "off"))["tier_unused"]
        assert message.endswith("nothing was read, fetch is off")

    def test_dram_that_only_evicts(self):
        """DRAM is dead where chunks come and go and none is hit."""
        assert "dram is dead weight: 500 chunks" in told(window("dram", tier_evictions_total=500.0))["tier_unused"]

    def test_dram_that_chunks_pass_through(self):
        """What is found in the remote comes through it, as decode's; what others find there was written from it."""
        passed = window("dram", tier_evictions_total=500.0)
        assert told(passed, window("remote", tier_lookup_tokens_total__result__hit=5e5)) == {}
        assert told(passed, served=True) == {}

    def test_no_capacity(self):
        """A configured tier without capacity is told; one that a decision emptied is not."""
        empty = replaced(TUNING, "tiers.dram.capacity_bytes", 0)
        assert told(tuning=empty) == {"tier_unused": "dram is configured, but its capacity is 0"}
        assert told(tuning=empty, emptied={("host-a", "tiers.dram.capacity_bytes")}) == {}

    def test_a_threshold_that_none_passes(self):
        """A floor above all that requests find there keeps the tier from ever serving."""
        found = {
            "gate_candidate_requests_total": 40.0,
            "gate_candidate_tokens_total": 40 * 2048.0,
            "gate_requests_total__decision__recompute__reason__too_short": 40.0,
        }
        message = told(window("remote", **found), tuning=replaced(TUNING, "tiers.remote.min_fetch_tokens", 100000))
        assert message["tier_unused"] == (
            "remote is dead weight: all 40 requests that found chunks there in 30m 00s were under min_fetch_tokens, "
            "100000; they found 2,048 tokens on average"
        )
        found["gate_candidate_requests_total"] = 41.0
        assert told(window("remote", **found)) == {}


class TestVainKnobs:
    SIZE = replace(
        MADE, field="tiers.dram.capacity_bytes", target=Target("host-a", "dram"), before=1 << 31, after=1 << 30
    )
    EVICTION = replace(
        MADE, field=f"pools.{DIGEST}.dram.eviction", target=Target("host-a", "dram", DIGEST), before="lru", after="arc"
    )

    def test_an_eviction_that_does_not_follow(self):
        """Set to one algorithm, running another."""
        tuning = replaced(TUNING, self.EVICTION.field, "arc")
        assert "the pool still runs lru" in told(tuning=tuning, decisions=[self.EVICTION])["knob_without_effect"]
        follows = replaced(STATUS, f"pools.{DIGEST}.dram.effective.eviction", "arc")
        assert told(tuning=tuning, decisions=[self.EVICTION], status=follows) == {}

    def test_a_capacity_that_does_not_follow(self):
        """Set to half, but effective is what it was; within the grace nothing is said."""
        assert told(decisions=[self.SIZE]) == {}
        lags = replaced(STATUS, f"pools.{DIGEST}.dram.effective.capacity_bytes", 1 << 31)
        assert "effective are 2.0 GiB" in told(decisions=[self.SIZE], status=lags)["knob_without_effect"]
        fresh = replace(self.SIZE, applied_at=NOW - timedelta(seconds=60))
        assert told(decisions=[fresh], status=lags) == {}

    def test_a_terabyte_is_not_there_within_minutes(self):
        """Memory is provisioned at a GiB a second or more."""
        field, size = self.SIZE.field, 1 << 40
        tuning = replaced(TUNING, field, size)
        for minutes, kinds in ((17, set()), (21, {"knob_without_effect"})):
            large = replace(self.SIZE, after=size, applied_at=NOW - timedelta(minutes=minutes))
            assert told(tuning=tuning, decisions=[large]).keys() == kinds

    def test_after_a_restart_it_is_provisioned_anew(self):
        """Whenever it was decided: of a store that has just started it is not there yet."""
        field, size = self.SIZE.field, 1 << 40
        tuning, large = replaced(TUNING, field, size), replace(self.SIZE, after=size)
        for uptime_s, kinds in ((600.0, set()), (1200.0, {"knob_without_effect"}), (None, {"knob_without_effect"})):
            status = STATUS | {"uptime_s": uptime_s}
            assert told(tuning=tuning, decisions=[large], status=status).keys() == kinds

    def test_a_capacity_without_a_pool_that_could_follow(self):
        """After a restart of the store only the disk has pools: DRAM's follow with the first engine."""
        held = {DIGEST: {"model": "llama", "disk": {"effective": {"capacity_bytes": 1 << 30}}}}
        assert told(decisions=[self.SIZE], status=STATUS | {"pools": held}) == {}

    def test_a_disk_for_which_no_engine_has_come(self):
        """What a restart found there may have what it holds, until somebody asks for more; more than all is wrong."""
        disk = replace(self.SIZE, field="tiers.disk.capacity_bytes", target=Target("host-a", "disk"))
        tuning = replaced(TUNING, disk.field, 1 << 30)

        def of(mib, **more):
            pool = {"model": "llama", "disk": {"effective": {"capacity_bytes": mib << 20}}, **more}
            return told(decisions=[disk], tuning=tuning, status=STATUS | {"pools": {DIGEST: pool}})

        assert of(1) == of(1024) == of(1024, dram={}) == {}
        assert "effective are 1.0 MiB" in of(1, dram={})["knob_without_effect"]
        assert "effective are 2.0 GiB" in of(2048)["knob_without_effect"]

    def test_a_switch_that_engines_ignore(self):
        """Off, and still there are fetches."""
        off = replaced(TUNING, "tiers.remote.fetch", "off")
        fetched = replace(window("remote", gate_fetched_tokens_total=4096.0), start=after(minutes=10))
        assert (
            "yet 4,096 tokens were fetched since" in told(fetched, tuning=off, decisions=[MADE])["knob_without_effect"]
        )

    def test_an_accepted_change_that_reads_back_otherwise(self):
        """What the actuator found is an incident until the store follows after all, or something newer is known."""
        failed = replace(MADE, state=State.FAILED, reason="it costs; accepted without effect: it reads back as on")
        assert "accepted without effect" in told(decisions=[failed])["knob_without_effect"]
        assert told(decisions=[failed, replace(MADE, after="on")]) == {}
        assert told(decisions=[failed], tuning=replaced(TUNING, failed.field, failed.after)) == {}

    def test_a_later_change_that_was_refused_hides_nothing(self):
        """The store runs another algorithm than the one before set, which stands."""
        tuning = replaced(TUNING, self.EVICTION.field, "arc")
        refused = replace(self.EVICTION, state=State.FAILED, before="arc", after="s3fifo", reason="the store refused")
        message = told(tuning=tuning, decisions=[self.EVICTION, refused])["knob_without_effect"]
        assert "the pool still runs lru" in message

    def test_a_split_is_told_of_the_store_that_it_had_no_effect_on(self):
        """What it set elsewhere was set back, and had its effect."""
        reason = "it pays; host-b dram: accepted without effect: it reads back as 1; what was made of it was set back"
        failed = replace(self.SIZE, state=State.FAILED, evidence={"split": [{}]}, reason=reason, after=7)
        assert told(decisions=[failed]) == {}
        assert "knob_without_effect" in told(decisions=[replace(failed, reason=reason.replace("host-b", "host-a"))])


class TestThrash:
    def test_young_chunks_that_are_wanted_back(self):
        """Evicted soon after their last use, and found below by many requests."""
        bucket = next(i for i, bound in enumerate(BY_NAME["tier_evicted_idle_seconds"].buckets) if bound > 10)
        dram = window("dram", tier_evictions_total=300.0, tier_evicted_idle_seconds=histogram(*[0] * bucket, 300))
        asked = window("", prompt_tokens_total=10000.0)
        below = replace(window("remote", tier_lookup_tokens_total__result__hit=4000.0), namespace=DIGEST)
        message = told(dram, asked, below)["thrash"]
        assert message.startswith(
            f"dram thrashes: 300 chunks of {dram.model} were evicted in 30m 00s, half of them within"
        )
        assert "40% of its prompt tokens were found in tiers below" in message
        assert "thrash" not in told(dram, asked, replace(below, namespace="another")), "another model's"
        rare = replace(below, values={"tier_lookup_tokens_total{result=hit}": 400.0})
        assert "thrash" not in told(dram, asked, rare)
        handed = {f"tier_lookup_tokens_total{{result=hit,stage={stage}}}": 4000.0 for stage in ("all", "decode")}
        whole = replace(asked, values={f"prompt_tokens_total{{stage={stage}}}": 10000.0 for stage in ("all", "decode")})
        assert "40% of its prompt tokens" in told(dram, whole, replace(below, values=handed))["thrash"]

    def test_what_prefill_hands_over_is_not_wanted_back(self):
        """Decode finds all of it in the remote, and whatever it has used may leave."""
        bucket = next(i for i, bound in enumerate(BY_NAME["tier_evicted_idle_seconds"].buckets) if bound > 10)
        dram = window("dram", tier_evictions_total=300.0, tier_evicted_idle_seconds=histogram(*[0] * bucket, 300))
        asked = window("", prompt_tokens_total__stage__decode=10000.0)
        handed = window("remote", tier_lookup_tokens_total__result__hit__stage__decode=10000.0)
        below = replace(handed, namespace=DIGEST)
        assert "thrash" not in told(dram, asked, below)

    def test_a_field_that_goes_back_and_forth(self):
        """Three reversals within the hours remembered."""
        ways = [("on", "off"), ("off", "on")] * 2
        flips = [replace(MADE, before=before, after=after) for before, after in ways]
        assert told(decisions=flips) == {"thrash": "tiers.remote.fetch went back and forth 3 times in 4 decisions"}
        assert told(decisions=flips[:3]) == {}

    def test_a_rollback_is_a_reversal(self):
        """The same change was made and set back, and again; what was only kept goes one way."""
        grown = replace(MADE, field="tiers.dram.capacity_bytes", before=1, after=2)
        undone = [
            replace(grown, state=State.ROLLED_BACK, applied_at=after(minutes=at), updated_at=after(minutes=at + 5))
            for at in (0, 10)
        ]
        assert told(decisions=undone) == {
            "thrash": "tiers.dram.capacity_bytes went back and forth 3 times in 2 decisions"
        }
        assert "thrash" not in told(decisions=[undone[0], replace(grown, applied_at=after(minutes=10))])

    def test_two_changes_that_are_undone_one_after_the_other_turn_once(self):
        """Up, up, then down, down: the later one was set back first."""
        first, second = (
            replace(
                MADE,
                field="tiers.dram.capacity_bytes",
                before=size,
                after=size + 1,
                state=State.ROLLED_BACK,
                applied_at=after(minutes=10 * size),
                updated_at=after(minutes=60 - 10 * size),
            )
            for size in (1, 2)
        )
        assert told(decisions=[first, second]) == {}


def test_unsalted_traffic_where_tenants_pay():
    """Requests without a salt are told where the tuning knows tenants, however few they are."""
    counted = window("", requests_total__salted__no=7.0, requests_total__salted__yes=93.0)
    quotas = {**TUNING, "tenants": {"ab" * 16: {"quota_bytes": 1}, "cd" * 16: {"quota_bytes": 1}}}
    message = "7 of 100 requests had no salt, while quotas are set for 2 tenants"
    assert told(counted, tuning=quotas) == {"unsalted_traffic": message}
    assert told(counted) == {}


def test_unsalted_traffic_among_salted():
    """Without quotas, salts show that there are tenants; a few requests without one, or all of them, show nothing."""
    mixed = window("", requests_total__salted__no=20.0, requests_total__salted__yes=80.0)
    assert told(mixed) == {"unsalted_traffic": "20 of 100 requests had no salt, while the others carry one"}
    assert told(window("", requests_total__salted__no=19.0, requests_total__salted__yes=81.0)) == {}
    assert told(window("", requests_total__salted__no=1000.0)) == {}
    assert told(window("", requests_total__salted__yes=1000.0)) == {}


def test_a_tier_that_a_decision_emptied_is_not_called_unused(agent, store, rounds):
    """As long as that is its last change; one that was emptied by hand is."""
    rounds(1)
    made(agent, store, "tiers.dram.capacity_bytes", 1 << 30, 0, tuner="tier_size")
    rounds(1)
    assert wrong(agent) == []
    made(agent, store, "tiers.dram.capacity_bytes", 0, 1 << 30, tuner="tier_size")
    rounds(1)
    store.by_hand("tiers.dram.capacity_bytes", 0)
    rounds(1)
    assert sorted(wrong(agent)) == ["tier_unused", "tuning_drift"]


def test_a_tier_that_is_about_to_be_emptied_is_not_called_unused(agent, store, clock, rounds):
    """The change reached the store, its answer was lost, and a freeze holds up finding out."""
    rounds(1)
    store.lose_answers = True
    decision = made(agent, store, "tiers.dram.capacity_bytes", 1 << 30, 0, tuner="tier_size")
    agent.history.journal.freeze("release", "anna", clock.now(), None)
    rounds(2)
    assert agent.history.decisions.get(decision.id).state == State.APPROVED
    assert (store.tuning["tiers"]["dram"]["capacity_bytes"], wrong(agent)) == (0, [])


def test_a_remote_that_another_host_reads_serves(agents, store, other, clock, monkeypatch):
    """What one host writes, such as one of prefill, another may read: nobody's remote is unused then.

    It did read in the last hour, though it misses a round, or though this agent has yet to read that from history.
    """
    agents.end()
    agent = agents(store, other)

    def unused(hits):
        for _ in range(50):
            clock.advance(15)
            store.count("tier_transfer_bytes_total", float(GIB), tier="remote", operation="write")
            if hits:
                place = {"namespace": DIGEST, "model": "llama", "tier": "remote"}
                other.count("tier_lookup_tokens_total", 256.0, **place, result="hit", origin="other_host")
            agent.loop.run_once()
        return "tier_unused" in wrong(agent)

    assert agent.leader.leads()
    assert not unused(hits=True)
    other.up = False
    agent.loop.run_once()
    assert "tier_unused" not in wrong(agent)
    agents.end()
    agent = agents(store, other)
    agent.loop.run_once()
    assert "tier_unused" not in wrong(agent)
    other.up = True
    agents.end()
    monkeypatch.setattr("tiertune_agent.incidents.seen.READ_AT_ONCE", 1)
    agent = agents(store, other)
    for _ in range(3):
        clock.advance(15)
        agent.loop.run_once()
        assert "tier_unused" not in wrong(agent)
    clock.advance(3600)
    assert unused(hits=False)


@pytest.mark.parametrize("split", [False, True])
def test_a_tier_that_a_decision_emptied_long_ago_is_not_called_unused(agent, store, clock, rounds, split):
    """By itself, or with other hosts in a split; emptied by hand it is."""
    rounds(2)
    field = "tiers.dram.capacity_bytes"
    if split:
        steps = [{"store": "host-a", "tier": "dram", "field": field, "from": 1 << 30, "to": 0}]
        wish = Proposal(field, 1 << 30, 0, "", {"split": steps})
    else:
        wish = Proposal(field, 1 << 30, 0, "")
    store.by_hand(field, 0)
    rounds(1)
    assert "tier_unused" in wrong(agent)
    one = proposed(agent.history, "tier_size", Target("fleet" if split else "host-a", "dram"), wish, at=clock.now())
    agent.history.decisions.move(one, State.APPLIED, now=clock.now(), applied_at=clock.now())
    clock.advance(86400)
    rounds(2)
    assert "tier_unused" not in wrong(agent)


def test_what_a_split_emptied_and_a_later_one_left_out_is_not_called_unused(agent, store, clock, rounds):
    """The later one changes other hosts alone, so the earlier is still this host's last change."""
    field = "tiers.dram.capacity_bytes"
    store.by_hand(field, 0)
    rounds(1)
    assert "tier_unused" in wrong(agent)
    for host, size in (("host-a", 0), ("host-b", 2 << 30)):
        steps = [{"store": host, "tier": "dram", "field": field, "from": 1 << 30, "to": size}]
        wish = Proposal(field, 1 << 30, size, "", {"split": steps})
        one = proposed(agent.history, "tier_size", Target("fleet", "dram"), wish, at=clock.now())
        agent.history.decisions.move(one, State.APPLIED, now=clock.now(), applied_at=clock.now())
        clock.advance(600)
    rounds(1)
    assert "tier_unused" not in wrong(agent)


def test_windows_that_could_not_be_read_are_read_again(agent, clock, rounds, monkeypatch):
    """The database was away when an agent began to lead: the last hour still counts when it is back."""
    rounds(2)
    seen = SeenWindows(agent.history, clock.now)
    with monkeypatch.context() as patch:
        patch.setattr(agent.history.measured, "fleet_windows", Mock(side_effect=DatabaseError("gone")))
        with pytest.raises(DatabaseError):
            seen.heard([], ["host-a"])
    assert total(seen.heard([], ["host-a"])["host-a"], "prompt_tokens_total")
