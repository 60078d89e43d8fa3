"""The namespaces that a store serves: who uses them, whose pools lend their share, what is known after a restart."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Container, Mapping
from dataclasses import dataclass

from tiertune_connector.sessions.session import Session
from tiertune_connector.state import Served, StateDir
from tiertune_connector.tiers.shares import Held, crowded
from tiertune_connector.tuning import LocalTier, Tuning
from tiertune_connector.units import Clock

log = logging.getLogger(__name__)
FILE = "namespaces.json"
LENT_AFTER_S = 3600.0
"""Unused for so long, a namespace lends: engines that merely restart find what they left."""
_PATIENCE_S = 1.0
"""Wait for others that save: a client gives up a store after five, and its slab may take two to open."""
_NOT_KEPT = "after a restart a flush by epoch may not know a namespace: %s"
_REMEMBERED = 1024
"""Namespaces, in use or latest: new weights come a few times a day."""


@dataclass(eq=False)
class Namespaces:
    """Thread-safe under ``lock``, which is the store's.

    ``clock`` gives monotonic seconds; with a ``state``, what was served is known after a restart.
    """

    lock: threading.RLock
    clock: Clock
    state: StateDir | None = None

    def __post_init__(self) -> None:
        self._saved = self.state.kept(FILE, dict[str, Served]) if self.state else {}
        self._served = OrderedDict(self._saved)
        self._saving = threading.Lock()
        self._sessions: list[Session] = []
        """May have ended since the last look."""
        self._used_at: dict[str, float] = {}
        self._started = self.clock()

    def join(self, session: Session) -> None:
        """A client uses its namespace until its session ends."""
        assert session.namespace is not None
        with self.lock:
            self._served[session.digest] = Served(session.namespace.model, session.namespace.epoch)
            self._served.move_to_end(session.digest)
            self._sessions.append(session)
            self._used_at[session.digest] = self.clock()
            if len(self._served) > _REMEMBERED:
                users = self._look()
                unused = (name for name in self._served if name not in users)
                del self._served[next(unused, next(iter(self._served)))]

    def keep(self) -> None:
        """Save what is new. Waits for the state directory; a failed write is logged, and tried again."""
        if not self._saving.acquire(timeout=_PATIENCE_S):  # who saves now goes on with what is new
            log.warning(_NOT_KEPT, "the state directory does not answer")
            return
        try:
            while self.state is not None and (served := self._known()) != self._saved:
                self.state.keep(FILE, served)
                self._saved = served
        except OSError as error:
            log.warning(_NOT_KEPT, error)
        finally:
            self._saving.release()

    def of(self, epoch: int, namespace: str | None = None) -> list[str]:
        """The namespaces of an epoch, or of these only the named one."""
        with self.lock:
            return [name for name, each in self._served.items() if each.epoch == epoch and namespace in (None, name)]

    def served(self, namespace: str) -> Served | None:
        """What is known of a namespace."""
        return self._served.get(namespace)

    def model(self, namespace: str) -> str:
        """A namespace's model name; empty if unknown."""
        served = self._served.get(namespace)
        return served.model if served else ""

    def lend(self, tiers: Mapping[LocalTier, Mapping[str, Held]], tuning: Tuning) -> bool:
        """Mark the pools that lend their share; True if shares are to be made anew.

        An unused namespace's pools lend at once if it holds nothing, else after a while, and then only those to which
        the tuning gives no capacity of their own. A pool that somebody uses no longer counts as found. Where nobody is
        nothing changes but by the tuning: engines that start anew find what they left, also in room that was lent.
        """
        with self.lock:
            users, anew = self._look(), False
            holding = {name for pools in tiers.values() for name, held in pools.items() if len(held.pool)}
            for tier, pools in tiers.items():
                own = {name for name in pools if tuning.pool(name, tier).capacity_bytes is not None}
                for name, held in pools.items():
                    free = name not in holding or (name not in own and self._long_unused(name))
                    lends = (free and name not in users) if users else (held.lends and name not in own)
                    empty = bool(users) and lends and held.allowed > 0 and not len(held.pool)
                    anew |= empty or lends is not held.lends
                    held.lends = lends
                    held.found = held.found and name not in users
                anew |= bool(users) and crowded(pools, own)
            return anew

    def known(self, namespace: str) -> bool:
        """Whether somebody uses a namespace, or has since the start, and `over` has not told it since."""
        return namespace in self._used_at

    def over(self, held: Container[str]) -> list[str]:
        """Namespaces not ``held``, and unused for so long that their pools would lend; each is told once."""
        with self.lock:
            users = self._look()
            names = [name for name in self._used_at if name not in users and name not in held]
            over = [name for name in names if self._long_unused(name)]
            for name in over:
                del self._used_at[name]
            return over

    def _known(self) -> dict[str, Served]:
        with self.lock:
            return dict(self._served)

    def _look(self) -> set[str]:
        """Note whose clients are there, or have left since the last look; those that are there are returned."""
        self._used_at |= dict.fromkeys((session.digest for session in self._sessions), self.clock())
        self._sessions = [session for session in self._sessions if not session.ended]
        return {session.digest for session in self._sessions}

    def _long_unused(self, name: str) -> bool:
        return self.clock() - self._used_at.get(name, self._started) >= LENT_AFTER_S
