"""Sources that keep their own connector: remembered, watched and advised on as stores are, but never changed."""

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

from tiertune_agent.collector.exported import ObservedRows
from tiertune_agent.collector.observer import Observer
from tiertune_agent.collector.stores import Heard, Trouble
from tiertune_agent.history.store import History
from tiertune_agent.incidents.seen import SeenWindows
from tiertune_agent.incidents.sources import incidents
from tiertune_agent.incidents.watch import messages
from tiertune_agent.records import Now, Snapshot, Window

LATELY = timedelta(minutes=10)
"""Windows younger than this are kept one by one."""


class Observing:
    """What the loop needs of observed sources. Nothing here can send them anything but questions."""

    def __init__(self, observer: Observer, history: History, exported: ObservedRows, now: Now) -> None:
        self._observer = observer
        self._history = history
        self._exported = exported
        self._now = now
        self._hour = SeenWindows(history, now)
        self._lately: dict[str, list[Window]] = {}

    @property
    def addresses(self) -> Mapping[str, str]:
        """The sources' names, by address."""
        return self._observer.addresses

    def collect(self, taken: Collection[str]) -> list[Heard]:
        """One answer per source; ``taken``: names that stores have. What a source reports is exported from now on."""
        answers = self._observer.collect(taken)
        for answer in answers:
            if isinstance(answer, Snapshot):
                self._exported.tell(answer.store, self._observer.rows(answer.store))
            else:
                self._exported.forget(self.addresses.get(answer.store, answer.store))  # one left out is told by address
        return answers

    def forget(self) -> None:
        """Drop it all: another agent leads, or did meanwhile."""
        self._observer.forget()
        self._exported.forget()
        self._hour.forget()
        self._lately.clear()

    def look(self, snapshots: Sequence[Snapshot], troubles: Sequence[Trouble]) -> None:
        """Open and close incidents; history must already have the snapshots."""
        hours = self._hour.heard(snapshots)
        found = {one.store: incidents(one, hours.get(one.store, ()), self._recent(one)) for one in snapshots}
        self._history.journal.tell_incidents(messages(snapshots, troubles, found), self._now())

    def close(self) -> None:
        self._observer.close()

    def _recent(self, snapshot: Snapshot) -> list[Window]:
        kept, since = self._lately.get(snapshot.store, []), self._now() - LATELY
        self._lately[snapshot.store] = [one for one in (*kept, *snapshot.windows) if one.start >= since]
        return self._lately[snapshot.store]
