"""History on both real databases: times, windows, ledger, decisions, incidents, freezes."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from agent.conftest import both_backends as backend  # noqa: F401
from agent.fakes import DIGEST, START, histogram, remote_window
from tiertune_agent.history.decisions import place
from tiertune_agent.history.store import FORTNIGHT, KEPT_CANDIDATE_WINDOWS
from tiertune_agent.records import Made, Prospect, Rates, Snapshot, StageWindow, State, Target, Window
from tiertune_agent.tuners.base import NoChange, Proposal

TARGET = Target("host-a", "remote", models=("llama",))
WISH = Proposal("tiers.remote.fetch", "on", "off", "it costs", {"windows": [1, 2]}, requests=9)


def snapshot(*windows, stages=(), at=START, **fields):
    known = {"store": "host-a", "url": "http://host-a:7410", "boot_id": "b", "version": "1", "status": {}, "tuning": {}}
    return Snapshot(**{**known, "totals": {}, "at": at, "windows": windows, "stages": stages, **fields})


class TestWindows:
    def test_windows_come_back_as_they_were(self, history):
        """Figures, histograms and aware UTC times survive the database, oldest first."""
        windows = [remote_window(i, requests=i, fetch=0.1) for i in range(3)]
        dram = Window("host-a", DIGEST, "llama", "dram", START, 15.0, {"tier_evicted_idle_seconds": histogram(1, 0, 2)})
        history.remember(snapshot(*windows, dram), Rates())
        assert history.windows("host-a", tier="remote") == windows
        assert history.windows("host-a", tier="remote", limit=1) == windows[-1:]
        assert history.windows("host-a", tier="dram", namespace=DIGEST) == [dram]
        assert history.windows("host-b", tier="remote") == []
        assert history.windows("host-a", tier="remote")[0].start.tzinfo is UTC
        assert len(history.store_windows("host-a", START + timedelta(seconds=15))) == 2

    def test_a_time_of_another_zone_is_the_same_moment(self, history):
        """What goes in at +02:00 comes out in UTC; a time without a zone is refused."""
        there = START.astimezone(timezone(timedelta(hours=2)))
        history.remember(snapshot(at=there), Rates())
        assert history.stores()[0].last_seen == START
        assert history.stores()[0].last_seen.tzinfo is UTC
        with pytest.raises(Exception, match="a time without a zone"):
            history.open_incident("x", "", "", datetime(2025, 1, 1))  # noqa: DTZ001

    def test_stages_are_kept(self, history, database, sql):
        """Stage windows land in their table."""
        history.remember(
            snapshot(stages=(StageWindow("host-a", "all", "prefill", "", START, 15.0, 3.5, 700.0),)), Rates()
        )
        told = "stage, phase, gpu_seconds, tokens"
        assert sql(database, f"select {told} from stage_windows") == [("all", "prefill", 3.5, 700.0)]

    def test_gpus_are_kept(self, history, database, sql):
        """What a GPU told lands beside the phases of its stage."""
        gpu = StageWindow("host-a", "all", "", "GPU-1", START, 15.0, 0.0, 0.0, 0.75, 30 << 30, 50 << 30, 350.5, 5000.0)
        history.remember(snapshot(stages=(gpu,)), Rates())
        told = "gpu, utilization, memory_used_bytes, memory_free_bytes, power_watts, energy_joules"
        rows = sql(database, f"select {told} from stage_windows")
        assert rows == [("GPU-1", 0.75, 30 << 30, 50 << 30, 350.5, 5000.0)]

    def test_pruning_keeps_the_last_candidates(self, history):
        """Old windows go; the last ones with candidates stay, however old, for they tell what a fetch is worth."""
        idle = [remote_window(i) for i in range(30, 60)]
        asked = [remote_window(i, requests=1, recompute=1.0) for i in range(KEPT_CANDIDATE_WINDOWS + 5)]
        history.remember(snapshot(*asked, *idle), Rates())
        assert history.prune(START + timedelta(days=2), timedelta(days=1)) == 35
        assert history.candidate_windows("host-a", "remote") == asked[5:]
        assert history.windows("host-a", tier="remote") == asked[5:]

    def test_a_store_is_one_row(self, history):
        """Seen again, a store's row is renewed; when it was first seen stays."""
        history.remember(snapshot(boot_id="b1"), Rates())
        history.remember(snapshot(boot_id="b2", at=START + timedelta(hours=1)), Rates())
        (store,) = history.stores()
        assert (store.boot_id, store.first_seen, store.last_seen) == ("b2", START, START + timedelta(hours=1))


