"""Redis as operators run it: a failover, a server of several lost, and users that may do little. Real servers."""

import logging
import re
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

import pytest
import redis

from connector.store.serving import evict_all
from connector.stores import PATIENCE_S, amid, chain, eventually
from e2e.redis_servers import redis_watched
from e2e.remote_stores import NBYTES, SECRET, TENANT, A, health, opened, read, serving, write, written
from e2e.servers import redis_server
from e2e.stalls import timed
from tiertune_connector.access import Login
from tiertune_connector.chunk import HEADER_BYTES
from tiertune_connector.settings import StoreSettings
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.redis import PREFIX, WINDOW_BYTES

pytestmark = pytest.mark.real
MANUAL = Path(__file__).parents[2] / "docs" / "remote.md"


# -- Sentinel


@pytest.mark.slow
def test_after_a_failover_a_store_goes_on_with_the_new_master():
    """The master is killed: loads end within their deadline as misses; then chunks are read and written there again."""
    with redis_watched() as watched, serving(watched.url) as (engine, http):
        keys = chain("k", 8)
        engine.put_all(keys)
        written(http)
        with redis.Redis(port=watched.replica.port) as replica:
            eventually(lambda: len(list(replica.scan_iter(PREFIX + b"[0-9a-f]*", count=100))) >= 8)
        evict_all(http)
        assert engine.find(keys) == ["remote"] * 8
        watched.master.process.kill()
        took_s, loaded = timed(lambda: engine.load(keys, deadline_s=1.0))
        assert took_s < 1.8
        assert set(loaded.outcomes) <= {"miss", "error", "late"}
        assert engine.read(loaded) == 0
        eventually(lambda: health(http)["health"] == "ok" and engine.find(keys) == ["remote"] * 8)
        assert http.total("tier_errors_total", tier="remote", reason="error") > 0
        assert engine.get(keys) == 8
        new = chain("new", 8)
        engine.put_all(new)
        written(http)
        evict_all(http)
        assert engine.get(new) == 8


@pytest.mark.slow
def test_a_failover_leaves_no_partial_chunk():
    """Threads write and read all the time while the master is killed: what the new master shows is whole."""
    with redis_watched() as watched, opened(watched.url, timeout_s=1.0) as tier:
        outcomes, reads = [], []

        def work(number, stop):
            for key in cycle(chain(f"thread-{number}", 200)):
                if stop.is_set():
                    return
                outcomes.append(write(tier, key))
                reads.append(read(tier, key))

        with amid(work, 3):
            eventually(lambda: len(outcomes) > 5)
            watched.master.process.kill()
            eventually(lambda: Outcome.ERROR in outcomes and all(outcome.kept for outcome in outcomes[-3:]))
        assert set(outcomes) <= {Outcome.OK, Outcome.THERE, Outcome.ERROR, Outcome.TIMEOUT, Outcome.FULL}
        assert Outcome.CORRUPT not in reads
        with redis.Redis(port=watched.replica.port) as raw:
            assert raw.info("replication")["role"] == "master"
            shown = list(raw.scan_iter(PREFIX + A.encode() + b":*", count=1000))
            assert {raw.strlen(name) for name in shown} == {NBYTES + HEADER_BYTES}
            keys = [name.removeprefix(PREFIX + A.encode() + b":") for name in shown]
        with opened(watched.url, timeout_s=PATIENCE_S) as patient:
            assert {read(patient, key) for key in keys} == {Outcome.OK}


@pytest.mark.slow
def test_why_there_is_no_master_is_told_sentinel_by_sentinel():
    """One is not there, one is no Sentinel, one watches no such service, or says that the master is down."""
    with redis_watched() as watched:
        (absent, sentinel), *_ = re.findall(r"//(.*),(.*)/chunks", watched.url)
        plain = f"127.0.0.1:{watched.replica.port}"
        with opened(f"redis+sentinel://{absent},{plain},{sentinel}/others/0") as tier:
            assert write(tier, b"key") is Outcome.ERROR
            assert re.fullmatch(
                rf"no master of 'others': Sentinel {absent}: Error 111 connecting to {absent}\. Connection refused\.; "
                rf"Sentinel {plain}: unknown command 'SENTINEL'.*; Sentinel {sentinel} watches no such service",
                tier.why,
            )
        watched.replica.process.kill()
        watched.master.process.kill()
        with opened(f"redis+sentinel://{sentinel}/chunks/0") as tier:
            down = f"no master of 'chunks': Sentinel {sentinel} says that 127.0.0.1:{watched.master.port} is down"
            eventually(lambda: write(tier, b"key") is Outcome.ERROR and tier.why == down)


# -- several servers


