"""What an agent remembers of stores and namespaces that are there no more: history does, its memory does not."""

import json
from datetime import datetime, timedelta
from types import FunctionType, ModuleType

import httpx
import pytest

from agent.fakes import DIGEST, SLOW, FakeStore
from tiertune_agent.collector.sampling import SEED

pytestmark = pytest.mark.slow

OTHERS = (
    "sqlalchemy",
    "httpx",
    "fastapi",
    "starlette",
    "logging",
    "_thread",
    "threading",
    "jinja2",
    "prometheus_client",
)
AUTO = """
version: 1
mode: auto
guard: {changes_per_hour: 100, min_requests: 1, soak: 1m}
tuners: {remote_fetch: {period: 15s, disable_after: 2, enable_after: 2}, tier_size: {period: 1m}}
"""


class Sampled(FakeStore):
    """With a namespace of its own, samples of it, and nonsense in place of these on demand."""

    digest, agreed, nonsense = DIGEST, 0, False

    def get_status(self, request):
        told = super().get_status(request).json()
        told["pools"] = {self.digest: {**told["pools"][DIGEST], "chunk_tokens": 256}}
        return httpx.Response(200, json=told)

    def put_sampling(self, request):
        self.agreed = json.loads(request.content)["version"]
        return httpx.Response(200, json={})

    def get_samples(self, _request):
        if self.nonsense:
            return httpx.Response(200, text="[]")
        now_s = self.clock.now().timestamp()
        head = {"boot_id": self.boot_id, "next": 0, "rate": 1.0, "hash_seed": SEED, "hot_version": self.agreed}
        head |= {"dropped": 0, "behind": 0, "time_s": now_s}
        counted = {"requests": int(now_s), "chunks": 4 * int(now_s), "hot_candidates": {}}
        return httpx.Response(200, text=json.dumps({**head, "namespaces": {self.digest: counted}}))


def texts(root):
    """All that is written anywhere in an object of ours, and in what it holds."""
    found, seen, todo = set(), set(), [root]
    while todo:
        one = todo.pop()
        if isinstance(one, str):
            found.add(one)
        if id(one) in seen or isinstance(one, str | bytes | int | float | datetime | type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            todo += [*one, *one.values()]
        elif isinstance(one, list | tuple | set | frozenset) or type(one).__name__ == "deque":
            todo += one
        elif hasattr(one, "__self__"):
            todo.append(one.__self__)
        elif not type(one).__module__.startswith(OTHERS):
            todo += getattr(one, "__dict__", {}).values()
            todo += [getattr(one, name) for name in getattr(one, "__slots__", ()) if hasattr(one, name)]
    return found


def exported(agent, store):
    """Metrics that have a sample of the store."""
    lines = agent.metrics.render().decode().splitlines()
    return {line.partition("{")[0].removeprefix("tiertune_") for line in lines if f'store="{store}"' in line}


@pytest.fixture
def stores(clock):
    made = [Sampled(clock, name) for name in ("host-a", "host-b")]
    made[1].digest = "cd" * 16
    return made


@pytest.fixture
def agent(agents, stores, listed, policy_file):
    """It finds its stores in the list."""
    policy_file.write_text(AUTO)
    return agents(*stores, stores=(), stores_file=listed("host-a", "host-b"))


@pytest.fixture
def rounds(agent, stores, clock):
    def run(count, later=timedelta()):
        clock.at += later
        for _ in range(count):
            clock.advance(15)
            for store in stores:
                store.bandwidth = SLOW
                store.counters["tier_resident_bytes", (("tier", "remote"),)] = 1e9
                store.traffic()
            agent.tick()

    return run


@pytest.mark.parametrize("nonsense", [False, True])
def test_a_store_that_left_leaves_nothing_in_memory(agent, stores, listed, rounds, nonsense):
    """A day after: neither its name, its address nor its namespace; its metrics at once, the others' stay."""
    rounds(12)
    stores[1].nonsense = nonsense
    rounds(2)
    for name in ("host-a", "host-b"):
        assert {"agent_change_timestamp_seconds", "agent_money_total"} <= exported(agent, name)
    stores[1].up = False
    listed("host-a")
    rounds(2)
    assert "agent_money_total" in exported(agent, "host-a")
    assert exported(agent, "host-b") == set()
    rounds(5, timedelta(days=1, hours=7))
    left = texts(agent) & {"host-b", "http://host-b:7410", "host-b:7410", stores[1].digest}
    assert left == set()
    assert {"host-a", stores[0].digest} <= texts(agent)


def test_a_store_that_came_back_has_its_changes_again(agent, listed, rounds):
    """At once, without another change."""
    rounds(12)
    for here in (["host-a"], ["host-a", "host-b"]):
        listed(*here)
        rounds(1)
        assert ("agent_change_timestamp_seconds" in exported(agent, "host-b")) == ("host-b" in here)


def test_a_store_that_left_is_forgotten_a_fortnight_later(agent, listed, rounds, database, sql):
    """What tuners answered about it goes at once. Its decisions stay, and its account by the day."""

    def kept():
        names = {"stores": "name"}
        tables = ("answers", "stores", "windows", "hours", "ledger", "decisions")
        there = {one: f"select 1 from {one} where {names.get(one, 'store')} = 'host-b'" for one in tables}
        return [one for one, query in there.items() if sql(database, query)]

    rounds(12)
    listed("host-a")
    rounds(1)
    assert kept() == ["stores", "windows", "ledger", "decisions"]
    rounds(1, timedelta(days=13))
    for job in (agent.sum_up, agent.prune):
        job()
    assert kept() == ["stores", "hours", "ledger", "decisions"]
    rounds(1, timedelta(days=2))
    agent.prune()
    assert kept() == ["ledger", "decisions"]
    assert sql(database, "select count(*) from ledger where store = 'host-b' and hour not like '%00:00:00.%'") == [(0,)]
    assert sql(database, "select name from stores") == [("host-a",)]
