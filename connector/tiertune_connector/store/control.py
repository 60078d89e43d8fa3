"""The one place where a running store's tuning is checked, replaced and persisted."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tiertune_connector.codec import missing
from tiertune_connector.documents import FieldError, differences
from tiertune_connector.state import StateDir, body_digest, latest
from tiertune_connector.store.tiered import TieredStore
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.linux import memory_bytes, most_memory
from tiertune_connector.tuning import LOCAL, SLOWER, LocalTier, Tuning, parse_tuning
from tiertune_connector.units import format_size

_PATIENCE_S = 1.0
"""Wait for an earlier change to be kept: agents give up an answer after three."""
UNTIL = ", until the store is started anew"
UNCHANGED = "nothing was changed"


class VersionConflictError(Exception):
    """The change was made for another version of the tuning."""


class KeyReusedError(Exception):
    """The idempotency key belongs to another change."""


class NotKeptError(OSError):
    """The state directory could not be written; the message says why, and what is in force."""


@dataclass(eq=False)
class Control:
    """Applies tunings to a store, whole or not at all, and keeps them over restarts."""

    store: TieredStore
    state: StateDir

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        kept, self._changes = self.state.load()
        self._kept: Tuning | None = kept or self.tuning  # the settings count until the first change
        """What a restart has; None: nobody knows."""
        self._commanded: bool | None = None
        """The last bypass since a change began."""

    @property
    def tuning(self) -> Tuning:
        return self.store.tuning

    def put(self, document: Any, *, expected_version: int, key: str) -> Tuning:  # noqa: ANN401 (JSON)
        """Apply a tuning document made for ``expected_version``; returns the tuning in force.

        The same change under the same ``key`` is applied once, however often it is sent. A sender that lost the answer
        may look, and resend the change for the version that it made. FieldError names the wrong field; no error
        leaves anything changed.
        """
        body = body_digest(document)
        change = f"{expected_version} {body}"
        with self._alone(UNCHANGED):
            with self.store.dram.lock:  # a bypass shows in the version from then on, or is in time to be seen
                self._commanded = None
            if key in self._changes:
                known, present = self._changes[key], {"version": self.tuning.version}
                resent = known.endswith(f" {body}")  # is what it asked for still in force?
                if known != change and not (resent and parse_tuning(document | present) == self.tuning):
                    raise KeyReusedError("the Idempotency-Key was used for another change")
                return self.tuning
            if expected_version != self.tuning.version:
                raise VersionConflictError(f"the tuning is at version {self.tuning.version}")
            tuning = parse_tuning(document).model_copy(update={"version": expected_version + 1})
            check(self.store, tuning)
            check_sizes(self.store, tuning, self.tuning)
            changes = latest(self._changes | {key: change})
            self._keep(tuning, changes, UNCHANGED)
            self._changes = changes
            self._apply(tuning)
            return tuning

    def keep(self, otherwise: str = UNCHANGED) -> Tuning:
        """Have a restart find the tuning in force, which new settings may have changed; NotKeptError."""
        with self._alone(otherwise):
            tuning = self.tuning
            if tuning != self._kept:
                self._keep(tuning, self._changes, otherwise)
            return tuning

    def bypass(self, *, on: bool) -> Tuning:
        """Answer miss to everything, or serve again, at once; NotKeptError if a restart would forget that."""
        with self.store.dram.lock:  # at once: another change may hang in the state directory
            self._commanded = on
            if self.tuning.bypass != on:
                version = self.tuning.version + 1  # nobody may change what was there before
                self.store.retune(self.tuning.model_copy(update={"bypass": on, "version": version}))
        return self.keep(f"bypass is {'on' if on else 'off'}{UNTIL}")

    def _apply(self, tuning: Tuning) -> None:
        """Put a kept tuning in force. A bypass that was commanded meanwhile stays, as a later version if it differs."""
        with self.store.dram.lock:
            bypass, present = self._commanded, self.tuning.version
            if bypass is not None and (bypass != tuning.bypass or present >= tuning.version):
                version = max(tuning.version, present) + 1
                tuning = tuning.model_copy(update={"bypass": bypass, "version": version})
            self.store.retune(tuning)

    @contextmanager
    def _alone(self, otherwise: str) -> Iterator[None]:
        """Keep other changes out; NotKeptError if an earlier one hangs in the state directory."""
        if not self._lock.acquire(timeout=_PATIENCE_S):
            raise NotKeptError(f"{self.state.tuning_path}: an earlier change is still being written: {otherwise}")
        try:
            yield
        finally:
            self._lock.release()

    def _keep(self, tuning: Tuning, changes: Mapping[str, str], otherwise: str) -> None:
        """Persist a tuning; ``otherwise`` says what holds if that fails."""
        self._kept = None
        try:
            self.state.save(tuning, changes)
        except OSError as error:
            raise NotKeptError(f"{self.state.tuning_path}: {error.strerror or error}: {otherwise}") from error
        self._kept = tuning


def check(store: TieredStore, tuning: Tuning) -> None:
    """FieldError if this store cannot do what the tuning says: a knob must never be accepted without effect."""
    for tier in SLOWER:
        if tier not in store.lanes:
            for field, (_, off) in differences(tuning.document(), tuning.without(tier).document()):
                only = "null" if off is None else off
                raise FieldError(field, f"this store has no {tier} tier: it can only be {only}")
    codec = tuning.tiers.remote.codec
    if codec != "raw":
        coded = store.lanes["remote"].codec is not None
        told = missing(codec) if coded else "nothing but Redis keeps coded chunks: it can only be raw"
        if told:
            raise FieldError("tiers.remote.codec", told)


def check_sizes(store: TieredStore, tuning: Tuning, before: Tuning) -> None:
    """FieldError if a tier is to grow beyond what this machine could ever hold, or a pool beyond its tier.

    Sizes that do not change may stay: a tier may shrink below what its pools ask.
    """
    for tier in LOCAL:
        asked, field = tuning.capacity_bytes(tier), f"tiers.{tier}.capacity_bytes"
        if asked > before.capacity_bytes(tier) and (why := too_large(tuning, tier, store.disk)):
            raise FieldError(field, why)
        for digest in tuning.pools:
            own = tuning.pool(digest, tier).capacity_bytes
            if own is not None and own > asked and own != before.pool(digest, tier).capacity_bytes:
                message = f"{own} bytes are asked, {field} gives {asked} to all pools together"
                raise FieldError(f"pools.{digest}.{tier}.capacity_bytes", message)


def too_large(tuning: Tuning, tier: LocalTier, disk: DiskTier | None) -> str:
    """Why this machine could never hold what is asked of a tier; empty if it could. ``disk`` is that tier, if any."""
    asked, place = tuning.capacity_bytes(tier), "the machine"
    try:
        if tier == "dram":
            room, most = memory_bytes(), most_memory()
        elif disk is None:
            return ""
        else:
            place = f"the file system of {disk.root}"
            room = most = disk.room_bytes
    except OSError as error:
        return f"nobody knows what {place} has: {error.strerror}"
    told = f"{format_size(asked)} are asked, {place} has {format_size(room)}: {most >> 20}MiB are the most that fit"
    return told if asked > room else ""
