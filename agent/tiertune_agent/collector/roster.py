"""Which stores there are: from the settings, from a file that others write, and from resolved names."""

import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import datetime, timedelta
from pathlib import Path
from threading import Thread
from time import sleep
from urllib.parse import urlsplit

from tiertune_agent.collector.targets import StoreAddress, StoresFile
from tiertune_agent.followed import Followed
from tiertune_agent.records import Now
from tiertune_connector.documents import parse_yaml

LATE_S = 2.0
"""How long a look waits for the addresses of all names; later ones are left to the next look."""
GONE_AFTER = timedelta(hours=1)
"""How long an address that its name no longer has stays in the fleet, as a host that died is an incident."""
Resolve = Callable[[str, int], Collection[str]]
"""Gives the addresses of a name, for a port. OSError if it has none."""
FILE_PROBLEM, NAME_PROBLEM = "stores_file_invalid", "stores_unresolved"


def resolved(host: str, port: int) -> list[str]:
    """Addresses of a name, only of its first family, as a host has one of each. OSError if it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for family, *_, address in found if family == found[0][0]})


class Roster:
    """The stores, looked up anew in every window. Problems with a file or name are reported; what was known stays."""

    def __init__(
        self,
        stores: Sequence[StoreAddress] = (),
        file: Path | None = None,
        names: Sequence[str] = (),
        *,
        now: Now,
        resolve: Resolve = resolved,
        settle: Callable[[float], None] = sleep,
    ) -> None:
        """``names``: as ``http://name:port``. DocumentError if the ``file`` cannot be used."""
        self._fixed = stores
        self._file: Followed[Sequence[StoreAddress]] = Followed(file, _listed, (), settle)
        self._names = [_Name(url, resolve) for url in names]
        self._now = now
        self._told: dict[str, datetime] = {}
        self.stores: Mapping[str, StoreAddress] = {}
        """By address; first those of the settings and the file, last those that their names no longer have."""
        self.former: Collection[str] = ()
        """Addresses that their names no longer have."""
        self.look()

    def look(self) -> bool:
        """Look the stores up; returns whether they, or their order, have changed."""
        now, before = self._now(), self.stores
        fixed = {store.url: store for store in (*self._fixed, *self._file.look())}
        wait([name.ask() for name in self._names], LATE_S)
        told = {url for name in self._names for url in name.told()}
        self._told |= dict.fromkeys(told, now)
        self._told = {url: min(at, now) for url, at in self._told.items() if now - at < GONE_AFTER}
        self.former = self._told.keys() - told - fixed.keys()
        found = (*sorted(told), *sorted(self.former))
        self.stores = fixed | {url: StoreAddress(url=url) for url in found if url not in fixed}
        return list(self.stores.items()) != list(before.items())  # their order decides who is met first

    @property
    def unknown(self) -> list[str]:
        """Names that were never resolved: nobody knows which stores they have."""
        return [name.host for name in self._names if name.found is None]

    def leave(self, url: str) -> None:
        """Drop a former address whose store is at another one by now."""
        self._told.pop(url, None)

    def problems(self) -> dict[str, str]:
        """What is wrong, by kind of incident; empty: nothing."""
        names = "; ".join(name.problem for name in self._names if name.problem)
        return {FILE_PROBLEM: self._file.problem, NAME_PROBLEM: names}


class _Name:
    """A name's addresses as last resolved. Resolvers may be slow, so no look waits long for one."""

    def __init__(self, url: str, resolve: Resolve) -> None:
        parts = urlsplit(url)
        self.host, self._port = parts.hostname or "", parts.port or 0
        self._resolve = resolve
        self.found: Collection[str] | None = None
        """Addresses of its stores when it was last resolved; None: it never was."""
        self._asked: Future[Collection[str]] | None = None
        self.problem = ""

    def ask(self) -> Future[Collection[str]]:
        """Start to resolve the name, unless that is under way."""
        self._asked = self._asked or _beside(lambda: self._resolve(self.host, self._port))
        return self._asked

    def told(self) -> Collection[str]:
        """Addresses of its stores; those of the last time if there is no new answer."""
        asked = self.ask()
        if asked.done():
            self._asked = None
            try:
                hosts = [f"[{one}]" if ":" in one else one for one in asked.result()]
                self.found, self.problem = [f"http://{host}:{self._port}" for host in hosts], ""
            except (OSError, ValueError) as error:
                self.problem = f"{self.host}: {getattr(error, 'strerror', None) or error}"
        else:
            self.problem = f"{self.host}: no resolver answered within {LATE_S:.0f} s"
        return self.found or ()


def _beside(work: Callable[[], Collection[str]]) -> Future[Collection[str]]:
    """Run ``work`` on a thread that does not keep an ending process alive; the future has its result or exception."""
    made: Future[Collection[str]] = Future()

    def run() -> None:
        try:
            made.set_result(work())
        except Exception as error:  # noqa: BLE001 (whoever asked is told)
            made.set_exception(error)

    Thread(target=run, name="resolve", daemon=True).start()
    return made


def _listed(path: Path, text: str) -> tuple[StoreAddress, ...]:
    return parse_yaml(text, StoresFile, name=str(path)).stores
