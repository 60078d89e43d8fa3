"""``tiertune store serve``: builds a store from its settings, serves it, and ends cleanly."""

import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from urllib.parse import unquote, urlsplit

import uvicorn

from tiertune_connector.control import Control
from tiertune_connector.counters import Counters
from tiertune_connector.lane import Lane
from tiertune_connector.serve.http import application
from tiertune_connector.serve.server import Server
from tiertune_connector.settings import RemoteSettings, StoreSettings
from tiertune_connector.state import State
from tiertune_connector.store import TieredStore
from tiertune_connector.tiers.base import Tier
from tiertune_connector.tiers.directory import DirectoryTier
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.dram import DramTier
from tiertune_connector.tiers.redis import RedisTier

log = logging.getLogger(__name__)
_SWITCH_INTERVAL_S = 0.0005  # CPython's 5 ms defeats millisecond tails


class StoreProcess:
    """A store with its socket, its HTTP and its state, from ``start`` to ``stop``."""

    def __init__(self, settings: StoreSettings, *, wrap_remote: Callable[[Tier], Tier] = lambda tier: tier) -> None:
        """StateError if the state directory cannot be used. ``wrap_remote`` may put something around the remote."""
        self.counters = Counters()
        self._state = State(settings.state_dir)
        self.name = self._state.name(settings.name)
        tuning, _ = self._state.load()
        tuning = tuning or settings.first_tuning()
        clock = time.monotonic
        disk = DiskTier(settings.disk.path) if settings.disk else None
        lanes = {"disk": Lane(disk, self.counters, clock)} if disk else {}
        if disk is not None:
            disk.recover(tuning.tiers.disk.capacity_bytes, tuning.defaults.eviction)
        if settings.remote:
            lanes["remote"] = Lane(wrap_remote(remote_tier(settings.remote, self.name)), self.counters, clock)
        self.store = TieredStore(
            self.name,
            tuning,
            dram=DramTier(segment_bytes=settings.dram.segment, clock=clock),
            disk=disk,
            lanes=lanes,
            counters=self.counters,
            clock=clock,
            lease_s=settings.lease,
        )
        self.store.check(tuning)
        self.store.retune(tuning)
        probe_every_s = settings.remote.probe_every if settings.remote else 3600.0
        self.server = Server(self.store, settings.socket, self.counters, probe_every_s=probe_every_s)
        self.control = Control(self.store, self._state)
        app = application(self.server, self.control, self.counters, clock)
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
        self._http = uvicorn.Server(config)
        self._listener = _listen(settings.http.host, settings.http.port)
        self._thread = threading.Thread(target=self._http.run, args=([self._listener],), name="http", daemon=True)

    @property
    def address(self) -> str:
        """Where HTTP is served."""
        host, port = self._listener.getsockname()[:2]
        return f"http://{host}:{port}"

    def start(self) -> None:
        """Serve; OSError if another store listens on the socket."""
        self.server.start()
        self._thread.start()
        self._state.write("http", self.address + "\n")
        log.info("store %s serves on %s, HTTP on %s", self.name, self.server.path, self.address)

    def stop(self) -> None:
        self._http.should_exit = True
        self._thread.join(5)
        self._listener.close()
        self.server.stop()
        self.store.close()
        self._state.close()


def remote_tier(settings: RemoteSettings, writer: str) -> Tier:
    """The remote that an address names; it may be away, and come later."""
    parts = urlsplit(settings.url)
    if parts.scheme == "file":
        return DirectoryTier(Path(unquote(parts.path)), writer=writer, capacity_bytes=settings.capacity)
    return RedisTier(settings.url, writer=writer, timeout_s=settings.timeout)


def run(process: StoreProcess) -> None:
    """Serve until SIGTERM or SIGINT. For a process's main thread."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    ended = threading.Event()

    def end(_signal: int, _frame: FrameType | None) -> None:
        ended.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    process.start()
    ended.wait()
    log.info("store %s ends", process.name)
    process.stop()


def serve(settings: StoreSettings) -> None:
    """Serve until told to end. OSError, StateError, TuningError if that is not possible."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    run(StoreProcess(settings))


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"http {host}:{port}: {error.strerror}") from error
    return listener
