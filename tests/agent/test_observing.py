"""An agent over sources that keep their own connector: it remembers, shows, advises, and only ever reads."""

from unittest.mock import Mock

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.fakes import SLOW, fetch
from agent.observed import grow
from agent.sources import LMCACHE, VLLM, FakeSource, scaled, without
from tiertune_agent.backtest.run import backtest
from tiertune_agent.policy.document import load

WAITED = "vllm:kv_offload_lookup_async_delay_seconds_sum"


def test_a_backtest_tunes_it_no_more_than_an_agent_does(observing, database, tmp_path, store):
    """Nothing of it can be set: over a history with stores and sources only the stores are tuned."""
    cache = FakeSource("cache-a", "lmcache", LMCACHE)
    one = observing(cache, stores=[store])
    one.pass_windows(6, store.traffic)
    one.agent.history.close()
    found = backtest(database, load(tmp_path / "policy.yaml"), 3600)
    assert found.document()["stores"] == ["host-a"]
    assert {answer["store"] for answer in found.answers} == {"host-a", "fleet"}


def test_its_windows_are_those_of_its_counters(observing, vllm):
    """Between two readings 512 tokens were found on the disk: one window says so, and not what nobody tells."""
    one = observing(vllm)

    def traffic():
        grow(vllm, "vllm:prompt_tokens_total", 1024)
        grow(vllm, "vllm:prompt_tokens_cached_by_source_total", 512, source="disk")

    one.pass_windows(2, traffic)
    disk, staging = (one.agent.history.measured.windows("engine-a", tier=tier)[-1] for tier in ("disk", "staging"))
    assert (disk.seconds, disk.known("tier_lookup_tokens_total", result="hit")) == (15, 512)
    untold = "saved_seconds_total", "lost_seconds_total", "gate_requests_total", "tier_resident_bytes"
    assert [disk.known(name) for name in untold] == [None] * 4
    assert staging.known("tier_lookup_tokens_total", result="hit") == 0


@pytest.mark.parametrize("started", ["told", "untold"])
def test_hits_that_are_counted_before_their_prompt_make_no_misses(observing, vllm, started):
    """vLLM counts hits at admission, prompts at the first token: misses that fall in between have not begun anew.

    Several API servers tell no start of a process: there all counters that fall with the misses tell of a restart.
    """
    if started == "untold":
        vllm.text = without(vllm.text, "process_start_time_seconds")
    one = observing(vllm)

    def missed():
        last = one.agent.history.measured.windows("engine-a", tier="gpu")[-1]
        exported = text_string_to_metric_families(one.get("/metrics").text)
        asked = (each for family in exported for each in family.samples if each.labels.get("result") == "miss")
        (told,) = (each.value for each in asked if each.labels["tier"] == "gpu")
        return last.known("tier_lookup_tokens_total", result="miss"), told

    one.pass_windows(1, lambda: grow(vllm, "vllm:prompt_tokens_cached_by_source_total", 4096, source="device"))
    assert missed() == (0, 20608)
    one.pass_windows(1, lambda: grow(vllm, "vllm:prompt_tokens_total", 5096))
    assert missed() == (1000, 21608)
    if started == "untold":
        vllm.text = scaled(without(VLLM, "process_start_time_seconds"), 0.5)
        one.pass_windows(1)
        assert missed() == (10304, 10304)


def test_the_ledger_has_what_is_told_and_null_for_the_rest(observing, vllm, lmcache):
    """Bytes where they are told; no seconds, and so no net money, nor costs that would look like a loss."""
    one = observing(vllm, lmcache)
    one.pass_windows(3)
    document = one.get("/api/v1/ledger").json()
    rows = {(row["store"], row["tier"]): row for row in document["ledger"]}
    l1 = rows["cache-a", "dram"]
    assert (l1["bytes"], l1["saved"], l1["lost"], l1["money"], l1["transferred"]) == (25165824, None, None, None, None)
    assert rows["engine-a", "disk"]["transferred"] == 0
    assert rows["engine-a", "disk"]["bytes"] is None
    assert document["tiers"]["dram"] == {"saved": None, "lost": None, "money": None}
    assert "tiertune_agent_money_total{" not in one.get("/metrics").text


def test_the_page_shows_what_is_unknown_as_such(observing, vllm, lmcache):
    """Dashes for seconds, words for what is not told; no version of a tuning, no switch of a fetch."""
    one = observing(vllm, lmcache)
    one.pass_windows(2)
    page = one.get("/").text
    assert "Engines are observed; there is no store of TierTune." in page
    assert "Observed</span> 2 of 2 answer" in page
    assert "observed: vllm" in page
    assert "observed: lmcache_mp" in page
    assert "seconds saved and lost: the engine does not measure" in page
    assert "remote fetch" not in page.partition('id="stores"')[2].partition("</section>")[0].partition("</h2>")[2]
    saved = page.partition('<p class="name">Saved</p>')[2][:60]
    assert "\u2013" in saved
    fleet = {store["name"]: store for store in one.get("/api/v1/fleet").json()["stores"]}
    assert fleet["engine-a"]["observed"] == "vllm"
    assert fleet["engine-a"]["tiers"]["disk"]["resident_bytes"] is None
    assert fleet["cache-a"]["tiers"]["dram"]["capacity_bytes"] == 100663296


