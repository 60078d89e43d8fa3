"""An agent over sources that keep their own connector: it remembers, shows, warns and advises, and only ever reads."""

from unittest.mock import Mock

import httpx
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from agent.fakes import SLOW, FakeStore
from agent.observed import World
from agent.sources import LMCACHE, LMCACHE_MP, VLLM, FakeSource, without
from tiertune_agent.backtest.run import backtest
from tiertune_agent.policy.document import load
from tiertune_agent.records import State

POLICY = """
version: 1
mode: auto
guard: {changes_per_hour: 100, min_requests: 1, soak: 1m}
prices: {gpu_hour: 3.6, dram_gib_month: 730, remote_gib_month: 73, network_gib: 1}
tuners: {advice: {period: 1m}}
"""
TRIED, STORED = (
    "lmcache_mp_l2_store_submitted_objects_chunks_total",
    "lmcache_mp_l2_store_completed_objects_chunks_total",
)
WAITED = "vllm:kv_offload_lookup_async_delay_seconds_sum"


@pytest.fixture
def world(database, tmp_path, clock):
    """Makes one, over sources (and stores); what it holds is closed at the end."""
    made = []
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)

    def make(*sources, stores=()):
        made.append(World(database, policy, clock, sources, stores))
        made[-1].agent.loop.run_once()
        return made[-1]

    yield make
    for one in made:
        one.agent.close()


@pytest.fixture
def vllm():
    return FakeSource("engine-a", "vllm", VLLM)


@pytest.fixture
def lmcache():
    return FakeSource("cache-a", "lmcache_mp", LMCACHE_MP)


def grow(told, name, by, /, **labels):
    """A counter goes on."""
    for line in told.text.splitlines():
        head, _, value = line.rpartition(" ")
        if head.startswith(name) and all(f'{label}="{text}"' in head for label, text in labels.items()):
            told.text = told.text.replace(line, f"{head} {float(value) + by!r}")


def test_a_backtest_tunes_it_no_more_than_an_agent_does(world, database, tmp_path, clock):
    """Nothing of it can be set: over a history with stores and sources only the stores are tuned."""
    store, cache = FakeStore(clock), FakeSource("cache-a", "lmcache", LMCACHE)
    one = world(cache, stores=[store])
    one.pass_windows(6, store.traffic)
    one.agent.history.close()
    found = backtest(database, load(tmp_path / "policy.yaml"), 3600)
    assert found.document()["stores"] == ["host-a"]
    assert {answer["store"] for answer in found.answers} == {"host-a", "fleet"}


def test_its_windows_are_those_of_its_counters(world, vllm):
    """Between two readings 512 tokens were found on the disk: one window says so, and what nobody tells is null."""
    one = world(vllm)

    def traffic():
        grow(vllm, "vllm:prompt_tokens_total", 1024)
        grow(vllm, "vllm:prompt_tokens_cached_by_source_total", 512, source="disk")

    one.pass_windows(2, traffic)
    window = one.get("/api/v1/windows?store=engine-a&tier=disk").json()["windows"][-1]
    assert (window["seconds"], window["hit_tokens"]) == (15, 512)
    assert [window[name] for name in ("saved_s", "lost_s", "fetched", "recomputed", "resident_bytes")] == [None] * 5
    quiet = one.get("/api/v1/windows?store=engine-a&tier=staging").json()["windows"][-1]
    assert quiet["hit_tokens"] == 0


def test_the_ledger_has_what_is_told_and_null_for_the_rest(world, vllm, lmcache):
    """Bytes where they are told; no seconds, and so no net money, nor costs that would look like a loss."""
    one = world(vllm, lmcache)
    one.pass_windows(3)
    document = one.get("/api/v1/ledger").json()
    rows = {(row["store"], row["tier"]): row for row in document["ledger"]}
    l1 = rows["cache-a", "dram"]
    assert (l1["bytes"], l1["saved"], l1["lost"], l1["money"], l1["transferred"]) == (25165824, None, None, None, None)
    assert rows["engine-a", "disk"]["transferred"] == 0
    assert rows["engine-a", "disk"]["bytes"] is None
    assert document["tiers"]["dram"] == {"saved": None, "lost": None, "money": None}
    assert "tiertune_agent_money_total{" not in one.get("/metrics").text


