"""The remote as several servers, or behind Sentinel: one capacity, equal shares, whole changes; against real ones."""

from contextlib import ExitStack
from unittest.mock import Mock

import httpx
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from agent.fakes import START, wrong
from agent.test_remote import change, opened, stands
from connector.stores import eventually
from e2e.redis_servers import certificates, redis_by_tls, redis_watched
from e2e.servers import redis_server, wait_until
from tiertune_agent.collector.stores import Trouble
from tiertune_agent.fields import replaced
from tiertune_agent.remote.managed import shares
from tiertune_connector.access import PASSWORD

pytestmark = pytest.mark.real
MB = 2**20


@pytest.fixture(scope="module")
def servers():
    with ExitStack() as stack:
        yield [stack.enter_context(redis_server()) for _ in range(3)]


@pytest.fixture
def raws(servers):
    with ExitStack() as stack:
        raws = [stack.enter_context(redis.Redis.from_url(one.url, decode_responses=True)) for one in servers]
        for raw in raws:
            raw.config_set("maxmemory", 64 * MB)
            raw.config_set("maxmemory-policy", "allkeys-lru")
        yield raws


@pytest.fixture
def remote(servers):
    with opened(tuple(one.url for one in servers)) as made:
        yield made


def each(raws, name="maxmemory"):
    found = [raw.config_get(name)[name] for raw in raws]
    return [int(value) for value in found] if name == "maxmemory" else found


@given(st.integers(10, 2**50), st.integers(1, 9))
def test_shares_add_up_and_differ_by_a_byte(capacity, servers):
    """What is read back as the sum is what was wished."""
    found = shares(capacity, servers)
    assert (sum(found), len(found)) == (capacity, servers)
    assert max(found) - min(found) <= 1


def test_nothing_and_no_bound_are_so_on_each():
    """A capacity of zero is the least that Redis has; no bound is none on any."""
    assert (shares(0, 2), shares(None, 2)) == ([1, 1], [0, 0])


def test_a_capacity_is_divided_and_reads_back_as_the_sum(remote, raws):
    """Each server has its share; nothing is set where nothing changes."""
    assert change(remote, capacity_bytes=100 * MB).is_success
    assert stands(remote)["capacity_bytes"] == 100 * MB == sum(each(raws))
    assert max(each(raws)) - min(each(raws)) <= 1
    snapshot = remote.read(START)
    state = snapshot.status["tiers"]["remote"]
    assert [one["capacity_bytes"] for one in state["servers"]] == each(raws)
    assert state["resident_bytes"] == sum(one["resident_bytes"] for one in state["servers"]) > 0


def test_servers_of_other_sizes_stay_so_until_the_sum_changes(remote, raws):
    """A new policy is set on each and moves no memory."""
    raws[0].config_set("maxmemory", 32 * MB)
    assert stands(remote)["capacity_bytes"] == 160 * MB
    assert change(remote, policy="allkeys-lfu").is_success
    assert each(raws) == [32 * MB, 64 * MB, 64 * MB]
    assert each(raws, "maxmemory-policy") == ["allkeys-lfu"] * 3


def test_one_without_a_bound_leaves_the_whole_without_one(remote, raws):
    """A sum with an unknown is unknown."""
    raws[1].config_set("maxmemory", 0)
    assert stands(remote)["capacity_bytes"] is None


def test_one_that_evicts_nothing_is_seen_among_others(remote, raws):
    """Its policy is told first: what does not begin with allkeys is what the tuner mends, and then on all."""
    raws[2].config_set("maxmemory-policy", "noeviction")
    assert stands(remote)["policy"] == "noeviction, allkeys-lru"
    assert change(remote, policy="allkeys-lru").is_success
    assert each(raws, "maxmemory-policy") == ["allkeys-lru"] * 3


def test_a_change_by_hand_that_leaves_the_sum_is_a_change(remote, raws):
    """The version is of every server."""
    document = remote.tuning()
    raws[0].config_set("maxmemory", 32 * MB)
    raws[1].config_set("maxmemory", 96 * MB)
    assert stands(remote) == document["remote"]
    assert remote.put_tuning(document, expected=document["version"], key="key").status_code == 412


def limited(raw, *rights):
    raw.execute_command("ACL", "SETUSER", "tuner", "reset", "on", ">secret-word", "+info", "+config|get", *rights)


def test_one_that_refuses_leaves_all_as_they_were(servers, raws):
    """Told by name before anything is set; and if it changes its mind later, the others are set back."""
    for raw in raws:
        limited(raw, "+config|set")
    urls = tuple(one.url.replace("//", "//tuner@") for one in servers)
    with opened(urls, {PASSWORD: "secret-word"}) as remote:
        assert remote.refusal() == ""
        limited(raws[2])
        assert remote.refusal().startswith(f"{servers[2].url} refuses CONFIG: ")
        answer = change(remote, capacity_bytes=90 * MB)
        assert answer.status_code == 422
        told = answer.json()["message"]
        assert told.startswith(f"{servers[2].url}: ")
        assert told.endswith("the servers set before it were set back")
        assert each(raws) == [64 * MB] * 3
        assert "secret-word" not in told + remote.refusal()


