"""The store that the first engine starts: one for all, and gone when nobody needs it."""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager, suppress
from errno import EACCES
from pathlib import Path
from unittest.mock import Mock

import pytest

from connector.stores import NAMESPACE, Engine, chain, eventually
from tiertune_connector.client import link as links
from tiertune_connector.protocol.frames import Frames
from tiertune_connector.protocol.messages import Request, Welcome
from tiertune_connector.serve import embedded
from tiertune_connector.serve.main import IdleWatch
from tiertune_connector.vllm.joining import join
from tiertune_connector.vllm.settings import parse

DRAM = 4 << 20
ENSURE = """
import sys
from pathlib import Path
from tiertune_connector.serve import embedded
print("ready", flush=True)
sys.stdin.readline()
embedded.IDLE_EXIT_S = float(sys.argv[2])
sys.exit(not embedded.ensure(Path(sys.argv[1]), dram_bytes=4 << 20))
"""


@pytest.fixture
def path(home):
    """A socket; whoever serves there in the end is ended."""
    path = home / "s.sock"
    yield path
    if (pid := served_by(path)) is not None:
        os.kill(pid, signal.SIGTERM)
        eventually(lambda: gone(pid))


def served_by(path: Path) -> int | None:
    """The process that listens there."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return None
        return struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"  # whoever adopted it is to blame


def log(path: Path) -> str:
    return (Path(f"{path}.state") / "store.log").read_text()


@pytest.mark.slow
def test_racing_engines_start_one_store_which_ends_when_they_are_gone(path):
    """Two processes at once, then a client; the store is no child of theirs, and leaves no socket and no process."""
    command, pipe = [sys.executable, "-c", ENSURE, str(path), "5"], subprocess.PIPE
    racers = [subprocess.Popen(command, stdin=pipe, stdout=pipe) for _ in range(2)]
    assert [racer.stdout.readline() for racer in racers] == [b"ready\n"] * 2
    for racer in racers:
        racer.stdin.close()
        racer.stdout.close()
    assert [racer.wait(60) for racer in racers] == [0, 0]
    eventually(lambda: " serves on " in log(path))  # it listens a moment before
    assert log(path).count(" serves on ") == 1
    pid = served_by(path)
    assert pid is not None
    assert os.getsid(pid) != os.getsid(0)
    assert int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) not in [r.pid for r in racers]
    with Engine(path) as engine:
        assert engine.connected
        keys = chain("shared", 3)
        engine.put_all(keys)
        assert engine.get(keys) == 3
    eventually(lambda: not path.exists() and gone(pid), 30)
    assert " no client for 5 s" in log(path)


@pytest.mark.slow
def test_a_store_that_is_killed_is_started_again(path):
    """Its socket is left behind, and answers nobody."""
    assert embedded.ensure(path, dram_bytes=DRAM)
    pid = served_by(path)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not embedded.answers(path))
    assert path.exists()
    assert embedded.ensure(path, dram_bytes=DRAM)
    assert served_by(path) not in (None, pid)


@pytest.mark.slow
def test_a_store_whose_folder_goes_serves_who_is_there_and_harms_no_later_one(home, monkeypatch):
    """Folders for temporary files get removed whole: it ends for want of clients alone, and leaves the next one be."""
    path, usual_s = home / "run" / "s.sock", embedded.IDLE_EXIT_S
    monkeypatch.setattr(embedded, "IDLE_EXIT_S", 5)
    assert embedded.ensure(path, dram_bytes=DRAM)
    monkeypatch.setattr(embedded, "IDLE_EXIT_S", usual_s)
    eventually(lambda: " serves on " in log(path))
    first = served_by(path)
    with Engine(path) as engine:
        path.parent.rename(home / "gone")
        assert embedded.ensure(path, dram_bytes=DRAM)
        eventually(lambda: " serves on " in log(path))
        second = served_by(path)
        assert second not in (None, first)
        keys = chain("kept", 3)
        engine.put_all(keys)
        assert engine.get(keys) == 3
    eventually(lambda: gone(first))
    assert served_by(path) == second
    os.kill(second, signal.SIGTERM)
    eventually(lambda: gone(second))


@pytest.mark.slow
def test_a_store_whose_folder_has_gone_ends_without_clients(home, monkeypatch):
    """As any other: nobody can come to it."""
    path = home / "run" / "s.sock"
    monkeypatch.setattr(embedded, "IDLE_EXIT_S", 3)
    assert embedded.ensure(path, dram_bytes=DRAM)
    eventually(lambda: " serves on " in log(path))
    pid, told = served_by(path), (Path(f"{path}.state") / "store.log").open()
    path.parent.rename(home / "gone")
    eventually(lambda: gone(pid))
    with told:
        assert "no client for 3 s" in (text := told.read())
    assert "cannot start" not in text


def test_a_lock_that_cannot_be_made_anew_ends_no_store(path):
    """As where a folder for temporary files was cleaned, and has no room: nobody asks for a store, nor takes turns."""
    path.parent.mkdir(exist_ok=True)
    lock = embedded.lock_path(path)
    lock.symlink_to(lock)
    assert embedded.last_asked(path) == 0
    with embedded.turn(path, 0.1) as had:
        assert had


@pytest.mark.slow
def test_a_store_that_cannot_start_is_told_of(path, caplog, monkeypatch):
    """The engine goes on without, at once, and its log has the store's own words."""
    monkeypatch.setattr(embedded, "SEGMENT_BYTES", 0)
    assert not embedded.ensure(path, dram_bytes=DRAM)
    assert re.search(r"dram.segment: Input should be greater than 0", caplog.text)


