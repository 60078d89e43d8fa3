"""Two real stores and an agent: samples arrive, prospects are kept."""

from contextlib import ExitStack
from datetime import timedelta

import numpy as np
import pytest

from agent.whatif_fleet import exact_cost
from connector.stores import running
from tiertune_agent.run import utc_now
from tiertune_connector.client.store_client import StoreClient
from tiertune_connector.keys import Namespace
from tiertune_connector.protocol.messages import PrefillLine
from tiertune_connector.whatif.chain import Shape

pytestmark = pytest.mark.slow

POLICY = "version: 1\nmode: observe\ntuners: {tier_size: {period: 1ms}}\n"
NAMESPACE = Namespace(model="llama", chunk_tokens=16)
CHUNK_BYTES = 1000


@pytest.fixture
def stores(tmp_path):
    with ExitStack() as stack:
        for name in ("host-a", "host-b"):
            (tmp_path / name).mkdir()
        yield [stack.enter_context(running(tmp_path / name, name=name, dram=64_000)) for name in ("host-a", "host-b")]


@pytest.fixture
def agent(agents, stores, policy_file):
    policy_file.write_text(POLICY)
    return agents(real=True, now=utc_now, stores=[{"url": store.address} for store in stores])


@pytest.fixture
def players(stores):
    clients = [
        StoreClient(store.server.path, NAMESPACE, chunk_bytes=CHUNK_BYTES, chunk_tokens=16, engine="e")
        for store in stores
    ]
    for client in clients:
        client.prefill = lambda: PrefillLine(0.01, 1e-3, 0.5, 0, 0, 0)
        assert client.connect()
    yield clients
    for client in clients:
        client.close()


def conversations(count, people, *, seed=0):
    """A request's host and keys: everybody's conversation begins alike, grows with every turn, and then ends."""
    rng = np.random.default_rng(seed)
    turns = [0] * people
    for _ in range(count):
        who = int(rng.integers(people))
        turns[who] += 1
        blocks = ["system", *(f"{who}-{turns[who] // 6}-{turn}" for turn in range(turns[who] % 6 + 1))]
        yield int(rng.integers(2)), [block.rjust(16, "0").encode() for block in blocks]


def play(players, requests):
    for host, keys in requests:
        players[host].lookup("r", keys, prompt_tokens=16 * len(keys)).result(10)
    for player in players:
        player.reserve([]).result(10)  # answered when the lookups before it are counted


def test_prospects_of_two_stores_are_those_of_an_exact_simulation(agent, stores, players):
    """From lookups at real stores to rows in SQL: what each size of DRAM would have cost."""
    requests = list(conversations(600, people=20))
    agent.loop.run_once()  # the stores are told how to sample
    agent.loop.run_once()
    play(players, requests)
    agent.loop.run_once()
    (prospect,) = agent.history.measured.prospects(NAMESPACE.digest, utc_now() - timedelta(hours=1))
    assert prospect.requests == 600
    shapes = [Shape.parse(name) for name in prospect.costs if "@" not in name]
    assert {shape.dram for shape in shapes} >= {0, 16_000, 32_000, 64_000, 128_000}
    for shape in shapes:
        exact = exact_cost(requests, shape, 2)
        assert prospect.costs[str(shape)] == pytest.approx(exact, rel=0.02), shape
    assert agent.samples.missed == 0
