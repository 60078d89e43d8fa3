"""Transfers: each job reported once, and never while a thread may still touch its staging."""

import threading
from unittest.mock import Mock

import numpy as np
import pytest

from connector.stores import eventually
from connector.transfers.fake_client import KEYS, ONE_GRANTED, drained, load, slot, store
from tiertune_connector.client.store_client import Reserved
from tiertune_connector.vllm.transfers import Job, Transfers


def test_a_load_fills_the_rows_it_was_given(transfers, client, staging):
    """Key by key the slot's bytes are in the row that vLLM named, and the slots are released."""
    load(transfers, 7, [3, 0, 2])
    assert transfers.take() == []
    client.comes()
    job = drained(transfers)
    assert (job.id, job.succeeded, job.late) == (7, True, False)
    assert [int(row[0]) for row in staging] == [2, 0, 3, 1]
    client.gave_back_once()
    assert transfers.take() == []


def test_loads_under_way_at_the_same_time_are_shared(transfers, client):
    """What each of them took is no measure of a copy: it may have waited for the other's."""
    for number in range(2):
        load(transfers, number)
    for number in range(2):
        client.comes(question=number)
    transfers.drain(10)
    assert [job.shared for job in transfers.take()] == [True, True]
    load(transfers)
    store(transfers, 2)
    client.comes(question=2)
    client.grants(Reserved([None] * 3, ["present"] * 3))
    transfers.drain(10)
    assert [job.shared for job in transfers.take()] == [False, False], "those before it are over"


def test_jobs_need_no_thread_that_is_not_there_yet(transfers, client, monkeypatch):
    """A machine may run out of threads later: then vLLM's scheduler would end, on which jobs begin."""
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    load(transfers)
    client.comes()
    assert drained(transfers).succeeded
    store(transfers)
    client.grants(Reserved([None] * 3, ["present"] * 3))
    assert drained(transfers).succeeded


def test_a_load_that_found_less_tells_which_keys_came(transfers, client):
    """Missing and corrupt chunks are left out of the successful keys."""
    found = client.holds(2)
    client.corrupt.add(found[1])
    load(transfers)
    client.comes(found)
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
    client.comes()
    transfers.drain(10)
    assert not staging.any()
    client.gave_back_once()
    assert transfers.take() == []


def test_a_copy_in_progress_is_not_reported_by_its_deadline(transfers, client, clock):
    """While a thread may write a row, the job is not over, however late it is; rows that none has begun are left."""
    client.hold.clear()
    load(transfers)
    client.comes()
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
        client.grants(Reserved(client.holds(), [""] * 3))
        eventually(lambda: len(client.pending) == 2)
        client.answers([True] * 3, 1)
    else:
        load(transfers)
        client.comes()
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
    client.grants(Reserved(client.holds(), [""] * 3))
    assert all(storing.acquire(timeout=10) for _ in range(2))
    load(transfers, 2)
    client.comes(question=1)
    (job,) = eventually(transfers.take)
    assert (job.id, job.succeeded) == (2, True)
    client.hold.set()
    transfers.close(0)


def test_a_load_does_not_wait_for_the_copies_of_stores(transfers, client, staging):
    """However many chunks are on their way to the store."""
    client.writing.clear()
    for job in range(4):
        store(transfers, job)
    client.grants()
    assert client.copying.wait(10)
    load(transfers, 9, [3, 0, 2])
    client.comes(question=-1)
    assert client.gave_back.wait(10)
    client.writing.set()
    assert staging[3].all()


def test_a_load_that_waits_for_a_copying_thread_is_late_too(client, clock, staging):
    """Its deadline ends it while other copies are before it; its slots go back then, and staging is not touched."""
    transfers = Transfers(client, staging, clock=clock, threads=1)
    client.hold.clear()
    found = client.holds()
    for job in (1, 2):
        load(transfers, job, [0, 1, 2] if job == 1 else [3, 3, 3])
        client.comes(found, -1)
    assert client.copying.wait(10)
    clock.now += 1.0
    (job,) = transfers.take()
    assert (job.id, job.late, job.done) == (2, True, [])
    assert client.released == [job.reply]
    client.hold.set()
    transfers.close(10)
    assert not staging[3].any()
    assert len(client.released) == 2


