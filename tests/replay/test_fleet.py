"""A fleet's caches while requests pass: resized, switched, watched."""

from hypothesis import given
from hypothesis import strategies as st

from replay.files import first, scenario
from tiertune_agent.replay.contents import FleetPools, Sizes, contents
from tiertune_agent.replay.play import Play
from tiertune_agent.replay.simulate import Replay
from tiertune_agent.whatif.shapes import SHARES

CHAINS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 12)),  # engine, conversation, length
    max_size=40,
)


def fleet(dram=8, disk=0, remote=40, **fields):
    return FleetPools(scenario(nodes=2, **fields), Sizes(dram, disk, remote), 512)


def use(tiers, engine, chain):
    found = tiers.find(engine, chain)
    tiers.write_through(engine, chain, found)
    return found


@given(CHAINS)
def test_what_is_found_is_the_nearest_tier_of_each_chunk(requests):
    """Gapless from the head; a chunk is told from DRAM before disk before remote."""
    tiers = fleet(disk=12)
    for engine, conversation, length in requests:
        chain = [100 * conversation + place for place in range(length)]
        pools = {
            "dram": tiers.dram_pools[tiers.node(engine)],
            "disk": tiers.disk_pools[tiers.node(engine)],
            "remote": tiers.remote_pool,
        }
        nearest = [next((name for name, pool in pools.items() if key in pool), "") for key in chain]
        expected = nearest[: nearest.index("")] if "" in nearest else nearest
        assert use(tiers, engine, chain) == expected


def test_growing_keeps_and_shrinking_evicts_at_once():
    """Every node's DRAM, and the remote; what is not named stays as it is."""
    tiers = fleet(dram=8, remote=40)
    for engine in (0, 3):
        use(tiers, engine, list(range(10)))
    tiers.resize(dram=4)
    assert [len(pool) for pool in tiers.dram_pools] == [4, 4]
    assert tiers.find(0, list(range(10))) == ["dram"] * 4 + ["remote"] * 6
    tiers.resize(remote=5)
    use(tiers, 0, list(range(10)))
    assert tiers.find(0, list(range(10))) == ["dram"] * 4 + ["remote"]
    assert (len(tiers.remote_pool), [pool.capacity for pool in tiers.dram_pools]) == (5, [4, 4])
    tiers.resize(dram=0, remote=0)
    assert tiers.find(0, list(range(10))) == ["dram"]


def test_a_switch_keeps_the_contents():
    """All nodes' DRAM goes on with what it holds under the other algorithm; the remote keeps its own."""
    tiers = fleet()
    use(tiers, 0, list(range(6)))
    tiers.switch("arc")
    assert {pool.algorithm for pool in tiers.dram_pools} == {"arc"}
    assert tiers.remote_pool.algorithm == "lru"
    assert tiers.find(0, list(range(6))) == ["dram"] * 6


class Notes:
    """A conductor that writes down what it sees, and once takes the remote away."""

    def __init__(self, fleet, stop_at):
        self.fleet, self.seen, self.stop_at = fleet, [], stop_at

    def request(self, index, at_s, engine):
        self.seen.append((index, at_s, engine))
        if index == self.stop_at:
            self.fleet.resize(remote=0)


def test_a_conductor_sees_each_request_before_it_is_looked_up(small):
    """In order, with time and engine; what it changes counts from that request on."""
    replay = Replay(small, scenario())
    notes = Notes(replay.fleet(replay.own), stop_at=500)
    found = list(contents(small, scenario(), replay._engines, notes.fleet, notes))
    plain = list(contents(small, scenario(), replay._engines, replay.fleet(replay.own)))
    assert notes.seen == [(index, each.at_s, each.engine) for index, each in enumerate(found)]
    assert found[:500] == plain[:500]
    assert any("remote" in each.tiers for each in found[:500])
    assert not any("remote" in each.tiers for each in found[500:])


def test_nothing_is_looked_up_before_it_is_asked_for(small):
    """The engine of a request may depend on what became of the one before."""
    asked = []

    def engines():
        for index in range(len(small)):
            asked.append(index)
            yield 0

    found = contents(small, scenario(), engines(), FleetPools(scenario(), Sizes(10, 0, 10), small.block_tokens))
    assert asked == []
    next(found)
    next(found)
    assert asked == [0, 1]


def test_the_best_split_is_the_best_of_all(small):
    """No share of the grid has a lower mean with the gate on, and it tells its share."""
    replay = Replay(first(small, 300), scenario())
    best = replay.run("best_split")
    plays = {share: replay.play(Play(replay, "rule"), replay.fleet(replay.split(share))) for share in SHARES}
    means = {share: replay.report(tally, split=[]) for share, tally in plays.items()}
    share = best["split"][0][1]
    assert best["ttft_mean_s"] == min(report["ttft_mean_s"] for report in means.values())
    assert best["ttft_mean_s"] == means[share]["ttft_mean_s"]
    assert best["is"] == f"{share:g} remote"


def test_splits_share_one_total(small):
    """Whatever the share, DRAM of all nodes and the remote are the same number of chunks, rounding aside."""
    replay = Replay(small, scenario())
    totals = [4 * size.dram + size.remote for size in map(replay.split, SHARES)]
    assert max(totals) - min(totals) <= 5
