"""What vLLM and LMCache tell becomes a store's counters: the right ones, and none that nobody told."""

import time
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.sources import KV_EXPORTER, LMCACHE, LMCACHE_MP, VLLM, scaled, second_engine, without
from extending import kv_exporter
from tiertune_agent.catalogue import METRICS as OF_AGENT
from tiertune_agent.collector.adapters import ADAPTERS
from tiertune_agent.collector.adapters.exposition import Exposition
from tiertune_agent.collector.adapters.mapped import REASONS, Hints, Mapped
from tiertune_agent.collector.counters import Reading, windows
from tiertune_agent.incidents.detectors import known
from tiertune_agent.records import Window, series
from tiertune_connector.catalogue import LABELS, METRICS

TEXTS = {"vllm": VLLM, "lmcache_mp": LMCACHE_MP, "lmcache": LMCACHE, "kv_exporter": KV_EXPORTER}
AT = datetime(2025, 3, 5, 12, tzinfo=UTC)
KNOWN_TOGETHER = ("observed_chunks_total", "tier_transfer_bytes_total", "observed_wait", "stage_")
"""Of these a zero may follow from another counter of the same event."""


@pytest.fixture(autouse=True, scope="module")
def example():
    """The adapter of docs/extending/adapter.md is held to what the others are."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(ADAPTERS, "kv_exporter", kv_exporter.mapped)
        yield


def test_every_adapter_has_its_text():
    """Registering an adapter without what its source tells fails here."""
    assert set(TEXTS) == set(ADAPTERS)


@pytest.mark.parametrize("kind", sorted(TEXTS))
def test_the_reference_says_which_labels_may_be_unknown(kind):
    """Who asks for those that a store has would miss what a source tells."""
    rows = ADAPTERS[kind](Exposition(TEXTS[kind]), Hints()).rows
    unknown = {label for _, labels in rows for label, value in labels if value == "unknown"}
    assert [label for label in sorted(unknown) if "`unknown`" not in LABELS[label]] == []


def test_a_label_may_hold_what_unicode_takes_for_the_end_of_a_line():
    """A model's name is written as it is: lines end with a line feed, or as some servers end them."""
    for end in ("\n", "\r\n"):
        text = f'# TYPE hits_total counter{end}hits_total{{model="a\u2028\x85b"}} 2.0{end}'
        assert Exposition(text).split("hits_total", "model") == {"a\u2028\x85b": 2.0}


def mapped(kind, text=None, **hints):
    return ADAPTERS[kind](Exposition(text or TEXTS[kind]), Hints(**hints))


def told(kind, text=None, **hints):
    """Rows by the names that windows give them, with tiers."""
    return {series(name, labels): value for (name, labels), value in mapped(kind, text, **hints).rows.items()}


def tokens(rows, tier):
    """Hit and missed."""
    found = {"hit": None, "miss": None}
    for name, value in rows.items():
        for result in found:
            if name.startswith(f"tier_lookup_tokens_total{{tier={tier},result={result},"):
                found[result] = value
    return found["hit"], found["miss"]


KV_WAIT = "stage_gpu_seconds_total{stage=all,phase=kv_wait}"
DRAM_CAPACITY = "tier_capacity_bytes{tier=dram,state=effective}"
MOVED = "tier_transfer_bytes_total{{tier={},operation={}}}"
# The GPU is asked for every prompt, each tier below for the rest; bytes are those between the tiers.
OF_VLLM = {
    "prompt_tokens_total{stage=all}": 24704,
    MOVED.format("disk", "write"): 16777216,
    MOVED.format("staging", "read"): 41943040,
    KV_WAIT: 0.3,
}
# L1 is DRAM, an L2 of files is a disk; capacity follows from what is used and its share.
OF_LMCACHE_MP = {
    "tier_resident_bytes{tier=disk}": 12582912,
    DRAM_CAPACITY: 100663296,
    "requests_total{salted=no}": 18,
    "requests_total{salted=yes}": 0,
}
# Its hits are a whole.
OF_LMCACHE = {"tier_resident_bytes{tier=dram}": 1500, MOVED.format("remote", "write"): 3000, KV_WAIT: 0.5}
# Mebibytes and milliseconds become bytes and seconds.
OF_THE_EXAMPLE = {MOVED.format("disk", "write"): 12 << 20, KV_WAIT: 0.6, DRAM_CAPACITY: 96 << 20}


