"""A store process whose disk is full, broken or read-only, and a machine whose memory is short."""

import errno
import os
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from connector.stores import NAMESPACE, STRIDE, Engine, chain, eventually
from e2e.store_child import Child, refused
from tiertune_connector.units import format_size

pytestmark = pytest.mark.slow
SLOT = 4096 + STRIDE
"""What a chunk takes on disk."""

FAULTY = """
import errno, os, pathlib
flag = pathlib.Path({flag!r})
def spoilt(call):
    def checked(fd, *more):
        if flag.exists() and os.readlink(f"/proc/self/fd/{{fd}}").endswith(".slab"):
            raise OSError({number}, "a fault")
        return call(fd, *more)
    return checked
for name in {calls}:
    setattr(os, name, spoilt(getattr(os, name)))
"""
"""A disk whose operations fail as long as a file is there: no medium breaks on demand, and no other can be made
read-only while its files are open.
"""
WRITES = ("pwrite", "pwritev")
CALLS = ("pread", "preadv", *WRITES)


@contextmanager
def small_disk(path: Path, size: int):
    """A file system of its own, of so many bytes; skips where we may not mount."""
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", path], check=False, capture_output=True
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def put(store, engine, keys):
    """In pieces that the queue behind can take."""
    for start in range(0, len(keys), 10):
        engine.put_all(keys[start : start + 10])
        eventually(lambda: store.idle("disk"))


def dropped(store, reason):
    return store.http.total("write_behind_dropped_total", tier="disk", reason=reason)


def test_a_file_system_that_is_full_costs_chunks_and_has_room_again(home):
    """What is there is read whole, what does not fit is told as full; freed, it is used again; no restart."""
    capacity = {"capacity": 100 * SLOT}
    with (
        small_disk(home / "disk", 100 * SLOT) as path,
        Child(home, disk={"path": str(path), **capacity},
              remote={"url": f"file://{home}/remote", "probe_every": 0.5}) as store,
        Engine(store.socket) as engine,
    ):  # fmt: skip
        (path / "other").write_bytes(bytes(60 * SLOT))  # somebody else's
        store.http.retune(tiers__disk__write="commit", tiers__remote__write="off", tiers__remote__fetch="off")
        eventually(store.has_memory)
        keys = chain("k", 80)
        put(store, engine, keys)
        assert dropped(store, "full") > 10
        state, reason = store.told("disk")
        assert (state, reason.partition(":")[0]) == ("slow", "full")
        assert f"disk: slow: {reason}" in store.http.text("/healthz")
        store.empty()
        kept = [key for key in keys if engine.get([key])]
        assert 30 <= len(kept) < 60
        engine.put_all(chain("hot", 8))
        assert engine.get(chain("hot", 8)) == 8
        (path / "other").unlink()
        eventually(lambda: put(store, engine, chain(f"try{time.monotonic()}", 10)) or store.health("disk") == "ok")
        before = dropped(store, "full")
        put(store, engine, chain("after", 40))
        assert dropped(store, "full") == before
        store.empty()
        assert engine.get(chain("after", 40)) == 40
        assert store.http.total("internal_errors_total") == 0
        assert "Traceback" not in store.log.read_text()


def test_a_broken_disk_is_told_and_bypassed_until_it_is_well(home):
    """Input and output errors: the tier is dead, with its reason; DRAM serves; what it had is read again after that."""
    flag = home / "broken"
    first = FAULTY.format(flag=str(flag), number=errno.EIO, calls=CALLS)
    with (
        Child(home, first=first, disk={"path": str(home / "disk"), "capacity": 100 * SLOT},
              remote={"url": f"file://{home}/remote", "probe_every": 0.5}) as store,
        Engine(store.socket) as engine,
    ):  # fmt: skip
        store.http.retune(tiers__disk__write="commit", tiers__remote__write="off")
        eventually(store.has_memory)
        keys = chain("k", 40)
        put(store, engine, keys)
        store.empty()
        flag.touch()
        assert [engine.load([key]).outcomes for key in keys[:3]] == [["error"]] * 3
        assert store.http.total("tier_errors_total", tier="disk", operation="read", reason="error") == 3
        state, reason = store.told("disk")
        assert (state, "in a row ended in error: [Errno 5] a fault" in reason) == ("dead", True)
        assert "disk: dead: " in store.http.text("/healthz")
        engine.put_all(chain("hot", 20))
        assert engine.get(chain("hot", 20)) == 20
        flag.unlink()
        eventually(lambda: engine.get(keys[:1]) == 1)
        store.await_health("disk", "ok")
        assert [engine.get([key]) for key in keys] == [1] * 40, "an error drops nothing"
        assert store.http.total("internal_errors_total") == 0


