"""A client of a store that is in memory, for tests of what copies to and from it."""

import threading
from concurrent.futures import Future

import numpy as np

from tiertune_connector.client.store_client import ArrivedPart, ClientSlot, Loaded, Reserved
from tiertune_connector.protocol.messages import SlotRef
from tiertune_connector.vllm.transfers import Job

KEYS = [bytes([n]) * 36 for n in range(3)]
ROW = 4096


def slot(index):
    return ClientSlot(KEYS[index], SlotRef(0, index, 1, 0), 1)


ONE_GRANTED = Reserved([slot(0), None, None], ["", "full", "full"])


def load(transfers, job=1, rows=(0, 1, 2)):
    """Into these rows of staging; its deadline comes a second later."""
    transfers.load(Job(job, f"request-{job}", KEYS, list(rows), loads=True, deadline_s=1))


def store(transfers, job=1):
    """The first rows, with the same deadline."""
    transfers.store(Job(job, f"request-{job}", KEYS, [0, 1, 2], loads=False, deadline_s=1))


def drained(transfers):
    """The one job that is over when all copies have ended."""
    transfers.drain(10)
    (job,) = transfers.take()
    return job


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

    def holds(self, count=3):
        """Slots of the first keys: all bytes of the first are 1, of the next 2."""
        made = [slot(index) for index in range(count)]
        for index, known in enumerate(made):
            self.payloads[known] = np.full(ROW, index + 1, np.uint8)
        return made

    def comes(self, slots=None, question=0):
        """The reply to a load: of the first keys these slots, or all."""
        slots = self.holds() if slots is None else slots
        outcomes = ["hit"] * len(slots) + ["miss"] * (len(KEYS) - len(slots))
        self.answers(Loaded(slots, outcomes, {}, 1, 1), question)

    def gave_back_once(self):
        """All that was loaded, and nothing twice."""
        assert self.gave_back.wait(10)
        assert len(self.released) == 1

    def grants(self, reserved=ONE_GRANTED):
        """The reply to a reservation, once it has been asked for."""
        self.reservation().set_result(reserved)

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