def test_what_cannot_be_set_back_is_told(remote, raws, servers, monkeypatch):
    """A part of a change that stays is named with its value: no half is passed over in silence."""
    first, _, last = remote._servers
    real = first.set

    def once(name, value):
        if value != 30 * MB:
            raise redis.ConnectionError("gone")
        real(name, value)

    monkeypatch.setattr(first, "set", once)
    monkeypatch.setattr(last, "set", Mock(side_effect=redis.ResponseError("not today")))
    answer = change(remote, capacity_bytes=90 * MB)
    assert answer.status_code == 422
    told = f"{servers[0].url} could not be set back (gone): its maxmemory is {30 * MB}"
    assert answer.json()["message"] == f"{servers[2].url}: not today; {told}"
    assert each(raws) == [30 * MB, 64 * MB, 64 * MB]


def test_one_that_may_have_been_set_is_set_back_with_the_others(remote, raws, monkeypatch):
    """Its answer was lost: the sum would be neither the old nor the new one, and the decision would just expire."""
    last = remote._servers[2]
    real = last.set

    def lost(name, value):
        real(name, value)
        if value == 30 * MB:
            raise redis.TimeoutError("no answer")

    monkeypatch.setattr(last, "set", lost)
    with pytest.raises(httpx.ReadTimeout, match="no answer; the servers set before it were set back"):
        change(remote, capacity_bytes=90 * MB)
    assert each(raws) == [64 * MB] * 3
    monkeypatch.setattr(last, "set", Mock(side_effect=redis.ConnectionError("gone")))
    with pytest.raises(httpx.ConnectError, match=f"could not be set back \\(gone\\): its maxmemory may be {30 * MB}"):
        change(remote, capacity_bytes=90 * MB)


def test_one_that_is_away_is_trouble_by_name_and_nothing_is_set(servers, raws):
    """A remote of which a part is unknown is not managed meanwhile."""
    with redis_server() as other:
        urls = (servers[0].url, other.url)
        with opened(urls) as remote:
            document = remote.tuning()
            other.process.kill()
            other.process.wait()
            told = remote.read(START)
            assert isinstance(told, Trouble)
            assert told.message.startswith(f"{other.url}: ")
            with pytest.raises(httpx.ConnectError, match=other.url):
                remote.put_tuning(document, expected=document["version"], key="key")
            assert each(raws[:1]) == [64 * MB]


def test_behind_sentinel_the_replica_is_set_too():
    """So that a failover changes no size; the agent goes on with the new master by itself."""
    with redis_watched() as watched, opened(watched.url) as remote:
        assert change(remote, capacity_bytes=48 * MB, policy="allkeys-lfu").is_success
        with ExitStack() as stack:
            ports = (watched.master.port, watched.replica.port)
            raws = [stack.enter_context(redis.Redis(port=port, decode_responses=True)) for port in ports]
            assert each(raws) == [48 * MB] * 2
            assert each(raws, "maxmemory-policy") == ["allkeys-lfu"] * 2
            watched.master.process.kill()
            wait_until(lambda: raws[1].info("replication")["role"] == "master", "the Sentinel has made another master")
            eventually(lambda: not isinstance(remote.read(START), Trouble), 20)
            assert stands(remote) == {"capacity_bytes": 48 * MB, "policy": "allkeys-lfu"}
            assert change(remote, capacity_bytes=40 * MB).is_success
            assert each(raws[1:]) == [40 * MB]


def test_by_tls_with_a_certificate_of_its_own(tmp_path):
    """The same files as a store's."""
    files = certificates(tmp_path)
    tls = {"ca_file": files.ca, "certificate_file": files.client, "key_file": files.client_key}
    with redis_by_tls(files) as port, opened(f"rediss://localhost:{port}/0", tls=tls) as remote:
        assert remote.refusal() == ""
        assert change(remote, capacity_bytes=40 * MB).is_success
        assert stands(remote)["capacity_bytes"] == 40 * MB


def test_a_dead_server_of_several_is_an_incident(agent, store, rounds):
    """The store's tier is only slow, for the others answer; the one that does not is named."""
    unwell = [{"server": "b:6379/0", "health": "dead", "reason": "told so"}]
    state = {"health": "slow", "reason": "1 of 2 servers: b:6379/0 is dead: told so", "servers": unwell}
    store.tells("get_status", lambda told: replaced(told, "tiers.remote", state))
    rounds(1)
    (incident,) = agent.history.journal.incidents()
    assert (incident["kind"], incident["message"]) == ("tier_dead", f"remote: {state['reason']}")
    unwell[0]["health"] = "ok"
    rounds(1)
    assert wrong(agent) == []
