"""Parts of chunks: they are copied as they come, and a load whose deadline has passed takes no more of them."""

import threading

import pytest

from connector.stores import eventually
from connector.transfers.fake_client import ROW, drained, load
from tiertune_connector.client.store_client import ArrivedPart


def test_what_comes_is_copied_before_all_has_come(transfers, client, staging):
    """Part by part, into the rows that vLLM named; the reply then finishes them."""
    found = client.holds()
    load(transfers, rows=[3, 0, 2])
    client.arriving([ArrivedPart(1, found[1], 1000), ArrivedPart(0, found[0], ROW)])
    client.arriving([ArrivedPart(1, found[1], 3000)])
    eventually(lambda: {ArrivedPart(0, found[0], ROW), ArrivedPart(1, found[1], 3000)} <= set(client.parts))
    assert transfers.take() == []
    assert [int((row == 1).sum() + (row == 2).sum()) for row in staging] == [3000, 0, 0, ROW]
    client.comes(found)
    job = drained(transfers)
    assert job.succeeded
    assert [int(row[-1]) for row in staging] == [2, 0, 3, 1]
    client.gave_back_once()


@pytest.mark.parametrize("whole", [False, True])
def test_what_comes_while_a_part_is_copied_is_copied_next(transfers, client, whole):
    """More parts, or the reply: neither waits for the other."""
    client.hold_parts.clear()
    found = client.holds()
    load(transfers)
    client.arriving([ArrivedPart(0, found[0], 1000)])
    assert client.copying.wait(10)
    if whole:
        client.comes(found)
    else:
        client.arriving([ArrivedPart(1, found[1], 1000)])
    client.hold_parts.set()
    if whole:
        (job,) = eventually(transfers.take)
        assert job.succeeded
    else:
        eventually(lambda: ArrivedPart(1, found[1], 1000) in client.parts)


def test_a_deadline_ends_a_load_between_two_parts(transfers, client, clock, staging):
    """What comes afterwards never reaches staging, which may be another request's by then."""
    found = client.holds()
    load(transfers)
    client.arriving([ArrivedPart(0, found[0], 1000)])
    eventually(lambda: client.parts and all(not job.copying and not job.over for job in transfers._jobs.values()))
    clock.now += 1.0
    (job,) = transfers.take()
    assert (job.late, job.done) == (True, [])
    staging[:] = 0
    client.arriving([ArrivedPart(0, found[0], 2000)])
    client.comes(found)
    transfers.drain(10)
    assert client.gave_back.wait(10)
    assert not staging.any()
    assert len(client.parts) == 1


def test_a_part_in_progress_is_not_reported_by_its_deadline(transfers, client, clock):
    """While a thread may write a row, the job is not over; a reply meanwhile waits for it, and is late."""
    client.hold_parts.clear()
    found = client.holds()
    load(transfers)
    client.arriving([ArrivedPart(0, found[0], 1000)])
    assert client.copying.wait(10)
    client.comes(found)
    clock.now += 5.0
    assert transfers.take() == []
    client.hold_parts.set()
    job = drained(transfers)
    assert (job.late, job.done) == (True, [])
    client.gave_back_once()


def test_a_deadline_ends_a_load_whose_parts_wait(transfers, client, clock):
    """However many have come: only those that threads copy are seen through."""
    client.hold_parts.clear()
    found = client.holds()
    load(transfers)
    client.arriving([ArrivedPart(index, slot, ROW) for index, slot in enumerate(found)])
    assert client.copying.wait(10)
    client.arriving([ArrivedPart(0, found[0], ROW)])
    clock.now += 1.0
    assert transfers.take() == []
    client.hold_parts.set()
    (job,) = eventually(transfers.take)
    assert (job.late, job.done) == (True, [])
    client.comes(found)
    transfers.close(10)
    assert len(client.parts) in (1, 2)  # two, if there is a helper
    client.gave_back_once()


def test_the_parts_of_one_load_do_not_hold_up_another(transfers, client, staging):
    """Of two copying threads a load has one at most, whatever comes for it."""
    client.hold_parts.clear()
    found = client.holds()
    load(transfers, rows=[3, 3, 3])
    for _ in range(9):
        client.arriving([ArrivedPart(0, found[0], ROW)])
    assert client.copying.wait(10)
    load(transfers, 2)
    client.comes(found, 1)
    (job,) = eventually(transfers.take)
    assert (job.id, job.succeeded) == (2, True)
    client.hold_parts.set()


def test_a_reply_that_meets_the_end_of_its_load_gives_back(transfers, client, monkeypatch):
    """It came while a part was copied, and the load is ended before its thread looks again: released, once."""
    move = transfers._move
    ended = lambda job, copying: copying or eventually(lambda: job.over)  # noqa: E731
    monkeypatch.setattr(transfers, "_move", lambda job, copying: move(job, copying=copying) and ended(job, copying))
    client.hold_parts.clear()
    (found,) = client.holds(1)
    load(transfers)
    client.arriving([ArrivedPart(0, found, 1000)])
    assert client.copying.wait(10)
    client.comes([found])
    closing = threading.Thread(target=transfers.close, args=(0,))
    closing.start()
    client.hold_parts.set()
    closing.join(10)
    assert not closing.is_alive()
    client.gave_back_once()


def test_a_part_that_raises_fails_the_job(transfers, client, caplog):
    """The reply's slots are given back all the same."""
    (found,) = client.holds(1)
    client.corrupt.add(found)
    load(transfers)
    client.arriving([ArrivedPart(0, found, 1000)])
    (job,) = eventually(transfers.take)
    assert (job.late, job.done) == (False, [])
    client.comes([found])
    assert client.gave_back.wait(10)
    assert [record.message for record in caplog.records] == ["a copy between staging and the store failed"]
