"""Many chunks stored at once: in steps, the prompt's head first, and nothing for who has gone."""

import itertools

import pytest

from connector.stores import Engine, chain, eventually, pool
from tiertune_connector.protocol.messages import Abort, Reserve
from tiertune_connector.serve import server
from tiertune_connector.store import storing
from tiertune_connector.tiers import steps


def test_who_stores_many_chunks_holds_up_nobody(store, engine, monkeypatch):
    """They are reserved and committed in steps, and others are answered in between."""
    with Engine(store, name="engine-1") as other:
        told = []
        eventually(lambda: pool(store).pool.capacity >= 25)
        monkeypatch.setattr(steps, "sleep", lambda _: told.append(other.reserve([]).slots))
        monkeypatch.setattr(storing, "AT_ONCE", 10)
        monkeypatch.setattr(server, "AT_ONCE", 10)
        engine.put_all(chain("k", 25))
        assert told == [[]] * 4, "between three steps of reserving, and of commits"
        assert engine.get(chain("k", 25)) == 25


def test_who_goes_amid_a_reserve_of_many_chunks_gets_no_more(store, engine, monkeypatch):
    """Nothing is reserved for a client that is no more: nobody would give it back."""
    (session,) = store.server.sessions()
    eventually(lambda: pool(store).pool.capacity >= 25)
    monkeypatch.setattr(storing, "AT_ONCE", 10)
    monkeypatch.setattr(server, "AT_ONCE", 10)
    turns = itertools.count()
    monkeypatch.setattr(steps, "sleep", lambda _: next(turns) == 1 and store.store.holdings.end(session))
    reserved = engine.reserve(chain("k", 25))
    assert [slot is None for slot in reserved.slots] == [False] * 20 + [True] * 5, "the head came first"
    assert (session.reservations, len(session.quarantined)) == ({}, 20)
    assert pool(store).pool.pinned == 0


def test_what_is_stored_of_many_chunks_while_others_take_the_room_is_the_prompts_head(store, engine, monkeypatch):
    """A tail without it is found by nobody, and takes the room of what others store."""
    (session,) = store.server.sessions()
    eventually(lambda: pool(store).pool.capacity == 64)
    monkeypatch.setattr(storing, "AT_ONCE", 10)
    others = chain("other", 40)

    def reserve(request, keys):
        return store.store.storing.reserve(session, Reserve(1, request, keys, b""))

    waiting = [others]
    monkeypatch.setattr(
        steps,
        "sleep",
        lambda _: pool(store).pool.pinned == 20 and waiting and reserve("other", waiting.pop()),
    )
    reserved = reserve("r", chain("k", 50))
    assert all(pool(store).pool.busy(key) for key in others)
    assert [slot is not None for slot in reserved.slots] == [True] * 24 + [False] * 26
    assert reserved.reasons == [""] * 24 + ["full"] * 26


def test_an_abort_ends_the_quarantine_of_what_it_names_alone(store, engine):
    """The client may still be writing the slots of its other chunks."""
    (session,) = store.server.sessions()
    keys = chain("k", 2)
    engine.reserve(keys)
    with store.store.dram.lock:
        for key in keys:
            store.store.holdings.give_up(session, key, quarantine=True)
    store.store.storing.abort(session, Abort(keys[:1]))
    assert [key for key, _ in session.quarantined] == keys[1:]


@pytest.mark.parametrize("request_id", ["r", "unknown"])
def test_many_chunks_that_are_stored_leave_tail_first(store, engine, monkeypatch, request_id):
    """As few ones do, whether the store knows the prompt or not."""
    eventually(lambda: pool(store).pool.capacity == 64)
    monkeypatch.setattr(storing, "AT_ONCE", 10)
    keys = chain("k", 25)
    assert engine.find(keys, "r") == []
    engine.put_all(keys, request_id)
    assert list(pool(store).pool) == keys[::-1]
