"""A fault that stops a tier's operations, writes of a lane, and what it counted."""

import threading

from connector.stores import A, counted, payload, view
from tiertune_connector.chunk import Origin
from tiertune_connector.counters import Counters
from tiertune_connector.slower.writers import Write
from tiertune_connector.tiers.base import Outcome


class Gate:
    """A fault that stops operations until it is opened."""

    def __init__(self, *operations: str, outcome: Outcome | None = None) -> None:
        self.stopped = threading.Semaphore(0)
        self.entered = 0
        self._operations, self._outcome = operations, outcome

    def __call__(self, operation: str) -> Outcome | None:
        if operation not in self._operations:
            return None
        self.entered += 1
        self.stopped.acquire()
        return self._outcome

    def open(self) -> None:
        self.stopped.release(10_000)


def write(key: bytes, told: list, namespace: str = A) -> Write:
    return Write(namespace, key, view(payload(key, 100)), Origin("host-a"), lambda o: told.append((key, o)))


def total(counters: Counters, name: str, *labels: str) -> float:
    return sum(value for told, value in counted(counters, name).items() if told[: len(labels)] == labels)