def test_a_disk_that_turns_read_only_is_told_and_writes_to_it_end(home):
    """As a file system does that found itself damaged: told within some writes, DRAM serves, it is tried again."""
    flag = home / "read-only"
    first = FAULTY.format(flag=str(flag), number=errno.EROFS, calls=WRITES)
    disk, remote = {"path": str(home / "disk"), "capacity": 100 * SLOT}, {"url": f"file://{home}/remote"}
    with (
        Child(home, first=first, disk=disk, remote=remote | {"probe_every": 0.5}) as store,
        Engine(store.socket) as engine,
    ):
        store.http.retune(tiers__disk__write="commit", tiers__remote__write="off")
        eventually(store.has_memory)
        put(store, engine, chain("k", 10))
        flag.touch()
        rounds = []

        def told():  # every half second it is tried again
            rounds.append(chain(f"more-{len(rounds)}", 20))
            put(store, engine, rounds[-1])
            return store.told("disk")[0] == "dead" and dropped(store, "dead") > 0

        eventually(told)
        assert engine.get(rounds[-1]) == 20
        store.empty()
        eventually(lambda: engine.get(chain("k", 10)) == 10), "it can be read when it is tried again"
        flag.unlink()
        store.await_health("disk", "ok")
        put(store, engine, chain("after", 10))
        store.empty()
        assert engine.get(chain("after", 10)) == 10
        assert store.http.total("internal_errors_total") == 0


def test_a_store_ends_though_its_remote_hangs(home):
    """A file that nobody can open stands for a file server that does not answer: SIGTERM does not wait for it."""
    remote = {"url": f"file://{home}/remote", "timeout": 0.2}
    (home / "remote").mkdir()
    (key,) = chain("k", 1)
    name = key.hex()
    folder = home / "remote" / NAMESPACE.digest / name[-2:]
    folder.mkdir(parents=True)
    with Child(home, remote=remote) as store, Engine(store.socket) as engine:
        os.mkfifo(folder / name)
        eventually(lambda: engine.find([key]) == ["remote"])  # a busy machine may not find it in time
        assert engine.load([key], deadline_s=0.1).outcomes == ["late"]
        store.process.terminate()
        assert store.process.wait(15) == 0
        assert "ends though these hang: remote-read_0" in store.log.read_text()
    assert not store.socket.exists()


@pytest.mark.parametrize("fault", ["read-only", "a file", "too small"])
def test_a_disk_that_cannot_be_used_is_refused_at_the_start(home, fault):
    """Status 2, and what to mend: the place, or the size that is asked and the one that is there."""
    with small_disk(home / "disk", 1 << 20) as path:
        where, capacity = path, 400 * SLOT if fault == "too small" else 0
        if fault == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", path], check=True)
        elif fault == "a file":
            where = path / "file"
            where.write_text("precious")
        told = refused(home, disk={"path": str(where), "capacity": capacity})
        assert str(where) in told
        assert "Traceback" not in told
        assert "Errno" not in told
        if fault == "too small":
            assert f"disk.capacity: {format_size(400 * SLOT)} are asked" in told
            assert "has 1.0 MiB: " in told


def test_memory_that_runs_short_is_told_and_serving_goes_on(home):
    """A control group with little room: effective stays below what is wanted, nobody is killed; later it grows."""
    group = Path("/sys/fs/cgroup/memory") / f"tiertune-test-{home.name}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(256 << 20))
    except OSError as error:
        pytest.skip(f"no control group of memory can be made here: {error}")
    join = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
    wanted = 512 << 20
    try:
        with (
            Child(home, first=join, dram={"capacity": wanted, "segment": "16MiB"}) as store,
            Engine(store.socket) as engine,
        ):
            pools = lambda: next(iter(store.http.get("/v1/status")["pools"].values()))["dram"]  # noqa: E731
            eventually(lambda: pools()["effective"]["capacity_bytes"] > 32 << 20)
            keys = chain("k", 1000)
            for start in range(0, 1000, 100):
                engine.put_all(keys[start : start + 100])
            assert engine.get(keys) == 1000
            told = pools()
            assert told["effective"]["capacity_bytes"] < told["applied"]["capacity_bytes"] <= wanted
            stat = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
            used = int((group / "memory.usage_in_bytes").read_text()) - int(stat["total_inactive_file"])
            assert used < (256 - 32) << 20  # bursts have room
            (group / "memory.limit_in_bytes").write_text(str(1 << 30))
            eventually(store.has_memory, 20)
            assert engine.get(keys) == 1000
            assert store.http.total("internal_errors_total") == 0
    finally:
        eventually(lambda: (group / "cgroup.procs").read_text() == "")
        group.rmdir()
