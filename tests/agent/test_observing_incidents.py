"""What goes wrong at a source is told: a tier that is dead or unused, a source that is silent or tells nonsense."""

import pytest

from agent.observed import grow
from agent.sources import LMCACHE, LMCACHE_MP, FakeSource

pytestmark = pytest.mark.slow

TRIED, STORED = (
    "lmcache_mp_l2_store_submitted_objects_chunks_total",
    "lmcache_mp_l2_store_completed_objects_chunks_total",
)


def test_a_tier_that_stores_nothing_is_dead(observing, lmcache):
    """Chunks are submitted to L2 and none arrives: told in minutes, and over when one arrives again."""
    one = observing(lmcache)

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


def test_a_primary_without_room_is_dead(observing, vllm):
    """Every allocation fails, as with a host tier smaller than a prompt: nothing is stored."""
    one = observing(vllm)
    failed = "vllm:kv_offload_allocation_failure_total"
    vllm.set(failed, 0.0, engine="0")
    one.pass_windows(4, lambda: grow(vllm, failed, 12))
    assert one.open()["tier_dead", "engine-a"].startswith("staging (host memory of the connector) is dead")


def test_a_tier_that_is_written_and_never_read_is_unused(observing, vllm):
    """In ten minutes a disk was written and gave nothing back; one read ends it."""
    one = observing(vllm)
    written = "vllm:kv_offload_tiering_write_bytes_total"
    one.pass_windows(12, lambda: grow(vllm, written, 1e6), seconds=60)
    assert "disk is dead weight: 11.4 MiB were written in" in one.open()["tier_unused", "engine-a"]
    one.pass_windows(1, lambda: grow(vllm, "vllm:kv_offload_tiering_read_bytes_total", 5.0))
    assert one.open() == {}


def test_an_l1_that_serves_nobody_is_unused_though_it_is_copied_to_l2(observing, lmcache):
    """The copies count as reads of L1; what comes from L2 passes through it, and ends that."""
    one = observing(lmcache)

    def copied():
        for name in ("lmcache_mp_l1_write_chunks_total", "lmcache_mp_l1_read_chunks_total", TRIED, STORED):
            grow(lmcache, name, 10)

    def used():
        grow(lmcache, "lmcache_mp_lookup_hit_l2_tokens_total", 1024)
        grow(lmcache, "lmcache_mp_l2_prefetch_load_completed_chunks_total", 4)

    one.pass_windows(12, copied, seconds=60)
    told = one.open()["tier_unused", "cache-a"]
    assert "dram is dead weight: 120 chunks were written in" in told
    one.pass_windows(1, used)
    assert one.open() == {}


def test_a_tier_of_which_no_reads_are_told_is_not_called_unused(observing):
    """Unknown is not nothing: LMCache within the engine tells no hits of its host tier."""
    source = FakeSource("engine-b", "lmcache", LMCACHE)
    one = observing(source)
    one.pass_windows(12, lambda: grow(source, "lmcache:local_cpu_evict_keys_count_total", 30), seconds=60)
    assert one.open() == {}


def test_a_silent_source_is_an_incident_and_has_no_old_figures(observing, vllm):
    """Its series end on the agent's metrics; back again, the incident is over and the gap is one window."""
    one = observing(vllm)
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


@pytest.mark.parametrize("text", ["<html>welcome</html>", LMCACHE_MP, 'vllm:prompt_tokens_total{engine="0" x\n'])
def test_what_is_not_such_metrics_is_told(observing, vllm, text):
    """A page, another program's metrics, half a line: an incident, and no figures."""
    one = observing(vllm)
    vllm.text = text
    one.pass_windows(1)
    assert set(one.open()) == {("store_nonsense", "engine-a")}


def test_an_address_shared_by_several_processes_is_told(observing, vllm):
    """An older process than before is an incident, no restart: what is counted by turns looks healthy."""
    one, told = observing(vllm), []
    for older in (False, True, True, False, False, True):
        vllm.set("process_start_time_seconds", 1795290000.0 - older)
        one.pass_windows(1)
        told.append(one.open().get(("store_nonsense", "engine-a"), ""))
    assert [bool(one) for one in told] == [False, True, False, False, False, True]
    assert told[-1].endswith("several share the address; name each by its own")


def test_another_boot_begins_anew(observing, vllm):
    """A restart, or another process behind one address: no window spans two boots, and the next one counts again."""
    one = observing(vllm)
    for turn in range(4):
        vllm.set("process_start_time_seconds", 1795290000.0 + turn % 2)
        vllm.set("vllm:prompt_tokens_total", 30000.0 + 100 * turn, engine="0")
        one.pass_windows(1)
    assert (one.open(), one.agent.history.measured.windows("engine-a", tier="")) == ({}, [])
    vllm.set("vllm:prompt_tokens_total", 30307.0, engine="0")
    one.pass_windows(1)
    (last,) = one.agent.history.measured.windows("engine-a", tier="")
    assert last.total("prompt_tokens_total") == 7


def test_a_store_keeps_its_name(observing, vllm, other):
    """A source that is called as a store calls itself is left out, and told."""
    other.tells("get_counters", lambda told: told | {"store": "engine-a"})
    one = observing(vllm, stores=(other,))
    one.pass_windows(1)
    assert set(one.open()) == {("duplicate_store", "http://engine-a:8000/metrics")}
    assert one.agent.history.store("engine-a").url == "http://host-b:7410"


def test_a_source_whose_name_a_store_takes_is_exported_no_more(observing, vllm, other):
    """Prometheus would have the store's figures beside the source's last ones, under one name."""
    one = observing(vllm, stores=(other,))
    one.pass_windows(1)
    assert 'store="engine-a"' in one.get("/metrics").text
    other.tells("get_counters", lambda told: told | {"store": "engine-a"})
    one.pass_windows(1)
    assert 'tiertune_prompt_tokens_total{stage="all",store="engine-a"}' not in one.get("/metrics").text
