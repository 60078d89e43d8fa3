"""From cumulative counters to windows; stores that vanish, restart or talk nonsense."""

import json
import re
from datetime import timedelta

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette

from agent.fakes import DIGEST, START, transport, window
from tiertune_agent.collector.counters import parse, windows
from tiertune_agent.collector.roster import Roster
from tiertune_agent.collector.stores import KEPT_S, Collector, Trouble
from tiertune_agent.collector.targets import StoreAddress
from tiertune_agent.credentials import Access
from tiertune_agent.records import Histogram, Snapshot, series
from tiertune_agent.settings import AgentSettings
from tiertune_connector.httpd.serving import Serving


def reading(metrics, time_s=1000.0, boot_id="b1"):
    return parse({"store": "host-a", "boot_id": boot_id, "time_s": time_s, "metrics": metrics})


def table(name, labels, *rows):
    """One metric, as a store tells it."""
    return {name: {"labels": labels.split(), "rows": [[*row] for row in rows]}}


def lookups(*rows):
    return table("tier_lookup_tokens_total", "tier result origin namespace model", *rows)


def hits(count, tier="dram", namespace=DIGEST):
    """Of a pool, that were found by who stored them."""
    return [tier, "hit", "self", namespace, "llama", count]


def between(before, after, **later):
    return windows(reading(before), reading(after, **{"time_s": 1015.0, **later}), START)


NAMES, TEXTS = st.sampled_from(["a_total", "a_total_b", "a"]), st.sampled_from(["x", "y"])
SERIES = st.dictionaries(
    st.builds(series, NAMES, st.dictionaries(TEXTS, TEXTS).map(dict.items)),
    st.floats(0, 9) | st.just(Histogram(1.0, 1.0, {0: 1.0})),
)


@given(SERIES, NAMES, st.dictionaries(TEXTS, TEXTS, max_size=2))
def test_series_are_found_by_name_and_labels(values, name, labels):
    """As a look through all of them finds them, in their order, whatever other windows have."""
    told = window("dram", values)
    found = [(key, value) for key, value in values.items() if key.partition("{")[0] == name]
    inner = {key: dict(re.findall("([xy])=([xy])", key)) for key, _ in found}
    assert told.matching(name, **labels) == [value for key, value in found if {**inner[key], **labels} == inner[key]]
    counts = [(name, inner[key], value) for key, value in found if not isinstance(value, Histogram)]
    assert list(told.each(name)) == counts


def test_a_connection_is_kept_from_window_to_window():
    """The agent closes an idle one first: a store that did might do so while it is asked."""
    settings = AgentSettings(stores=[StoreAddress(url="http://host-a")])
    assert settings.window < KEPT_S < Serving(Starlette(), None, None)._server.config.timeout_keep_alive


