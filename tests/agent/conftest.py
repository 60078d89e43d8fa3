"""An agent on a real database, with fake stores and a clock that the test moves.

It is an SQLite file, but for modules that say ``from agent.conftest import both_backends as backend``.
"""

import itertools
import json
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest
from sqlalchemy import Engine
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite as SQLiteDialect
from sqlalchemy.util import LRUCache

from agent.agents import EVICTION, POLICY, busy, client_of, looks_of, made, make_agent, pass_windows
from agent.fakes import DIGEST, SLOW, Clock, FakeStore
from agent.hostile import hostile_history
from agent.html import Page
from agent.managed import managed_redis, world  # noqa: F401
from agent.observed import lmcache, observing, vllm  # noqa: F401
from e2e.postgres import postgres_server
from tiertune_agent.history.database import connect, open_current
from tiertune_agent.history.store import History
from tiertune_agent.policy.document import load

BACKENDS = ["sqlite", pytest.param("postgresql", marks=pytest.mark.real)]

_NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def written_whole(monkeypatch):
    """A test writes a file at once: nobody waits a tenth of a second for the rest of it."""
    monkeypatch.setattr("tiertune_agent.followed.SETTLED_S", 0.0)


@pytest.fixture(autouse=True, scope="session")
def compiled_once():
    """Statements are compiled once for all SQLite files, and not for each test's engine again, which takes longer."""
    with pytest.MonkeyPatch.context() as patch:
        compiled = LRUCache(1000)
        patch.setattr(Engine, "_compiled_cache", property(lambda _: compiled, lambda _, __: None), raising=False)
        patch.setattr(SQLiteDialect, "__eq__", lambda one, other: type(one) is type(other))
        patch.setattr(SQLiteDialect, "__hash__", lambda one: hash(type(one)))
        yield


@pytest.fixture
def backend():
    """What the test's database is."""
    return "sqlite"


@pytest.fixture(params=BACKENDS)
def both_backends(request):
    """In a module, under the name ``backend``: every test runs on SQLite and on PostgreSQL."""
    return request.param


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    """A migrated SQLite file, to be copied: migrating takes a while."""
    path = tmp_path_factory.mktemp("database") / "empty.sqlite"
    open_current(f"sqlite:///{path}").dispose()
    return path


@pytest.fixture(scope="session")
def postgres():
    """A PostgreSQL with a migrated database, to be copied. No test stops it."""
    with postgres_server() as server:
        server.command("create database empty")
        open_current(server.url("empty")).dispose()
        yield server


@pytest.fixture
def agent_process(tmp_path):
    """Starts an agent by the folder's ``agent.yaml``; returns the process and where it serves."""
    main = "from tiertune_agent.cli import main; main()"
    command = [sys.executable, "-c", main, "agent", "run", "--config", "agent.yaml"]
    started = []

    def run():
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        started.append(process)
        for line in process.stderr:
            found = re.search(r"serves on (http://\S+)", line)
            if found:
                return process, found[1]
        raise AssertionError("the agent ended before it served")

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def bare(backend, request, tmp_path):
    """The address of an empty database of this test's own."""
    if backend == "sqlite":
        yield f"sqlite:///{tmp_path / 'agent.sqlite'}"
        return
    with _copy(request.getfixturevalue("postgres"), "template0") as url:
        yield url


@pytest.fixture
def database(backend, request, tmp_path):
    """The address of a migrated database of this test's own."""
    if backend == "postgresql":
        with _copy(request.getfixturevalue("postgres"), "empty") as url:
            yield url
        return
    shutil.copy(request.getfixturevalue("empty_database"), tmp_path / "agent.sqlite")
    yield f"sqlite:///{tmp_path / 'agent.sqlite'}"


@contextmanager
def _copy(postgres, template):
    """A database of one test; gone after it, as the files of hundreds take minutes to remove."""
    name = f"test_{next(_NUMBERS)}"
    postgres.command(f"create database {name} template {template}")
    yield postgres.url(name)
    postgres.command(f"drop database {name} with (force)")


@pytest.fixture
def sql():
    """Runs one statement on a database by its address, past the application; the rows that it gives."""

    def run(url, statement):
        engine = connect(url)
        with engine.begin() as connection:
            result = connection.exec_driver_sql(statement)
            rows = [tuple(row) for row in result] if result.returns_rows else []
        engine.dispose()
        return rows

    return run


@pytest.fixture
def history(database):
    history = History(open_current(database))
    yield history
    history.close()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(clock):
    return FakeStore(clock)


@pytest.fixture
def other(clock):
    return FakeStore(clock, "host-b")


