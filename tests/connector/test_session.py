"""What a store remembers of a client's prompts: as many as take a certain memory, however long they are."""

import pytest

from connector.small_store import NEW
from connector.stores import CHUNK_BYTES, CHUNK_TOKENS, NAMESPACE
from tiertune_connector.protocol.messages import Own
from tiertune_connector.sessions.session import Prompt, Session

LONG = 8192
"""Chunks of 16 tokens that a prompt of 128 Ki tokens has."""
MOST_KEYS = 1 << 19


@pytest.fixture
def session():
    return Session("c", "engine-0", "all", NAMESPACE, CHUNK_BYTES, CHUNK_TOKENS)


def look(session, request, chunks, found=0):
    """A prompt is looked up, and the engine has not told yet what it had itself."""
    session.chains.put(request, Prompt([b"k"] * chunks, [], ["dram"], found, deferred=True))


def known(session, names):
    """Those of the requests that are remembered."""
    return [request for request in names if session.chains.get(request)]


def test_long_prompts_take_no_more_memory_than_short_ones(session):
    """A thousand prompts of 128 Ki tokens in chunks of 16 were 600 MB of a store, for each engine."""
    names = [f"r{number}" for number in range(200)]
    for request in names:
        look(session, request, LONG)
    kept = known(session, names)
    assert MOST_KEYS - 2 * LONG < len(kept) * LONG <= MOST_KEYS
    assert kept == names[-len(kept) :]


def test_short_prompts_are_kept_however_many_wait(session):
    """Thousands that wait for their turn: the hits of each are counted once the engine tells what it had itself."""
    names = [f"r{number}" for number in range(5000)]
    for request in names:
        look(session, request, 16)
    assert known(session, names) == names
    for number in range(2 * MOST_KEYS // LONG):
        look(session, f"long {number}", LONG)
    assert known(session, names) == []
    assert known(session, ["long 127"])


def test_a_prompt_longer_than_all_that_is_remembered_is_kept_alone(session):
    """Until the next one comes."""
    look(session, "short", 4)
    look(session, "endless", MOST_KEYS + 1)
    assert known(session, ["short", "endless"]) == ["endless"]
    look(session, "next", 4)
    assert known(session, ["endless", "next"]) == ["next"]


def test_a_prompt_that_is_looked_up_again_counts_once(session):
    """Under the same id it is the newest one, with its new keys."""
    for number in range(3 * MOST_KEYS // LONG):
        look(session, "again", LONG)
        look(session, f"r{number % 8}", 4)
    assert known(session, ["again", *(f"r{number}" for number in range(8))]) == [
        "again", *(f"r{number}" for number in range(8))
    ]  # fmt: skip


def test_a_prompt_whose_turn_has_come_is_a_late_one(served):
    """What the engine had itself is known with it; its chunks are to be stored soon."""
    session = served.join(NEW)
    look(session, "waits", 16, found=2)
    for number in range(MOST_KEYS // LONG - 2):
        look(session, f"r{number}", LONG)
    served.store.lookups.own(session, Own("waits", 2, 1))
    for number in range(20):
        look(session, f"s{number}", LONG)
    chain = session.chains.get("waits")
    assert chain is not None
    assert (chain.found, len(chain.keys), chain.deferred) == (3, 16, False)
