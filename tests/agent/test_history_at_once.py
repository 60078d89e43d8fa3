"""What the round and operators write to history at the same time: neither undoes the other's, nor is turned away."""

import threading
from datetime import timedelta

import pytest
from sqlalchemy import event

from agent.conftest import both_backends as backend  # noqa: F401
from agent.fakes import after, remember, snapshot
from e2e.servers import wait_until
from tiertune_agent.history.database import DatabaseError, connect
from tiertune_agent.history.store import _keep
from tiertune_agent.records import Rates

on_postgres = pytest.mark.parametrize("backend", [pytest.param("postgresql", marks=pytest.mark.real)], indirect=True)


def meanwhile(history, table, act):
    """Act once, right before the next statement that writes the table; returns whether it did, when it is over."""
    met = []

    def told(_connection, _cursor, statement, *_):
        if statement.startswith((f"UPDATE {table}", f"INSERT INTO {table}")) and not met:
            met.append(statement)
            act()

    event.listen(history._engine, "before_cursor_execute", told)
    return met


def keep(history, url, *, on):
    """As a command does, and a round."""
    with history._session() as session:
        _keep(session, url, on=on)


@pytest.mark.parametrize("other", ["heard", "kept"])
def test_a_wish_for_an_address_is_kept_whatever_another_does_to_it(history, other):
    """A round drops the earlier one, which a store has just heard; or keeps one of its own."""
    url = "http://new"
    if other == "heard":
        keep(history, url, on=True)
        met = meanwhile(history, "wishes", lambda: history.acknowledge_bypass([("new", url, True)]))
    else:
        met = meanwhile(history, "wishes", lambda: keep(history, url, on=True))
    keep(history, url, on=False)
    assert met
    assert history.wishes([url]) == {url: False}


def test_what_a_store_answers_meanwhile_stays_when_a_bypass_is_acknowledged(history):
    """A round writes the store's newer tuning just before the acknowledgement is written."""
    remember(history, tuning={"version": 1, "bypass": False})
    history.wish_bypass({"host-a": "http://host-a:7410"}, on=True)
    met = meanwhile(
        history, "stores", lambda: remember(history, tuning={"version": 2, "bypass": False}, at=after(seconds=15))
    )
    history.acknowledge_bypass([("host-a", "http://host-a:7410", True)])
    store = history.store("host-a")
    assert met
    assert (store.tuning, store.pending_bypass) == ({"version": 2, "bypass": True}, None)


def test_a_bypass_that_is_wished_while_another_is_acknowledged_stays(history):
    """Off, commanded in the very moment in which on is acknowledged, is still to be told."""
    remember(history, tuning={"version": 1, "bypass": False})
    history.wish_bypass({"host-a": "http://host-a:7410"}, on=True)
    met = meanwhile(history, "stores", lambda: history.wish_bypass({"host-a": "http://host-a:7410"}, on=False))
    history.acknowledge_bypass([("host-a", "http://host-a:7410", True)])
    (store,) = history.stores()
    assert met
    assert (store.pending_bypass, store.tuning["bypass"]) == (False, False)
    history.acknowledge_bypass([("host-a", "http://host-a:7410", False)])
    assert history.stores()[0].pending_bypass is None


@pytest.mark.parametrize("command", ["all", "one"])
def test_who_is_met_while_a_bypass_of_all_is_lifted_does_not_hear_it(history, command):
    """A round found it wished; it is lifted before the new store's row is there, of which no command knows yet."""
    remember(history, store="there", url="http://there")
    history.wish_bypass_of_all(on=True)
    lifted = {
        "all": lambda: history.wish_bypass_of_all(on=False),
        "one": lambda: history.wish_bypass({"there": "http://there"}, on=False),
    }
    met = meanwhile(history, "stores", lifted[command])
    seen = [(snapshot(store=name, url=f"http://{name}", at=after(seconds=15)), Rates()) for name in ("there", "new")]
    history.remember(seen)
    assert met
    assert {store.name: store.pending_bypass for store in history.stores()} == {"there": False, "new": None}


@pytest.mark.parametrize("earlier", [None, False])
def test_a_wish_for_a_store_is_kept_while_another_is_met_at_its_address(history, earlier):
    """Whoever answers there hears the last one."""
    remember(history, url="http://here")
    if earlier is not None:
        history.wish_bypass({"host-a": "http://here"}, on=earlier)
    met = meanwhile(history, "stores", lambda: history.wish_bypass({"host-a": "http://here"}, on=True))
    remember(history, store="host-b", url="http://here", at=after(seconds=15))
    assert met
    assert history.wishes(["http://here"]) == {"http://here": True}
    assert history.store("host-a").pending_bypass is None