@pytest.mark.parametrize(
    ("kind", "tiers", "others"),
    [
        ("vllm", {"gpu": (4096, 20608), "staging": (2048, 18560), "disk": (8192, 10368)}, OF_VLLM),
        ("lmcache_mp", {"dram": (6144, 12288), "disk": (4096, 8192)}, OF_LMCACHE_MP),
        ("lmcache", {"unknown": (4096, None)}, OF_LMCACHE),
        ("kv_exporter", {"dram": (6144, 12288), "disk": (4096, 8192)}, OF_THE_EXAMPLE),
    ],
)
def test_each_tells_hits_by_tier(kind, tiers, others):
    """Those found and those missed; of the rest what it tells, in the units of stores."""
    rows = told(kind)
    assert {tier: tokens(rows, tier) for tier in tiers} == tiers
    assert {name: rows[name] for name in others} == pytest.approx(others)


def test_vllm_never_tells_what_it_does_not_measure():
    """No bytes held, no capacity, no evictions, no seconds saved or lost, no health."""
    names = {name for name, _ in mapped("vllm").rows}
    assert not names & {"tier_resident_bytes", "tier_capacity_bytes", "tier_evictions_total", "tier_health"}
    assert not {name for name in names if name.startswith(("saved", "lost", "gate", "fetch"))}


def test_that_seconds_of_loads_may_be_those_of_several_ranks_is_said():
    """vLLM adds them up and tells no number of ranks; where nothing was loaded, it matters to nobody."""
    assert any("ranks" in one for one in mapped("vllm").unknown)
    assert not any("ranks" in one for one in mapped("vllm", without(VLLM, "vllm:kv_offload_load_time_total{")).unknown)


def test_engines_behind_one_address_add_up():
    """Two engines that did the same are twice one."""
    one, two = told("vllm"), told("vllm", second_engine(VLLM))
    assert two == {name: pytest.approx(2 * value) for name, value in one.items()}


def test_a_declared_counter_of_vllm_is_zero_until_its_first_event():
    """prometheus_client names every family from the start: no failure was counted, so there was none."""
    rows = told("vllm", without(VLLM, "vllm:kv_offload_tiering_read"))
    assert "tier_transfer_bytes_total{tier=disk,operation=read}" not in rows
    declared = without(VLLM, "vllm:kv_offload_tiering_read_bytes_total{")
    assert told("vllm", declared)["tier_transfer_bytes_total{tier=disk,operation=read}"] == 0
    assert rows["tier_errors_total{tier=disk,operation=write,reason=failed}"] == 0


def test_a_counter_of_another_tier_is_zero_without_its_type_too():
    """A proxy may leave the TYPE lines out: a family that has samples is there, so a tier without one has none yet."""
    moved = "vllm:kv_offload_tiering_read_bytes_total"
    told = Exposition(f'{moved}{{tier="1:fs"}} 3\n')
    assert [told.counted(moved, tier=tier) for tier in ("1:fs", "2:obj")] == [3, 0]
    assert told.counted("vllm:kv_offload_tiering_write_bytes_total", tier="1:fs") is None


@pytest.mark.parametrize(("own", "tier"), [("1:fs", "disk"), ("1:obj", "remote"), ("1:p2p", "remote")])
def test_secondary_tiers_are_a_disk_or_remote(own, tier):
    """fs is a disk; S3 and peers are remote, whatever source vLLM books their tokens under."""
    made = mapped("vllm", VLLM.replace("1:fs", own))
    assert made.tiers[tier] == own
    assert tokens({series(n, ls): v for (n, ls), v in made.rows.items()}, tier) == (8192, 10368)


def test_secondary_tiers_of_two_kinds_leave_their_hits_unknown():
    """Nothing tells which of a disk and a remote had the tokens."""
    other = VLLM.replace('tier="0:primary"', 'tier="2:obj"')
    rows, made = told("vllm", other), mapped("vllm", other)
    assert tokens(rows, "disk") == tokens(rows, "remote") == (None, None)
    assert tokens(rows, "staging") == (2048, 18560)
    assert tokens(rows, "unknown") == (8192, None)
    assert any("hits of tiers beyond" in sentence for sentence in made.unknown)


def test_an_engine_with_anothers_connector_has_a_gpu_alone():
    """Without vLLM's offloading its external hits belong to no tier, unless the settings name one."""
    plain = without(VLLM, "vllm:kv_offload")
    made = mapped("vllm", plain)
    assert set(made.tiers) == {"gpu", "unknown"}
    assert tokens(told("vllm", plain), "unknown") == (10240, None)
    assert tokens(told("vllm", plain, tier="dram"), "dram") == (10240, 10368)


