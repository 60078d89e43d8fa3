"""History on both real databases: times, windows, the ledger."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest

from agent.conftest import both_backends as backend  # noqa: F401
from agent.fakes import DIGEST, START, after, histogram, ledger_rows, pruned, remember, remote_window, window
from tiertune_agent.history import measured
from tiertune_agent.records import Rates, StageWindow
from tiertune_agent.tuners.remote_fetch import MOST_CANDIDATES


class TestWindows:
    def test_windows_come_back_as_they_were(self, history, monkeypatch):
        """Figures, histograms and aware UTC times survive the database, oldest first."""
        windows, read = [remote_window(i, requests=i, fetch=0.1) for i in range(3)], history.measured.windows
        dram = window("dram", {"tier_evicted_idle_seconds": histogram(1, 0, 2)}, namespace=DIGEST, model="llama")
        remember(history, *windows, dram)
        assert read("host-a", tier="remote") == windows
        assert dram in history.measured.fleet_windows(["host-a"], dram.start)
        assert read("host-b", tier="remote") == []
        assert read("host-a", tier="remote")[0].start.tzinfo is UTC
        assert len(history.measured.fleet_windows(["host-a"], after(seconds=15))) == 2
        monkeypatch.setattr(measured, "MOST_OF_TIER", 1)
        assert read("host-a", tier="remote") == windows[-1:]

    def test_bytes_are_whole(self, history, database, sql):
        """For those who read the tables themselves; seconds and rates are as measured."""
        values = {"tier_resident_bytes": 16711680.0, "gate_candidate_bytes_total{tier=remote}": 5.0}
        values |= {"saved_seconds_total": 2.0, "fetch_estimate_bytes_per_second": 4.0}
        remember(history, window("remote", values, namespace=DIGEST))
        ((told,),) = sql(database, "select counters from windows")
        told = json.loads(told) if isinstance(told, str) else told
        assert {name: type(value) for name, value in told.items()} == {
            name: int if "bytes" in name and "per_second" not in name else float for name in values
        }

    def test_a_time_of_another_zone_is_the_same_moment(self, history):
        """What goes in at +02:00 comes out in UTC; a time without a zone is refused."""
        there = START.astimezone(timezone(timedelta(hours=2)))
        remember(history, at=there)
        assert history.stores()[0].last_seen == START
        assert history.stores()[0].last_seen.tzinfo is UTC
        with pytest.raises(Exception, match="a time without a zone"):
            history.journal.tell_incidents({("x", ""): "y"}, datetime(2025, 1, 1))  # noqa: DTZ001

    def test_stages_and_gpus_are_kept(self, history, database, sql):
        """What a GPU told lands beside the phases of its stage."""
        figures = (0.75, 30 << 30, 50 << 30, 350.5, 5000.0)
        stage = StageWindow("host-a", "all", "prefill", "", START, 15.0, 3.5, 700.0)
        gpu = StageWindow("host-a", "all", "", "GPU-1", START, 15.0, 0.0, 0.0, *figures)
        remember(history, stages=(stage, gpu))
        told = "utilization, memory_used_bytes, memory_free_bytes, power_watts, energy_joules"
        rows = sql(database, f"select stage, phase, gpu, gpu_seconds, tokens, {told} from stage_windows order by gpu")
        assert rows == [("all", "prefill", "", 3.5, 700.0, *[None] * 5), ("all", "", "GPU-1", 0.0, 0.0, *figures)]

    def test_the_last_candidates_outlive_their_windows(self, history):
        """Windows go; what the last requests found in the remote stays, however old: it tells what a fetch is worth."""
        for index in range(MOST_CANDIDATES + 5):
            remember(history, remote_window(index, requests=index, nbytes=100.0, recompute=1.0))
        for index in range(30, 60):
            remember(history, remote_window(index))
        history.retention.sum_up(after(days=2))
        assert pruned(history, after(days=2), timedelta(days=1)) == MOST_CANDIDATES + 35
        assert history.measured.windows("host-a", tier="remote") == []
        last = range(5, MOST_CANDIDATES + 5)
        assert history.store("host-a").candidates == [[index, index, 100.0, 1.0] for index in last]
        assert history.measured.typical(["host-a", "host-b"]).keys() == {"host-a"}

    def test_hits_in_dram_leave_the_last_candidates_of_the_remote(self, history):
        """While fetching is off only faster tiers have candidates: however many, they displace nothing."""
        remember(history, *(remote_window(i, requests=1, recompute=1.0) for i in range(5)))
        remember(history, *(replace(remote_window(i, requests=1, recompute=1.0), tier="dram") for i in range(5, 90)))
        assert history.store("host-a").candidates == [[1.0, 1.0, 0.0, 1.0]] * 5

    def test_a_store_is_one_row(self, history):
        """Seen again, a store's row is renewed; when it was first seen stays."""
        remember(history, boot_id="b1")
        remember(history, boot_id="b2", at=after(hours=1))
        (store,) = history.stores()
        assert (store.boot_id, store.first_seen, store.last_seen) == ("b2", START, after(hours=1))


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
            window("remote", {**held, "tier_resident_bytes": 2.0**30}),
            window("remote", {"tier_resident_bytes": 3 * 2.0**30}, after(seconds=15), 45.0),
            window("remote", {"saved_seconds_total": 1.0}, after(hours=1)),
            window("", {"clients": 2.0}),
        ]
        for each in windows:
            remember(history, each, rates=rates)
        first, second = ledger_rows(history, START)
        assert (first["seconds"], first["saved"], first["lost"]) == (60.0, 30.0, 5.0)
        assert first["bytes"] == round(2.5 * 2**30)
        assert first["transferred"] == 2**30
        assert first["money"] == pytest.approx(25 * 3.6 / 3600 - 0.5 * (15 + 3 * 45) / 3600 - 0.25)
        assert (second["hour"], second["saved"]) == ("2025-03-05T13:00:00+00:00", 1.0)
