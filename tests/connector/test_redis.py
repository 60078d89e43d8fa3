"""Redis as the remote: away, hung, restarted, full, evicting. A real server throughout."""

import signal
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace

import numpy as np
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from connector.stores import (
    A,
    B,
    amid,
    at_best,
    at_once,
    chain,
    eventually,
    payload,
    read_chunk,
    redis_tier,
    running,
    short_folder,
    view,
)
from e2e.servers import redis_server
from tiertune_agent.demo.ports import free_port
from tiertune_connector.chunk import HEADER_BYTES, NOBODY
from tiertune_connector.codec import Codec
from tiertune_connector.counters import Counters
from tiertune_connector.tiers import redis as module
from tiertune_connector.tiers.base import Outcome, Usage
from tiertune_connector.tiers.redis import WINDOW_BYTES, _leading

pytestmark = pytest.mark.real
PREFIX = b"tiertune:" + A.encode() + b":"
NAME = PREFIX + b"key"
NBYTES = 4 * WINDOW_BYTES + 100
TIMEOUT_S = 0.3


@pytest.fixture
def tier(server, raw):
    with opened(server.url) as tier:
        yield tier


@contextmanager
def opened(url, timeout_s=5.0, **more):
    tier = redis_tier(url, timeout_s=timeout_s, **more)
    yield tier
    tier.close()


@given(st.lists(st.booleans(), max_size=300))
def test_the_leading_run_is_found_with_few_questions(there):
    """Whatever is there behind it."""
    run = [*there, False].index(False)
    found, asked = questions(there)
    assert found == run
    assert asked <= 2 + len(there).bit_length()


@pytest.mark.parametrize(("gap", "most"), [(range(499, 500), 11), (range(1, 1000, 2), 7), (range(100, 900), 9)])
def test_what_a_question_finds_narrows_the_next_one(gap, most):
    """The server looks for each name, and serves nobody meanwhile: in all for no more than three times a prompt's."""
    names = []
    found, asked = questions([place not in gap for place in range(1000)], names)
    assert found == gap.start
    assert asked <= most
    assert sum(names) <= 3 * 1000


@pytest.mark.parametrize("run", [0, 1, 40, 63, 64])
def test_of_a_prompt_that_nobody_went_on_with_the_server_is_asked_twice_at_most(run):
    """Once, if it has nothing of it, or all: that is what most cold prompts wait for."""
    found, asked = questions([True] * run + [False] * (64 - run))
    assert (found, asked) == (run, 1 if run in (0, 64) else 2)


@contextmanager
def at_step(tier, number, act):
    """``act`` in the middle of an operation: when that many of its steps were taken."""
    check, steps = tier._check, iter(range(number + 1))

    def checked(until):
        if next(steps, None) == number:
            act()
        check(until)

    tier._check = checked
    yield
    tier._check = check


def questions(there, names=None):
    """How long the leading run is, and how many questions it took to find out; ``names`` gets how many each named."""
    asked = [] if names is None else names

    def here(start, stop):
        asked.append(stop - start)
        return sum(there[start:stop])

    return _leading(len(there), here), len(asked)


def write(tier, key, nbytes=NBYTES):
    return tier.write(A, key, view(payload(key, nbytes)), NOBODY)


def read(tier, key, nbytes=NBYTES):
    return read_chunk(tier, A, key, nbytes)[0]


@pytest.mark.parametrize("nbytes", [1, WINDOW_BYTES - 1, WINDOW_BYTES, WINDOW_BYTES + 1, 3 * WINDOW_BYTES])
def test_chunks_of_any_number_of_windows(tier, raw, nbytes):
    """What is in Redis is one key, without an expiry, and nothing beside it."""
    assert write(tier, b"key", nbytes) is Outcome.OK
    assert read(tier, b"key", nbytes) is Outcome.OK
    assert [raw.ttl(name) for name in raw.keys()] == [-1]  # noqa: SIM118 (a command)
    out, windows = np.zeros(nbytes, np.uint8), []
    assert tier.read(A, b"key", view(out), windows.append)[0] is Outcome.OK
    assert windows == [*range(WINDOW_BYTES, nbytes, WINDOW_BYTES), nbytes], "each is told when it has come"


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 64, 100])
def test_present_finds_every_length_in_few_round_trips(tier, raw, length):
    """A binary search: the run's length is exact, and most questions are one command."""
    keys = chain("k", 100)
    for key in [*keys[:length], *keys[length + 1 :]]:
        raw.set(PREFIX + key, b"x")
    raw.config_resetstat()
    assert tier.present(A, keys) == (Outcome.OK, length)
    assert raw.info("commandstats")["cmdstat_exists"]["calls"] <= 9