def test_an_engine_without_a_connector_has_no_tiers_to_know_of():
    """Nothing lies beyond its own cache, so no hits there are unknown."""
    text = without(VLLM, "vllm:kv_offload", "vllm:external_prefix_cache")
    for source in ("host", "disk"):
        text = text.replace(f'source="{source}"}} 2048.0', f'source="{source}"}} 0.0').replace(
            f'source="{source}"}} 8192.0', f'source="{source}"}} 0.0'
        )
    made = mapped("vllm", text)
    assert set(made.tiers) == {"gpu"}
    assert not [one for one in made.unknown if "beyond" in one]


def test_a_vllm_with_other_names_says_what_is_not_told():
    """Prompts, or where they were found, under names that nobody reads are unknown, and the card says so."""
    for name in ("vllm:prompt_tokens_", "vllm:prompt_tokens_cached_"):
        renamed = VLLM.replace(name, name.replace("prompt", "input"))
        assert any("where they were found" in one for one in mapped("vllm", renamed).unknown)
        assert not [row for row in told("vllm", renamed) if row.startswith("tier_lookup_tokens_total")]
    assert not any("where they were found" in one for one in mapped("vllm").unknown)


def test_why_lmcache_evicts_is_unknown():
    """It counts what a clear drops, and chunks of L2 that were read, with what left for want of room."""
    rows = told("lmcache_mp", LMCACHE_MP + "lmcache_mp_l1_evicted_chunks_total 5.0\n")
    assert rows["tier_evictions_total{tier=dram,algorithm=,reason=unknown}"] == 5


def test_lmcaches_stores_are_told_by_chunks_not_by_completed_requests():
    """Completed requests count failed ones: 24 chunks were to be stored, 20 were."""
    rows = told("lmcache_mp")
    assert rows["observed_chunks_total{tier=disk,operation=try}"] == 24
    assert rows["observed_chunks_total{tier=disk,operation=write}"] == 20
    nothing = told("lmcache_mp", without(LMCACHE_MP, "lmcache_mp_l2_store_completed_objects"))
    assert nothing["observed_chunks_total{tier=disk,operation=write}"] == 0


def test_lmcaches_bytes_need_the_size_of_a_chunk():
    """It counts chunks; the settings say what one weighs, else bytes stay unknown."""
    moved = MOVED.format("disk", "write")
    assert moved not in told("lmcache_mp")
    assert told("lmcache_mp", chunk_bytes=1 << 20)[moved] == 20 << 20


def test_reads_of_an_l1_above_an_l2_are_those_from_there():
    """The server counts what it copies to L2 as read of L1, too: a cache that serves nobody would look used."""
    read, bytes_read = "observed_chunks_total{tier=dram,operation=read}", MOVED.format("dram", "read")
    above = told("lmcache_mp", chunk_bytes=1 << 20)
    assert (above[read], above.get(bytes_read)) == (16, None)
    alone = told("lmcache_mp", without(LMCACHE_MP, "lmcache_mp_l2_usage_bytes"), chunk_bytes=1 << 20)
    assert (alone[read], alone[bytes_read]) == (72, 72 << 20)


def test_several_l2_adapters_leave_their_hits_unknown():
    """L2 hits are not split by adapter."""
    two = LMCACHE_MP.replace(
        'l2_usage_bytes{l2_name="fs"}', 'l2_usage_bytes{l2_name="resp"} 5\nlmcache_mp_l2_usage_bytes{l2_name="fs"}'
    )
    made = mapped("lmcache_mp", two)
    assert set(made.tiers) == {"dram", "unknown"}
    assert any("fs" in sentence and "resp" in sentence for sentence in made.unknown)


def test_a_counter_of_lmcache_that_is_not_there_is_unknown():
    """OpenTelemetry shows a counter from its first event on: no evictions told is not no evictions."""
    rows = told("lmcache_mp")
    assert not [name for name in rows if name.startswith(("tier_evictions", "tier_errors"))]


def test_lmcache_in_workers_knows_no_hits_by_tier():
    """One tier named in the settings has them. Gauges of tiers never used say nothing."""
    rows = told("lmcache")
    assert [name for name in rows if name.startswith("tier_lookup_tokens_total")] == [
        "tier_lookup_tokens_total{tier=unknown,result=hit,origin=unknown,stage=all}"
    ]
    assert tokens(told("lmcache", tier="dram"), "dram") == (4096, 8192)
    assert not [name for name in rows if "tier=disk" in name or name.startswith("tier_resident_bytes{tier=remote")]