class TestDifferences:
    def test_counters_are_split_by_tier_and_pool(self):
        """Each tier of each namespace gets its window; other labels stay with the counter."""
        counted, _ = between(
            lookups(hits(10.0), ["dram", "miss", "", DIGEST, "llama", 5.0]),
            lookups(
                hits(30.0),
                ["dram", "miss", "", DIGEST, "llama", 5.0],
                ["remote", "hit", "other_host", DIGEST, "llama", 7.0],
            ),
        )
        by_tier = {window.tier: window for window in counted}
        assert by_tier["dram"].values == {"tier_lookup_tokens_total{result=hit,origin=self}": 20.0}
        assert by_tier["remote"].total("tier_lookup_tokens_total", result="hit", origin="other_host") == 7.0
        assert by_tier["remote"].total("tier_lookup_tokens_total", origin="self") == 0.0
        assert (by_tier["dram"].namespace, by_tier["dram"].model, by_tier["dram"].seconds) == (DIGEST, "llama", 15.0)
        assert by_tier["dram"].start == START - timedelta(seconds=15)

    def test_gauges_are_taken_as_they_are(self):
        """A gauge that fell is not a difference; one that is not told is None, not 0."""
        more, less = (
            table("tier_resident_bytes", "tier namespace model", ["dram", DIGEST, "m", held]) for held in (70.0, 50.0)
        )
        (window,), _ = between(more, less)
        assert window.gauge("tier_resident_bytes") == 50.0
        assert window.gauge("tier_pinned_bytes") is None

    def test_histograms_are_differenced_by_bucket(self):
        """Counts, sum and buckets are those of the window alone; one that is new, or was reset, counts as a whole."""

        def idle(buckets, total):
            row = ["dram", DIGEST, "m", buckets, total, sum(buckets)]
            return table("tier_evicted_idle_seconds", "tier namespace model", row)

        (window,), _ = between(idle([1, 2, 0], 5.0), idle([1, 4, 1], 9.0))
        assert window.values["tier_evicted_idle_seconds"] == Histogram(3, 4.0, {1: 2, 2: 1})
        for before in (lookups(), idle([9, 0, 0], 1.0)):
            (window,), _ = between(before, idle([1, 4, 1], 9.0))
            assert window.values["tier_evicted_idle_seconds"] == Histogram(6, 9.0, {0: 1, 1: 4, 2: 1})

    def test_a_new_boot_counts_from_zero(self):
        """After a restart everything counted since belongs to the window."""
        (window,), _ = between(
            lookups(hits(100.0)),
            lookups(hits(30.0)),
            boot_id="b2",
        )
        assert window.total("tier_lookup_tokens_total") == 30.0

    def test_waiting_for_chunks_is_a_phase_of_its_stage(self):
        """Every phase that a store counts becomes a row, and their seconds add up to the counter's growth."""
        phases = ("prefill", "decode", "mixed", "kv_wait")
        first = [["talker", phase, 1.0] for phase in phases[1:]]
        second = [["talker", phase, 2.0 + number] for number, phase in enumerate(phases)]
        before, after = (table("stage_gpu_seconds_total", "stage phase", *rows) for rows in (first, second))
        _, stages = between(before, after)
        assert {s.phase: s.gpu_seconds for s in stages} == {"prefill": 2.0, "decode": 2.0, "mixed": 3.0, "kv_wait": 4.0}

    def test_a_gpu_is_a_row_with_its_stage(self):
        """Its gauges as they are, its energy as it grew; it is no part of the store's own window."""

        def told(utilization, joules):
            gpu = ["GPU-1", "prefill"]
            memory = [*gpu, "used", 30.0 * 2**30], [*gpu, "free", 50.0 * 2**30]
            return (
                table("gpu_utilization_ratio", "gpu stage", [*gpu, utilization])
                | table("gpu_power_watts", "gpu stage", [*gpu, 350.5])
                | table("gpu_memory_bytes", "gpu stage state", *memory)
                | table("gpu_energy_joules_total", "gpu stage", [*gpu, joules])
            )

        counted, (row,) = between(told(0.25, 1000.0), told(0.75, 6000.0))
        assert counted == ()
        assert (row.stage, row.phase, row.gpu, row.gpu_seconds, row.tokens) == ("prefill", "", "GPU-1", 0.0, 0.0)
        assert (row.utilization, row.power_watts, row.energy_joules) == (0.75, 350.5, 5000.0)
        assert (row.memory_used_bytes, row.memory_free_bytes) == (30 * 2**30, 50 * 2**30)

    def test_what_a_gpu_does_not_tell_is_none(self):
        """Not 0: a GPU without an energy counter did not run for nothing."""
        power = table("gpu_power_watts", "gpu stage", ["GPU-1", "", 70.0])
        _, (row,) = between(power, power)
        assert (row.power_watts, row.energy_joules, row.utilization, row.memory_used_bytes) == (70.0, None, None, None)

    @given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 1000)), min_size=1, max_size=30))
    def test_windows_add_up_to_the_counters(self, steps):
        """Over any sequence of growth and restarts, the windows sum to all that was ever counted."""
        value, boot, total, summed = 0, 0, 0, 0.0
        before = reading(lookups(hits(0.0)), boot_id="0")
        for index, (restart, growth) in enumerate(steps, start=1):
            boot, value = (boot + 1, 0) if restart else (boot, value)
            value, total = value + growth, total + growth
            row = hits(float(value))
            after = reading(lookups(row), time_s=1000.0 + 15 * index, boot_id=str(boot))
            counted, _ = windows(before, after, START)
            summed += sum(window.total("tier_lookup_tokens_total") for window in counted)
            before = after
        assert summed == total