@pytest.mark.slow
def test_one_server_of_three_that_dies_costs_its_share_until_it_is_back():
    """Its chunks are misses, the others' are read; health names it; started again, it is used by itself."""
    with ExitStack() as stack:
        servers = {server.port: server for server in (stack.enter_context(redis_server()) for _ in range(3))}
        urls = [server.url for server in servers.values()]
        engine, http = stack.enter_context(serving(urls))
        keys = chain("k", 30)
        engine.put_all(keys)
        written(http)
        where = {}
        for port in servers:
            with redis.Redis(port=port) as raw:
                names = raw.scan_iter(PREFIX + b"[1-9a-f]*", count=1000)
                where |= {name.split(b":", 2)[2]: port for name in names}
        assert set(where) == set(keys)
        assert set(where.values()) == set(servers)
        evict_all(http)
        dead = where[keys[4]]
        servers[dead].process.kill()
        eventually(lambda: f"127.0.0.1:{dead}/0 is dead" in health(http)["reason"])
        assert health(http)["health"] == "slow"
        states = {one["server"]: one["health"] for one in health(http)["servers"]}
        assert states == {f"127.0.0.1:{port}/0": "dead" if port == dead else "ok" for port in servers}
        assert http.total("tier_server_health", server=f"127.0.0.1:{dead}/0", state="dead") == 1
        others = [key for key in keys if where[key] != dead]
        assert engine.get(others) == len(others)
        assert engine.find([keys[4]]) == []
        stack.enter_context(redis_server(port=dead))
        eventually(lambda: health(http)["health"] == "ok")
        engine.put_all([keys[4]])
        written(http)
        evict_all(http)
        assert engine.get(keys[4:5]) == 1
        assert not {"tier_resident_bytes", "tier_capacity_bytes", "tier_evictions_total"} & of_remote(http)


def of_remote(http):
    """Families in which a store tells something of the remote."""
    return set(re.findall(r'^tiertune_(\w+)\{[^}]*tier="remote"', http.text("/metrics"), re.MULTILINE))


# -- users


def rights():
    """Of the user that the manual writes down: keys and commands."""
    (line,) = re.findall(r"^user tiertune on #<[^>]*> (.*)$", MANUAL.read_text(), re.MULTILINE)
    return line.split()


def user(raw, words):
    raw.execute_command("ACL", "SETUSER", "tiertune", "reset", "on", f">{SECRET}", *words)


def everything(tier, raw):
    """What every operation of a store answers, also where a chunk was cut short, or is another's."""
    told = [write(tier, key) for key in (b"one", b"two", b"three")]
    told += [tier.present(A, [b"one", b"two", b"none"]), read(tier, b"one")]
    name = PREFIX + A.encode() + b":two"
    raw.set(name, raw.getrange(name, 0, WINDOW_BYTES + 100))
    told += [read(tier, b"two"), raw.exists(name)]
    return [*told, tier.flush(tenant=TENANT), tier.flush(), (tier.usage().resident_bytes or 0) > 0]


WORKS = [
    *[Outcome.OK] * 3,
    (Outcome.OK, 2),
    Outcome.OK,
    *(Outcome.CORRUPT, 0),
    *((Outcome.OK, 2), (Outcome.OK, 0)),
    True,
]


@pytest.fixture
def as_user(server, tmp_path):
    (tmp_path / "password").write_text(SECRET)
    url = server.url.replace("//", "//tiertune@")
    with opened(url, Login(password_file=tmp_path / "password")) as tier:
        yield tier


def test_a_store_works_with_the_rights_that_the_manual_names(as_user, raw):
    """Every operation, also the rare ones, with exactly those; and no key of anybody else."""
    user(raw, rights())
    assert everything(as_user, raw) == WORKS
    with pytest.raises(redis.exceptions.NoPermissionError):
        as_user._redis.getrange(b"somebody", 0, 1)


@pytest.mark.parametrize("command", [word for word in rights() if word.startswith("+")])
def test_the_manual_names_no_right_too_much(as_user, raw, command):
    """Without any one of them something does not work."""
    user(raw, [word for word in rights() if word != command])
    assert everything(as_user, raw) != WORKS


# -- passwords


def test_a_password_is_nowhere_told(server, raw, tmp_path, caplog):
    """Neither a right one nor a wrong one is in settings, status, metrics, health or logs; a wrong one is an error."""
    caplog.set_level(logging.DEBUG)
    user(raw, rights())
    url, file = server.url.replace("//", "//tiertune@"), tmp_path / "password"
    file.write_text(SECRET)
    with serving(url, password_file=file) as (engine, http):
        engine.put(chain("k", 3))
        written(http)
        assert raw.dbsize() >= 3
        file.write_text("another-secret-word")
        raw.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        eventually(lambda: health(http)["health"] == "dead")
        told = [http.text("/metrics"), str(http.get("/v1/status")), caplog.text]
        file.write_text(SECRET)
        eventually(lambda: health(http)["health"] == "ok")
        told += [str(http.get("/v1/status")), caplog.text]
    settings = StoreSettings.model_validate(
        {"socket": "/s", "state_dir": "/d", "dram": {"capacity": 0}, "remote": {"url": url, "password_file": file}}
    )
    assert not any("secret-word" in text for text in [*told, repr(settings), settings.model_dump_json()])
