"""The Redis that is managed: reading, setting, refusals, deadlines; against a real one."""

import contextlib
import socket
import time
from datetime import timedelta

import httpx
import pytest
import redis

from agent.fakes import START, after
from connector.stores import PATIENCE_S, at_best
from e2e.servers import redis_server
from tiertune_agent.collector.stores import Trouble
from tiertune_agent.demo.ports import free_port
from tiertune_agent.remote.managed import Remote, remote_of
from tiertune_agent.settings import AgentSettings, RemoteAccess, load
from tiertune_connector.access import PASSWORD
from tiertune_connector.documents import DocumentError

MB = 2**20


@contextlib.contextmanager
def opened(url, environment=None, *, timeout=PATIENCE_S, **access):
    """What answers has all the time that it takes, unless a test bounds it: a busy machine is no slow remote."""
    remote = Remote(RemoteAccess(url=url, timeout=timeout, **access), lambda: 0.0, environment or {})
    try:
        yield remote
    finally:
        remote.close()


@pytest.fixture(scope="module")
def server():
    with redis_server(maxmemory="64mb") as started:
        yield started


@pytest.fixture
def remote(server):
    with opened(server.url) as made:
        yield made


def stands(remote):
    return remote.tuning()["remote"]


def change(remote, **values):
    document = remote.tuning()
    wanted = {**document, "remote": {**document["remote"], **values}}
    return remote.put_tuning(wanted, expected=document["version"], key="key")


def test_a_window_is_as_long_as_it_was_though_the_clock_was_set(server):
    """A day that was never there pays no rent."""
    steady = iter((100.0, 115.0, 130.0))
    remote = Remote(RemoteAccess(url=server.url, timeout=PATIENCE_S), lambda: next(steady), {})
    try:
        told = [remote.read(after(days=days)).windows for days in (0, 1, 0)]
    finally:
        remote.close()
    assert [[(window.start, window.seconds) for window in windows] for windows in told] == [
        [],
        [(after(days=1, seconds=-15), 15.0)],
        [(START - timedelta(seconds=15), 15.0)],
    ]


def test_it_tells_what_is_set_and_held(remote):
    """Capacity and policy as a tuning document; bytes held and keys evicted as a tier's state."""
    change(remote, capacity_bytes=64 * MB, policy="allkeys-lru")
    snapshot = remote.read(START)
    assert snapshot.tuning["remote"] == {"capacity_bytes": 64 * MB, "policy": "allkeys-lru"}
    state = snapshot.status["tiers"]["remote"]
    assert (state["health"], state["capacity_bytes"]) == ("ok", 64 * MB)
    assert state["resident_bytes"] > 0
    assert state["evicted_keys"] == 0


def test_nothing_to_hold_is_not_no_bound(remote, server):
    """Redis takes maxmemory 0 for no bound: a capacity of zero is the least there is, and no bound reads as none."""
    change(remote, capacity_bytes=0)
    with redis.Redis.from_url(server.url) as raw:
        assert raw.config_get("maxmemory")["maxmemory"] == "1"
        assert stands(remote)["capacity_bytes"] == 0
        raw.config_set("maxmemory", 0)
        assert stands(remote)["capacity_bytes"] is None


def test_what_redis_refuses_is_told(remote):
    """A policy that there is not: 422 with Redis's own words."""
    answer = change(remote, policy="allkeys-best")
    assert answer.status_code == 422
    assert "maxmemory-policy" in answer.json()["message"]


@pytest.mark.parametrize(
    "acl",
    ["~* +@all -config", "~* +@all -config|set", "~* +ping"],
    ids=["no CONFIG", "CONFIG GET only", "nothing"],
)
def test_a_redis_that_lets_nobody_tune_it_is_found_out_before(server, acl):
    """A user who may not set: refused by name, without setting anything."""
    with redis.Redis.from_url(server.url) as raw:
        raw.execute_command("ACL", "SETUSER", "agent", "reset", "on", ">secret-word", *acl.split())
    with opened(server.url.replace("//", "//agent@"), {PASSWORD: "secret-word"}) as remote:
        assert "refuses CONFIG" in remote.refusal()
        assert "secret-word" not in remote.refusal()


def test_the_rights_that_the_manual_names_are_enough(server):
    """A user with INFO, CONFIG GET and CONFIG SET, and nothing else, reads and sets."""
    with redis.Redis.from_url(server.url) as raw:
        rights = ["resetkeys", "-@all", "+info", "+config|get", "+config|set"]
        raw.execute_command("ACL", "SETUSER", "tuner", "reset", "on", ">secret-word", *rights)
    with opened(server.url.replace("//", "//tuner@"), {PASSWORD: "secret-word"}) as remote:
        assert remote.refusal() == ""
        assert change(remote, capacity_bytes=40 * MB).is_success
        assert stands(remote)["capacity_bytes"] == 40 * MB
        assert remote.url == server.url