def test_a_long_log_begins_anew_with_the_next_store(path, monkeypatch):
    """Engines that crash for ever start one each time; the last but one is kept, as it may tell why."""
    monkeypatch.setattr(embedded, "START_S", 0.0)
    monkeypatch.setattr(subprocess, "run", Mock())
    folder = Path(f"{path}.state")
    folder.mkdir(mode=0o700)
    for said in ("a" * (embedded.MOST_LOG_BYTES + 1), "b" * embedded.MOST_LOG_BYTES):
        (folder / "store.log").write_text(said)
        embedded.ensure(path, dram_bytes=DRAM)
    assert log(path) == said
    assert (folder / "store.log.old").read_text().startswith("aa")


def test_a_store_that_the_shell_cannot_start_is_told_of(path, caplog, monkeypatch):
    """As where it may have no more processes: the engine goes on without a store."""
    monkeypatch.setattr(embedded, "_DETACHED", "exit 2")
    assert not embedded.ensure(path, dram_bytes=DRAM)
    assert "no store could be started" in caplog.text


@pytest.mark.parametrize(("mode", "user"), [(0o755, os.getuid()), (0o700, 4242)], ids=["open", "another's"])
def test_another_users_folder_is_not_trusted(home, monkeypatch, caplog, mode, user):
    """A folder for temporary files is everybody's: what lies under our name there must be ours alone."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    monkeypatch.setattr(os, "getuid", lambda: user)
    folder = home / "tiertune"
    folder.mkdir()
    folder.chmod(mode)
    assert not embedded.ensure(embedded.default_socket(), dram_bytes=DRAM)
    assert "is not a directory of this user's alone" in caplog.text


@pytest.mark.parametrize("there", [{}, {"store_dram": 0}], ids=["none can be started", "none is to be started"])
def test_another_users_store_is_told_nothing(home, monkeypatch, caplog, there):
    """Whoever was first to make our folder, and listens there, would get every chunk: he is hung up on."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    monkeypatch.setattr(links, "ROOT", -1)
    embedded.runtime_dir().mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(embedded.default_socket()))
        listening.listen()
        listening.settimeout(10)
        client = join(parse({"connect_timeout": "0s", **there}), NAMESPACE, chunk_bytes=64, engine="engine")
        try:
            for _ in range(2):  # whether somebody is there, it asks itself, too
                with listening.accept()[0] as caller:
                    assert caller.recv(1) == b""
        finally:
            client.close()
    assert "user 4242 should" in caplog.text


@pytest.mark.parametrize(
    ("there", "says"), [("nothing", "No such file or directory"), ("closed", "Permission denied"), ("older", "0.0.9")]
)
def test_an_engine_without_a_store_says_why(home, caplog, monkeypatch, there, says):
    """In one line: nobody listens, or it may not connect, or is told another protocol."""
    path = home / "s.sock"
    if there == "closed":  # to others than root, whom nothing is closed to
        monkeypatch.setattr(socket.socket, "connect", Mock(side_effect=PermissionError(EACCES, os.strerror(EACCES))))
    with socket.socket(socket.AF_UNIX) as listening, ExitStack() as stack:
        if there == "older":
            listening.bind(str(path))
            listening.listen()
            stack.enter_context(answering(listening, Welcome("boot", "protocol 1 is not served: this store has 0.0.9")))
        settings = {"socket": str(path), "connect_timeout": "1s" if there == "older" else "200ms"}
        join(parse(settings), NAMESPACE, chunk_bytes=64, engine="engine").close()
    (line,) = [each.getMessage() for each in caplog.records if each.name.startswith("vllm.")]
    assert str(path) in line
    assert says in line
    assert "recomputed" in line