def test_a_server_that_is_away_is_an_outcome_at_once():
    """Every operation says error; nothing raises, nothing waits."""
    with opened(f"redis://127.0.0.1:{free_port()}/0") as tier:

        def refused():
            started = time.monotonic()
            assert tier.present(A, [b"key"]) == (Outcome.ERROR, 0)
            assert read(tier, b"key") is Outcome.ERROR
            assert write(tier, b"key") is Outcome.ERROR
            assert tier.flush() == (Outcome.ERROR, 0)
            assert tier.usage() == Usage(None, None, None), "what nobody told is not nothing"
            return time.monotonic() - started

        assert at_best(refused, 2.0)


def test_a_hung_server_is_a_time_out_and_works_when_it_goes_on(server, raw):
    """An outcome within the time-out; the connection that hung is not used again."""
    with opened(server.url, timeout_s=TIMEOUT_S) as tier:
        eventually(lambda: write(tier, b"key") is Outcome.OK)
        server.process.send_signal(signal.SIGSTOP)
        try:
            for operation in (
                lambda: tier.present(A, [b"key"])[0],
                lambda: read(tier, b"key"),
                lambda: write(tier, b"other"),
                lambda: tier.flush()[0],
            ):

                def timed_out(operation=operation):
                    started = time.monotonic()
                    assert operation() is Outcome.TIMEOUT
                    return time.monotonic() - started

                assert at_best(timed_out, 2 * TIMEOUT_S + 0.2)
        finally:
            server.process.send_signal(signal.SIGCONT)
        eventually(lambda: read(tier, b"key") is Outcome.OK)
        eventually(lambda: write(tier, b"other") is Outcome.OK)


def test_a_slow_server_cannot_stretch_an_operation(tier, monkeypatch):
    """Many commands, each within its time-out, do not add up to more than twice it."""
    now = iter(range(1000))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    tier._timeout_s = 1.0
    assert write(tier, b"key", 8 * WINDOW_BYTES) is Outcome.TIMEOUT
    tier._timeout_s = 1000.0
    assert write(tier, b"key", 8 * WINDOW_BYTES) is Outcome.OK
    tier._timeout_s = 1.0
    assert read(tier, b"key", 8 * WINDOW_BYTES) is Outcome.TIMEOUT


@pytest.mark.parametrize(("took_s", "outcome"), [(1.9, Outcome.OK), (2.1, Outcome.TIMEOUT)])
def test_a_long_chunk_may_take_longer(tier, took_s, outcome, monkeypatch):
    """Eight of 16 MiB at a time, for several hosts, may be more than a link carries in a second: that is no fault."""
    assert write(tier, b"there", 16 * WINDOW_BYTES) is Outcome.OK
    tier._timeout_s = 1.0
    for operation, key in ((read, b"there"), (write, b"key")):
        times = iter([0.0])
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda times=times: next(times, took_s)))
        assert operation(tier, key, 16 * WINDOW_BYTES) is outcome


def test_a_restarted_server_is_used_again():
    """Empty, as it has no persistence; nobody has to reconnect by hand."""
    port = free_port()
    with opened(f"redis://127.0.0.1:{port}/0") as tier:
        with redis_server(port=port):
            assert write(tier, b"key") is Outcome.OK
        assert read(tier, b"key") is Outcome.ERROR
        with redis_server(port=port):
            assert read(tier, b"key") is Outcome.MISS
            assert write(tier, b"key") is Outcome.OK
            assert read(tier, b"key") is Outcome.OK


def test_eviction_under_maxmemory_takes_whole_chunks_only():
    """A server that evicts all the time gives whole chunks and misses, and no chunk that is there in part."""
    with redis_server(maxmemory="48mb") as server, opened(server.url) as tier:
        keys = chain("k", 30)

        def storing(part: int, _: threading.Event) -> None:
            for key in keys[part::3]:
                assert write(tier, key) in (Outcome.OK, Outcome.FULL)

        with amid(storing, 3):
            outcomes = [read(tier, key) for _ in range(3) for key in keys]
        outcomes += [read(tier, key) for key in keys]
        assert set(outcomes) == {Outcome.OK, Outcome.MISS}
        with redis.Redis.from_url(server.url) as raw:
            assert raw.info("stats")["evicted_keys"] > 0
            assert {raw.strlen(name) for name in raw.scan_iter(PREFIX + b"*")} == {NBYTES + 256}