def test_the_page_shows_what_is_unknown_as_such(world, vllm, lmcache):
    """Dashes for seconds, words for what is not told; no version of a tuning, no switch of a fetch."""
    one = world(vllm, lmcache)
    one.pass_windows(2)
    page = one.get("/").text
    assert "2 sources are observed" in page
    assert "observed: vllm" in page
    assert "observed: lmcache_mp" in page
    assert "seconds saved and lost: the engine does not measure" in page
    assert "remote fetch" not in page.partition('id="stores"')[2].partition("</section>")[0].partition("</h2>")[2]
    saved = page.partition('<p class="name">Saved</p>')[2][:60]
    assert "\u2013" in saved
    fleet = {store["name"]: store for store in one.get("/api/v1/fleet").json()["stores"]}
    assert fleet["engine-a"]["observed"] == "vllm"
    assert fleet["engine-a"]["tiers"]["disk"]["saved_s"] is None
    assert fleet["engine-a"]["tiers"]["disk"]["resident_bytes"] is None
    assert fleet["cache-a"]["tiers"]["dram"]["capacity_bytes"] == 100663296


def test_stores_and_sources_stand_side_by_side(world, vllm, clock):
    """A store is tuned as ever; its figures are zero where nothing was counted, the source's are unknown."""
    store = FakeStore(clock)
    one = world(vllm, stores=(store,))
    one.pass_windows(3, store.traffic)
    assert [known.store for known in one.agent.loop.collector.collect()] == ["host-a"]
    assert "One store shares KV chunks" in one.get("/").text
    answers = {answer["store"] for answer in one.get("/api/v1/fleet").json()["answers"]}
    assert answers == {"host-a", "engine-a", "fleet"}
    assert [a["tuner"] for a in one.agent.history.answers.newest() if a["store"] == "engine-a"] == ["loading"]


def test_what_goes_wrong_with_a_source_stops_no_tuning(world, vllm, clock, monkeypatch):
    """Its part of a round comes last: a store whose fetches lose is switched off all the same."""
    store = FakeStore(clock, bandwidth=SLOW)
    one = world(vllm, stores=(store,))
    monkeypatch.setattr(one.agent.observing, "look", Mock(side_effect=RuntimeError("a source that nobody thought of")))
    for _ in range(4):
        with pytest.raises(RuntimeError):
            one.pass_windows(1, store.traffic)
    assert store.tuning["tiers"]["remote"]["fetch"] == "off"


def test_a_source_is_only_ever_read(world, vllm, lmcache, clock):
    """On auto, frozen and unfrozen, bypassed, flushed, with proposals approved: nothing but GET reaches a source."""
    store = FakeStore(clock)
    one = world(vllm, lmcache, stores=(store,))
    _lose(vllm)
    one.pass_windows(12, lambda: _lose(vllm))
    http = TestClient(one.agent.app, base_url="http://localhost")
    for path, body in (
        ("bypass", {"on": True}),
        ("bypass", {"on": True, "store": "engine-a"}),
        ("flush", {}),
        ("decisions/1/approve", None),
        ("decisions/1/rollback", None),
    ):
        http.post(f"/api/v1/{path}", json=body)
    one.pass_windows(3)
    assert {method for method, host in one.sent if host != store.name} == {"GET"}
    assert {"PUT", "POST"} & {method for method, host in one.sent if host == store.name}
    assert http.post("/api/v1/bypass", json={"on": True, "store": "engine-a"}).status_code == 404


def test_no_decision_can_be_made_at_a_source(world, vllm):
    """Even one that somebody wrote by hand finds nobody to apply it to."""
    one = world(vllm)
    assert one.agent._client("engine-a") is None


def _lose(vllm):
    """A window of 20 requests in which loading took ten times as long as computing."""
    requests = 20
    grow(vllm, "vllm:time_to_first_token_seconds_count", requests)
    grow(vllm, "vllm:external_prefix_cache_hits_total", 1000 * requests)
    grow(vllm, WAITED, 1.0 * requests)
    grow(vllm, "vllm:request_prefill_time_seconds_sum", 0.1 * requests)
    grow(vllm, "vllm:request_prefill_kv_computed_tokens_sum", 1000 * requests)


