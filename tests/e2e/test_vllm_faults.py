"""Tenants, damaged chunks, late loads, dead stores, broken sockets: right tokens always, and never another's chunk."""

import numpy as np
import pytest

from e2e.servers import wait_until
from e2e.vllm_engines import Request, differences, of_engines
from e2e.vllm_fixtures import CHUNK_BYTES, chunks, fetching, prompts
from e2e.vllm_stores import MIB, damage
from tiertune_connector.chunk import HEADER_BYTES

pytestmark = of_engines(600)


def salted(some, salt):
    return [Request(prompt, salt=salt) for prompt in some]


def test_another_salt_never_hits_and_the_same_salt_does(fleet, reference, engine_a, engine_b):
    """What tenant one stored is found by tenant one alone: not by tenant two, and not without a salt."""
    some = prompts(2, seed=21)
    fleet.computed(engine_a, salted(some, "one"))
    hits = fleet.host_a.hits("dram") + fleet.host_a.hits("remote")
    for requests in (salted(some, "two"), salted(some, "")):
        assert fleet.right(engine_b, requests).external == 0
    assert fleet.host_a.hits("dram") + fleet.host_a.hits("remote") == hits
    engine_b.reset()
    fleet.fetched(engine_b, salted(some, "one"))


def test_a_reset_while_the_worker_still_stores(fleet, reference, engine_a, engine_b):
    """What it was told before it writes over rows of staging that are others' by then: no load may be in them yet."""
    some = prompts(1, seed=28)
    fleet.computed(engine_a, some)
    engine_b.reset()
    with fetching(engine_b):
        engine_b.start(some, do="over_reset", storing=prompts(1, seed=29)[0])
        assert differences(engine_b.finish().answers, fleet.expected(some)) == []
    engine_b.reset()
    fleet.fetched(engine_b, some)


def test_damaged_chunks_are_recomputed(fleet, reference, engine_b, engine_c):
    """One flipped byte in every chunk of Redis: the store notices each that is asked for, the engine recomputes."""
    some = prompts(2, seed=22)
    in_remote(fleet, engine_b, some)
    fleet.host_b.wait_estimate(at_least=MIB)
    assert damage(fleet.redis.url, HEADER_BYTES + CHUNK_BYTES // 2) >= chunks(some)
    corrupt = fleet.host_b.http.total("tier_errors_total", tier="remote", operation="read", reason="corrupt")
    with fetching(engine_c):
        fleet.right(engine_c, some)
    after = fleet.host_b.http.total("tier_errors_total", tier="remote", operation="read", reason="corrupt")
    assert after > corrupt, "no damaged chunk was read"
    assert fleet.host_b.flush().keys() >= {"dram", "remote"}


def test_a_load_that_is_late_is_recomputed(fleet, reference, engine_b, engine_c):
    """The remote gets slower than predicted by far: the engine waits for its deadline, not for the chunks."""
    some = prompts(1, seed=23)
    in_remote(fleet, engine_b, some)
    fleet.host_b.wait_estimate(at_least=MIB)
    outcomes = missed(fleet)
    fleet.host_b.link[0] = 0.2 * MIB  # 20 s for these chunks
    engine_c.ask("always_fetch", on=True)  # what its first steps told of its prefills may be wrong on a busy machine
    try:
        got = fleet.right(engine_c, some)
    finally:
        engine_c.ask("always_fetch", on=False)
        fleet.host_b.link[0] = 0.0
    assert got.answers[0].ttft_s < 6.0
    wait_until(lambda: missed(fleet) > outcomes, "the fetch is counted as late or failed")


def test_a_store_that_is_killed_amid_requests(fleet, reference, engine_a, engine_b):
    """Requests under way and later ones answer right; once the store is back, engines share again."""
    some, later = prompts(12, seed=24, tail=200), prompts(2, seed=25)
    expected = fleet.expected(some)
    clients, asked = fleet.host_a.clients(), fleet.host_a.http.total("prompt_tokens_total")
    for engine in (engine_a, engine_b):
        engine.start([Request(prompt, at=0.05 * number) for number, prompt in enumerate(some)])
    wait_until(lambda: fleet.host_a.http.total("prompt_tokens_total") > asked, "a request is under way")
    fleet.host_a.kill()
    for engine in (engine_a, engine_b):
        assert differences(engine.finish().answers, expected) == []
    engine_b.reset()
    assert fleet.right(engine_b, some[:4]).external == 0

    fleet.host_a.restart()
    fleet.host_a.wait_back(clients)
    fleet.computed(engine_a, later)
    fleet.fetched(engine_b, later)


@pytest.mark.parametrize("call", ["write", "read"])
def test_a_socket_that_breaks_in_mid_copy(fleet, reference, engine_a, engine_b, call):
    """The engine lives and goes on copying into or out of a slot that is not its own any more: none torn is read."""
    some = prompts(2, seed=26 if call == "write" else 27)
    fleet.expected(some)
    if call == "read":
        fleet.computed(engine_a, some)
        engine_b.reset()
    breaks, clients = engine_b.ask("broken")["broken"], fleet.host_a.clients()
    engine_b.ask("break_socket", path=str(fleet.host_a.socket), call=call, after=3)
    with fetching(engine_b):
        fleet.right(engine_b, some)
    assert engine_b.ask("broken")["broken"] == breaks + 1
    fleet.host_a.wait_back(clients)

    for engine in (engine_a, engine_b):
        engine.reset()
        fleet.right(engine, some)
    wait_until(lambda: fleet.host_a.http.total("quarantined_slots") == 0, "no slot stays out of use")


def in_remote(fleet, engine, some):
    """Prompts that another host's engine has computed: they are in Redis alone, as host b sees it."""
    fleet.computed(engine, some)
    fleet.host_b.forget_dram()


def missed(fleet):
    """Fetches from host b's remote that were not there in time."""
    counted = (
        fleet.host_b.http.total("gate_outcomes_total", tier="remote", outcome=kind) for kind in ("late", "failed")
    )
    return float(np.sum(list(counted)))
