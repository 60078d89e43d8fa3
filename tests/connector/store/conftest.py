"""A store with a remote, and an engine of it."""

import pytest

from connector.store.serving import joined, serving


@pytest.fixture
def store(home, remote):
    with serving(home, remote) as process:
        yield process


@pytest.fixture
def engine(store):
    with joined(store) as engine:
        yield engine