class TestStores:
    @pytest.fixture
    def collector(self, clock, store, other):
        stores = [StoreAddress(url=f"http://{each.name}:7410") for each in (store, other)]
        roster = Roster(stores, now=clock.now)
        made = Collector(roster, clock.now, clock.seconds, Access(transport=transport(store, other)))
        yield made
        made.close()

    def test_the_first_answer_is_the_baseline(self, collector, clock, store):
        """What was counted before the agent came belongs to no window; what comes after does."""
        store.traffic()
        first = collector.collect()[0]
        assert (first.store, first.windows) == ("host-a", ())
        clock.advance(15)
        store.traffic(requests=3)
        second = collector.collect()[0]
        assert self.requests(second) == (15.0, 3.0)
        assert second.tuning["version"] == 1

    def test_another_store_at_an_address_begins_with_its_first_answer(self, collector, clock, store, other):
        """What it has counted since its boot was counted where it was read before: it is in no window again."""
        other.traffic(requests=1000)
        collector.collect()
        clock.advance(15)
        store.name, store.boot_id, store.counters = "host-b", "boot-7", other.counters
        other.up = False
        moved = collector.collect()[0]
        assert (moved.store, moved.windows) == ("host-b", ())
        clock.advance(15)
        store.traffic(requests=3)
        assert self.requests(collector.collect()[0]) == (15.0, 3.0)

    def test_a_tuning_is_read_when_it_has_changed(self, collector, clock, store):
        """By its version, or as the store has begun anew; by a store that does not tell one of both, each time."""
        asked, answer = [], store.get_tuning
        store.get_tuning = lambda request: asked.append(request) or answer(request)

        def told():
            clock.advance(15)
            del asked[:]
            snapshot = collector.collect()[0]
            return snapshot.tuning["bypass"], len(asked)

        assert [told(), told()] == [(False, 1), (False, 0)]
        store.tuning = {**store.tuning, "bypass": True, "version": 2}
        assert [told(), told()] == [(True, 1), (True, 0)]
        store.restart()
        store.tuning = {**store.tuning, "bypass": False}
        assert [told(), told()] == [(False, 1), (False, 0)]
        status = json.loads(store.get_status(None).content)
        for name in ("tuning_version", "boot_id"):
            store.answers("get_status", 200, json={**status, name: None})
            assert [told(), told()] == [(False, 1), (False, 1)]

    def requests(self, snapshot):
        """Seconds of the remote's window, and requests that found chunks there."""
        remote = next(w for w in snapshot.windows if w.tier == "remote" and not w.namespace)
        return remote.seconds, remote.total("gate_candidate_requests_total")

    def test_what_passed_while_a_store_was_away_is_counted_later(self, collector, clock, store):
        """The window after an absence is longer, and nothing of it is lost."""
        collector.collect()
        store.up = False
        store.traffic(requests=5)
        clock.advance(15)
        collector.collect()
        store.up = True
        clock.advance(15)
        assert self.requests(collector.collect()[0]) == (30.0, 5.0)

    def test_a_clock_that_stands_still_is_stale(self, collector):
        """Counters with the same time as before make no window."""
        collector.collect()
        assert [(t.kind, t.store) for t in collector.collect()] == [
            ("stale_counters", "host-a"),
            ("stale_counters", "host-b"),
        ]

    @pytest.mark.parametrize("seconds", [-20, 86400])
    def test_what_passed_while_a_clock_was_set_is_counted_later(self, collector, clock, store, seconds):
        """The answer itself is stale, and nothing of it is lost; nor is there rent for a day that never was."""
        collector.collect()
        store.tells("get_counters", lambda told: told | {"time_s": told["time_s"] + seconds})
        store.traffic(requests=5)
        clock.advance(15)
        assert collector.collect()[0].kind == "stale_counters"
        store.traffic(requests=2)
        clock.advance(15)
        assert self.requests(collector.collect()[0]) == (15.0, 7.0)

    def test_a_clock_years_ahead_is_told_though_the_agents_went_back(self, collector, clock, store):
        """No window is as long, and none can begin before there were years."""
        collector.collect()
        store.tells("get_counters", lambda told: told | {"time_s": 1e12})
        clock.advance(-20)
        assert [getattr(answer, "kind", "") for answer in collector.collect()] == ["stale_counters", "stale_counters"]

    @pytest.mark.parametrize(
        "answer",
        [
            httpx.Response(200, text="<html>"),
            httpx.Response(200, json=[1, 2]),
            httpx.Response(200, json={"store": "host-a"}),
            httpx.Response(200, json={"store": "host-a", "boot_id": "b", "time_s": 1, "metrics": {"x": {"labels": 3}}}),
            httpx.Response(200, json={"store": "host-a", "boot_id": "b", "time_s": True, "metrics": {}}),
        ],
        ids=["page", "list", "fields missing", "wrong table", "no number"],
    )
    def test_nonsense_is_trouble(self, collector, store, answer):
        """Whatever answers in a store's place does not bring the agent down."""
        store.get_counters = lambda _request: answer
        trouble = collector.collect()[0]
        assert isinstance(trouble, Trouble)
        assert trouble.kind == "store_nonsense"

    @pytest.mark.parametrize(
        ("where", "field", "value"),
        [
            *[("status", "tiers", value) for value in (3, {"x": 3}, {"dram": None})],
            *[("status", "pools", value) for value in ([], {"x": None}, {"x": {"model": []}})],
            ("status", "pools", {"x": {"chunk_bytes": "many"}}),
            ("status", "pools", {"x": {"dram": {"effective": {"capacity_bytes": {}}}}}),
            ("status", "tiers", {"remote": {"servers": [3]}}),
            *[("tuning", "tiers", value) for value in ([], {"remote": "on"}, {"dram": {"capacity_bytes": "1 GiB"}})],
            ("tuning", "pools", {"x": {"dram": "lru"}}),
            ("tuning", "defaults", {"eviction": {}}),
        ],
    )
    def test_an_answer_of_another_shape_is_trouble(self, collector, store, where, field, value):
        """It names the place, and reaches nobody who would stumble over it: the other stores are tuned."""
        store.tells(f"get_{where}", lambda told: told | {field: value})
        first, second = collector.collect()
        assert (first.kind, second.store) == ("store_nonsense", "host-b")
        assert f"{where}.{field}" in first.message

    @pytest.mark.parametrize(
        "table",
        [
            {"labels": ["tier"], "rows": [[3, 1.0]]},
            {"labels": ["tier"], "rows": [["remote", [1], "much", 1]]},
            {"labels": [3], "rows": [["remote", 1.0]]},
            {"labels": ["tier"], "rows": [["remote", float("nan")]]},
        ],
        ids=["label", "histogram", "name", "nan"],
    )
    def test_so_are_counters_that_count_nothing(self, collector, store, table):
        """Labels are text and values numbers, or no database takes them, nor those of any store with them."""
        document = json.loads(store.get_counters(None).content)
        document["metrics"]["x_total"] = table
        store.answers("get_counters", 200, text=json.dumps(document))
        assert [getattr(answer, "kind", "") for answer in collector.collect()] == ["store_nonsense", ""]

    def test_what_a_later_version_tells_besides_is_none(self, collector, store):
        """Keys that this one does not know, wherever they stand, and what is null."""

        def more(told):
            told["tiers"]["remote"] |= {"later": [1], "capacity_bytes": None}
            told["pools"][DIGEST] |= {"later": {}, "prefill": None, "disk": {"later": 1}}
            return told | {"later": 3}

        store.tells("get_status", more)
        store.tuning |= {"later": 3, "pools": {DIGEST: {"dram": {"capacity_bytes": None, "later": "x"}}}}
        assert isinstance(collector.collect()[0], Snapshot)

    def test_an_error_status_is_trouble(self, collector, store):
        """A store that answers 500 is as good as away."""
        store.answers("get_status", 500)
        assert collector.collect()[0].kind == "store_unreachable"

    def test_two_stores_of_one_name_are_trouble(self, collector, other):
        """Only the first of two stores that call themselves the same is tuned."""
        other.name = "host-a"
        first, second = collector.collect()
        assert first.store == "host-a"
        assert second.kind == "duplicate_store"
        assert "calls itself host-a, as http://host-a:7410 did" in second.message

    def test_an_address_that_no_longer_answers_calls_itself_nothing(self, collector, clock, store, other):
        """If its store answers at another one, what is told is true of both; so it is if that one falls silent, too."""
        collector.collect()
        clock.advance(15)
        store.up, other.name = False, "host-a"
        first, second = collector.collect()
        assert (first.store, first.kind) == ("host-a", "store_unreachable")
        assert (second.store, second.kind) == ("http://host-b:7410", "duplicate_store")
        assert "not tuned until http://host-a:7410 is taken out" in second.message
        other.up = False
        assert [(one.store, one.kind) for one in collector.collect()] == [
            ("host-a", "store_unreachable"),
            ("http://host-b:7410", "store_unreachable"),
        ]

    def test_a_name_in_the_settings_is_checked(self, clock, store):
        """A store that is not the one that the settings mean is not tuned."""
        roster = Roster([StoreAddress(url="http://host-a:7410", name="gpu-7")], now=clock.now)
        collector = Collector(roster, clock.now, clock.seconds, Access(transport=transport(store)))
        assert collector.collect()[0].kind == "store_misnamed"
        collector.close()
