"""Transfers: each job reported once, and never while a thread may still touch its staging."""

import threading
from unittest.mock import Mock

import numpy as np
import pytest

from connector.fake_client import FakeClient
from connector.stores import eventually
from tiertune_connector.client.store_client import ArrivedPart, ClientSlot, Loaded, Reserved
from tiertune_connector.protocol.messages import SlotRef
from tiertune_connector.vllm.transfers import Job, JobState, Transfers

KEYS = [bytes([n]) * 36 for n in range(3)]
ROW = 4096


@pytest.fixture
def client():
    return FakeClient()


@pytest.fixture
def staging():
    return np.zeros((4, ROW), np.uint8)


@pytest.fixture(params=[0, 1], ids=["alone", "helped"])
def transfers(request, client, clock, staging):
    made = Transfers(client, staging, clock=clock, helpers=request.param)
    yield made
    client.hold.set()
    client.hold_parts.set()
    made.close(0)


def slot(index):
    return ClientSlot(KEYS[index], SlotRef(0, index, 1, 0), 1)


ONE_GRANTED = Reserved([slot(0), None, None], ["", "full", "full"])


def slots(client, count):
    made = [slot(index) for index in range(count)]
    for index, known in enumerate(made):
        client.payloads[known] = np.full(ROW, index + 1, np.uint8)
    return made


def loaded(slots):
    return Loaded(slots, ["hit"] * len(slots) + ["miss"] * (len(KEYS) - len(slots)), {}, 1, 1)


def come(client, question=0):
    """All that a load was to bring."""
    client.answers(loaded(slots(client, 3)), question)


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


def test_a_load_fills_the_rows_it_was_given(transfers, client, staging):
    """Key by key the slot's bytes are in the row that vLLM named, and the slots are released."""
    load(transfers, 7, [3, 0, 2])
    assert transfers.take() == []
    come(client)
    job = drained(transfers)
    assert (job.id, job.succeeded, job.late) == (7, True, False)
    assert [int(row[0]) for row in staging] == [2, 0, 3, 1]
    assert len(client.released) == 1
    assert transfers.take() == []


def test_jobs_need_no_thread_that_is_not_there_yet(transfers, client, monkeypatch):
    """A machine may run out of threads later: then vLLM's scheduler would end, on which jobs begin."""
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    load(transfers)
    come(client)
    assert drained(transfers).succeeded
    store(transfers)
    client.reservation().set_result(Reserved([None] * 3, ["present"] * 3))
    assert drained(transfers).succeeded


def test_a_load_that_found_less_tells_which_keys_came(transfers, client):
    """Missing and corrupt chunks are left out of the successful keys."""
    found = slots(client, 2)
    client.corrupt.add(found[1])
    load(transfers)
    client.answers(loaded(found))
    job = drained(transfers)
    assert not job.succeeded
    assert job.done == KEYS[:1]


def test_a_load_past_its_deadline_fails_and_late_bytes_never_reach_staging(transfers, client, clock, staging):
    """A reply after the deadline only gives its slots back."""
    load(transfers)
    clock.now += 1.0
    (job,) = transfers.take()
    assert job.late
    assert job.done == []
    come(client)
    transfers.drain(10)
    assert not staging.any()
    assert len(client.released) == 1
    assert transfers.take() == []


def test_a_copy_in_progress_is_not_reported_by_its_deadline(transfers, client, clock):
    """While a thread may write a row, the job is not over, however late it is; rows that none has begun are left."""
    client.hold.clear()
    load(transfers)
    come(client)
    assert client.copying.wait(10)
    clock.now += 5.0
    assert transfers.take() == []
    client.hold.set()
    job = drained(transfers)
    assert job.done in (KEYS[:1], KEYS[:2])  # two, if there is a helper
    assert job.late