@pytest.mark.parametrize("step", range(8))
def test_nothing_is_visible_before_all_of_it_is_written(tier, raw, step):
    """Whenever the server is asked meanwhile: it comes at once. A writer that dies then leaves nothing."""
    seen = []

    def dies():
        seen.append(raw.dbsize())
        raise KeyboardInterrupt

    with at_step(tier, step, dies), suppress(KeyboardInterrupt):
        write(tier, b"key", 6 << 20)
    assert seen == [0]
    assert tier.present(A, [b"key"]) == (Outcome.OK, 0)
    assert raw.dbsize() == 0
    assert write(tier, b"key") is Outcome.OK


@pytest.mark.parametrize("step", [1, 2, 4, 7])
@pytest.mark.parametrize("operate", [read, write])
def test_a_connection_that_breaks_ends_the_operation(tier, raw, operate, step):
    """Wherever it does; the next one has a new connection."""
    key = b"here" if operate is read else b"key"
    write(tier, b"here", 6 << 20)

    def cut():
        raw.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    with at_step(tier, step, cut):
        assert operate(tier, key, 6 << 20) is Outcome.ERROR
    assert operate(tier, key, 6 << 20) is Outcome.OK
    assert read(tier, key, 6 << 20) is Outcome.OK


def test_a_write_that_another_one_overtakes_changes_nothing(tier, raw):
    """What came first stays as it is."""
    with at_step(tier, 3, lambda: raw.set(NAME, b"first")):
        assert write(tier, b"key") is Outcome.OK
    assert raw.get(NAME) == b"first"


def test_a_chunk_that_left_and_came_back_during_a_read_is_a_miss(tier, raw):
    """Not damage: what came back is whole, and stays. Windows that were asked for and not read disturb nobody."""
    nbytes = 8 * WINDOW_BYTES
    write(tier, b"key", nbytes)
    whole, unfit = raw.get(NAME), tier._unfit

    def back(*told):
        raw.set(NAME, whole)
        return unfit(*told)

    tier._unfit = back
    with at_step(tier, 12, lambda: raw.delete(NAME)):
        assert read(tier, b"key", nbytes) is Outcome.MISS
    assert read(tier, b"key", nbytes) is Outcome.OK


@pytest.mark.parametrize("step", [6, 12])
@pytest.mark.parametrize("codec", ["raw", "lz4"])
def test_a_chunk_that_another_one_replaced_during_a_read_is_a_miss(server, tier, raw, codec, step):
    """Not damage: engines that compute the same prompt get other bytes now and then, and what they wrote is whole."""
    nbytes = 8 * WINDOW_BYTES
    coding = Codec(time.monotonic, Counters())
    coding.writes = codec
    with opened(server.url, codec=coding) as other:
        assert other.write(A, b"key", view(np.zeros(nbytes, np.uint8)), NOBODY) is Outcome.OK
        theirs = raw.getdel(NAME)
        write(tier, b"key", nbytes)
        with at_step(tier, step, lambda: raw.set(NAME, theirs)):
            assert read(tier, b"key", nbytes) is Outcome.MISS
        assert raw.get(NAME) == theirs
        out = np.ones(nbytes, np.uint8)
        assert other.read(A, b"key", view(out))[0] is Outcome.OK
        assert not out.any()


@pytest.mark.parametrize("left", [1, 255, 256, 257, 256 + WINDOW_BYTES, 256 + NBYTES - 1, 256 + NBYTES + 1])
def test_a_chunk_of_another_length_is_damage_and_leaves(tier, raw, left):
    """One that is too long is read as it should be: its own part of it is whole."""
    write(tier, b"key")
    value = (raw.get(NAME) + b"x")[:left]
    raw.set(NAME, value)
    longer = left > 256 + NBYTES
    assert read(tier, b"key") is (Outcome.OK if longer else Outcome.CORRUPT)
    assert raw.exists(NAME) == longer


@pytest.mark.parametrize(("namespace", "key"), [(A, "two"), (B, "one")], ids=["another key", "another namespace"])
def test_a_value_under_another_name_is_damage_and_leaves(tier, raw, namespace, key):
    """It is whole, and not the chunk that is asked for."""
    assert write(tier, b"one", 5000) is Outcome.OK
    raw.copy(f"tiertune:{A}:one", f"tiertune:{namespace}:{key}")
    assert read_chunk(tier, namespace, key.encode(), 5000)[0] is Outcome.CORRUPT
    assert not raw.exists(f"tiertune:{namespace}:{key}")