def test_a_renamed_config_is_a_refusal():
    """As hosted services do it: the command does not exist."""
    with redis_server(options=["--rename-command", "CONFIG", ""]) as server, opened(server.url) as remote:
        assert "refuses CONFIG" in remote.refusal()


def test_one_that_may_be_tuned_is_left_as_it_is(remote):
    """The question whether it may be set changes nothing; one that is away is not refused: it may come."""
    before = stands(remote)
    assert remote.refusal() == ""
    assert stands(remote) == before
    with opened(f"redis://127.0.0.1:{free_port()}/0") as away:
        assert away.refusal() == ""


def test_a_password_comes_from_a_file_or_the_environment_and_is_nowhere_told(tmp_path):
    """With either it is let in, with a wrong one it is not; no message and no state has the password."""
    (tmp_path / "password").write_text("secret-word\n")
    with redis_server(options=["--requirepass", "secret-word"]) as server:
        with opened(server.url, password_file=tmp_path / "password") as remote:
            assert remote.read(START).tuning["remote"]["capacity_bytes"] == 64 * MB
        with opened(server.url, {PASSWORD: "secret-word"}) as remote:
            assert "secret-word" not in repr(remote.read(START))
        with opened(server.url, {PASSWORD: "wrong-word"}) as remote:
            told = remote.read(START)
            assert isinstance(told, Trouble)
            assert "wrong-word" not in told.message + remote.refusal()
            assert "refuses CONFIG" in remote.refusal()


def test_a_password_file_that_is_not_there_is_a_mistake_in_the_settings(tmp_path):
    """Exit 2, with the file to mend."""
    with pytest.raises(DocumentError, match="none: cannot be read: No such file"):
        Remote(RemoteAccess(url="redis://127.0.0.1:1/0", password_file=tmp_path / "none"), time.monotonic)
    with pytest.raises(DocumentError, match=r"remote\.tls: .*none: No such file"):
        Remote(RemoteAccess(url="rediss://127.0.0.1:1/0", tls={"ca_file": tmp_path / "none"}), time.monotonic)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("file:///srv/remote", "every store bounds by itself what it wrote"),
        ("redis://:word@host:6379/0", "leave the password out"),
        ("redis://host:6379/0?password=word", "leave the password out"),
        ("http://host", "expected a redis://"),
        ("redis://host:port/0", "ort"),
    ],
)
def test_an_address_that_cannot_be_managed_says_why(tmp_path, url, told):
    """A directory, a password in the address, no Redis: told with the place in the file."""
    path = tmp_path / "agent.yaml"
    path.write_text(f"stores: [{{url: 'http://127.0.0.1:7410'}}]\nremote: {{url: '{url}'}}\n")
    with pytest.raises(DocumentError, match=told) as caught:
        load(path)
    assert "word@" not in str(caught.value)


def test_files_lie_beside_the_settings(tmp_path):
    """A relative path starts at the file's folder, as all paths there."""
    path = tmp_path / "agent.yaml"
    remote = "{url: 'rediss+sentinel://host/chunks', password_file: secrets/redis, sentinel_password_file: s, "
    path.write_text(f"stores: [{{url: 'http://127.0.0.1:7410'}}]\nremote: {remote}tls: {{ca_file: ca.pem}}}}\n")
    found = load(path).remote
    assert (found.password_file, found.sentinel_password_file) == (tmp_path / "secrets/redis", tmp_path / "s")
    assert found.tls.ca_file == tmp_path / "ca.pem"
    assert isinstance(load(path), AgentSettings)


def test_to_manage_what_nobody_named_is_a_mistake():
    """The policy wants it managed and the settings name none: exit 2; not managed, none is needed."""
    with pytest.raises(DocumentError, match=r"policy.yaml:2:10: .* name no remote"):
        remote_of(None, time.monotonic, manages="policy.yaml:2:10")
    assert remote_of(None, time.monotonic, manages="") is None


def test_a_redis_that_hangs_costs_one_deadline():
    """It takes the connection and says nothing: trouble for the round, a store that is away for a change."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        with opened(url, timeout=0.1) as remote:

            def refused():
                began = time.monotonic()
                assert isinstance(remote.read(START), Trouble)
                with pytest.raises(httpx.TransportError):
                    remote.tuning()
                return time.monotonic() - began

            assert at_best(refused, 2)