class TestLedger:
    def test_an_hour_adds_up_to_its_windows(self, history):
        """Seconds are sums, bytes a mean weighted by time, money the value less rent and network."""
        rates = Rates(gpu_hour=3.6, gib_hour={"remote": 0.5}, network_gib=0.25)
        held = {
            "saved_seconds_total": 30.0,
            "lost_seconds_total": 5.0,
            "tier_transfer_bytes_total{operation=load}": 2.0**30,
        }
        windows = [
            Window("host-a", "", "", "remote", START, 15.0, {**held, "tier_resident_bytes": 2.0**30}),
            Window(
                "host-a", "", "", "remote", START + timedelta(seconds=15), 45.0, {"tier_resident_bytes": 3 * 2.0**30}
            ),
            Window("host-a", "", "", "remote", START + timedelta(hours=1), 15.0, {"saved_seconds_total": 1.0}),
            Window("host-a", "", "", "", START, 15.0, {"clients": 2.0}),
        ]
        for window in windows:
            history.remember(snapshot(window), rates)
        first, second = history.ledger(START)
        assert (first["seconds"], first["saved"], first["lost"]) == (60.0, 30.0, 5.0)
        assert first["bytes"] == round(2.5 * 2**30)
        assert first["transferred"] == 2**30
        assert first["money"] == pytest.approx(25 * 3.6 / 3600 - 0.5 * (15 + 3 * 45) / 3600 - 0.25)
        assert (second["hour"], second["saved"]) == ("2025-03-05T13:00:00+00:00", 1.0)


class TestDecisions:
    def propose(self, history, wish=WISH, mode="recommend", at=START):
        return history.decisions.propose("remote_fetch", TARGET, wish, mode=mode, version=3, policy=1, now=at)

    def test_a_decision_comes_back_as_it_was(self, history):
        """Target, values, evidence, versions and times survive the database."""
        decision = self.propose(history)
        assert history.decisions.get(decision.id) == decision
        assert decision.target == TARGET
        assert (decision.before, decision.after, decision.state) == ("on", "off", State.PROPOSED)
        assert decision.evidence == {"windows": [1, 2]}
        assert decision.document()["from"] == "on"

    def test_the_same_wish_again_renews_its_row(self, history):
        """A repeated wish is one decision with newer evidence; another wish supersedes it."""
        first = self.propose(history)
        again = self.propose(history, Proposal("tiers.remote.fetch", "on", "off", "it still costs"))
        assert (again.id, again.reason) == (first.id, "it still costs")
        other = self.propose(history, Proposal("tiers.remote.fetch", "on", "maybe", "other"))
        assert other.id != first.id
        assert history.decisions.get(first.id).state == State.EXPIRED

    def test_a_wish_that_is_gone_expires(self, history):
        """A proposal that its tuner no longer makes cannot be approved any more."""
        decision = self.propose(history)
        history.decisions.withdraw("remote_fetch", TARGET, "it pays again", now=START)
        gone = history.decisions.get(decision.id)
        assert gone.state == State.EXPIRED
        assert gone.reason.endswith("no longer wished: it pays again")

    def test_a_decision_moves_once(self, history):
        """Of two who move the same decision, one succeeds; the other changes nothing."""
        decision, heard = self.propose(history), []
        history.decisions.observer = lambda tuner, state: heard.append((tuner, state))
        assert history.decisions.move(decision, State.APPROVED, now=START).state == State.APPROVED
        assert history.decisions.move(decision, State.REJECTED, now=START) is None
        assert history.decisions.get(decision.id).state == State.APPROVED
        assert heard == [("remote_fetch", State.APPROVED)]

    def test_changes_are_counted_by_when_they_were_applied(self, history):
        """The last change of a target, and how many a store saw, come from decisions that did change it."""
        for hours in (0, 1, 2):
            decision = self.propose(history, Proposal("tiers.remote.fetch", "on", f"off{hours}", ""))
            if hours < 2:
                at = START + timedelta(hours=hours)
                history.decisions.move(decision, State.APPLIED, now=at, applied_at=at)
        last = Made("tiers.remote.fetch", "on", "off1", START + timedelta(hours=1))
        assert history.decisions.last_changes() == {place("remote_fetch", TARGET): last}
        assert history.decisions.changes_since(START + timedelta(minutes=30)) == {"host-a": 1}

    def test_a_verdict_is_a_row_and_a_state(self, history):
        """Judged once, a decision carries its verdict and is not judged again."""
        decision = history.decisions.move(self.propose(history), State.APPLIED, now=START, applied_at=START)
        history.decisions.judge(decision, State.KEPT, "good", {"gains": [1.0]}, START)
        history.decisions.judge(decision, State.INCONCLUSIVE, "late", {}, START)
        assert [verdict["verdict"] for verdict in history.decisions.verdicts(decision.id)] == ["kept"]
        assert history.decisions.get(decision.id).state == State.KEPT

    def test_the_newest_answer_is_kept_also_when_it_is_no_change(self, history):
        """One row per tuner and target, holding the last sentence."""
        for reason in ("first", "second"):
            history.decisions.answer("remote_fetch", TARGET, NoChange(reason), START)
        history.decisions.answer("tier_size", Target("host-a", "dram"), WISH, START)
        assert [(a["tuner"], a["change"], a["reason"]) for a in history.decisions.answers()] == [
            ("remote_fetch", False, "second"),
            ("tier_size", True, "it costs"),
        ]

    def test_prospects_come_back_by_namespace_and_time(self, history):
        """Those of one namespace, or of all, from a time on, oldest first; old ones are pruned."""
        seen = [
            Prospect(namespace, START + timedelta(minutes=5 * index), 300.0, index, {"1/0/0": 0.5, "2/0/0": 0.25})
            for index in range(3)
            for namespace in (DIGEST, "cd" * 16)
        ]
        history.remember_prospects(reversed(seen))
        assert history.prospects(DIGEST, START) == seen[::2]
        assert len(history.prospects("", START + timedelta(minutes=5))) == 4
        assert history.prune(START + FORTNIGHT + timedelta(minutes=5), timedelta(days=1)) == 2
        assert history.prospects(DIGEST, START) == seen[2::2]


