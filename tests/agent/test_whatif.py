"""Samples of several stores become what the fleet's requests would have cost under other sizes of its tiers."""

from functools import partial

import pytest

from agent.whatif_fleet import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    DIGEST,
    FETCH,
    NOW,
    PREFILL,
    TOKEN_S,
    Fleet,
    Host,
    begun,
    conversations,
    exact_cost,
    exact_rest,
)
from tiertune_connector.keys import Namespace
from tiertune_connector.protocol.messages import Side
from tiertune_connector.whatif.chain import Shape


def test_prospects_are_those_of_an_exact_simulation():
    """Two hosts, every chunk sampled: each size's cost per request is what following all chunks gives."""
    fleet, requests = begun(600)
    (prospect,) = fleet.told(requests)
    assert (prospect.namespace, prospect.requests) == (DIGEST, 600)
    shapes = [Shape.parse(name) for name in prospect.costs if "@" not in name]
    assert len(shapes) >= 8
    for shape in shapes:
        assert prospect.costs[str(shape)] == pytest.approx(exact_cost(requests, shape, 2)), shape
    assert len({round(cost, 9) for cost in prospect.costs.values()}) > 5, "sizes differ in what they cost"


@pytest.mark.parametrize("gate", [{"fetch": "off"}, {"min_fetch_tokens": 100 * CHUNK_TOKENS}])
def test_a_remote_that_the_gate_leaves_alone_saves_nothing(gate):
    """Switched off, or for longer prompts than any: probes find it quick, and DRAM has no help from it."""
    fleet = Fleet()
    for host in fleet.hosts:
        host.gate |= gate
    requests = list(conversations(600))
    for shape, cost in costs(fleet, requests):
        assert cost == pytest.approx(exact_cost(requests, shape._replace(remote=0), 2)), shape


def test_a_floor_that_some_prompts_reach_costs_what_lies_between():
    """What is as long is fetched, the rest computed: dearer than without a floor, less so than if none reaches it."""
    requests, told = list(conversations(600)), []
    for floor in (0, 4, 100):
        fleet = Fleet()
        for host in fleet.hosts:
            host.gate |= {"min_fetch_tokens": floor * CHUNK_TOKENS}
        told.append(dict(costs(fleet, requests))[NOW])
    assert told == sorted(set(told))


def test_rounds_add_up_to_the_same():
    """Prospects of several rounds, weighted by their requests, are the one of all: the ghosts stay warm."""
    fleet, requests = begun(600)
    told = []
    for start in range(0, 600, 100):
        told += fleet.told(requests[start : start + 100])
    assert [prospect.requests for prospect in told] == [100] * 6
    mean = sum(prospect.costs[str(NOW)] for prospect in told) / 6
    assert mean == pytest.approx(exact_cost(requests, NOW, 2))


@pytest.mark.parametrize("slower", [0, 1])
def test_hosts_with_unlike_gpus_are_priced_each_by_its_own(slower):
    """As if each host's requests were all: whichever store is read last does not price the others'."""
    requests, told = list(conversations(600)), []
    for slow in ({slower}, {0, 1}, set()):
        fleet = Fleet()
        for host in slow:
            fleet.hosts[host].prefill = PREFILL | {"seconds_per_flop": 10 * TOKEN_S}
        fleet.round()
        told.append(fleet.told(requests)[0].costs)
    mixed, slow, quick = ({size: cost for size, cost in costs.items() if size.endswith("/0/0")} for costs in told)
    (size,) = mixed  # without a remote, no host finds what the other one wrote
    share = sum(len(keys) for host, keys in requests if host == slower) / sum(len(keys) for _, keys in requests)
    assert mixed[size] == pytest.approx(share * slow[size] + (1 - share) * quick[size], rel=0.05)


def test_stores_clocks_need_not_agree():
    """An hour apart, the requests of two hosts are still played as they came."""
    requests = list(conversations(300))
    costs = []
    for skew_s in (0.0, 3600.0):
        fleet = Fleet()
        fleet.hosts[1].skew_s = skew_s
        fleet.round()
        costs.append(fleet.told(requests)[0].costs)
    assert costs[0] == pytest.approx(costs[1])


def costs(fleet, requests):
    """Of each simulated shape what the requests would cost, which are played in one round."""
    fleet.round()
    (prospect,) = fleet.told(requests)
    told = [(Shape.parse(name), cost) for name, cost in prospect.costs.items() if "@" not in name]
    assert len(told) > 5
    return told


@pytest.mark.parametrize("begun_anew", [0, 1])
def test_the_chunks_of_other_groups_of_layers_take_room_too(begun_anew, monkeypatch):
    """A model with two groups has in tiers twice as large what one with a single group has; a store may not know."""
    monkeypatch.setattr("agent.whatif_fleet.FETCH", dict.fromkeys(FETCH, (0.0, 1e-15)))
    plain, requests = begun(400)
    (expected,) = plain.told(requests)
    fleet = Fleet(dram=80, remote=160)
    for host in fleet.hosts[begun_anew:]:
        host.observer.beside(host.session, [Side([b"k" * 16], CHUNK_TOKENS, 0)])
    fleet.round()
    (prospect,) = fleet.told(requests)
    twice = Shape(2 * NOW.dram, 0, 2 * NOW.remote)
    assert prospect.costs[str(twice)] == pytest.approx(expected.costs[str(NOW)])