def test_lmcache_in_workers_has_the_tiers_that_it_used():
    """The engine's own prefix cache and a disk are told once something is in them."""
    used = {"num_vllm_hit_tokens_total": 300, "local_storage_usage": 700}
    text = "\n".join(
        line.replace(" 0.0", f" {used[name]}")
        if (name := line.partition("{")[0].removeprefix("lmcache:")) in used
        else line
        for line in LMCACHE.splitlines()
    )
    rows = told("lmcache", text)
    assert tokens(rows, "gpu") == (300, 12_000)
    assert rows["tier_resident_bytes{tier=disk}"] == 700
    assert {"gpu", "disk"} <= mapped("lmcache", text).tiers.keys()


def test_what_every_worker_of_an_engine_counts_is_counted_once():
    """With tensor parallelism each worker looks up and loads the same prompts; bytes are each one's own."""
    again = [line.replace('worker_id="0"', 'worker_id="2"') for line in LMCACHE.splitlines() if 'worker_id="0"' in line]
    alone, many = (told("lmcache", text, tier="dram") for text in (LMCACHE, "\n".join([LMCACHE, *again])))
    own = {MOVED.format("remote", "write"): 6000, "tier_resident_bytes{tier=dram}": 2500}
    assert many == alone | own


@pytest.mark.parametrize(("adapter", "tier"), [("fs", "disk"), ("raw_block", "disk"), ("resp", "remote")])
def test_lmcaches_l2_is_the_tier_that_its_adapter_makes_it(adapter, tier):
    """What lies on a disk of the host is disk; a Redis is remote."""
    rows = told("lmcache_mp", LMCACHE_MP.replace('l2_name="fs"', f'l2_name="{adapter}"'))
    assert {name.partition("tier=")[2].partition(",")[0] for name in rows if "operation=write" in name} == {
        "dram",
        tier,
    }


def test_the_example_leaves_unknown_what_is_not_told():
    """A limit of -1 is none, and no errors told are not 0."""
    disk = {"health": "observed", "reason": "nvme", "resident_bytes": 12 << 20, "capacity_bytes": None}
    assert mapped("kv_exporter").state()["disk"] == disk
    readings = [
        Reading("a", "boot", float(factor), mapped("kv_exporter", scaled(KV_EXPORTER, factor)).rows)
        for factor in (1, 2)
    ]
    (disk,) = [window for window in windows(*readings, AT, still=True)[0] if window.tier == "disk"]
    assert disk.known("tier_transfer_bytes_total", operation="read") == 4 << 20
    assert disk.known("tier_errors_total") is None
    assert disk.known("saved_seconds_total") is None


@pytest.mark.parametrize("kind", TEXTS)
def test_every_row_has_a_catalogued_name_and_labels(kind):
    """What the agent exports of sources is what stores export, or declared as the agent's own."""
    declared = {metric.name: set(metric.labels) for metric in (*OF_AGENT, *METRICS)}
    for name, labels in mapped(kind, chunk_bytes=1, tier="dram").rows:
        assert {label for label, _ in labels} <= declared[name], name


@pytest.mark.parametrize("kind", TEXTS)
@settings(max_examples=30)
@given(data=st.data())
def test_no_adapter_invents_a_zero(kind, data):
    """Whatever is left out of what a source tells, no value becomes 0 for it, nor another one but by what is gone."""
    lines = [line for line in TEXTS[kind].splitlines() if not line.startswith("#")]
    positive = [line for line in lines if float(line.rpartition(" ")[2]) > 0]
    kept = data.draw(st.lists(st.sampled_from(positive), unique=True))
    rows = told(kind, "\n".join(kept) + "\n", chunk_bytes=7, tier="dram")
    differences = ("result=miss", "salted=yes", "salted=no")
    for name, value in rows.items():
        if not name.startswith(KNOWN_TOGETHER) and not any(part in name for part in differences):
            zero_by_sum = "tier_lookup" in name and "hit" in name  # of sources that are told, of this tier none
            assert value > 0 or zero_by_sum, name


