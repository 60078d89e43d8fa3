"""A store with a remote, and an engine of it."""

import pytest

from connector.store.serving import joined, serving
from tiertune_connector.tiers.memory import MemoryTier


@pytest.fixture
def remote():
    """The remote of a store: memory, whose faults a test sets."""
    return MemoryTier()


@pytest.fixture
def store(home, remote):
    with serving(home, remote) as process:
        yield process


@pytest.fixture
def engine(store):
    with joined(store) as engine:
        yield engine