def test_a_load_that_a_drain_ended_is_not_copied_in_its_time_either(client, clock, staging):
    """It waits for a copying thread, and its deadline is far: its rows may be another request's by then."""
    transfers = Transfers(client, staging, clock=clock, threads=1)
    client.hold.clear()
    for job in (1, 2):
        load(transfers, job, [0, 1, 2] if job == 1 else [3, 3, 3])
        client.comes(question=-1)
    assert client.copying.wait(10)
    closing = threading.Thread(target=transfers.close, args=(0,))
    closing.start()
    (job,) = eventually(transfers.take)
    assert (job.id, job.done) == (2, [])
    client.hold.set()
    closing.join(10)
    assert staging[0].any()
    assert not staging[3].any()


def test_a_store_writes_what_is_wanted_and_then_commits_it(transfers, client, staging):
    """Chunks that the store does not want are neither written nor committed, and are no failure."""
    staging[:] = np.arange(4, dtype=np.uint8)[:, None]
    wanted = slot(1)
    transfers.store(Job(1, "a", KEYS, [1, 2, 3], loads=False, deadline_s=1))
    client.grants(Reserved([None, wanted, None], ["present", "", "full"]))
    transfers._storing.shutdown()
    assert transfers.take() == []
    client.answers([True], 1)
    (job,) = transfers.take()
    assert job.succeeded
    assert client.committed == [wanted]
    assert client.aborted == []
    assert int(client.payloads[wanted][0]) == 2


def test_a_store_that_says_less_than_it_was_asked_fails_the_job_alone(transfers, client):
    """One of another version: vLLM's scheduler, which is told of the job, must not end on it. It has its slots back."""
    given = slot(0)
    store(transfers)
    client.grants(Reserved([given, None, None], [""]))
    job = drained(transfers)
    assert not job.succeeded
    assert job.results == ["failed"] * 3
    assert client.aborted == [given]


def test_a_store_whose_connection_is_gone_has_failed(transfers, client, monkeypatch):
    """Nothing is committed, whichever of its slots are still there."""
    monkeypatch.setattr(client, "write", lambda *_: False)
    store(transfers)
    client.grants()
    job = drained(transfers)
    assert job.results == ["failed", "full", "full"]
    assert (client.committed, client.aborted) == ([], [slot for slot in ONE_GRANTED.slots if slot])


def test_a_store_that_waits_for_a_copying_thread_is_late_too(transfers, client, clock):
    """Its slots go back then, and are not written any more."""
    client.hold.clear()
    for job in (1, 2):
        store(transfers, job)
        client.reservation()
    client.answers(ONE_GRANTED)
    assert client.copying.wait(10)
    given = slot(2)
    client.answers(Reserved([None, None, given], ["full", "full", ""]), 1)
    clock.now += 1.0
    (job,) = transfers.take()
    assert (job.id, job.late, client.aborted) == (2, True, [given])
    client.hold.set()
    transfers.close(0)
    assert given not in client.payloads
    assert client.aborted == [given]


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
    client.grants()
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
    client.grants()
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
    client.comes([slot(0)])
    job = drained(transfers)
    assert job.done == []
    assert [record.message for record in caplog.records] == ["a copy between staging and the store failed"]
    client.gave_back_once()


def test_a_store_whose_copy_raises_has_failed_chunk_by_chunk(transfers, client, caplog, monkeypatch):
    """As `engine_stored_chunks_total` counts them; the store has its slots back."""
    monkeypatch.setattr(client, "write", Mock(side_effect=OSError("a slot that cannot be written")))
    store(transfers)
    given = [slot(0), slot(2)]
    client.grants(Reserved([given[0], None, given[1]], ["", "full", ""]))
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