def test_loading_that_loses_is_advised_against(world, vllm):
    """Requests wait ten times as long for loaded tokens as computing takes: recommended, and nobody can apply it."""
    one = world(vllm)
    one.pass_windows(9, lambda: _lose(vllm))
    (decision,) = one.agent.history.decisions.find()
    assert (decision.tuner, decision.field, decision.after) == ("loading", "advice.loading", "recompute")
    assert (decision.state, decision.mode, decision.target.store) == (State.PROPOSED, "recommend", "engine-a")
    assert "requests waited 1,000 ms for 1000 loaded tokens, and 100 ms for 1000 computed ones" in decision.reason
    refused = TestClient(one.agent.app, base_url="http://localhost").post(f"/api/v1/decisions/{decision.id}/approve")
    assert refused.status_code == 409


def test_what_is_not_told_is_advised_on_by_nobody(world, lmcache):
    """LMCache tells no prefill: the answer says that too little is known."""
    one = world(lmcache)
    one.pass_windows(6)
    (answer,) = one.agent.history.answers.newest()
    assert (answer["tuner"], answer["change"]) == ("loading", False)
    assert "not enough data" in answer["reason"]


def test_a_tier_that_stores_nothing_is_dead(world, lmcache):
    """Chunks are submitted to L2 and none arrives: told in minutes, and over when one arrives again."""
    one = world(lmcache)

    def lost():
        grow(lmcache, TRIED, 15)
        grow(lmcache, "lmcache_mp_l2_store_completed_requests_total", 4)

    one.pass_windows(1, lambda: (lost(), grow(lmcache, STORED, 15)))
    one.pass_windows(1, lost)
    assert one.open() == {}
    one.pass_windows(1, lost)
    told = one.open()["tier_dead", "cache-a"]
    assert told.startswith("disk (L2: fs) is dead: the last 30 chunks")
    one.pass_windows(1, lambda: (lost(), grow(lmcache, STORED, 15)))
    assert one.open() == {}


def test_a_primary_without_room_is_dead(world, vllm):
    """Every allocation fails, as with a host tier smaller than a prompt: nothing is stored."""
    one = world(vllm)
    failed = "vllm:kv_offload_allocation_failure_total"
    vllm.set(failed, 0.0, engine="0")
    one.pass_windows(4, lambda: grow(vllm, failed, 12))
    assert one.open()["tier_dead", "engine-a"].startswith("staging (host memory of the connector) is dead")


def test_a_tier_that_is_written_and_never_read_is_unused(world, vllm):
    """In ten minutes a disk was written and gave nothing back; one read ends it."""
    one = world(vllm)
    written = "vllm:kv_offload_tiering_write_bytes_total"
    one.pass_windows(12, lambda: grow(vllm, written, 1e6), seconds=60)
    assert "disk is dead weight: 11.4 MiB were written in" in one.open()["tier_unused", "engine-a"]
    one.pass_windows(1, lambda: grow(vllm, "vllm:kv_offload_tiering_read_bytes_total", 5.0))
    assert one.open() == {}


def test_a_tier_of_which_no_reads_are_told_is_not_called_unused(world):
    """Unknown is not nothing: LMCache within the engine tells no hits of its host tier."""
    source = FakeSource("engine-b", "lmcache", LMCACHE)
    one = world(source)
    one.pass_windows(12, lambda: grow(source, "lmcache:local_cpu_evict_keys_count_total", 30), seconds=60)
    assert one.open() == {}


def test_a_silent_source_is_an_incident_and_has_no_old_figures(world, vllm):
    """Its series end on the agent's metrics; back again, the incident is over and the gap is one window."""
    one = world(vllm)
    one.pass_windows(1)
    assert 'store="engine-a"' in one.get("/metrics").text
    vllm.up = False
    one.pass_windows(1)
    assert one.open() == {("store_unreachable", "engine-a"): "http://engine-a:8000/metrics: connection refused"}
    assert 'tiertune_prompt_tokens_total{stage="all",store="engine-a"}' not in one.get("/metrics").text
    vllm.up = True
    one.pass_windows(1)
    assert one.open() == {}
    assert one.agent.history.measured.windows("engine-a", tier="disk")[-1].seconds == 30


