"""A share of requests is held out from remote fetches, always the same ones, and all are timed."""

import pytest

from connector.memory_tier import MemoryTier
from connector.store.serving import put_remote, serving
from connector.stores import chain, eventually
from tiertune_connector.protocol.messages import FirstToken
from tiertune_connector.store.lookups import group_of

KEYS = chain("held", 3)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_about_the_share_is_held_out(share):
    """Of many requests the share; the same ones every time; those of a smaller share are among those of a larger."""
    names = [f"cmpl-{number}" for number in range(5000)]
    groups = [group_of(name, share) for name in names]
    assert groups.count("held") / 5000 == pytest.approx(share, abs=0.02)
    assert groups == [group_of(name, share) for name in names]
    assert {group_of(name, 0.5) for name, group in zip(names, groups, strict=True) if group == "held"} == {"held"}
    assert {group_of(name, 0.0) for name in names} == {""}


@pytest.fixture
def remote():
    remote = MemoryTier()
    put_remote(remote, KEYS)
    return remote


@pytest.fixture
def store(home, remote):
    with serving(home, remote) as process:
        yield process


HELD, FREE = (
    next(name for name in map(str, range(1000)) if group_of(name, 0.2) == group) for group in ("held", "fetched")
)


def looked_up(engine, request):
    return engine.client.lookup(request, KEYS, prompt_tokens=60).result(10)


def test_without_a_holdout_nobody_is_timed(engine):
    """By default every request may fetch, and the store asks for no times."""
    for request in (HELD, FREE):
        reply = looked_up(engine, request)
        assert (reply.tiers, reply.group) == (["remote"] * 3, "")
        assert reply.gate["remote"].fetch_on


def test_those_held_out_may_not_fetch_and_all_are_timed(engine, http):
    """The gate of a request that is held out is off, whenever it asks; the others' is on."""
    assert http.retune(tiers__remote__holdout=0.2).status_code == 200
    for request, on, group in ((HELD, False, "held"), (FREE, True, "fetched"), (HELD, False, "held")):
        reply = looked_up(engine, request)
        assert (reply.gate["remote"].fetch_on, reply.group) == (on, group)
    nothing = engine.client.lookup(HELD, chain("nothing", 2), prompt_tokens=40).result(10)
    assert nothing.group == ""


def test_times_are_counted_by_group(engine, http):
    """As the lookup told it, whatever share is held out when the request ends; of no group, nothing is counted."""
    engine.client.tell(FirstToken(48, 9.0, looked_up(engine, HELD).group))
    http.retune(tiers__remote__holdout=0.2)
    groups = [looked_up(engine, request).group for request in (HELD, FREE, FREE)]
    http.retune(tiers__remote__holdout=0.0)
    for seconds, group in zip((2.0, 0.5, 1.5), groups, strict=True):
        engine.client.tell(FirstToken(48, seconds, group))
    engine.heard()
    expected = {
        "held": {"requests": 1, "seconds": 2, "tokens": 48, "seconds2": 4, "tokens2": 2304, "seconds_tokens": 96},
        "fetched": {"requests": 2, "seconds": 2, "tokens": 96, "seconds2": 2.5, "tokens2": 4608, "seconds_tokens": 96},
    }
    for group, sums in expected.items():
        for name, value in sums.items():
            assert http.total("holdout_sums_total", tier="remote", group=group, sum=name) == value


def test_a_share_beyond_half_is_refused(http):
    """More than half is no holdout."""
    answer = http.retune(tiers__remote__holdout=0.6)
    assert (answer.status_code, answer.json()["field"]) == (422, "tiers.remote.holdout")


def test_requests_are_counted_with_and_without_salt(engine, http):
    """A tenant's lookup is salted, any other is not."""
    engine.client.lookup("a", KEYS, prompt_tokens=60, tenant=b"t" * 16).result(10)
    looked_up(engine, "b")
    looked_up(engine, "c")
    eventually(lambda: http.total("requests_total", salted="yes") == 1)  # counted behind the answer
    eventually(lambda: http.total("requests_total", salted="no") == 2)