def test_stores_and_sources_stand_side_by_side(observing, vllm, store):
    """A store is tuned as ever; its figures are zero where nothing was counted, the source's are unknown."""
    one = observing(vllm, stores=(store,))
    one.pass_windows(3, store.traffic)
    assert [known.store for known in one.agent.loop.collector.collect()] == ["host-a"]
    assert "Engines share KV chunks" in one.get("/").text
    answers = {answer["store"] for answer in one.get("/api/v1/fleet").json()["answers"]}
    assert answers == {"host-a", "engine-a", "fleet"}
    assert [a["tuner"] for a in one.agent.history.answers.newest() if a["store"] == "engine-a"] == ["loading"]


def test_what_goes_wrong_with_a_source_stops_no_tuning(observing, vllm, store, monkeypatch):
    """Its part of a round comes last: a store whose fetches lose is switched off all the same."""
    store.bandwidth = SLOW
    one = observing(vllm, stores=(store,))
    monkeypatch.setattr(
        one.agent.loop.watch, "look_at_sources", Mock(side_effect=RuntimeError("a source that nobody thought of"))
    )
    for _ in range(4):
        with pytest.raises(RuntimeError):
            one.pass_windows(1, store.traffic)
    assert fetch(store) == "off"


def test_a_source_is_only_ever_read(observing, vllm, lmcache, store):
    """On auto, frozen and unfrozen, bypassed, flushed, with proposals approved: nothing but GET reaches a source."""
    one = observing(vllm, lmcache, stores=(store,))
    _lose(vllm)
    one.pass_windows(12, lambda: _lose(vllm))
    http = one.http
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


def test_no_decision_can_be_made_at_a_source(observing, vllm):
    """Even one that somebody wrote by hand finds nobody to apply it to."""
    one = observing(vllm)
    assert one.agent._client("engine-a") is None


def _lose(vllm):
    """A window of 20 requests in which loading took ten times as long as computing."""
    requests = 20
    grow(vllm, "vllm:time_to_first_token_seconds_count", requests)
    grow(vllm, "vllm:external_prefix_cache_hits_total", 1000 * requests)
    grow(vllm, WAITED, 1.0 * requests)
    grow(vllm, "vllm:request_prefill_time_seconds_sum", 0.1 * requests)
    grow(vllm, "vllm:request_prefill_kv_computed_tokens_sum", 1000 * requests)


def test_loading_that_loses_is_advised_against(observing, vllm):
    """Requests wait ten times as long for loaded tokens as computing takes: recommended, and nobody can apply it."""
    one = observing(vllm)
    one.pass_windows(9, lambda: _lose(vllm))
    (decision,) = one.agent.history.decisions.find()
    assert (decision.tuner, decision.field, decision.after) == ("loading", "advice.loading", "recompute")
    assert (decision.state, decision.mode, decision.target.store) == ("proposed", "recommend", "engine-a")
    assert "requests waited 1,000 ms for 1000 loaded tokens, and 100 ms for 1000 computed ones" in decision.reason
    assert one.http.post(f"/api/v1/decisions/{decision.id}/approve").status_code == 409


def test_what_is_not_told_is_advised_on_by_nobody(observing, lmcache):
    """LMCache tells no prefill: the answer says that too little is known."""
    one = observing(lmcache)
    one.pass_windows(6)
    (answer,) = one.agent.history.answers.newest()
    assert (answer["tuner"], answer["change"]) == ("loading", False)
    assert "not enough data" in answer["reason"]


def test_the_agent_exports_what_it_mapped_as_stores_do(observing, vllm, lmcache):
    """Valid text, one family per name, the source as label store; nothing of what is unknown, or when it stands by."""
    one = observing(vllm, lmcache)
    one.agent.metrics.set("tier_resident_bytes", 5, "remote")
    text = one.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    counted = {(family.type, sample.name.endswith("_total")) for family in families for sample in family.samples}
    assert counted == {("counter", True), ("gauge", False), ("histogram", False)}
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
        ([{"url": "http://a:1"}], "http://host:port/metrics"),
        ([{"url": "http://u:p@a:1/metrics"}], "no user and no password"),
        ([{"url": "ftp://a/metrics"}], "http://host:port/metrics"),
        ([{"kind": "sglang"}], "kind"),
        ([{"name": "fleet"}], "stands for the whole fleet"),
        ([{}, {}], "a is named twice"),
        ([{"kind": "lmcache", "chunk_bytes": 0}], "chunk_bytes"),
        ([], "name a store in stores, stores_file or stores_dns"),
    ],
)
def test_bad_settings_are_told_and_end_with_2(tiertune, tmp_path, observe, said):
    """The place and what to write; the command ends with 2."""
    import yaml

    sound = {"name": "a", "url": "http://a:1/metrics", "kind": "vllm"}
    (tmp_path / "agent.yaml").write_text(yaml.safe_dump({"observe": [sound | wrong for wrong in observe]}))
    ended = tiertune("agent", "run", "--config", tmp_path / "agent.yaml")
    assert ended.returncode == 2
    assert said in ended.stderr
