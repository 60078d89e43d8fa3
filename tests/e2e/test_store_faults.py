"""Faults around a store process: it hangs, is terminated, or has settings with which it cannot start."""

import time

import pytest

from connector.stores import STRIDE, Engine, at_best, chain, eventually
from e2e.store_child import Child, mapped, refused, stopped
from tiertune_connector.protocol.messages import Own

pytestmark = pytest.mark.slow


def test_a_store_that_hangs_stops_no_engine(home):
    """Calls return at once, whatever is unanswered; when it goes on it answers."""
    with Child(home) as store, Engine(store.socket) as engine:
        engine.put(chain("k", 3))
        with stopped(store.process):
            futures = []

            def longest() -> float:
                took = []
                for _ in range(200):
                    started = time.monotonic()
                    futures.append(engine.client.lookup("r", chain("k", 200), prompt_tokens=3200))
                    engine.client.tell(Own("r", 200, 0))
                    took.append(time.monotonic() - started)
                return max(took)

            assert at_best(longest, 1.0)
            assert not futures[-1].done() or futures[-1].result().tiers == []
        eventually(lambda: engine.client.connected and engine.get(chain("k", 3)) == 3)


def test_a_terminated_store_ends_cleanly_under_traffic(home):
    """Status 0, within seconds; its socket, its memory and its processes are gone."""
    with Child(home) as store, Engine(store.socket) as engine:
        engine.put(chain("k", 10))
        loaded = engine.load(chain("k", 10))
        store.process.terminate()
        assert store.process.wait(10) == 0
        assert not store.socket.exists()
        eventually(lambda: not engine.client.connected)
        assert engine.read(loaded) == 0
        assert "Traceback" not in store.log.read_text()


def test_a_second_store_is_refused_with_the_place(home):
    """Same socket, same state, same disk, same port: status 2, a message, and the first goes on."""
    disk = {"path": str(home / "disk"), "capacity": 0}
    (home / "other").mkdir()
    with Child(home, disk=disk) as store, Engine(store.socket) as engine:
        port = store.http.get("/v1/status") and int(str(store.http._http.base_url).rsplit(":", 1)[1].strip("/"))
        other = home / "other"
        assert f"{home}/s.sock: another store listens here already" in refused(other, socket=str(home / "s.sock"))
        assert f"{home}/state: another store uses this state directory" in refused(other, state_dir=str(home / "state"))
        assert f"{home}/disk: another store uses this disk directory" in refused(other, disk=disk)
        assert f"http 127.0.0.1:{port}: " in refused(other, http={"port": port})
        assert "Traceback" not in (other / "log").read_text()
        assert {path.name for path in other.rglob("*")} == {"store.yaml", "log"}
        engine.put_all(chain("k", 3))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"dram": {"capacity": "lots"}}, "store.yaml:1:"),
        ({"remote": {"url": "ftp://x"}}, "remote.url: expected a redis://"),
        ({"remote": {"url": "redis://h/0?socket_timeout=soon"}}, "remote.url: an address has no options"),
        ({"remote": {"url": "redis://h/0", "password_file": "none"}}, "/none: cannot be read: No such file"),
        ({"socket": "none/s.sock"}, "socket: there is no folder none: make it, or mend the path"),
        ({"state_dir": "/dev/null/state"}, "/dev/null/state: Not a directory"),
        ({"state_dir": "/proc/state"}, "/proc/state: No such file or directory: no folder can be made there"),
        ({"disk": {"path": "/proc"}}, "/proc/lock: No such file or directory: no file can be written there"),
        ({"dram": {"capacity": "9000TiB"}}, "dram.capacity: 9000.0 TiB are asked, the machine has"),
        ({"dram": {"capacity": "9000TiB"}}, "MiB are the most that fit"),
        ({"http": {"port": 0, "certificate_file": "none", "key_file": "none"}}, "are no certificate and key"),
    ],
)
def test_a_configuration_that_cannot_work_says_what_to_mend(home, more, message):
    """Status 2, no traceback, nothing left running, and no file or folder."""
    new = home / "a" / "b"
    folders = {"state_dir": f"{new}/state", "socket": f"{home}/s.sock", "disk": {"path": f"{new}/disk"}}
    told = refused(home, **(folders | more))
    assert message in told
    assert "Traceback" not in told
    assert {path.name for path in home.rglob("*")} == {"store.yaml", "log"}


def test_a_store_that_cannot_start_leaves_what_was_there(home):
    """Its name, its tuning, and what others have in the folders that it would have used."""
    with Child(home, name="") as store:
        name = store.http.get("/v1/status")["store"]
    (home / "disk").mkdir()
    (home / "disk" / "other").write_text("")
    (home / "state" / "http").unlink()  # as the next child does
    before = set(home.rglob("*"))
    refused(
        home, name="", disk={"path": str(home / "disk")}, http={"port": 0, "certificate_file": "n", "key_file": "n"}
    )
    assert set(home.rglob("*")) == before
    with Child(home, name="") as again:
        assert again.http.get("/v1/status")["store"] == name


@pytest.mark.parametrize("place", ["state_dir", "disk"])
def test_a_store_that_cannot_start_leaves_a_link_that_leads_nowhere(home, place):
    """To a disk that is not mounted yet: without it the next start would take a new folder in its place."""
    link = home / "link"
    link.symlink_to(home / "away")
    told = refused(home, **({"disk": {"path": str(link)}} if place == "disk" else {place: str(link)}))
    assert f"{link}: is there, and is no directory" in told
    assert link.is_symlink()


def test_memory_returns_to_the_machine_across_processes(home):
    """A smaller tuning unmaps segments in store and engine; the killed store's memory goes with its last engine."""
    with Child(home) as store, Engine(store.socket) as engine:
        eventually(store.has_memory)
        engine.put(chain("k", 64))
        engine.get(chain("k", 64))
        assert mapped(store.process.pid) == mapped() == 4 + 1  # and the index
        store.http.retune(tiers__dram__capacity_bytes=8 * STRIDE)
        eventually(lambda: mapped(store.process.pid) == mapped() == 1 + 1)
        store.kill()
        eventually(lambda: mapped() == 0)