@pytest.mark.parametrize("stores", [False, True])
def test_chunks_of_a_job_are_copied_several_at_a_time(client, clock, staging, monkeypatch, stores):
    """Each of three waits for the others: one after the other they would never end. Closed, they leave no thread."""
    together, before = threading.Barrier(3, timeout=10), set(threading.enumerate())

    def copy(*_):
        together.wait()
        return True

    monkeypatch.setattr(client, "write" if stores else "read", copy)
    transfers = Transfers(client, staging, clock=clock, helpers=4 if stores else 2)
    if stores:
        store(transfers)
        eventually(lambda: client.pending)
        client.answers(Reserved(slots(client, 3), [""] * 3))
        eventually(lambda: len(client.pending) == 2)
        client.answers([True] * 3, 1)
    else:
        load(transfers)
        come(client)
    assert drained(transfers).succeeded
    transfers.close(0)
    assert set(threading.enumerate()) <= before


def test_a_load_does_not_wait_for_what_copies_stores(client, clock, staging, monkeypatch):
    """While a store's chunks hang in all threads that copy for stores, a load's come several at a time all the same."""
    together, storing = threading.Barrier(3, timeout=10), threading.Semaphore(0)

    def write(*_):
        storing.release()
        return client.hold.wait(10)

    monkeypatch.setattr(client, "write", write)
    monkeypatch.setattr(client, "read", lambda *_: together.wait() >= 0)
    client.hold.clear()
    transfers = Transfers(client, staging, clock=clock, helpers=2)
    store(transfers)
    eventually(lambda: client.pending)
    client.answers(Reserved(slots(client, 3), [""] * 3))
    assert all(storing.acquire(timeout=10) for _ in range(2))
    load(transfers, 2)
    come(client, 1)
    (job,) = eventually(transfers.take)
    assert (job.id, job.succeeded) == (2, True)
    client.hold.set()
    transfers.close(0)


def test_what_comes_is_copied_before_all_has_come(transfers, client, staging):
    """Part by part, into the rows that vLLM named; the reply then finishes them."""
    found = slots(client, 3)
    load(transfers, rows=[3, 0, 2])
    client.arriving([ArrivedPart(1, found[1], 1000), ArrivedPart(0, found[0], ROW)])
    client.arriving([ArrivedPart(1, found[1], 3000)])
    eventually(lambda: {ArrivedPart(0, found[0], ROW), ArrivedPart(1, found[1], 3000)} <= set(client.parts))
    assert transfers.take() == []
    assert [int((row == 1).sum() + (row == 2).sum()) for row in staging] == [3000, 0, 0, ROW]
    client.answers(loaded(found))
    job = drained(transfers)
    assert job.succeeded
    assert [int(row[-1]) for row in staging] == [2, 0, 3, 1]
    assert len(client.released) == 1


def test_a_deadline_ends_a_load_between_two_parts(transfers, client, clock, staging):
    """What comes afterwards never reaches staging, which may be another request's by then."""
    found = slots(client, 3)
    load(transfers)
    client.arriving([ArrivedPart(0, found[0], 1000)])
    eventually(lambda: client.parts and all(job.state is JobState.WAITING for job in transfers._jobs.values()))
    clock.now += 1.0
    (job,) = transfers.take()
    assert (job.late, job.done) == (True, [])
    staging[:] = 0
    client.arriving([ArrivedPart(0, found[0], 2000)])
    client.answers(loaded(found))
    transfers.drain(10)
    assert client.gave_back.wait(10)
    assert not staging.any()
    assert len(client.parts) == 1


def test_a_part_in_progress_is_not_reported_by_its_deadline(transfers, client, clock):
    """While a thread may write a row, the job is not over; a reply meanwhile waits for it, and is late."""
    client.hold_parts.clear()
    found = slots(client, 3)
    load(transfers)
    client.arriving([ArrivedPart(0, found[0], 1000)])
    assert client.copying.wait(10)
    client.answers(loaded(found))
    clock.now += 5.0
    assert transfers.take() == []
    client.hold_parts.set()
    job = drained(transfers)
    assert (job.late, job.done) == (True, [])
    assert client.gave_back.wait(10)
    assert len(client.released) == 1


