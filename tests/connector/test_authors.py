"""Which engine computed a chunk, remembered in little room."""

import pytest

from connector.stores import A, B, chain
from tiertune_connector.store import accounts
from tiertune_connector.store.accounts import Authors


@pytest.fixture
def known():
    return Authors()


def test_a_chunk_is_its_last_writer_s(known):
    """In its namespace alone; of what was never written nobody knows."""
    first, second = chain("k", 2)
    known.wrote(A, first, "engine-0")
    known.wrote(A, second, "engine-0")
    known.wrote(A, second, "engine-1")
    assert known.of(A, [first, b"never written", second]) == ["engine-0", "engine-1"]
    assert known.of(B, [first, second]) == []


def test_of_more_than_are_remembered_none_is_another_s(known, monkeypatch):
    """A place is taken by the latest; who was there is forgotten."""
    monkeypatch.setattr(accounts, "REMEMBERED", 1 << 16)
    keys = chain("k", 1 << 17)
    for number, key in enumerate(keys):
        known.wrote(A, key, f"engine-{number % 2}")
    told = [known.of(A, keys[which::2]) for which in (0, 1)]
    assert [set(engines) for engines in told] == [{"engine-0"}, {"engine-1"}]
    assert 1 << 15 < sum(map(len, told)) <= 1 << 16
    assert known.of(A, keys[-1:]) == ["engine-1"]


def test_engines_beyond_the_first_many_are_nobody(known, monkeypatch):
    """Clients choose their names: they take no more room than numbers."""
    monkeypatch.setattr(accounts, "_NAMED", 4)
    keys = chain("k", 6)
    for number, key in enumerate(keys):
        known.wrote(A, key, f"engine-{number}")
    assert known.of(A, keys) == ["engine-0", "engine-1", "engine-2"]
    assert len(known._engines) == 4
