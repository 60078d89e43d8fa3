"""A client of a store that is in memory, for tests of what copies to and from it."""

import threading
from concurrent.futures import Future

import numpy as np

from tiertune_connector.client.store_client import ArrivedPart, ClientSlot, Loaded


class FakeClient:
    """A store in memory whose replies the test sends."""

    def __init__(self):
        self.payloads: dict[ClientSlot, np.ndarray] = {}
        self.pending: list[Future] = []
        self.reserving = threading.Semaphore(0)
        self.released: list[Loaded] = []
        self.parts: list[ArrivedPart] = []
        self.aborted: list[ClientSlot] = []
        self.committed: list[ClientSlot] = []
        self.corrupt: set[ClientSlot] = set()
        self.hold = threading.Event()
        self.hold.set()
        self.hold_parts = threading.Event()
        self.hold_parts.set()
        self.copying = threading.Event()
        self.writing = threading.Event()
        self.writing.set()
        self.gave_back = threading.Event()

    def _reply(self):
        self.pending.append(Future())
        return self.pending[-1]

    def answers(self, reply, question=0):
        """What was asked first, or another one."""
        self.pending[question].set_result(reply)

    def load(self, keys, *, deadline_s, arriving):
        self.arriving = arriving
        return self._reply()

    def read_part(self, part, out):
        self.copying.set()
        assert self.hold_parts.wait(10)
        if part.slot in self.corrupt:
            raise OSError("a part that cannot be read")
        out[: part.nbytes] = self.payloads[part.slot][: part.nbytes]
        self.parts.append(part)

    def reserve(self, keys, *, request, tenant):
        future = self._reply()
        self.reserving.release()
        return future

    def reservation(self):
        """The next: stores are offered on a thread."""
        assert self.reserving.acquire(timeout=10)
        return self.pending[-1]

    def commit(self, slots):
        self.committed += slots
        return self._reply()

    def read(self, slot, out):
        self.copying.set()
        assert self.hold.wait(10)
        out[:] = self.payloads[slot]
        return slot not in self.corrupt

    def write(self, slot, data):
        self.copying.set()
        assert self.hold.wait(10)
        assert self.writing.wait(10)
        self.payloads[slot] = data.copy()
        return True

    def release(self, loaded):
        self.released.append(loaded)
        self.gave_back.set()

    def abort(self, slots):
        self.aborted += slots
