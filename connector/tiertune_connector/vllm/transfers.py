"""Jobs that copy between staging and the store's slots. Imports no vLLM.

A job waits for the store's reply or for a copying thread (then its deadline can end it), or such a thread is using its
rows of staging (then nothing can end it), or it is over. So once a job is reported, no thread touches its rows again.
What the store gave for it is given back then. Chunks from slower tiers are copied as they arrive, part by part.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tiertune_connector.client.store_client import ArrivedPart, ClientSlot, Loaded, Reserved, StoreClient
from tiertune_connector.copying.crew import Crew, usual_helpers
from tiertune_connector.threads import Threads
from tiertune_connector.units import Clock
from tiertune_connector.vllm.lookups import STORES_SHARE

if TYPE_CHECKING:
    from concurrent.futures import Future

logger = logging.getLogger(f"vllm.{__name__}")
Staging = NDArray[np.uint8]


@dataclass(slots=True)
class Job:
    """One job of vLLM's. After it is over the last five fields say what became of it."""

    id: int
    request: str
    keys: list[bytes]
    chunks: list[int]
    """Rows of staging, aligned with ``keys``."""
    loads: bool
    deadline_s: float = 0.0
    """Seconds that it may wait."""
    suffix: bytes = b""
    """What all ``keys`` have behind vLLM's own."""
    tenant: bytes = b""
    started: float = 0.0
    copying: bool = False
    """A thread is using its rows; else it waits. Of a job that is over it says nothing."""
    over: bool = False
    parts: dict[int, ArrivedPart] = field(default_factory=dict)
    """Parts of a load that have arrived and are not copied yet, by position."""
    slots: list[ClientSlot] = field(default_factory=list)
    """Of a store job: those that the store gave, until they are to be committed."""
    handed: bool = False
    """A copying thread has the load, or it is in their queue: one thread at a time."""
    shared: bool = False
    """Another load was under way at the same time, by the same threads."""
    seconds: float = 0.0
    late: bool = False
    done: list[bytes] = field(default_factory=list)
    """Keys that were loaded; for a store job, those that the store took or did not want."""
    reply: Loaded | None = None
    reasons: list[str] = field(default_factory=list)
    """For a store job, why the store did not want a key; empty if it did."""

    @property
    def deadline(self) -> float:
        return self.started + self.deadline_s

    @property
    def succeeded(self) -> bool:
        return len(self.done) == len(self.keys)

    @property
    def results(self) -> list[str]:
        """What became of each chunk of a store job: stored, the store's reason, late or failed."""
        kept = set(self.done)
        failure = "late" if self.late else "failed"
        reasons = self.reasons or [""] * len(self.keys)
        return [
            reason or ("stored" if key in kept else failure) for key, reason in zip(self.keys, reasons, strict=True)
        ]