def test_a_deadline_ends_a_load_whose_parts_wait(transfers, client, clock):
    """However many have come: only those that threads copy are seen through."""
    client.hold_parts.clear()
    found = slots(client, 3)
    load(transfers)
    client.arriving([ArrivedPart(index, slot, ROW) for index, slot in enumerate(found)])
    assert client.copying.wait(10)
    client.arriving([ArrivedPart(0, found[0], ROW)])
    clock.now += 1.0
    assert transfers.take() == []
    client.hold_parts.set()
    (job,) = eventually(transfers.take)
    assert (job.late, job.done) == (True, [])
    client.answers(loaded(found))
    transfers.close(10)
    assert len(client.parts) in (1, 2)  # two, if there is a helper
    assert len(client.released) == 1


def test_the_parts_of_one_load_do_not_hold_up_another(transfers, client, staging):
    """Of two copying threads a load has one at most, whatever comes for it."""
    client.hold_parts.clear()
    found = slots(client, 3)
    load(transfers, rows=[3, 3, 3])
    for _ in range(9):
        client.arriving([ArrivedPart(0, found[0], ROW)])
    assert client.copying.wait(10)
    load(transfers, 2)
    client.answers(loaded(found), 1)
    (job,) = eventually(transfers.take)
    assert (job.id, job.succeeded) == (2, True)
    client.hold_parts.set()


def test_a_reply_that_meets_the_end_of_its_load_gives_back(transfers, client, monkeypatch):
    """It came while a part was copied, and the load is ended before its thread looks again: released, once."""
    move = transfers._move
    ended = lambda job, _, after: after is JobState.COPYING or eventually(lambda: job.over)  # noqa: E731
    monkeypatch.setattr(transfers, "_move", lambda *args: move(*args) and ended(*args))
    client.hold_parts.clear()
    (found,) = slots(client, 1)
    load(transfers)
    client.arriving([ArrivedPart(0, found, 1000)])
    assert client.copying.wait(10)
    client.answers(loaded([found]))
    closing = threading.Thread(target=transfers.close, args=(0,))
    closing.start()
    client.hold_parts.set()
    closing.join(10)
    assert not closing.is_alive()
    assert client.gave_back.wait(10)
    assert len(client.released) == 1


def test_a_part_that_raises_fails_the_job(transfers, client, caplog):
    """The reply's slots are given back all the same."""
    (found,) = slots(client, 1)
    client.corrupt.add(found)
    load(transfers)
    client.arriving([ArrivedPart(0, found, 1000)])
    (job,) = eventually(transfers.take)
    assert (job.late, job.done) == (False, [])
    client.answers(loaded([found]))
    assert client.gave_back.wait(10)
    assert [record.message for record in caplog.records] == ["a copy between staging and the store failed"]


def test_a_load_does_not_wait_for_the_copies_of_stores(transfers, client, staging):
    """However many chunks are on their way to the store."""
    client.writing.clear()
    for job in range(4):
        store(transfers, job)
    client.reservation().set_result(ONE_GRANTED)
    assert client.copying.wait(10)
    load(transfers, 9, [3, 0, 2])
    come(client, -1)
    assert client.gave_back.wait(10)
    client.writing.set()
    assert staging[3].all()


def test_a_load_that_waits_for_a_copying_thread_is_late_too(client, clock, staging):
    """Its deadline ends it while other copies are before it; its slots go back, and staging is not touched."""
    transfers = Transfers(client, staging, clock=clock, threads=1)
    client.hold.clear()
    found = slots(client, 3)
    for job in (1, 2):
        load(transfers, job, [0, 1, 2] if job == 1 else [3, 3, 3])
        client.answers(loaded(found), -1)
    assert client.copying.wait(10)
    clock.now += 1.0
    (job,) = transfers.take()
    assert (job.id, job.late, job.done) == (2, True, [])
    client.hold.set()
    transfers.close(10)
    assert not staging[3].any()
    assert len(client.released) == 2


