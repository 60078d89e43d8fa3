"""Miniature fleets: exact at rate 1, unbiased below, and as wise as the gate."""

from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiertune_connector.whatif.chain import PREFIX_ROUTING, ChainGhosts, SampledRequest, Shape
from tiertune_connector.whatif.sampler import Pick, Sampler, mix
from tiertune_connector.whatif.simulated import SimulatedPool


class Prices:
    """One second per chunk, a tenth more for every chunk before it; a fetch costs what the test says."""

    margin, floor = 1.0, 0.0

    def __init__(self, remote=0.1, latency=0.0, disk=0.0):
        self.remote, self.latency, self.disk = remote, latency, disk

    def prefill_s(self, chunks):
        return chunks + 0.05 * chunks * (chunks - 1)

    @property
    def fetch_s(self):
        return {"dram": (0.0, 0.0), "disk": (0.0, self.disk), "remote": (self.latency, self.remote)}


def seen(chain, host=0, hot=()):
    return SampledRequest(host, len(chain), [Pick(position, key, key in hot) for position, key in enumerate(chain)])


def chains(most=6):
    """Prompts of a few families: a chunk's key names its whole prefix."""
    family = st.integers(0, 3)
    return st.lists(st.tuples(family, st.integers(1, most)), min_size=1, max_size=40).map(
        lambda prompts: [[100 * family + depth for depth in range(length)] for family, length in prompts]
    )


def exact(prompts, hosts, dram, remote, prices):
    """Seconds of all prompts: the gate fetches all that follows the local prefix, or nothing."""
    local, far, total = {}, SimulatedPool(remote), 0.0
    for index, chain in enumerate(prompts):
        own = local.setdefault(index % hosts, SimulatedPool(dram))
        near = own.prefix(chain)
        end = near
        while end < len(chain) and (chain[end] in own or chain[end] in far):
            end += 1
        fetched = sum(key not in own for key in chain[near:end])
        latency, each = prices.fetch_s["remote"]
        whole = prices.prefill_s(len(chain))
        kept, fetch = prices.prefill_s(near), 0.0
        if end > near and prices.prefill_s(end) - kept > latency + each * (end - near):
            kept, fetch = prices.prefill_s(end), fetched * (each + latency / (end - near))
        total += whole - kept + fetch
        own.write_through(chain)
        if remote:
            far.write_through(chain)
    return total


@given(chains(), st.integers(1, 8), st.integers(0, 12), st.sampled_from([0.1, 0.9, 1.2, 3.0]))
def test_at_rate_one_a_miniature_fleet_is_the_fleet(prompts, dram, remote, each):
    """Every key sampled: the bill is what the pools themselves and the gate's rule give."""
    prices = Prices(remote=each, latency=0.05)
    shape = Shape(dram, 0, remote)
    ghosts = ChainGhosts([shape], rate=1.0, chunk_bytes=1)
    for index, chain in enumerate(prompts):
        ghosts.request(seen(chain, host=index % 2), prices)
    bill = ghosts.take()
    assert bill.seconds[str(shape)] == pytest.approx(exact(prompts, 2, dram, remote, prices))
    assert bill.requests == len(prompts)
    assert bill.chunks == sum(map(len, prompts))


@given(chains(), st.integers(1, 12), st.sampled_from([0.1, 0.9]))
def test_what_does_not_find_room_in_dram_is_recomputed(prompts, remote, each):
    """A store brings chunks of slower tiers into DRAM: without any, they are worth nothing, and half of it brings half.

    With room for the longest prompt they are worth what they are where no room is needed.
    """
    prices = Prices(remote=each, latency=0.05)
    none, some = Shape(0, 4, remote), Shape(6, 0, remote)
    nothing, all_fits, free = (
        ChainGhosts([none], rate=1.0, chunk_bytes=1, landing=0.75),
        *(ChainGhosts([some], rate=1.0, chunk_bytes=1, landing=landing) for landing in (1.0, None)),
    )
    for index, chain in enumerate(prompts):
        for ghosts in (nothing, all_fits, free):
            ghosts.request(seen(chain, host=index % 2), prices)
    whole = sum(prices.prefill_s(len(chain)) for chain in prompts)
    assert nothing.take().seconds[str(none)] == pytest.approx(whole)
    assert all_fits.take().seconds == pytest.approx(free.take().seconds)


def test_what_finds_room_is_a_share_of_what_is_there():
    """Six chunks in the remote, and room for three: half of what they would save."""
    prompt, shape = list(range(6)), Shape(4, 0, 100)
    saved = []
    for landing in (None, 0.75):
        ghosts = ChainGhosts([shape], rate=1.0, chunk_bytes=1, landing=landing)
        for host in (0, 1):
            ghosts.take()
            ghosts.request(seen(prompt, host=host), Prices())
        saved.append(Prices().prefill_s(6) - ghosts.take().seconds[str(shape)])
    assert saved[1] == pytest.approx(saved[0] / 2)