def test_a_full_server_that_does_not_evict_is_full_and_keeps_no_remains():
    """Out of memory is an outcome of its own."""
    with redis_server(maxmemory="16mb", policy="noeviction") as server, opened(server.url) as tier:
        outcomes = [write(tier, key) for key in chain("k", 8)]
        assert set(outcomes) == {Outcome.OK, Outcome.FULL}
        with redis.Redis.from_url(server.url) as raw:
            assert raw.dbsize() == outcomes.count(Outcome.OK)


def test_a_connection_is_kept_over_what_is_refused_for_want_of_room():
    """Who measures a server by what it refuses would else measure a new connection's begin."""
    with redis_server(maxmemory="1") as server, opened(server.url) as tier, redis.Redis.from_url(server.url) as raw:
        outcomes = [write(tier, key) for key in chain("k", 1)]
        before = raw.info("stats")["total_connections_received"]
        outcomes += [write(tier, key) for key in chain("k", 3)]
        assert set(outcomes) == {Outcome.FULL}
        assert raw.info("stats")["total_connections_received"] == before
        assert tier.present(A, chain("k", 3)) == (Outcome.OK, 0)


@pytest.mark.parametrize("count", [1, 2])
def test_servers_sized_to_nothing_tell_what_a_fetch_would_take(home, count):
    """They keep no probe that could be read; whether they are worth a size again depends on it."""
    with ExitStack() as stack:
        servers = [stack.enter_context(redis_server(maxmemory="1")) for _ in range(count)]
        urls = [server.url for server in servers]
        store = stack.enter_context(running(home, remote={"url": urls if count > 1 else urls[0], "probe_every": 0.1}))
        eventually(lambda: "remote" in store.store.health.costs({}, 0))
        assert [server.dbsize() for server in map(redis.Redis.from_url, urls)] == count * [0]


def test_many_threads_share_the_connections(server, raw):
    """More threads than connections: all are served."""
    with opened(server.url, connections=3) as tier:
        keys, wrong = chain("k", 16), []

        def work(number: int) -> None:
            outcomes = [operate(tier, keys[number], 9000) for _ in range(5) for operate in (write, read)]
            wrong.extend(outcome for outcome in outcomes if not outcome.kept)

        at_once(work, 16)
        assert wrong == []


def test_chunks_go_by_a_socket_of_the_host():
    """In as many windows. It holds more than Linux gives one by itself: we would sleep whenever that is full."""
    with (
        short_folder() as folder,
        redis_server(options=["--unixsocket", str(folder / "r.sock")]),
        opened(f"unix://{folder / 'r.sock'}") as tier,
    ):
        for nbytes in (1, 255, NBYTES, 7 * WINDOW_BYTES):
            assert write(tier, b"%d" % nbytes, nbytes) is Outcome.OK
            assert read(tier, b"%d" % nbytes, nbytes) is Outcome.OK
        assert read(tier, b"none") is Outcome.MISS
        assert tier.flush() == (Outcome.OK, 4)
        with tier._wire(time.monotonic() + 5) as wire, socket.socket(socket.AF_UNIX) as usual:
            rooms = [each.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for each in (wire.sock, usual)]
        assert rooms[0] >= 2 * rooms[1]


def test_other_users_of_the_server_are_left_alone(tier, raw):
    """A flush of everything drops chunks, not other keys."""
    raw.set(b"somebody", b"else")
    raw.set(b"tiertune:writing:now", b"half", ex=60)
    raw.hset(b"tiertune:agents:known", "a", "b")
    write(tier, b"key")
    assert tier.flush(tenant=b"t" * 16) == (Outcome.OK, 0)
    assert tier.flush() == (Outcome.OK, 1)
    assert raw.get(b"somebody") == b"else"
    assert raw.exists(b"tiertune:writing:now")
    assert raw.exists(b"tiertune:agents:known")


@pytest.mark.parametrize("tenant", [None, NOBODY.tenant])
def test_a_flush_drops_many_chunks_at_a_time(tier, raw, tenant):
    """A thousand with one command, and not with a round trip for each."""
    names = [PREFIX + b"%d" % number for number in range(2500)]
    write(tier, b"key")
    header = raw.getrange(NAME, 0, HEADER_BYTES - 1)
    raw.mset(dict.fromkeys(names, header))
    raw.config_resetstat()
    assert tier.flush(tenant=tenant) == (Outcome.OK, 2501)
    assert raw.info("commandstats")["cmdstat_unlink"]["calls"] == 3