class TestTheRest:
    def test_an_incident_is_opened_once_and_closed(self, history):
        """Repeated trouble renews the open incident; after it closed, new trouble is a new one."""
        assert history.open_incident("store_unreachable", "host-a", "refused", START)
        assert not history.open_incident("store_unreachable", "host-a", "timeout", START + timedelta(minutes=1))
        assert history.open_incidents() == {"store_unreachable": 1}
        history.close_incidents(["store_unreachable"], ["host-a"], START + timedelta(minutes=2))
        assert history.open_incidents() == {"store_unreachable": 0}
        assert history.open_incident("store_unreachable", "host-a", "again", START + timedelta(minutes=3))
        newest, oldest = history.incidents()
        assert (newest["message"], newest["closed_at"]) == ("again", None)
        assert (oldest["message"], oldest["last_seen"]) == ("timeout", "2025-03-05T12:01:00+00:00")

    def test_a_freeze_ends_by_time_or_by_command(self, history):
        """The longest freeze in force counts; unfreeze lifts all of them."""
        history.freeze("release", "ops", START, START + timedelta(hours=1))
        history.freeze("audit", "ops", START, None)
        assert history.frozen(START).reason == "audit"
        assert history.unfreeze(START + timedelta(minutes=1)) == 2
        assert history.frozen(START + timedelta(minutes=2)) is None
        history.freeze("short", "ops", START, START + timedelta(minutes=5))
        assert history.frozen(START + timedelta(minutes=5)) is None

    def test_a_policy_revision_is_a_row_per_text(self, history):
        """The same text is the same revision; a change, also back to an earlier text, is a new one."""
        numbers = [history.policy_revision(digest, "p.yaml", digest, START) for digest in ("a", "a", "b", "a")]
        assert numbers[0] == numbers[1] != numbers[2] != numbers[3] != numbers[0]
        assert len(history.policy_revisions()) == 3

    def test_what_a_store_calls_itself_is_cut(self, history):
        """A model's path may be longer than a name, or hold a zero: the window is kept, and found again."""
        told = Window("host-a\0", DIGEST, "m" * 4000, "remote", START, 15.0, {"clients": 1.0})
        history.remember(snapshot(told), Rates())
        (kept,) = history.windows("host-a", tier="remote", namespace=DIGEST)
        assert (kept.store, kept.model, kept.values) == ("host-a", "m" * 255, told.values)
        history.audit("ops\0", "127.0.0.1", "freeze", {"reason": "a\0b"}, START)
        assert history.audited()[0]["who"] == "ops"