def test_a_source_that_repeats_itself_is_stale(world, vllm):
    """An answer costs its process CPU time: four that are the same to the byte are one old answer."""
    one = world(vllm)
    one.pass_windows(2)
    assert one.open() == {}
    one.pass_windows(1)
    assert "same to the byte" in one.open()["stale_counters", "engine-a"]
    one.pass_windows(1, lambda: grow(vllm, "process_cpu_seconds_total", 0.1))
    assert one.open() == {}


def test_a_source_is_observed_on_after_the_agents_clock_was_set_back(world, vllm):
    """An incident for a window; what was counted meanwhile is in the next one."""
    one = world(vllm)

    def traffic():
        grow(vllm, "process_cpu_seconds_total", 0.1)
        grow(vllm, "vllm:prompt_tokens_total", 1024)

    one.pass_windows(1, traffic)
    one.pass_windows(1, traffic, seconds=-3600)
    assert "clock stands still or went back" in one.open()["stale_counters", "engine-a"]
    one.pass_windows(1, traffic)
    assert one.open() == {}
    found = one.agent.history.measured.windows("engine-a", tier="", until=one.clock.now())
    assert [(window.seconds, window.total("prompt_tokens_total")) for window in found] == [(15, 2048)]


@pytest.mark.parametrize("text", ["<html>welcome</html>", LMCACHE_MP, 'vllm:prompt_tokens_total{engine="0" x\n'])
def test_what_is_not_such_metrics_is_told(world, vllm, text):
    """A page, another program's metrics, half a line: an incident, and no figures."""
    one = world(vllm)
    vllm.text = text
    one.pass_windows(1)
    assert set(one.open()) == {("store_nonsense", "engine-a")}


def test_a_restarted_engine_counts_from_zero(world, vllm):
    """Another start time is another boot: all that it counted since is new."""
    one = world(vllm)
    one.pass_windows(1)
    vllm.set("process_start_time_seconds", 1795289999.0)
    vllm.text = without(vllm.text, "vllm:prompt_tokens_total")
    vllm.set("vllm:prompt_tokens_total", 30000.0, engine="0")
    one.pass_windows(1)
    last = one.agent.history.measured.windows("engine-a", tier="")[-1]
    assert last.total("prompt_tokens_total") == 30000


def test_an_address_shared_by_several_processes_is_told(world, vllm):
    """A load balancer in front makes counters jump: an older process than before is an incident, not a restart."""
    one = world(vllm)
    vllm.set("process_start_time_seconds", 1.0)
    one.pass_windows(1)
    assert "several share the address" in one.open()["store_nonsense", "engine-a"]


def test_an_older_process_that_stays_is_the_one_that_stands_there(world, vllm):
    """Its host's clock was set right, or the address given back to the former pod: counted from then on."""
    one = world(vllm)
    vllm.set("process_start_time_seconds", 1.0)
    for turn in range(5):
        assert (("store_nonsense", "engine-a") in one.open()) == (turn in (1, 2, 3)), turn
        vllm.set("vllm:prompt_tokens_total", 50000.0 + 100 * turn, engine="0")
        one.pass_windows(1)
    last = one.agent.history.measured.windows("engine-a", tier="")[-1]
    assert last.total("prompt_tokens_total") == 100


def test_processes_in_turns_stay_an_incident(world, vllm):
    """However long: what the older one tells is never counted."""
    one = world(vllm)
    for turn in range(12):
        vllm.set("process_start_time_seconds", 1.0 + turn % 2)
        one.pass_windows(1)
    assert "several share the address" in one.open()["store_nonsense", "engine-a"]