class Transfers:
    """All jobs of one engine. Started and taken on the scheduler thread; copies run on their own threads."""

    def __init__(
        self,
        client: StoreClient,
        staging: Staging,
        *,
        clock: Clock = time.monotonic,
        threads: int = 2,
        helpers: int | None = None,
    ) -> None:
        """``staging``: one row per chunk, (chunks, bytes of a chunk), uint8. ``threads`` load, one more stores.

        ``helpers`` more copy chunks of loads, and half as many others copy chunks of stores, so that no load waits for
        a store; None: as many as the processors allow.
        """
        self._client = client
        self._staging = staging
        self._clock = clock
        self._changed = threading.Condition()
        self._jobs: dict[int, Job] = {}
        self._loading = Threads(threads, "tiertune-load", ready=threads)
        # Apart: requests wait for loads, but nobody for stores, which may be gigabytes after a restart.
        self._storing = Threads(1, "tiertune-store")
        helpers = usual_helpers() if helpers is None else helpers
        self._crew, self._storing_crew = Crew(helpers), Crew(helpers // 2)

    def load(self, job: Job) -> None:
        """Fill the job's rows with the chunks of its keys, as they arrive."""
        self._start(job)
        self._client.load(
            job.keys, deadline_s=STORES_SHARE * job.deadline_s, arriving=partial(self._on_arriving, job)
        ).add_done_callback(partial(self._on_loaded, job))

    def store(self, job: Job) -> None:
        """Offer the job's rows as its keys to the store, from another thread: sending would hold up this one."""
        self._start(job)
        self._storing.submit(self._guarded, job, partial(self._offer, job))

    def skip(self, job: Job) -> None:
        """End a job without beginning it: it fails, unless it has no keys."""
        self._start(job)
        self._finish(job, [])

    def take(self) -> list[Job]:
        """Jobs that are over and were not taken yet; waiting ones whose deadline has passed are over now."""
        with self._changed:
            self._expire(self._clock())
            over = [job for job in self._jobs.values() if job.over]
            for job in over:
                del self._jobs[job.id]
        return over

    def drain(self, patience_s: float) -> None:
        """Wait at most ``patience_s`` for all jobs, then end those that wait, then let the copies finish."""
        with self._changed:
            self._changed.wait_for(lambda: self._expire(-inf), patience_s)
            self._changed.wait_for(lambda: self._expire(inf))  # some wait again after a copy

    def close(self, patience_s: float) -> None:
        """As ``drain``, and lets go of staging."""
        self.drain(patience_s)
        self._loading.shutdown()
        self._storing.shutdown()
        self._crew.close()
        self._storing_crew.close()
        self._staging = np.empty((0, 0), np.uint8)

    def _start(self, job: Job) -> None:
        job.started = self._clock()
        with self._changed:
            for other in self._jobs.values():
                if job.loads and other.loads and not other.over:
                    job.shared = other.shared = True
            self._jobs[job.id] = job

    def _expire(self, now: float) -> bool:
        """End jobs that wait and whose deadline has passed; returns whether all are over."""
        for job in self._jobs.values():
            if not (job.over or job.copying) and now >= job.deadline:
                job.late = True
                self._finish(job, [])
        return all(job.over for job in self._jobs.values())

    def _move(self, job: Job, *, copying: bool) -> bool:
        """A waiting job begins to copy, or a copying one waits again; returns whether it did: not one that is over."""
        with self._changed:
            if job.over or job.copying is copying:
                return False
            job.copying = copying
            self._changed.notify_all()
            return True

    def _finish(self, job: Job, done: list[bytes]) -> None:
        with self._changed:  # a caller may hold it
            if not job.over:
                job.over, job.done, job.seconds = True, done, self._clock() - job.started
                self._give_back(job)
                self._changed.notify_all()

    def _give_back(self, job: Job) -> None:
        if job.reply is not None:
            self._client.release(job.reply)
        self._client.abort(job.slots)

    def _offer(self, job: Job) -> None:
        if not job.over:  # it cannot be copying yet
            self._client.reserve(job.keys, request=job.request, tenant=job.tenant).add_done_callback(
                partial(self._on_reserved, job)
            )

    def _on_reserved(self, job: Job, future: "Future[Reserved]") -> None:
        """On whichever thread receives: hand the copy on, or give the slots back if the job is over by now."""
        reply = future.result()
        with self._changed:  # no copy goes to a pool that `close` has shut down: it ends all jobs before
            job.slots = [slot for slot in reply.slots if slot is not None]
            if job.over:
                self._give_back(job)
            else:
                self._storing.submit(self._guarded, job, partial(self._copy_out, job, reply))

    def _on_loaded(self, job: Job, future: "Future[Loaded]") -> None:
        """As `_on_reserved`."""
        with self._changed:
            job.reply = future.result()
            if job.over:
                self._give_back(job)
            else:
                self._hand_on(job)

    def _on_arriving(self, job: Job, parts: Sequence[ArrivedPart]) -> None:
        """Runs on whichever thread receives."""
        with self._changed:
            if not job.over:
                job.parts.update((part.position, part) for part in parts)
                self._hand_on(job)

    def _hand_on(self, job: Job) -> None:
        """Have a thread copy the load, unless one does already, or will. Call with the lock held."""
        if not job.handed:
            job.handed = True
            self._loading.submit(self._guarded, job, partial(self._copy_in, job))

    def _guarded(self, job: Job, work: Callable[[], None]) -> None:
        """Runs on a copying thread. If ``work`` raises, the job has failed, and is counted so."""
        try:
            work()
        except Exception:
            logger.exception("a copy between staging and the store failed")
            self._finish(job, [])

    def _copy_in(self, job: Job) -> None:
        """Copy what has come, unless the job is over; while it copies, its deadline cannot end it.

        Of parts, those that come meanwhile wait behind other loads. Of a whole load only leading keys have slots; those
        that no thread has begun to copy by the deadline are left out.
        """
        if not self._move(job, copying=True):
            return
        with self._changed:
            parts, job.parts = list(job.parts.values()), {}
        in_time = partial(self._in_time, job)
        if job.reply is None:
            come = [(part, job.chunks[part.position]) for part in parts]
            self._crew.each(lambda one: self._client.read_part(one[0], self._staging[one[1]]), come, goes_on=in_time)
            self._move(job, copying=False)
            with self._changed:
                job.handed = False
                if not job.over and (job.reply or job.parts):
                    self._hand_on(job)
            return
        rows = list(zip(job.reply.slots, job.chunks, strict=False))
        whole = self._crew.each(lambda one: self._client.read(one[0], self._staging[one[1]]), rows, goes_on=in_time)
        job.late = len(whole) < len(rows)
        self._finish(job, [key for key, good in zip(job.keys, whole, strict=False) if good])

    def _in_time(self, job: Job) -> bool:
        return self._clock() < job.deadline

    def _copy_out(self, job: Job, reply: Reserved) -> None:
        """As `_copy_in`."""
        if not self._move(job, copying=True):
            return
        aligned = zip(reply.slots, job.chunks, reply.reasons, strict=True)
        rows = [(slot, chunk) for slot, chunk, _ in aligned if slot is not None]
        job.reasons = reply.reasons
        if not all(self._storing_crew.each(lambda one: self._client.write(one[0], self._staging[one[1]]), rows)):
            self._finish(job, [])  # the connection that the slots came from is gone
        elif not rows:
            self._finish(job, job.keys)
        else:
            slots, job.slots = job.slots, []
            self._move(job, copying=False)
            self._client.commit(slots).add_done_callback(partial(self._on_commit, job, slots))

    def _on_commit(self, job: Job, slots: list[ClientSlot], future: "Future[list[bool]]") -> None:
        refused = {slot.key for slot, kept in zip(slots, future.result(), strict=True) if not kept}
        self._finish(job, [key for key in job.keys if key not in refused])
