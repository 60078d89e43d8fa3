"""Transfers between a staging region of four rows and a store in memory."""

import numpy as np
import pytest

from connector.transfers.fake_client import ROW, FakeClient
from tiertune_connector.vllm.transfers import Transfers


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