def test_a_process_that_comes_back_after_an_older_one_is_not_counted_from_its_beginning(world, vllm):
    """An address that is balanced over two: what the newer one had counted before is not counted again."""
    one = world(vllm)
    one.pass_windows(1)
    newer = vllm.text
    for turn in range(4):
        vllm.set("process_start_time_seconds", 1.0)
        vllm.set("vllm:prompt_tokens_total", 100.0 + turn, engine="0")
        one.pass_windows(1)
    vllm.text = newer
    vllm.set("vllm:prompt_tokens_total", 24710.0, engine="0")
    one.pass_windows(1)
    vllm.set("vllm:prompt_tokens_total", 24717.0, engine="0")
    one.pass_windows(1)
    windows = one.agent.history.measured.windows("engine-a", tier="")
    assert sum(window.total("prompt_tokens_total") or 0 for window in windows) == 7


def test_a_store_keeps_its_name(world, vllm, clock):
    """A source that is called as a store calls itself is left out, and told."""
    store = FakeStore(clock, name="host-b")
    told = store.get_counters
    store.get_counters = lambda request: httpx.Response(200, json={**told(request).json(), "store": "engine-a"})
    one = world(vllm, stores=(store,))
    one.pass_windows(1)
    assert set(one.open()) == {("duplicate_store", "http://engine-a:8000/metrics")}
    assert one.agent.history.store("engine-a").url == "http://host-b:7410"


def test_a_source_whose_name_a_store_takes_is_exported_no_more(world, vllm, clock):
    """Prometheus would have the store's figures beside the source's last ones, under one name."""
    store = FakeStore(clock, name="host-b")
    one = world(vllm, stores=(store,))
    one.pass_windows(1)
    assert 'store="engine-a"' in one.get("/metrics").text
    told = store.get_counters
    store.get_counters = lambda request: httpx.Response(200, json={**told(request).json(), "store": "engine-a"})
    one.pass_windows(1)
    assert 'tiertune_prompt_tokens_total{stage="all",store="engine-a"}' not in one.get("/metrics").text


def test_the_agent_exports_what_it_mapped_as_stores_do(world, vllm, lmcache):
    """Valid text, one family per name, the source as label store; nothing of what is unknown, or when it stands by."""
    one = world(vllm, lmcache)
    one.agent.remote_gauges._show("tier_resident_bytes", 5, "remote")
    text = one.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    samples = {
        (sample.name, sample.labels.get("store"), sample.labels.get("tier"), sample.labels.get("result"))
        for family in families
        for sample in family.samples
    }
    assert ("tiertune_tier_lookup_tokens_total", "engine-a", "disk", "hit") in samples
    assert ("tiertune_tier_resident_bytes", "cache-a", "disk", None) in samples
    assert ("tiertune_tier_resident_bytes", None, "remote", None) in samples
    assert not [one for one in samples if one[1] == "engine-a" and "resident" in one[0]]
    one.agent.leader.resign()
    one.agent.leader.leads = lambda: False
    one.agent.stand()
    assert "engine-a" not in one.get("/metrics").text


@pytest.mark.parametrize(
    ("observe", "said"),
    [
        ([{"name": "a", "url": "http://a:1", "kind": "vllm"}], "http://host:port/metrics"),
        ([{"name": "a", "url": "http://u:p@a:1/metrics", "kind": "vllm"}], "no user and no password"),
        ([{"name": "a", "url": "ftp://a/metrics", "kind": "vllm"}], "http://host:port/metrics"),
        ([{"name": "a", "url": "http://a:1/metrics", "kind": "sglang"}], "kind"),
        ([{"name": "fleet", "url": "http://a:1/metrics", "kind": "vllm"}], "stands for the whole fleet"),
        ([{"name": "a", "url": "http://a:1/metrics", "kind": "vllm"}] * 2, "a is named twice"),
        ([{"name": "a", "url": "http://a:1/metrics", "kind": "lmcache", "chunk_bytes": 0}], "chunk_bytes"),
        ([], "at least one store"),
    ],
)
def test_bad_settings_are_told_and_end_with_2(tiertune, tmp_path, observe, said):
    """The place and what to write; the command ends with 2."""
    import yaml

    (tmp_path / "agent.yaml").write_text(yaml.safe_dump({"observe": observe}))
    ended = tiertune("agent", "run", "--config", tmp_path / "agent.yaml")
    assert ended.returncode == 2
    assert said in ended.stderr
