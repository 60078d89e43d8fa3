"""History on both real databases: what stands beside decisions: bypass, incidents, freezes, stores, policies."""

from datetime import timedelta

import pytest

from agent.conftest import both_backends as backend  # noqa: F401
from agent.fakes import DIGEST, START, after, remember, remote_window, snapshot, window
from tiertune_agent.records import OBSERVED, Rates


@pytest.fixture
def journal(history):
    return history.journal


class TestTheRest:
    def test_an_incident_is_opened_once_and_closed(self, journal):
        """Repeated trouble renews the open incident; after it closed, new trouble is a new one."""
        for minute, message, number in ((0, "refused", 1), (1, "timeout", 1), (2, "", 0), (3, "again", 1)):
            told = {("store_unreachable", "host-a"): message}
            journal.tell_incidents(told, after(minutes=minute))
            assert journal.open_incidents() == {"store_unreachable": number}
        newest, oldest = journal.incidents()
        assert (newest["message"], newest["closed_at"]) == ("again", None)
        assert (oldest["message"], oldest["last_seen"]) == ("timeout", "2025-03-05T12:01:00+00:00")

    def test_every_open_incident_is_told_however_many_there_are(self, journal):
        """The oldest may be the one that matters; of those that are over the newest 100 less what is open."""
        away = {("store_unreachable", f"host-{number}"): "refused" for number in range(150)}
        journal.tell_incidents({("tier_dead", "host-0"): "gone"}, START)
        journal.tell_incidents(away, START)
        told = journal.incidents()
        assert (len(told), told[-1]["kind"]) == (151, "tier_dead")
        journal.tell_incidents(dict.fromkeys(list(away)[:120], ""), START)
        told = journal.incidents()
        assert [one["closed_at"] is None for one in told] == [True] * 31 + [False] * 69

    def test_the_log_tells_what_opens_and_closes_and_in_one_line_each(self, journal, caplog):
        """Not what goes on; a message that others wrote forges no line."""
        caplog.set_level("INFO", "tiertune_agent")
        for message in ("refused\nby whom", "still refused", "", ""):
            journal.tell_incidents({("store_unreachable", "host-a"): message}, START)
        assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
            ("WARNING", "incident store_unreachable 'host-a' opened: 'refused\\nby whom'"),
            ("INFO", "incident store_unreachable 'host-a' closed"),
        ]

    def test_what_is_named_no_more_is_done_with_and_a_store_that_moved_goes_on(self, history):
        """Former stores are not shown, nor wished anything of; what is remembered of them stays, and counts once."""
        remember(history, remote_window(0, requests=1, fetch=0.1))
        history.wish_bypass({"host-a": "http://host-a:7410"}, on=True)
        history.named = lambda: {"http://elsewhere:7410"}
        assert history.stores() == []
        history.leave_out(())
        assert history.retention.sum_up(after(hours=2))
        remember(history, url="http://elsewhere:7410")
        (store,) = history.stores()
        assert (store.name, store.pending_bypass) == ("host-a", True)
        assert not history.retention.sum_up(after(hours=2))

    @pytest.mark.parametrize("reason", ["", "what a server answered: \0"])
    def test_a_bypass_of_all_is_for_former_stores_too_and_for_no_source(self, history, reason):
        """By status, whatever bytes it tells: nobody commands what is only observed."""
        ours = snapshot(status={"tiers": {"remote": {"reason": reason}}})
        history.remember([(ours, Rates()), (snapshot(store="engine-a", status={OBSERVED: "vllm"}), Rates())])
        history.named = lambda: {"http://elsewhere:7410"}
        history.wish_bypass_of_all(on=True)
        history.named = None
        assert [(one.name, one.pending_bypass) for one in history.stores()] == [("engine-a", None), ("host-a", True)]

    def test_where_another_store_answers_the_former_one_is_no_more(self, history):
        """An address that is used again has one store: that which answers; the other one may come back elsewhere."""
        history.named = lambda: {"http://host-a:7410", "http://host-b:7410"}
        remember(history)
        remember(history, store="host-z")
        assert [(one.name, one.url) for one in history.stores()] == [("host-z", "http://host-a:7410")]
        remember(history, url="http://host-b:7410")
        assert [one.name for one in history.stores()] == ["host-a", "host-z"]

    def test_two_sources_at_one_address_are_both_there(self, history):
        """An engine's own metrics and LMCache's within it, of which one may be silent for a round."""
        seen = {name: snapshot(store=name, url="http://e/metrics", status={OBSERVED: name}) for name in ("a", "b")}
        history.remember([(each, Rates()) for each in seen.values()])
        history.remember([(seen["b"], Rates())])
        assert [one.url for one in history.stores()] == ["http://e/metrics"] * 2

    def test_a_freeze_ends_by_time_or_by_command(self, journal):
        """The longest freeze in force counts; unfreeze lifts all of them."""
        journal.freeze("release", "ops", START, after(hours=1))
        journal.freeze("audit", "ops", START, None)
        assert journal.frozen(START).reason == "audit"
        assert journal.unfreeze(after(minutes=1)) == 2
        assert journal.frozen(after(minutes=2)) is None
        journal.freeze("short", "ops", START, after(minutes=5))
        assert journal.frozen(after(minutes=5)) is None

    def test_a_freeze_holds_and_is_lifted_though_the_clock_went_back(self, journal):
        """Set right, or that of an agent that took over."""
        journal.freeze("release", "ops", START, None)
        assert journal.frozen(START - timedelta(minutes=1)).reason == "release"
        assert journal.unfreeze(START - timedelta(minutes=1)) == 1
        assert journal.frozen(after(minutes=1)) is None

    def test_a_policy_revision_is_a_row_per_text(self, journal):
        """The same text is the same revision; a change, also back to an earlier text, is a new one."""
        numbers = [journal.policy_revision(digest, "p.yaml", digest, START) for digest in ("a", "a", "b", "a")]
        assert numbers[0] == numbers[1] != numbers[2] != numbers[3] != numbers[0]
        assert len(journal.policy_revisions()) == 3

    def test_what_a_store_calls_itself_is_cut(self, history, journal):
        """A model's path may be longer than a name, or hold a zero: the window is kept, and found again."""
        told = window("remote", {"clients": 1.0}, namespace=DIGEST, model="m" * 4000, store="host-a\0")
        remember(history, told)
        (kept,) = history.measured.windows_since("host-a", START, tier="remote", namespace=DIGEST)
        assert (kept.store, kept.model, kept.values) == ("host-a", "m" * 255, told.values)
        journal.audit("ops\0", "127.0.0.1", "freeze", {"reason": "a\0b"}, START)
        assert journal.audited()[0]["who"] == "ops"