def test_namespaces_share_the_tiers():
    """One that has a quarter of the DRAM is simulated with a quarter of every size."""
    fleet, requests = Fleet(), list(conversations(400))
    other = "cd" * 16

    def shared(host):
        def snapshot(at):
            told = type(host).snapshot(host, at)
            pool = told.status["pools"][DIGEST]
            three = {**pool, "dram": {"effective": {"capacity_bytes": 3 * host.dram, "eviction": "lru"}}}
            told.status["pools"][other] = three
            return told

        return snapshot

    for host in fleet.hosts:
        host.snapshot = shared(host)
    for sizes, cost in costs(fleet, requests):
        quarter = Shape(sizes.dram // 4, sizes.disk // 4, sizes.remote // 4)
        assert cost == pytest.approx(exact_cost(requests, quarter, 2)), sizes


def test_models_on_hosts_of_their_own_share_only_the_remote():
    """Each has all of its host's DRAM, and half of the remote."""
    fleet, requests = Fleet(), [(0, keys) for _, keys in conversations(400)]
    fleet.hosts[1].namespace = Namespace(model="qwen", chunk_tokens=CHUNK_TOKENS)
    fleet.hosts[1].boot()
    for sizes, cost in costs(fleet, requests):
        half = Shape(sizes.dram, sizes.disk, sizes.remote // 2)
        assert cost == pytest.approx(exact_cost(requests, half, 1)), sizes


def test_what_only_a_disk_remembers_sets_no_ghosts_up_anew():
    """A store was started anew and no engine has come yet: the namespace's share is still that of the others."""

    def costs(*without_dram):
        fleet, requests, restarted = Fleet(), list(conversations(400)), set()

        def told(host, at):
            snapshot = Host.snapshot(host, at)
            pool = snapshot.status["pools"][DIGEST]
            if host.name in restarted:
                pool["disk"] = pool.pop("dram")
            return snapshot

        for host in fleet.hosts:
            host.snapshot = partial(told, host)
        fleet.round()
        fleet.told(requests[:200])
        restarted.update(without_dram)
        (prospect,) = fleet.told(requests[200:])
        return prospect.costs

    assert costs("host-0") == costs()


def test_sizes_are_priced_with_lru_whatever_the_pools_have():
    """So a change of algorithm sets no ghosts up anew, and one of a newer store is no stranger."""
    fleet, usual = Fleet(), Fleet()
    requests, running, told = list(conversations(400)), iter(("lru", "arc", "of-tomorrow")), fleet.hosts[0].snapshot

    def snapshot(at):
        made = told(at)
        made.status["pools"][DIGEST]["dram"]["effective"]["eviction"] = next(running)
        return made

    fleet.hosts[0].snapshot = snapshot
    for each in (fleet, usual):
        each.round()
        each.play(requests[:200])
        each.round()
        each.play(requests[200:])
    assert [one.costs for one in fleet.round()] == [one.costs for one in usual.round()] != []


def test_a_new_size_outside_of_the_grid_makes_a_new_one_that_is_warm():
    """The requests of late are played again: the first prospect of the new sizes is not that of empty tiers."""
    fleet, requests = begun(600)
    fleet.told(requests[:400])
    for host in fleet.hosts:
        host.dram *= 9
    fleet.round()
    (prospect,) = fleet.told(requests[400:])
    new = NOW._replace(dram=9 * NOW.dram)
    assert prospect.costs[str(new)] == pytest.approx(exact_rest(requests[:400], requests[400:], new))


@pytest.mark.parametrize("told", [{"health": "dead"}, {"health": "ok", "capacity_bytes": None, "resident_bytes": None}])
def test_a_remote_that_does_not_answer_keeps_its_size(told):
    """Its stores tell no bound meanwhile: the sizes that are simulated stay those of the remote that comes back."""
    fleet, prospects = Fleet(), []
    fleet.round()
    for seed in range(3):
        prospects += fleet.told(conversations(100, seed=seed))
        for host in fleet.hosts:
            host.remote_told = told if seed == 0 else None
    assert [set(each.costs) for each in prospects] == [set(prospects[0].costs)] * 3


def test_a_store_that_misses_a_round_changes_no_size_that_is_simulated():
    """Of unlike hosts another would be in the middle, and what was told could not be compared with what follows."""
    fleet, largest = Fleet(3), []
    for host, size in zip(fleet.hosts, (20, 40, 70), strict=True):
        host.dram = size * CHUNK_BYTES
    fleet.round()
    for seed, up, later_s in ((0, True, 0), (1, False, 0), (2, True, 0), (3, False, 7200)):
        fleet.hosts[0].up = up
        fleet.now_s += later_s
        (prospect,) = fleet.told(conversations(100, hosts=3, seed=seed))
        largest.append(max(Shape.parse(shape).dram for shape in prospect.costs if "@" not in shape) // CHUNK_BYTES)
    assert largest == [160, 160, 160, 280]  # two hours later it is not waited for any more