@pytest.fixture
def policy_file(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return path


@pytest.fixture
def upgrade(tiertune, tmp_path):
    """``tiertune db upgrade`` of a database, by settings that name it."""

    def run(url, **settings):
        path = tmp_path / "settings.yaml"
        path.write_text(json.dumps({"database": url, "stores": [{"url": "http://127.0.0.1:9"}], **settings}))
        return tiertune("db", "upgrade", "--config", path)

    return run


@pytest.fixture
def agents(database, clock, store, policy_file):
    """Makes agents on the one database, over the one store; what they hold is closed at the end.

    ``real``: over no fake one, but those of the settings. ``agents.end()`` takes the lead from all of them, as their
    death would.
    """
    made = []

    def make(*stores, now=clock.now, real=False, **options):
        made.append(make_agent(database, policy_file, now, () if real else stores or (store,), **options))
        return made[-1]

    make.end = lambda: [agent.leader.resign() for agent in made]
    yield make
    for agent in made:
        agent.close()


@pytest.fixture
def agent(agents):
    return agents()


@pytest.fixture
def rounds(agent, store, clock):
    """Lets windows pass, each with traffic; a round that raised fails the test."""

    def run(count, requests=10, by=agent):
        pass_windows(by, store, clock, count, requests)

    agent.leader.leads()
    agent.loop.run_once()
    return run


@pytest.fixture
def http(agent):
    """Its API, asked from this host."""
    with client_of(agent) as client:
        yield client


@pytest.fixture
def api(http):
    """What it answers: ``api("fleet")`` reads a document, ``api("bypass", {"on": True})`` is a command."""

    def call(path, body=None, **parameters):
        path = f"/api/v1/{path}"
        return (http.get(path, params=parameters) if body is None else http.post(path, json=body)).json()

    return call


@pytest.fixture
def proposed(agent, store, rounds, policy_file):
    """Decision 1, to switch fetch off, is proposed; all decisions."""
    policy_file.write_text(POLICY.replace("mode: auto", "mode: recommend"))
    store.bandwidth = SLOW
    rounds(3)
    return agent.history.decisions


@pytest.fixture
def listed(tmp_path):
    """Writes the list of the stores that there are."""
    path = tmp_path / "stores.yaml"

    def write(*names):
        path.write_text("stores:\n" + "".join(f"- {{url: 'http://{name}:7410'}}\n" for name in names))
        return path

    return write


@pytest.fixture
def soak(agent, store, clock, rounds):
    """Runs windows in which the ghosts of two algorithms count."""

    def run(count, lru, arc):
        for index in range(count):
            store.simulate("lru", lru + index)
            store.simulate("arc", arc + 2 * index)
            rounds(1)

    return run


@pytest.fixture
def auto(policy_file):
    """All tuners may change by themselves; none of them is asked within the test."""
    policy_file.write_text(
        POLICY.replace("version: 1", "version: 1\nmode: auto").replace(
            "tuners: {", "tuners: {tier_size: {period: 90d}, eviction: {period: 90d, hold_off: 5m}, "
        )
    )


@pytest.fixture
def arc(agent, store, auto, rounds):
    """A change of the pool's algorithm, just made."""
    rounds(1)
    return made(agent, store, EVICTION, "lru", "arc", namespace=DIGEST)


@pytest.fixture
def seen(agent, clock):
    """Looks at what stands as nobody has before."""
    return lambda: looks_of(agent, clock).seen()


@pytest.fixture
def look(http, clock):
    """Reads the page anew."""

    def read(path="/"):
        clock.advance(1)  # a look is shared for a second
        answer = http.get(path)
        assert answer.status_code == 200
        return Page(answer.text)

    return read


@pytest.fixture(scope="module")
def shown(tmp_path_factory, empty_database):
    """The page, whole and its live part, of agents with an empty, a busy and a hostile history."""
    texts = {}
    for kind in ("empty", "busy", "hostile"):
        folder, clock = tmp_path_factory.mktemp(kind), Clock()
        shutil.copy(empty_database, folder / "agent.sqlite")
        (folder / "policy.yaml").write_text(POLICY)
        store = FakeStore(clock)
        agent = make_agent(f"sqlite:///{folder / 'agent.sqlite'}", folder / "policy.yaml", clock.now, [store])
        if kind == "busy":
            busy(agent, store, clock)
        if kind == "hostile":
            hostile_history(agent.history)
        with client_of(agent) as client:
            texts[kind] = [client.get(path).text for path in ("/", "/live")]
        agent.close()
    return texts


@pytest.fixture
def policy_of(tmp_path):
    def parse(text):
        (tmp_path / "p.yaml").write_text(text)
        return load(tmp_path / "p.yaml").policy

    return parse