@pytest.mark.parametrize("kind", TEXTS)
@settings(max_examples=30)
@given(steps=st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_windows_add_up_to_the_counters(kind, steps):
    """However the time between two readings is cut, counters (of tokens, which are whole) grow by the same."""
    factors = [1]
    for step in steps:
        factors.append(factors[-1] * step)
    readings = [
        Reading("a", "boot", float(at), mapped(kind, scaled(TEXTS[kind], factor)).rows)
        for at, factor in enumerate(factors)
    ]
    cut = [w for one, other in pairwise(readings) for w in windows(one, other, AT, still=True)[0]]
    whole = windows(readings[0], readings[-1], AT, still=True)[0]
    for window in whole:
        for name in {key.partition("{")[0] for key in window.values if key.partition("{")[0].endswith("_total")}:
            parts = [each for each in cut if each.tier == window.tier]
            assert known(parts, name) == pytest.approx(known([window], name), rel=1e-6, abs=1e-6)


def test_hits_that_stop_being_told_by_tier_are_not_counted_twice():
    """When a second adapter appears, what one tier had found until then does not come again under no tier's name."""
    rows = {("tier_lookup_tokens_total", (("tier", tier), ("result", "hit"))): 1000.0 for tier in ("disk", "unknown")}
    before = Reading("a", "boot", 0.0, dict([next(iter(rows.items()))]))
    (window,) = windows(before, Reading("a", "boot", 15.0, rows), AT, still=True)[0]
    assert (window.tier, window.known("tier_lookup_tokens_total")) == ("disk", 0.0)


@pytest.mark.parametrize("value", [-1.0, 2.0**63, 2.0**64 - 1, float("inf"), float("nan")])
def test_what_is_no_count_is_unknown(value):
    """A gauge that fell below zero without a sign, infinities, nothing at all."""
    made = Mapped()
    made.put("tier_resident_bytes", value, tier="dram")
    assert not made.rows


@pytest.mark.parametrize("share", ["5e-324", "1e-300", "0", "-1"])
def test_a_capacity_that_no_server_has_is_unknown(share):
    """By a share of it that is in use which cannot be."""
    text = LMCACHE_MP.replace('l1_tag="_default"} 0.25', f'l1_tag="_default"}} {share}')
    told = mapped("lmcache_mp", text)
    assert not [name for name, _ in told.rows if name == "tier_capacity_bytes"]


def test_reasons_of_a_source_are_few_plain_words():
    """What is no word, or one too many, is counted as other: labels of ours stay labels of ours."""
    made = Mapped()
    made.failures("disk", "read", {"x,operation=write": 2.0, "oom": 3.0} | {f"r{n:02}": 1.0 for n in range(30)})
    reasons = {dict(labels)["reason"]: value for (_, labels), value in made.rows.items()}
    assert len(reasons) == REASONS + 1
    assert reasons["oom"] == 3.0
    assert sum(reasons.values()) == 35.0


def test_a_window_of_a_source_tells_zero_from_unknown():
    """A counter that stood still is 0, one that nobody tells is None; in a store's window both are 0."""
    reading = Reading("a", "boot", 0.0, mapped("vllm").rows)
    later = Reading("a", "boot", 15.0, reading.rows)
    disk = next(window for window in windows(reading, later, AT, still=True)[0] if window.tier == "disk")
    assert disk.observed
    assert disk.known("tier_transfer_bytes_total", operation="read") == 0.0
    assert disk.known("saved_seconds_total") is None
    ours = Window("a", "", "", "disk", AT, 15.0, {})
    assert ours.known("saved_seconds_total") == 0.0


@pytest.mark.parametrize("text", ["vllm:prompt_tokens_total{engine=0 5", "vllm:prompt_tokens_total x"])
def test_nonsense_is_an_error(text):
    """A line of a wanted metric that is none is told as such."""
    with pytest.raises(ValueError, match="no Prometheus text"):
        told("vllm", text)


@pytest.mark.parametrize(
    "text",
    ['{model_name="' + '\\"' * (1 << 20) + '"} 1\n', "{" + 'a="b",' * (1 << 18) + "} 1\n", " 1\n" * (1 << 18)],
)
def test_what_would_be_parsed_for_minutes_is_an_error(text):
    """One source that says so much would hold up the whole fleet's rounds."""
    told = Exposition("".join(f"vllm:prompt_tokens_total{line}\n" for line in text.splitlines()))
    began = time.monotonic()
    with pytest.raises(ValueError, match="tells more of vllm:prompt_tokens_total than can be read in time"):
        ADAPTERS["vllm"](told, Hints())
    assert time.monotonic() - began < 5


def test_another_page_has_no_rows():
    """What tells none of the metrics gives none."""
    assert told("vllm", "<html><body>welcome</body></html>") == {}
