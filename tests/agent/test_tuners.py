"""tier_size, eviction and gate_settings: what they recommend, and why they do not."""

from datetime import timedelta

import pytest

from agent.fakes import DIGEST, START, histogram
from tiertune_agent.records import Target, Window, median, unbroken
from tiertune_agent.tuners.base import Current, NoChange, Proposal
from tiertune_agent.tuners.eviction import Eviction, EvictionSettings
from tiertune_agent.tuners.gate_settings import GateSettings
from tiertune_agent.tuners.remote_fetch import RemoteFetchSettings
from tiertune_agent.tuners.tier_size import TierSize, TierSizeSettings
from tiertune_connector.catalogue import BY_NAME

GIB = 1 << 30


def store_windows(count=25, *, resident=None, evictions=0, below=0.0):
    """Windows of one pool in a DRAM of 64 GiB, 10,000 prompt tokens each; ``resident`` in GiB by index."""
    windows = []
    for index in range(count):
        at = START + timedelta(seconds=15 * index)
        held = (resident(index) if resident else 64) * GIB
        dram = {"tier_resident_bytes": held, "tier_lookup_tokens_total{result=hit,origin=self}": 4000.0}
        if evictions:
            dram["tier_evictions_total{algorithm=lru,reason=room}"] = float(evictions)
            dram["tier_evicted_idle_seconds"] = histogram(0, 0, evictions)
        windows += [
            Window("host-a", DIGEST, "llama", "dram", at, 15.0, dram),
            Window(
                "host-a", DIGEST, "llama", "remote", at, 15.0, {"tier_lookup_tokens_total{result=hit,origin=x}": below}
            ),
            Window("host-a", DIGEST, "llama", "", at, 15.0, {"prompt_tokens_total{stage=all}": 10_000.0}),
        ]
    return windows


def sized(windows, capacity=64 * GIB, **settings):
    tuning = {"tiers": {"dram": {"capacity_bytes": capacity}}}
    return TierSize(TierSizeSettings(**settings)).evaluate(windows, Current(Target("host-a", "dram"), tuning, {}))


@pytest.mark.parametrize(
    ("windows", "said"),
    [
        (store_windows(5), "not enough data: 1m 15s of windows, a period is 5m 00s"),
        (store_windows(resident=lambda _: 60), "the size fits"),
        (store_windows(resident=lambda index: index), "and still fills"),
        (store_windows(evictions=9, below=100.0), "1.0% of the prompt tokens came from tiers below, 40.0% were hits"),
    ],
)
def test_tier_size_says_why_it_changes_nothing(windows, said):
    """Too short a history, a size that fits, a cache that still fills, or too little to gain: no change."""
    answer = sized(windows)
    assert isinstance(answer, NoChange)
    assert said in answer.reason


def test_tier_size_recommends_less_where_nothing_was_evicted():
    """A steady tier that evicts nothing keeps a quarter more than it ever held."""
    answer = sized(store_windows(resident=lambda _: 10))
    assert isinstance(answer, Proposal)
    assert answer.after == pytest.approx(12.5 * GIB, abs=1 << 20)
    assert "evicted nothing and held at most 10.0 GiB of 64.0 GiB" in answer.reason


def test_tier_size_recommends_more_where_tiers_below_serve_what_it_evicts():
    """Evictions, and hits below worth the least gain: one step more, told as the upper bound that it is."""
    answer = sized(store_windows(evictions=9, below=800.0), max_step=0.25)
    assert isinstance(answer, Proposal)
    assert answer.after == 80 * GIB
    assert "8.0% of the prompt tokens came from tiers below" in answer.reason
    assert "up to that share" in answer.reason


def test_tier_size_reads_only_what_came_after_the_last_change():
    """A change starts its history anew."""
    tuning = {"tiers": {"dram": {"capacity_bytes": 64 * GIB}}}
    changed = START + timedelta(seconds=15 * 20)
    answer = TierSize(TierSizeSettings()).evaluate(
        store_windows(resident=lambda _: 10), Current(Target("host-a", "dram"), tuning, {}, changed)
    )
    assert isinstance(answer, NoChange)
    assert "not enough data" in answer.reason