def test_what_is_not_fetched_takes_no_room():
    """Three chunks on the disk, and three behind them in a remote that is too dear: there is room for those three."""
    prompt, saved = list(range(6)), []
    for landing in (None, 0.75):
        shape = Shape(4, 3, 100)
        ghosts = ChainGhosts([shape], rate=1.0, chunk_bytes=1, landing=landing)
        for chain in (prompt, prompt[:3], [70, 71, 72, 73], prompt):  # others take what DRAM had
            ghosts.take()
            ghosts.request(seen(chain), Prices(remote=50.0))
        saved.append(ghosts.take().seconds[str(shape)])
    assert saved[0] == pytest.approx(saved[1])


@given(chains())
def test_more_memory_never_costs_more(prompts):
    """LRU keeps what a smaller one kept, so a larger shape has no larger bill."""
    shapes = [Shape(dram, 0, 0) for dram in (0, 1, 2, 4, 8, 16)]
    ghosts = ChainGhosts(shapes, rate=1.0, chunk_bytes=1)
    for chain in prompts:
        ghosts.request(seen(chain), Prices())
    bill = ghosts.take().seconds
    costs = [bill[str(shape)] for shape in shapes]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] == pytest.approx(sum(Prices().prefill_s(len(chain)) for chain in prompts))


@pytest.mark.parametrize("dear", [True, False])
@pytest.mark.parametrize(
    ("tier", "heads", "depth", "pairs"),
    [
        ("remote", 0, 2, [(Shape(1, 0, 100), Shape(1, 0, 0))]),
        ("disk", 1, 3, [(Shape(2, 100, 0), Shape(2, 0, 0)), (Shape(0, 100, 0), Shape(0, 0, 0))]),
    ],
)
def test_a_tier_that_costs_more_than_it_saves_is_not_used(tier, heads, depth, pairs, dear):
    """With a slow link, or disk, a shape with the tier costs what it costs without, with a fast one less.

    As gates would not fetch: a slow disk is no reason for more DRAM, nor for none of its own.
    """
    ghosts = ChainGhosts([shape for pair in pairs for shape in pair], rate=1.0, chunk_bytes=1)
    for _ in range(4):
        for family in range(1, 4):
            own = range(100 * family, 100 * family + depth)
            ghosts.request(seen([*range(heads), *own]), Prices(**{tier: 5.0 if dear else 0.01}))
    bill = ghosts.take().seconds
    for used, without in pairs:
        assert (bill[str(used)] == bill[str(without)]) == dear
        assert (bill[str(used)] < bill[str(without)]) != dear


def test_disk_chunks_pay_their_fetch():
    """What lies on the disk saves its recompute less its own load."""
    shape = Shape(0, 8, 0)
    ghosts = ChainGhosts([shape], rate=1.0, chunk_bytes=1)
    ghosts.request(seen([1, 2]), Prices(disk=0.25))
    ghosts.take()
    ghosts.request(seen([1, 2]), Prices(disk=0.25))
    assert ghosts.take().seconds[str(shape)] == pytest.approx(0.5)


def test_hot_chunks_count_as_local_and_take_no_room():
    """The fleet's hottest keys are exact: present, with weight 1, in every shape."""
    shape = Shape(1, 0, 0)
    ghosts = ChainGhosts([shape], rate=0.5, chunk_bytes=1)
    for _ in range(3):
        ghosts.request(seen([7, 8], hot=(7, 8)), Prices())
    bill = ghosts.take()
    assert bill.seconds[str(shape)] == pytest.approx(0.0)
    assert bill.chunks == 6


def test_prefix_routing_brings_a_prompt_to_where_it_was():
    """Two prompts that change hosts every time miss there, and hit where they were last."""
    shape = Shape(3, 0, 0)
    ghosts = ChainGhosts([shape], rate=1.0, chunk_bytes=1, prefix_routed=[shape])
    for turn in range(10):
        ghosts.request(seen([1, 2, 3], host=turn % 2), Prices())
        ghosts.request(seen([4, 5, 6], host=1 - turn % 2), Prices())
    bill = ghosts.take().seconds
    assert bill[f"{shape}{PREFIX_ROUTING}"] < 0.3 * bill[str(shape)]


def test_a_sampled_bill_is_unbiased():
    """Over many seeds the mean of bills from a third of the keys is the bill from all of them."""
    rng = np.random.default_rng(3)
    prompts = [[100 * family + depth for depth in range(20)] for family in rng.zipf(1.4, 400) % 60]
    shape = Shape(120, 0, 400)

    def bill(rate, seed):
        sampler = Sampler(rate)
        ghosts = ChainGhosts([shape], rate=rate, chunk_bytes=1)
        for index, chain in enumerate(prompts):
            (picks,) = sampler.pick([chain], mix(np.array(chain, np.uint64), seed))
            ghosts.request(SampledRequest(index % 2, len(chain), picks), Prices())
        return ghosts.take().seconds[str(shape)]

    assert fmean(bill(1 / 3, seed) for seed in range(20)) == pytest.approx(bill(1.0, 0), rel=0.05)


def test_a_shape_is_read_back_as_it_was_told():
    """The name of a shape in a bill tells its sizes."""
    shape = Shape(3, 0, 2**40)
    assert Shape.parse(str(shape)) == shape
