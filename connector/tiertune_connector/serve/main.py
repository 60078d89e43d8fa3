"""``tiertune store serve``: builds a store from its settings, serves it, and ends cleanly."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from math import inf
from pathlib import Path

from tiertune_connector.addresses import listed, parse_addresses
from tiertune_connector.codec import Codec
from tiertune_connector.counters import Counters
from tiertune_connector.documents import DocumentError, where
from tiertune_connector.ending import Ending, leave, until_told
from tiertune_connector.httpd.serving import Serving, certificate
from tiertune_connector.profile.gpu import GpuSampler, find_nvml, stages_of
from tiertune_connector.serve import embedded
from tiertune_connector.serve.garbage import GarbageCollector
from tiertune_connector.serve.http import Http, guarded
from tiertune_connector.serve.server import Server
from tiertune_connector.serve.writes import Writes
from tiertune_connector.settings import RemoteSettings, StoreSettings
from tiertune_connector.slower.lane import HUNG_S, Lane
from tiertune_connector.slower.scrub import Scrubber
from tiertune_connector.state import StateDir
from tiertune_connector.store.control import Control, too_large
from tiertune_connector.store.tiered import TieredStore
from tiertune_connector.tiers.base import Tier
from tiertune_connector.tiers.directory import DirectoryTier
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.dram import DramTier
from tiertune_connector.tiers.linux import most_memory
from tiertune_connector.tiers.media import MEDIA
from tiertune_connector.tiers.redis import RedisTier
from tiertune_connector.tiers.segment import allow_descriptors
from tiertune_connector.tiers.spread import SpreadTier
from tiertune_connector.tuning import LOCAL
from tiertune_connector.units import format_size

log = logging.getLogger(__name__)
_SWITCH_INTERVAL_S = 0.0001  # CPython's 5 ms defeats millisecond tails
_TRY_DISK_EVERY_S = 30.0
_OPEN_DISK_S = 2.0
"""A new client waits no longer for its slab to open: it gives up a store after five."""
_LOOK_S = 0.05
_IDLE_TURN_S = 0.1
_HANGS_S = 2.0
"""Time for idle threads to end, once all is served and kept."""


class StartError(ValueError):
    """A store cannot start as configured: a path, a port, a socket that somebody else has."""


class StoreProcess:
    """A store with its socket, its HTTP and its state, from ``start`` to ``stop``."""

    def __init__(self, settings: StoreSettings, *, wrap_remote: Callable[[Tier], Tier] = lambda tier: tier) -> None:
        """StartError, StateError, OSError if the store cannot be built; ``wrap_remote`` may wrap the remote.

        What is made on disk for a store that never serves is removed again.
        """
        folder = settings.socket.parent  # the path may be mistyped, and engines look for it elsewhere
        if not folder.is_dir() and folder not in _folders(settings):
            raise StartError(f"socket: there is no folder {folder}: make it, or mend the path")
        self.counters = Counters()
        self._clock = time.monotonic
        self.idle_exit_s = settings.idle_exit
        self._tiers = settings.slower
        self._served = False
        with ExitStack() as undo:
            undo.callback(self._unmake, _missing(*_folders(settings)))
            files = _missing(*(settings.state_dir / name for name in ("name", "tuning.json", "http", "tiers", "lock")))
            self._state = StateDir(settings.state_dir)
            undo.callback(self._state.close)
            undo.callback(self._unmake, files)
            self.name = self._state.name(settings.name)
            listener = settings.http.listen()
            self.address = settings.http.address(listener)
            """Where HTTP is served."""
            undo.callback(listener.close)
            self.store = self._build(settings, wrap_remote, undo)
            undo.callback(self.store.close)
            probe_every_s = settings.remote.probe_every if settings.remote else _TRY_DISK_EVERY_S
            self.server = Server(self.store, settings.socket, self.counters, probe_every_s=probe_every_s)
            undo.callback(self.server.stop)
            self.gpus = GpuSampler(
                lambda: stages_of(
                    (session.gpus, self.store.accounts.stage(session.stage))
                    for session in self.server.sessions()
                    if session.gpus
                ),
                self.counters,
                clock=self._clock,
                nvml=find_nvml(),
            )
            self.control = Control(self.store, self._state)
            writes = Writes(self._state, lambda: datetime.now(UTC))
            http = Http(self.server, self.control, self._clock, gpus=lambda: self.gpus.state, writes=writes)
            served = guarded(http.application(), settings.http, self._clock)
            self._http = Serving(served, listener, certificate(settings.http))
            undo.callback(self._http.stop)
            self._undo = undo.pop_all()

    def _build(self, settings: StoreSettings, wrap_remote: Callable[[Tier], Tier], undo: ExitStack) -> TieredStore:
        kept, _ = self._state.load()
        had = self._state.tiers()
        new = [tier for tier in settings.slower if had is not None and tier not in had]
        first = settings.first_tuning()
        tuning = settings.fit(kept, new) if kept else first
        for tier in LOCAL:  # the settings count until the first change
            sizes = [format_size(each.capacity_bytes(tier)) for each in (tuning, first)]
            if tuning.capacity_bytes(tier) != first.capacity_bytes(tier):
                log.info("%s keeps the %s of its tuning, not the %s of the settings", tier, *sizes)
        if (most := most_memory()) < (wanted := tuning.tiers.dram.capacity_bytes):
            told = "dram is to have %s: this machine or container allows %s"
            log.warning(told, format_size(wanted), format_size(most))
        lanes: dict[str, Lane] = {}
        disk: DiskTier | None = None
        if settings.disk is not None:
            lock = _missing(settings.disk.path / "lock")
            disk = DiskTier(settings.disk.path, self._clock)
            undo.callback(disk.close)
            undo.callback(self._unmake, lock)
        asked = LOCAL if kept is None else [tier for tier in LOCAL if tier in new]
        if problems := [f"{tier}.capacity: {why}" for tier in asked if (why := too_large(tuning, tier, disk))]:
            raise DocumentError(problems)
        if kept and tuning != kept:
            told = (
                f"new here, and as in a first tuning: {', '.join(new)}"
                if new
                else "a tier or codec has gone, and is off"
            )
            log.warning("%s: the tuning is now at version %d", told, tuning.version)
        if disk is not None:
            disk.recover(tuning.tiers.disk.capacity_bytes, tuning.defaults.eviction)
            lanes["disk"] = Lane(disk, self.counters, self._clock, patience_s=_OPEN_DISK_S, hung_s=HUNG_S)
            undo.callback(lanes["disk"].close)
        remote: Tier | None = None
        if settings.remote is not None:
            codec = Codec(self._clock, self.counters)
            remote = remote_tier(settings.remote, self.name, self.counters, codec)
            undo.callback(remote.close)
            lanes["remote"] = self._remote_lane(remote, wrap_remote(remote), codec, settings.remote)
            undo.callback(lanes["remote"].close)
        store = TieredStore(
            self.name,
            tuning,
            dram=DramTier(segment_bytes=settings.dram.segment, clock=self._clock),
            disk=disk,
            directory=remote if isinstance(remote, DirectoryTier) else None,
            lanes=lanes,
            counters=self.counters,
            clock=self._clock,
            lease_s=settings.lease,
            state=self._state,
        )
        store.retune(tuning)
        return store

    def _remote_lane(self, remote: Tier, wrapped: Tier, codec: Codec, settings: RemoteSettings) -> Lane:
        lane = partial(Lane, wrapped, self.counters, self._clock, patience_s=settings.timeout)
        if settings.path is not None:
            return lane(hung_s=HUNG_S)
        return lane(codec=codec, spread=remote if isinstance(remote, SpreadTier) else None)

    def start(self) -> None:
        """Serve; OSError if another store listens on the socket, StartError if not all threads can be had."""
        disk = self.store.disk
        scrubbing = [Scrubber(disk, self.counters, self._clock).run] if disk else []
        try:
            self.server.start(self.gpus.run, *scrubbing)
            self._http.start()
        except RuntimeError as error:
            raise StartError(f"{error}: not all threads can be had") from error
        self._state.note("http", self.address + "\n")
        self.control.keep()  # not before: a start that is refused, for another mistake in the settings, changes nothing
        self._state.save_tiers(self._tiers)
        self._served = True
        log.info("store %s serves on %s, HTTP on %s", self.name, self.server.path, self.address)

    def stop(self) -> None:
        """End all that was started, and give everything back; a second call does nothing."""
        self._undo.close()

    def _unmake(self, made: Iterable[Path]) -> None:
        """Remove what a store made that never served; folders that hold other things stay."""
        for path in () if self._served else made:
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()


def _missing(*paths: Path) -> list[Path]:
    """The paths not there yet; a dangling link is there, as its disk may not be mounted yet."""
    return [path for path in paths if not os.path.lexists(path)]


def _folders(settings: StoreSettings) -> Iterator[Path]:
    """The folders that a store makes, each before its parent."""
    for folder in (settings.state_dir, *((settings.disk.path,) if settings.disk else ())):
        yield from (folder, *folder.parents)


def remote_tier(settings: RemoteSettings, writer: str, counters: Counters, codec: Codec) -> Tier:
    """The remote that its settings name; it may be away for now. DocumentError if a file cannot be read."""
    if settings.path is not None:
        return MEDIA[settings.medium](settings.path, writer=writer, capacity_bytes=settings.capacity)
    settings.check()
    servers: dict[str, Tier] = {
        address.place: RedisTier(address, writer=writer, timeout_s=settings.timeout, login=settings, codec=codec)
        for address in parse_addresses(listed(settings.url))
    }
    one = next(iter(servers.values()))
    return SpreadTier(servers, counters, patience_s=settings.timeout) if len(servers) > 1 else one


def run(process: StoreProcess) -> None:
    """Serve until SIGTERM, SIGINT or a lack of clients. For a process's main thread."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    allow_descriptors()
    with until_told() as ending:
        try:
            process.start()
            _wait(process, ending, GarbageCollector())
            log.info("store %s ends", process.name)
        finally:
            process.stop()


