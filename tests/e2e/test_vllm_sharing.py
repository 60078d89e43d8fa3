"""Real engines share through real stores: on one host, across hosts, and after losses."""

from e2e.servers import wait_until
from e2e.vllm_engines import CHUNK_TOKENS, of_engines
from e2e.vllm_fixtures import CHUNK_BYTES, chunks, prompts
from e2e.vllm_stores import MIB

pytestmark = of_engines(600)


def test_two_engines_of_a_host_share_through_its_store(fleet, reference, engine_a, engine_b):
    """B, which never computed the prompts, gets every whole chunk that A computed, and answers as without any cache."""
    asked = prompts(3, seed=1)
    assert fleet.computed(engine_a, asked).external == 0
    hits, own = fleet.host_a.hits("dram", "same_host"), fleet.host_a.hits("dram", "self")
    fleet.fetched(engine_b, asked)
    wait_until(
        lambda: fleet.host_a.hits("dram", "same_host") - hits >= chunks(asked) * CHUNK_TOKENS, "hits are counted"
    )
    assert fleet.host_a.hits("dram", "self") == own


def test_two_hosts_share_through_redis(fleet, reference, engine_b, engine_c):
    """C, on another host with an empty store, gets what B computed from Redis, and answers as without any cache."""
    asked = prompts(3, seed=2)
    fleet.computed(engine_b, asked)
    fleet.host_b.wait_estimate(at_least=MIB)
    hits = fleet.host_b.hits("remote", "other_host")
    fleet.fetched(engine_c, asked)
    wait_until(
        lambda: fleet.host_b.hits("remote", "other_host") - hits >= chunks(asked) * CHUNK_TOKENS, "hits are counted"
    )


def test_an_engine_that_forgot_is_warm_from_the_store(fleet, reference, engine_b):
    """With its own cache and staging emptied, an engine gets back what it had stored."""
    asked = prompts(2, seed=3)
    fleet.computed(engine_b, asked)
    engine_b.reset()
    fleet.fetched(engine_b, asked)


def test_a_flushed_store_is_empty_and_fills_again(fleet, reference, engine_a, engine_b):
    """No chunk is found in any tier after a flush; what engines use then is stored anew, also from staging."""
    asked = prompts(2, seed=4)
    fleet.computed(engine_a, asked)  # all: what comes later is found after the flush
    dropped = fleet.host_a.flush()
    assert dropped["dram"] > 0
    assert dropped["remote"] > 0
    assert fleet.host_a.resident() == 0

    engine_b.reset()
    assert engine_b.generate(prompts(1, seed=4)).external == 0, "nothing may be found after a flush"
    fleet.right(engine_a, asked)  # from its own cache; staging has the chunks still
    refilled(fleet, engine_b, asked)


def test_a_restarted_store_is_filled_from_the_engines_staging(fleet, reference, engine_a, engine_b):
    """After a kill -9 the new store knows nothing; an engine that uses its chunks again hands them over once more."""
    asked = prompts(2, seed=5)
    fleet.computed(engine_a, asked)
    fleet.host_a.tune(tiers__remote__fetch="off")
    try:
        clients = fleet.host_a.clients()
        fleet.host_a.kill()
        fleet.right(engine_a, asked)
        fleet.host_a.restart()
        assert fleet.host_a.resident() == 0
        fleet.host_a.wait_back(clients)
        engine_a.generate(asked)
        refilled(fleet, engine_b, asked)
    finally:
        fleet.host_a.tune(tiers__remote__fetch="on")


def refilled(fleet, other, asked):
    """Engine A has used its chunks again: the store must have them all, and another engine find them."""
    fleet.host_a.wait_resident(chunks(asked) * CHUNK_BYTES)
    other.reset()
    fleet.fetched(other, asked)