@pytest.mark.parametrize("refusal", ["protocol 1 is not served: this store has 0.0.9", ""])
def test_once_a_store_that_refused_has_gone_another_is_started(path, monkeypatch, refusal):
    """After an upgrade the old one is still there. Once: another may refuse for the same reason, for ever."""
    monkeypatch.setattr(embedded, "ensure", ensure := Mock())
    monkeypatch.setattr(links, "_RECONNECT_S", 0.01)
    with ExitStack() as stack:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen()
            stores = {"socket": str(path), "store_dram": "4MiB", "connect_timeout": "100ms" if refusal else "30s"}
            with answering(listening, Welcome("boot", refusal)):
                client = join(parse(stores), NAMESPACE, chunk_bytes=64, engine="engine")
                stack.callback(client.close)
                eventually(lambda: client.boot_id or client.refusal)
                assert ensure.call_count == 1
        path.unlink()
        eventually(lambda: client.failure == "No such file or directory")
        eventually(lambda: ensure.call_count == (2 if refusal else 1))
        client.failure = ""
        eventually(lambda: client.failure)
    assert ensure.call_args_list == [((path,), {"dram_bytes": DRAM})] * (2 if refusal else 1)


@contextmanager
def answering(listening, welcome):
    """A store that says the same to all who come."""

    def serve():
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection:
                    frames = Frames(connection, Request)
                    if next(frames.receive(), None) is not None:
                        frames.send(welcome)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def test_who_names_a_socket_says_whose_store_it_is(home, monkeypatch):
    """It may be a service's, with a user of its own, in a folder that the operator has closed."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    assert embedded.owner(embedded.default_socket()) == os.getuid()
    assert embedded.owner(home / "store.sock") is None


def test_no_store_is_started_of_no_size(path):
    """`store_dram: 0` says never."""
    assert not embedded.ensure(path, dram_bytes=0)
    assert list(path.parent.iterdir()) == []


def test_a_new_size_comes_before_what_was_tuned(home):
    """Else an operator's change would do nothing; the same size keeps the tuning."""
    tuning = home / "tuning.json"
    embedded._configure(home / "s.sock", DRAM, home)
    for size, kept in ((DRAM, True), (2 * DRAM, False)):
        tuning.touch()
        config = embedded._configure(home / "s.sock", size, home)
        assert tuning.exists() is kept
        assert json.loads(config.read_text())["dram"]["capacity"] == size


def test_a_tuning_that_cannot_be_removed_is_told_of(path, caplog):
    """No store starts with what was tuned for another size; the settings of the last time stay for the next try."""
    state = path.with_name("s.sock.state")
    state.mkdir(mode=0o700)
    config = embedded._configure(path, DRAM, state)
    (state / "tuning.json").mkdir()
    assert not embedded.ensure(path, dram_bytes=2 * DRAM)
    assert f"no store could be started at {path}: " in caplog.text
    assert json.loads(config.read_text())["dram"]["capacity"] == DRAM


def test_spoilt_settings_of_the_last_time_are_written_anew(home):
    """A full disk, or a kill in the midst of writing, keeps no engine from its store; what was tuned stays."""
    (home / "store.yaml").write_text("")
    (home / "tuning.json").touch()
    config = embedded._configure(home / "s.sock", DRAM, home)
    assert json.loads(config.read_text())["dram"]["capacity"] == DRAM
    assert (home / "tuning.json").exists()


def test_the_runtime_folder_is_the_sessions_or_a_temporary_one(monkeypatch, home):
    """By the user's number where there is no session."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    assert embedded.runtime_dir() == home / "tiertune"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert embedded.runtime_dir().name == f"tiertune-{os.getuid()}"


def test_a_store_is_idle_only_without_clients_and_askers():
    """Whoever has just asked for a store is about to come."""
    watch = IdleWatch(60)
    assert not watch.over(59, clients=0, asked=0)
    assert not watch.over(70, clients=1, asked=0)
    assert not watch.over(129, clients=0, asked=0)
    assert not watch.over(130, clients=0, asked=1)
    assert not watch.over(189, clients=0, asked=1)
    assert watch.over(190, clients=0, asked=1)