@dataclass(eq=False)
class IdleWatch:
    """When a store that nobody uses may end. Asked from time to time, with the number of clients."""

    after_s: float
    busy_at: float = 0.0
    asked: int | None = None
    """None: the first look counts as busy."""

    def over(self, now: float, *, clients: int, asked: int) -> bool:
        """Whether nobody was there for ``after_s``; a changed ``asked`` means that somebody is about to come."""
        if clients or asked != self.asked:
            self.busy_at, self.asked = now, asked
        return now - self.busy_at >= self.after_s


def _wait(process: StoreProcess, ending: Ending, garbage: GarbageCollector) -> None:
    """Wait for ``ending``, or until no client came for long enough, and then stop the store."""
    path, watch = process.server.path, IdleWatch(process.idle_exit_s or inf)

    def over() -> bool:
        return watch.over(time.monotonic(), clients=len(process.server.sessions()), asked=embedded.last_asked(path))

    while not ending.wait(_LOOK_S):  # a signal taken by another thread is seen when this one wakes
        garbage.tidy()
        if process.idle_exit_s and over():
            with embedded.turn(path, _IDLE_TURN_S) as had:  # whoever starts a store waits until this one is gone
                if had and over():
                    log.info("no client for %g s", process.idle_exit_s)
                    process.stop()
                    return


def serve(settings: StoreSettings) -> None:
    """Serve until told to end. StartError, StateError if the store cannot start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        run(StoreProcess(settings))
    except OSError as error:
        raise StartError(where(error)) from error
    leave(_HANGS_S)