def held_up(database, held, *acts):
    """What fails of acts of which one after the other comes to wait for a row that somebody holds, or for another."""
    failed, other = [], connect(database)

    def run(act):
        try:
            act()
        except DatabaseError as error:
            failed.append(error)

    def waiting(count):
        with other.connect() as asking:
            here = "wait_event_type = 'Lock' and datname = current_database()"
            return asking.exec_driver_sql(f"select count(*) from pg_stat_activity where {here}").scalar_one() == count

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    with other.begin() as holding:
        holding.exec_driver_sql(f"select 1 from {held} for update")
        for count, thread in enumerate(threads, 1):
            thread.start()
            wait_until(lambda count=count: waiting(count), "it waits")
    for thread in threads:
        thread.join()
    other.dispose()
    return failed


@on_postgres
@pytest.mark.parametrize("command", ["wish_of_all", "wish", "acknowledge"])
@pytest.mark.parametrize(
    "seen",
    [
        pytest.param({"a": "a", "m": "m", "z": "z"}, id="three"),
        pytest.param({"m": "a", "z": "z"}, id="another_at_the_address_of_the_first"),
        pytest.param({"b": "z", "m": "m"}, id="another_at_the_address_of_the_last"),
    ],
)
def test_a_bypass_of_many_and_a_round_wait_for_each_other_in_one_order(history, database, seen, command):
    """One of them holds up the other: neither waits for what the other waits for, which PostgreSQL would end.

    ``seen``: stores that the round met, and at whose addresses.
    """
    for name in "zbma":  # PostgreSQL comes to them in this order
        remember(history, store=name, url=name)
    ours = {name: name for name in "zbma"}
    history.wish_bypass(ours, on=False)
    met = [(snapshot(store=name, url=url, at=after(seconds=15)), Rates()) for name, url in seen.items()]
    commands = {
        "wish_of_all": lambda: history.wish_bypass_of_all(on=True),
        "wish": lambda: history.wish_bypass(ours, on=True),
        "acknowledge": lambda: history.acknowledge_bypass((name, url, False) for name, url in ours.items()),
    }
    assert not held_up(database, "stores where name = 'm'", lambda: history.remember(met), commands[command])
    if command == "wish_of_all":
        assert {store.name for store in history.stores() if not store.pending_bypass} == set()


@on_postgres
@pytest.mark.parametrize("other", ["round", "leave_out", "acknowledge"])
def test_so_do_two_that_keep_or_drop_wishes_of_several_addresses(history, database, other):
    """Of stores that nobody knows: a round moves such wishes to addresses, or those of former stores are dropped."""
    for place, url in enumerate("zma"):  # PostgreSQL comes to them in this order
        history.wish_bypass({"new": url}, on=True)
        remember(history, store=f"former-{place}", url=url)
        history.wish_bypass_of_all(on=True)
    history.named = set
    met = [(snapshot(store=f"new-{url}", url=url, at=after(seconds=15)), Rates()) for url in "zma"]
    others = {
        "round": lambda: history.remember(met),
        "leave_out": lambda: history.leave_out(()),
        "acknowledge": lambda: history.acknowledge_bypass((f"new-{url}", url, True) for url in "zma"),
    }
    wish = lambda: history.wish_bypass({f"b{place}": url for place, url in enumerate("zma")}, on=True)  # noqa: E731
    assert not held_up(database, "wishes where url = 'm'", others[other], wish)


@on_postgres
@pytest.mark.parametrize("first", ["lift", "round"])
def test_a_bypass_of_all_is_lifted_before_a_round_or_after_it(history, database, first):
    """Also where a round meets none but new stores: of those that hear it, whoever lifts it afterwards knows."""
    history.wish_bypass_of_all(on=True)
    acts = {
        "lift": lambda: history.wish_bypass_of_all(on=False),
        "round": lambda: history.remember([(snapshot(store="new"), Rates())]),
    }
    assert not held_up(database, "wishes where url = 'fleet'", acts.pop(first), *acts.values())
    assert history.store("new").pending_bypass == (None if first == "lift" else True)
    assert history.wishes(["fleet"]) == {}


def test_a_store_that_comes_back_while_others_are_forgotten_is_not(history, monkeypatch):
    """Forgetting hundreds takes a while; one that answers by then has its row, and the bypass that it did not hear."""
    for name in "ab":
        remember(history, store=name, url=f"http://{name}")
    history.wish_bypass({"b": "http://b"}, on=True)
    names = history.retention._stores

    def found(*asked):
        told = names(*asked)
        remember(history, store="b", url="http://elsewhere", at=after(days=30))
        return told

    monkeypatch.setattr(history.retention, "_stores", found)
    history.retention.forget(after(days=30), timedelta(hours=6), ())
    assert [(store.name, store.pending_bypass) for store in history.stores()] == [("b", True)]
