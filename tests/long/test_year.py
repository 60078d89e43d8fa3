"""A year of 50 stores: how much room it takes, and how long what the page and the API ask for lasts."""

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import text

from agent.conftest import BACKENDS
from long.results import record
from long.year import STORES, Year
from tiertune_agent.changes.survey import MEMORY
from tiertune_agent.history.database import open_current
from tiertune_agent.history.decisions import MOST_MOVED
from tiertune_agent.history.retention import YEAR
from tiertune_agent.history.store import History
from tiertune_agent.incidents.watch import MEANT, REMEMBERED
from tiertune_agent.policy.document import followed
from tiertune_agent.records import State
from tiertune_agent.web import page
from tiertune_agent.web.look import Looks
from tiertune_agent.web.views import Views

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(3600)]
NOW = datetime(2026, 3, 5, 12, 30, tzinfo=UTC)
MOST_BYTES, MOST_S, TIMES = 2e9, 0.2, 7
WINDOW_S, REFRESH = 15, timedelta(seconds=page.REFRESH_S)
MOST_OF_A_WINDOW = 0.04
"""Of a core, for what the page makes of the windows that all stores tell at once."""


@pytest.fixture(scope="module", params=BACKENDS)
def filled(request, tmp_path_factory):
    """The backend's name, a history that holds the year, its rows by table, and its bytes."""
    folder = tmp_path_factory.mktemp("year")
    if request.param == "sqlite":
        url = f"sqlite:///{folder}/year.sqlite"
    else:
        server = request.getfixturevalue("year_postgres")
        server.command("create database year")
        url = server.url("year")
    engine = open_current(url)
    rows = Year(NOW).write(engine)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if request.param == "sqlite":
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.exec_driver_sql("ANALYZE")
            size = (folder / "year.sqlite").stat().st_size
        else:
            connection.exec_driver_sql("SET statement_timeout = 0")
            connection.exec_driver_sql("VACUUM ANALYZE")
            size = connection.scalar(text("SELECT pg_database_size('year')"))
    history = History(engine)
    yield request.param, history, rows, size
    history.close()


@pytest.fixture(scope="module")
def year_postgres():
    from e2e.postgres import postgres_server

    with postgres_server() as server:
        yield server


def seconds(ask, clock=time.perf_counter):
    """The quickest of some runs: what else the machine does is no finding."""
    took = []
    for _ in range(TIMES):
        began = clock()
        ask()
        took.append(clock() - began)
    return min(took)


def cpu_seconds(ask):
    """Of this process alone: what the page costs besides other work."""
    return seconds(ask, time.process_time)


def whole(answer):
    """Read what is sent piece by piece."""

    async def pieces():
        return [piece async for piece in answer.body_iterator]

    return asyncio.run(pieces())


def _of_a_round(history):
    """What is asked of decisions in every round, whatever happens in it."""
    changed, decisions = history.changed, history.decisions
    stores = [store.name for store in history.stores()]
    decisions.find(states=MEANT, limit=MOST_MOVED, since=NOW - REMEMBERED)
    changed.last(stores)
    decisions.in_state(State.PROPOSED)
    changed.superseded()
    decisions.undoing()
    changed.count(NOW - timedelta(hours=1), NOW)
    changed.undone(NOW - MEMORY, NOW, stores)


def test_a_year_takes_less_than_two_gigabytes(filled):
    """Windows of six hours, hours of a fortnight, days of the year, decisions and all else, with every index."""
    backend, _, rows, size = filled
    record("history_year", backend, {"stores": STORES, "bytes": size, "rows": rows})
    assert size < MOST_BYTES * STORES / 50


def test_what_the_page_and_the_api_ask_takes_less_than_200_ms(filled):
    """Every document of the API by its defaults."""
    backend, history, _, _ = filled
    views = Views(
        history, followed(None), leads=lambda: True, now=lambda: NOW, window_s=WINDOW_S, stores=dict, sources={}
    )
    asked = {
        "fleet": views.fleet,
        "decisions": lambda: views.decisions(None, 200),
        "decision": lambda: views.decision(9),
        "ledger of a day": lambda: whole(views.ledger(24)),
        "windows of a store": lambda: history.measured.fleet_windows(["host-07"], NOW - timedelta(minutes=15)),
        "policies": views.policies,
        "incidents": views.incidents,
        "audit": lambda: views.audit(100),
    }
    took = {name: seconds(ask) for name, ask in asked.items()}
    measured = history.measured
    others = {
        "account of a year": seconds(lambda: history.ledger.account(NOW - YEAR)),
        "ledger of a week": seconds(lambda: whole(views.ledger(7 * 24))),
        "ledger of a year": seconds(lambda: whole(views.ledger(365 * 24))),
        "what a round reads of decisions": seconds(lambda: _of_a_round(history)),
        "decisions to review": seconds(lambda: history.changed.standing(NOW - timedelta(days=7), ["host-07"], [])),
        "a week by hours": seconds(lambda: measured.windows_since("host-07", NOW - timedelta(days=7), tier="remote")),
    }
    record("history_queries_s", backend, {**took, **others})
    assert {name: spent for name, spent in took.items() if spent > MOST_S} == {}


def test_a_look_with_a_window_of_every_store_takes_less_than_200_ms(filled):
    """The queries that a page makes when all stores have told a window."""
    backend, history, _, _ = filled
    views = Views(
        history, followed(None), leads=lambda: True, now=lambda: NOW, window_s=WINDOW_S, stores=dict, sources={}
    )
    looks = Looks(views)
    looks._look()

    def renew():
        looks._stores = {name: replace(read, answered="before") for name, read in looks._stores.items()}
        looks._look()

    took = {"look": seconds(renew)}
    record("page_s", backend, took)
    assert took["look"] < MOST_S


def test_a_page_with_nothing_new_costs_less_than_200_ms(filled):
    """A look two seconds later, rendered; one that a second tab shares; one when every store has told a window."""
    backend, history, _, _ = filled
    now = [NOW]
    views = Views(
        history, followed(None), leads=lambda: True, now=lambda: now[0], window_s=WINDOW_S, stores=dict, sources={}
    )
    looks = Looks(views)
    app = FastAPI()
    app.include_router(page.router(looks))
    with TestClient(app) as http:

        def tab():
            assert http.get("/live").status_code == 200

        def later():
            now[0] += REFRESH
            tab()

        def told():
            now[0] = NOW
            looks._last = None
            looks._stores = {name: replace(read, answered="before") for name, read in looks._stores.items()}
            tab()

        began = time.process_time()
        tab()
        spent = {"first page": time.process_time() - began, "nothing new": cpu_seconds(later)}
        spent |= {"shared by a second tab": cpu_seconds(tab), "a window of every store": cpu_seconds(told)}
    record("page_cpu_s", backend, spent)
    assert spent["nothing new"] < MOST_S
    assert spent["shared by a second tab"] < MOST_S / 10
    assert spent["a window of every store"] < MOST_OF_A_WINDOW * WINDOW_S
