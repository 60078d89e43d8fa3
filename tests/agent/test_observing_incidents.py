"""What goes wrong at a source is told: a tier that is dead or unused, a source that is silent, stale or another."""

import pytest

from agent.observed import grow
from agent.sources import LMCACHE, LMCACHE_MP, FakeSource, without
from tiertune_agent.collector.observer import BOOTS

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


def test_a_source_that_repeats_itself_is_stale(observing, vllm):
    """An answer costs its process CPU time: four that are the same to the byte are one old answer."""
    one = observing(vllm)
    one.pass_windows(2)
    assert one.open() == {}
    one.pass_windows(1)
    assert "same to the byte" in one.open()["stale_counters", "engine-a"]
    one.pass_windows(1, lambda: grow(vllm, "process_cpu_seconds_total", 0.1))
    assert one.open() == {}


def test_a_source_is_observed_on_after_the_agents_clock_was_set_back(observing, vllm):
    """An incident for a window; what was counted meanwhile is in the next one."""
    one = observing(vllm)

    def traffic():
        grow(vllm, "process_cpu_seconds_total", 0.1)
        grow(vllm, "vllm:prompt_tokens_total", 1024)

    one.pass_windows(1, traffic)
    one.pass_windows(1, traffic, seconds=-3600)
    assert "clock stands still or went back" in one.open()["stale_counters", "engine-a"]
    one.pass_windows(1, traffic)
    assert one.open() == {}
    last = one.agent.history.measured.windows("engine-a", tier="")[-1]
    assert (last.seconds, last.total("prompt_tokens_total")) == (15, 2048)


@pytest.mark.parametrize("text", ["<html>welcome</html>", LMCACHE_MP, 'vllm:prompt_tokens_total{engine="0" x\n'])
def test_what_is_not_such_metrics_is_told(observing, vllm, text):
    """A page, another program's metrics, half a line: an incident, and no figures."""
    one = observing(vllm)
    vllm.text = text
    one.pass_windows(1)
    assert set(one.open()) == {("store_nonsense", "engine-a")}


def test_a_restarted_engine_counts_from_zero(observing, vllm):
    """Another start time is another boot: all that it counted since is new."""
    one = observing(vllm)
    one.pass_windows(1)
    vllm.set("process_start_time_seconds", 1795289999.0)
    vllm.text = without(vllm.text, "vllm:prompt_tokens_total")
    vllm.set("vllm:prompt_tokens_total", 30000.0, engine="0")
    one.pass_windows(1)
    last = one.agent.history.measured.windows("engine-a", tier="")[-1]
    assert last.total("prompt_tokens_total") == 30000


def test_an_engine_that_crashes_again_and_again_leaves_no_trail(observing, vllm):
    """Each time another boot, which is counted from zero; few of them are remembered."""
    one = observing(vllm)
    for turn in range(BOOTS + 9):
        vllm.set("process_start_time_seconds", 1795290000.0 + turn)
        vllm.set("vllm:prompt_tokens_total", 100.0, engine="0")
        one.pass_windows(1)
    last = one.agent.history.measured.windows("engine-a", tier="")[-1]
    assert last.total("prompt_tokens_total") == 100
    assert len(one.agent.observing._observer._known["engine-a"].boots) == BOOTS


def test_an_address_shared_by_several_processes_is_told(observing, vllm):
    """A load balancer in front makes counters jump: an older process than before is an incident, not a restart."""
    one = observing(vllm)
    vllm.set("process_start_time_seconds", 1.0)
    one.pass_windows(1)
    assert "several share the address" in one.open()["store_nonsense", "engine-a"]


def test_an_older_process_that_stays_is_the_one_that_stands_there(observing, vllm):
    """Its host's clock was set right, or the address given back to the former pod: counted from then on."""
    one = observing(vllm)
    vllm.set("process_start_time_seconds", 1.0)
    for turn in range(5):
        assert (("store_nonsense", "engine-a") in one.open()) == (turn in (1, 2, 3)), turn
        vllm.set("vllm:prompt_tokens_total", 50000.0 + 100 * turn, engine="0")
        one.pass_windows(1)
    last = one.agent.history.measured.windows("engine-a", tier="")[-1]
    assert last.total("prompt_tokens_total") == 100


def test_processes_in_turns_stay_an_incident(observing, vllm):
    """However long: what the older one tells is never counted."""
    one = observing(vllm)
    for turn in range(12):
        vllm.set("process_start_time_seconds", 1.0 + turn % 2)
        one.pass_windows(1)
    assert "several share the address" in one.open()["store_nonsense", "engine-a"]


def test_a_process_that_comes_back_after_an_older_one_is_not_counted_from_its_beginning(observing, vllm):
    """An address that is balanced over two: what the newer one had counted before is not counted again."""
    one = observing(vllm)
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