@pytest.mark.parametrize(
    ("capacity", "said"), [(0, "the tier has no capacity"), (GIB, "no prompt token was looked up")]
)
def test_tier_size_without_capacity_or_traffic_has_nothing_to_say(capacity, said):
    """An empty tier and an idle store are told apart from one that fits."""
    idle = [w for w in store_windows() if w.tier]
    answer = sized(idle, capacity)
    assert isinstance(answer, NoChange)
    assert said in answer.reason


def eviction(algorithm="lru", capacity=1 << 30, windows=(), **settings):
    pool = {"model": "llama", "chunk_bytes": 1 << 20, "dram": {"effective": {"capacity_bytes": capacity}}}
    tuning = {"pools": {DIGEST: {"dram": {"eviction": algorithm}}}, "defaults": {"eviction": "lru"}}
    current = Current(Target("host-a", "dram", DIGEST, ("llama",)), tuning, {"pools": {DIGEST: pool}})
    return Eviction(EvictionSettings(**settings)).evaluate(windows, current)


def test_eviction_admits_that_it_cannot_know():
    """Without ghosts, evictions alone say nothing about another algorithm, and the answer says so."""
    windows = [w for w in store_windows(evictions=4) if w.tier == "dram"]
    answer = eviction(windows=windows)
    assert isinstance(answer, NoChange)
    assert "not enough data: 100 chunks were evicted" in answer.reason
    assert "no ghost tells what arc or s3fifo would have kept" in answer.reason


def test_eviction_needs_no_algorithm_where_nothing_leaves():
    """A pool that evicted nothing is as well off with any algorithm."""
    answer = eviction(windows=store_windows(4))
    assert isinstance(answer, NoChange)
    assert "nothing was evicted in 12 windows" in answer.reason


def test_eviction_recommends_lru_for_a_handful_of_chunks():
    """On pools of up to 18 chunks ARC was measured below LRU."""
    answer = eviction("arc", capacity=12 << 20)
    assert isinstance(answer, Proposal)
    assert (answer.field, answer.after) == (f"pools.{DIGEST}.dram.eviction", "lru")
    assert isinstance(eviction("arc", capacity=19 << 20), NoChange)
    assert isinstance(eviction("arc", capacity=12 << 20, candidates=["arc"]), NoChange)


def test_gate_settings_follow_the_policy():
    """The policy's margin and floor are proposed where a store has others; a store that has them is left alone."""
    tuner = GateSettings(RemoteFetchSettings(margin=1.3, min_fetch_tokens=512))
    target = Target("host-a", "remote")
    for remote, field, after in (
        ({"margin": 1.1, "min_fetch_tokens": 0}, "tiers.remote.margin", 1.3),
        ({"margin": 1.3, "min_fetch_tokens": 0}, "tiers.remote.min_fetch_tokens", 512),
    ):
        answer = tuner.evaluate([], Current(target, {"tiers": {"remote": remote}}, {}))
        assert isinstance(answer, Proposal)
        assert (answer.field, answer.after) == (field, after)
    same = Current(target, {"tiers": {"remote": {"margin": 1.3, "min_fetch_tokens": 512}}}, {})
    assert isinstance(tuner.evaluate([], same), NoChange)


@pytest.mark.parametrize(
    ("starts", "until", "left"),
    [
        ([0, 15, 30], 45, [0, 15, 30]),
        ([0, 15, 30], 59, [0, 15, 30]),
        ([0, 15, 30], 60, []),
        ([0, 15, 60, 75], 90, [60, 75]),
        ([], 0, []),
    ],
    ids=["whole", "almost a window ago", "too long ago", "a gap", "none"],
)
def test_windows_in_a_row_have_no_gap(starts, until, left):
    """What came before a gap, or too long ago, is no evidence about now."""
    windows = [Window("s", "", "", "dram", START + timedelta(seconds=start), 15.0, {}) for start in starts]
    run = unbroken(windows, START + timedelta(seconds=until))
    assert [(window.start - START).total_seconds() for window in run] == left


def test_the_median_of_a_histogram_is_its_middle_bucket():
    """Over several windows, the bucket that holds the middle observation; none without observations."""
    name = "tier_evicted_idle_seconds"
    windows = [
        Window("s", "", "", "dram", START, 15.0, {name: histogram(*counts)}) for counts in ((3, 0, 0), (0, 1, 9))
    ]
    assert median(windows, name) == BY_NAME[name].buckets[2]
    assert median(windows[:1], name) == BY_NAME[name].buckets[0]
    assert median([], name) is None
