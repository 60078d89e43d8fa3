"""Miniature fleets are fine enough to tell sizes of the DRAM apart, or say nothing of them."""

import pytest

from agent.fakes import START
from agent.whatif_fleet import CHUNK_BYTES, CHUNK_TOKENS, DIGEST, NAMESPACE, Fleet, chain, many
from tiertune_agent.collector.samples import Answer, Header, Lookups
from tiertune_agent.collector.sampling import DRAM_KEYS, GHOST_KEYS, LEAST_RATE, MOST_KEYS, wanted_rate
from tiertune_agent.whatif.fleet import GhostPlan
from tiertune_connector.keys import Namespace
from tiertune_connector.sessions.session import Session
from tiertune_connector.whatif.chain import SampledRequest, Shape
from tiertune_connector.whatif.sampler import Pick, Sampler, hashes

SMALL = Namespace(model="small", chunk_tokens=CHUNK_TOKENS)
SMALL_BYTES = CHUNK_BYTES // 500


@pytest.mark.parametrize(
    ("chunks", "dram_chunks", "rate"),
    [
        (100, 10, 1.0),
        (8 * GHOST_KEYS, GHOST_KEYS, 1 / 8),
        (64 * GHOST_KEYS, 16 * DRAM_KEYS, 1 / 16),
        (1024 * GHOST_KEYS, DRAM_KEYS, MOST_KEYS / GHOST_KEYS / 1024),
        (1e12, 1e9, LEAST_RATE),
        (0, 0, 1.0),
    ],
)
def test_a_rate_follows_enough_keys_of_the_fleet_and_of_a_hosts_dram(chunks, dram_chunks, rate):
    """Many disks beside a small DRAM are no reason to simulate it with no chunk; but there is a bound."""
    assert wanted_rate(chunks, dram_chunks) == rate


def test_a_namespace_takes_what_it_would_be_sampled_with_alone():
    """Of samples that another namespace needs, those that a store would pick at its own rate; hot ones always."""
    keys = chain(*range(400))
    plan = GhostPlan((), Shape(1, 0, 0), 1 / 8, 1, 1)
    for rate in (1.0, 1 / 2, 1 / 8):
        seen, alone = (
            SampledRequest("a", 400, Sampler(of, keys[:3]).pick([keys], hashes(keys, 0))[0]) for of in (rate, plan.rate)
        )
        assert list(plan.sampled(seen, rate).samples) == list(alone.samples)
    assert 20 < len(alone.samples) < 100


def fleet_with_a_small_model(tier):
    """Two hosts on which a model with chunks of a few bytes has something in a tier, or everything."""
    fleet = Fleet(dram=16_000, remote=32_000)

    def shared(host):
        def snapshot(at):
            told = type(host).snapshot(host, at)
            held = {"effective": {"capacity_bytes": host.dram, "eviction": "lru"}}
            told.status["pools"][SMALL.digest] = {
                **told.status["pools"][DIGEST], "chunk_bytes": SMALL_BYTES, "dram": held
            }  # fmt: skip
            if tier == "disk":
                told.status["pools"][SMALL.digest]["disk"] = told.status["pools"][SMALL.digest].pop("dram")
            return told

        return snapshot

    for host in fleet.hosts:
        host.snapshot = shared(host)
    return fleet


def dram_costs(prospect):
    """Costs by the size of the DRAM, with the present other tiers."""
    shapes = {name: Shape.parse(name) for name in prospect.costs if "@" not in name}
    remote = max(shape.remote for shape in shapes.values())
    return [
        prospect.costs[name] for name, shape in sorted(shapes.items(), key=lambda one: one[1]) if shape.remote == remote
    ]


def test_a_model_that_left_chunks_on_a_disk_does_not_coarsen_others():
    """It may have gone for good: its small chunks had a large model's DRAM simulated with hardly any."""
    fleet, plain = fleet_with_a_small_model("disk"), Fleet(dram=16_000, remote=32_000)
    for each in (fleet, plain):
        each.round()
    assert fleet.handout.current.rate == plain.handout.current.rate == 1 / 8


def test_a_small_model_beside_it_leaves_a_large_one_its_resolution():
    """Stores sample for the one that needs most of it, and each is simulated as finely as it needs."""
    fleet = fleet_with_a_small_model("dram")
    sessions = [Session("s", "e", "all", SMALL, SMALL_BYTES, CHUNK_TOKENS) for _ in fleet.hosts]
    for host, session in zip(fleet.hosts, sessions, strict=True):
        host.observer.attach(session)
    fleet.round()
    fleet.round()
    for host, keys in many(400, people=50):
        fleet.hosts[host].observer.seen(sessions[host], keys, len(keys) * CHUNK_TOKENS)
    told = {prospect.namespace: prospect for prospect in fleet.told(many(6000, people=900))}
    large = dram_costs(told[NAMESPACE.digest])
    assert fleet.handout.current.rate >= 1 / 8
    assert len({round(cost, 9) for cost in large}) > 3, large
    assert sorted(large, reverse=True) == large, "more DRAM is never dearer"


def test_a_hot_set_is_handed_out_for_whoever_is_sampled():
    """Also where a large model's few chunks need all keys; it takes no key for hot, as it follows each."""
    fleet, hot = Fleet(), [b"k" * 16]
    fleet.round()
    for least, found in ((1.0, ()), (1 / 2, ()), (1 / 4, tuple(hot))):
        header = Header(
            boot_id="b", next=0, rate=1.0, hash_seed=0, hot_version=0, dropped=0, behind=0, time_s=0.0,
            namespaces={"ns": Lookups(requests=9, chunks=9, hot_candidates={hot[0]: 9})},
        )  # fmt: skip
        fleet.handout.round(
            [Answer("a", "http://a", header, [], {}, 0)], START, wanted=1.0, least=least, chunks_per_s=1.0
        )
        assert (fleet.handout.current.rate, fleet.handout.current.hot) == (1.0, found)
    seen = SampledRequest("a", 1, [Pick(0, hot[0], hot=True)])
    assert [pick.hot for pick in GhostPlan((), Shape(1, 0, 0), 1.0, 1, 1).sampled(seen, 1.0).samples] == [False]


def test_an_engine_that_is_away_leaves_its_namespace_its_rate():
    """After a store's restart only its disk tells of it, for as long as vLLM loads: simulations go on."""
    fleet = Fleet(dram=16_000, remote=32_000)
    fleet.round()
    fleet.told(many(2000, people=300))
    before, away = fleet.handout.current, [host.snapshot for host in fleet.hosts]

    def without_dram(of):
        def snapshot(at):
            told = of(at)
            told.status["pools"][DIGEST]["disk"] = told.status["pools"][DIGEST].pop("dram")
            return told

        return snapshot

    for host, of in zip(fleet.hosts, away, strict=True):
        host.snapshot = without_dram(of)
    fleet.round()
    assert fleet.handout.current.rate == before.rate == 1 / 8


def test_what_is_too_coarse_to_tell_sizes_apart_is_not_told():
    """A DRAM of 100 chunks beside a remote of ten million would have none in miniature: any size would do as well."""
    fleet = Fleet(dram=100, remote=10_000_000)
    fleet.round()
    fleet.told(many(500, people=50))
    fleet.round()
    (prospect,) = fleet.told(many(2000, people=50))
    assert (prospect.requests, prospect.costs) == (2000, {})