def test_a_store_writes_what_is_wanted_and_then_commits_it(transfers, client, staging):
    """Chunks that the store does not want are neither written nor committed, and are no failure."""
    staging[:] = np.arange(4, dtype=np.uint8)[:, None]
    wanted = slot(1)
    transfers.store(Job(1, "a", KEYS, [1, 2, 3], loads=False, deadline_s=1))
    client.reservation().set_result(Reserved([None, wanted, None], ["present", "", "full"]))
    transfers._storing.shutdown()
    assert transfers.take() == []
    client.answers([True], 1)
    (job,) = transfers.take()
    assert job.succeeded
    assert client.committed == [wanted]
    assert int(client.payloads[wanted][0]) == 2


def test_a_drain_ends_what_waits_for_the_store(transfers, client):
    """A store that never answers cannot hold the scheduler; slots that it grants later are given back."""
    store(transfers)
    reservation = client.reservation()
    transfers.drain(0)
    (job,) = transfers.take()
    assert not job.succeeded
    reservation.set_result(ONE_GRANTED)
    assert len(client.aborted) == 1
    assert client.committed == []


def test_a_drain_does_not_wait_for_the_commit_of_a_copy_that_it_saw_through(transfers, client):
    """A store that hangs between a copy and its commit cannot hold the scheduler either; no job is left."""
    client.hold.clear()
    store(transfers)
    client.reservation().set_result(ONE_GRANTED)
    assert client.copying.wait(10)
    draining = threading.Thread(target=transfers.drain, args=(0,), daemon=True)
    draining.start()
    draining.join(0.05)
    assert draining.is_alive(), "a copy is seen through"
    client.hold.set()
    draining.join(10)
    assert not draining.is_alive()
    assert [job.id for job in transfers.take()] == [1]


def test_a_store_that_is_over_before_it_is_offered_asks_nothing(transfers, client, clock):
    """The thread that offers was busy until the job's deadline: the store is not made to find room for it."""
    client.hold.clear()
    store(transfers)
    client.reservation().set_result(ONE_GRANTED)
    assert client.copying.wait(10)
    store(transfers, 2)
    clock.now += 1.0
    (job,) = transfers.take()
    assert (job.id, job.late) == (2, True)
    client.hold.set()
    transfers.close(0)
    assert not client.reserving.acquire(blocking=False)


def test_a_copy_that_raises_is_a_failed_job_and_logged(transfers, client, caplog):
    """An unexpected error in a copy neither loses the job nor its slots."""
    load(transfers)
    client.answers(loaded([slot(0)]))
    job = drained(transfers)
    assert job.done == []
    assert [record.message for record in caplog.records] == ["a copy between staging and the store failed"]
    assert len(client.released) == 1


def test_a_store_whose_copy_raises_has_failed_chunk_by_chunk(transfers, client, caplog, monkeypatch):
    """As `engine_stored_chunks_total` counts them; the store has its slots back."""
    monkeypatch.setattr(client, "write", Mock(side_effect=OSError("a slot that cannot be written")))
    store(transfers)
    given = [slot(0), slot(2)]
    client.reservation().set_result(Reserved([given[0], None, given[1]], ["", "full", ""]))
    (job,) = eventually(transfers.take)
    assert job.results == ["failed", "full", "failed"]
    assert client.aborted == given
    assert [record.message for record in caplog.records] == ["a copy between staging and the store failed"]


def test_a_job_that_is_not_begun_is_over_at_once(transfers, client):
    """It asks the store nothing; a load, which names its keys, has failed, a store has succeeded."""
    transfers.skip(Job(1, "a", [], [], loads=False))
    transfers.skip(Job(2, "a", KEYS, [], loads=True))
    assert {job.id: (job.loads, job.succeeded) for job in transfers.take()} == {1: (False, True), 2: (True, False)}
    assert transfers.take() == []
    assert not client.pending
