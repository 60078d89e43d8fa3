"""Stores in this process, in short-lived folders."""

import pytest

from connector.stores import Clock, short_folder


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def home():
    """A folder for one store; its path is short enough for a socket."""
    with short_folder() as folder:
        yield folder
