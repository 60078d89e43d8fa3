"""Two real stores and an agent: samples arrive, one hot set goes out, prospects are kept."""

import time
from datetime import timedelta

import numpy as np
import pytest

from agent.whatif_fleet import exact_cost
from connector.stores import settings
from tiertune_agent.run import Agent, utc_now
from tiertune_agent.settings import AgentSettings
from tiertune_connector.client.store_client import StoreClient
from tiertune_connector.keys import Namespace
from tiertune_connector.protocol.messages import PrefillLine
from tiertune_connector.serve.main import StoreProcess
from tiertune_connector.whatif.chain import Shape

pytestmark = pytest.mark.slow

POLICY = "version: 1\nmode: observe\ntuners: {tier_size: {period: 1ms}}\n"
NAMESPACE = Namespace(model="llama", chunk_tokens=16)
CHUNK_BYTES = 1000


def started(folder, name, dram, port=0):
    (folder / name).mkdir(exist_ok=True)
    store = StoreProcess(settings(folder / name, name=name, dram=dram, http={"port": port}))
    store.start()
    return store


@pytest.fixture
def dram():
    return 64_000


@pytest.fixture
def stores(tmp_path, dram):
    made = [started(tmp_path, name, dram) for name in ("host-a", "host-b")]
    yield made
    for store in made:
        store.stop()


@pytest.fixture
def agent(stores, database, policy_file):
    policy_file.write_text(POLICY)
    settings = AgentSettings(database=database, stores=[{"url": store.address} for store in stores], policy=policy_file)
    made = Agent(settings, now=utc_now)
    assert made.leader.leads()
    yield made
    made.close()


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


class TestLarge:
    @pytest.fixture
    def dram(self):
        return 60_000_000

    def test_one_hot_set_reaches_both_stores(self, agent, stores, players):
        """A fleet too large to follow every chunk: one rate, one seed, one set, the head of all prompts in it."""
        agent.loop.run_once()
        play(players, conversations(400, people=40))
        agent.loop.run_once()
        one, other = (store.store.observer.sampling for store in stores)
        assert one == other
        assert one.rate < 1
        assert one.version >= 1
        assert b"system".rjust(16, b"0") in one.hot

    def test_a_store_that_restarts_is_told_again(self, agent, stores, players, tmp_path, dram):
        """It forgot the set; after a round it has the fleet's."""
        play(players, conversations(400, people=40))
        agent.loop.run_once()
        agent.loop.run_once()
        port = int(stores[1].address.rpartition(":")[2])
        stores[1].stop()
        stores[1] = started(tmp_path, "host-b", dram, port)
        assert stores[1].store.observer.sampling.version == 0
        deadline = time.monotonic() + 20
        while stores[1].store.observer.sampling != stores[0].store.observer.sampling:
            assert time.monotonic() < deadline, "it was not told"
            agent.loop.run_once()
