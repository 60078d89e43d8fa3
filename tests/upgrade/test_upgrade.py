"""A history of every schema there was is upgraded with its rows, on both backends, and can go back.

The schemas lie in ``schemas/``, as they were when they were new. After a new migration ``dumps`` writes its own:
``PYTHONPATH=tests .venv/bin/python -m upgrade.dumps``
"""

from datetime import UTC, datetime, timedelta

import pytest
from alembic import command
from sqlalchemy import MetaData, func, select

from agent.conftest import bare, postgres  # noqa: F401
from agent.conftest import both_backends as backend  # noqa: F401
from agent.fakes import ledger_rows
from tiertune_agent.history.database import DatabaseError, _config, connect, open_current, upgrade
from tiertune_agent.history.store import History
from tiertune_agent.records import State, Target
from upgrade.dumps import SCHEMAS, load, revisions, shape, wipe

pytestmark = pytest.mark.slow

AT = datetime(2025, 3, 5, 12, tzinfo=UTC)
LATER = AT + timedelta(minutes=1)
WINDOW = {"tier_resident_bytes": 5.0, "gate_actual_seconds": {"count": 2.0, "sum": 3.0, "buckets": {"4": 2.0}}}
NAMED = {"store": "host-a", "tier": "remote", "namespace": ""}
ROWS = {
    "answers": {"tuner": "t", **NAMED, "at": AT, "change": True, "reason": "because"},
    "audit": {"id": 1, "at": AT, "who": "ops", "source": "here", "what": "freeze", "detail": {"on": True}},
    "decisions": {
        "id": 7,
        "key": "k",
        "tuner": "remote_fetch",
        **NAMED,
        "target": "host-a remote",
        "models": ["llama"],
        "field": "tiers.remote.fetch",
        "from": "on",
        "to": "off",
        "mode": "auto",
        "state": "soaking",
        "reason": "it costs",
        "evidence": {"windows": [1]},
        "expected_version": 1,
        "applied_version": 2,
        "policy_revision": 3,
        "created_at": AT,
        "updated_at": AT,
        "approved_at": AT,
        "approved_by": "policy",
        "applied_at": AT,
        "soak_until": LATER,
        "undo": {"by": "ops"},
        "waits": "no answer",
    },
    "freezes": {"id": 1, "reason": "release", "who": "ops", "start": AT, "until": None, "lifted_at": None},
    "incidents": {
        "id": 4,
        "kind": "tier_dead",
        "store": "host-a",
        "message": "gone",
        "opened_at": AT,
        "last_seen": LATER,
        "closed_at": None,
    },
    "ledger": {
        "hour": AT,
        **NAMED,
        "seconds": 15.0,
        "saved": 2.5,
        "lost": 0.5,
        "bytes": 9 << 40,
        "transferred": 7,
        "money": 1.25,
        "holdout": {"held": {"requests": 1.0}},
        "measured": 2.0,
        "measured_low": 1.0,
        "measured_high": 3.0,
    },
    "policy_revisions": {"id": 3, "digest": "d", "source": "p.yaml", "text": "version: 1", "loaded_at": AT},
    "stage_windows": {
        "id": 1,
        "store": "host-a",
        "stage": "all",
        "phase": "prefill",
        "gpu": "",
        "start": AT,
        "seconds": 15.0,
        "gpu_seconds": 3.5,
        "tokens": 700.0,
        "utilization": 0.5,
        "memory_used_bytes": 1 << 40,
        "memory_free_bytes": 2,
        "power_watts": 350.5,
        "energy_joules": 5.0,
    },
    "stores": {
        "name": "host-a",
        "url": "http://host-a:7410",
        "boot_id": "b",
        "version": "0.1.0",
        "first_seen": AT,
        "last_seen": LATER,
        "status": {"tiers": {}},
        "tuning": {"version": 2},
        "totals": {},
        "pending_bypass": True,
        "expected": {"version": 1},
        "expected_at": AT,
        "differs_since": AT,
        "summed_until": AT,
        "folded_until": AT,
        "candidates": [[3.0, 2.0, 1.5, 0.5]],
    },
    "verdicts": {"id": 1, "decision": 7, "at": LATER, "verdict": "kept", "reason": "good", "evidence": {"gain": 1}},
    "windows": {
        "id": 5,
        **NAMED,
        "model": "llama",
        "start": AT,
        "seconds": 15.0,
        "requests": 0,
        "counters": WINDOW,
    },
    "hours": {"id": 5, **NAMED, "model": "llama", "start": AT, "seconds": 3600.0, "counters": WINDOW},
    "prospects": {
        "id": 1,
        "namespace": "ab" * 16,
        "start": AT,
        "seconds": 300.0,
        "requests": 10,
        "costs": {"1/0/0": 0.5},
    },
    "reviews": {"id": 1, "decision": 7, "at": LATER, "stands": "stands", "reason": "pays", "evidence": {}},
    "wishes": {"url": "http://host-b:7410", "bypass": True},
}
"""One row of each table that there ever was, with each column that it ever had."""
DROPPED = {"stores": {"totals"}, "reviews": set(ROWS["reviews"]), "windows": {"requests"}}
"""Columns that newer schemas have not."""
ANEW = {"stores": {"expected", "expected_at", "differs_since"}}
"""Columns that are set anew on the way."""


def tables(engine):
    """As they are in the database, the application's models aside."""
    found = MetaData()
    found.reflect(engine)
    return {name: table for name, table in found.tables.items() if name != "alembic_version"}


def fill(engine):
    """One row in every table, in the columns that there are now."""
    with engine.begin() as connection:
        for name, table in tables(engine).items():
            row = {column.name: ROWS[name][column.name] for column in table.columns}
            connection.execute(table.insert(), [row])
            if engine.dialect.name == "postgresql" and "id" in row:  # as if it had given the number itself
                connection.execute(select(func.setval(func.pg_get_serial_sequence(name, "id"), row["id"])))


def rows(engine):
    """What every table holds: plain values, times in UTC."""
    with engine.connect() as connection:
        return {
            name: [dict(zip(row._mapping, map(plain, row), strict=True)) for row in connection.execute(table.select())]
            for name, table in tables(engine).items()
        }


def plain(value):
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    return value


def expected(name, columns):
    """The row as it was put in, in these columns."""
    return {column: ROWS[name][column] for column in columns}


def test_rows_are_there_for_every_column(bare):  # noqa: F811
    """What a later schema adds is to be added here too."""
    engine = open_current(bare)
    there = {name: set(row) - DROPPED.get(name, set()) for name, row in ROWS.items()}
    assert {name: set(table.columns.keys()) for name, table in tables(engine).items()} == {
        name: columns for name, columns in there.items() if columns
    }
    engine.dispose()


def test_the_schema_of_every_revision_is_kept():
    """A new migration adds its own, for both backends."""
    assert {path.name for path in SCHEMAS.iterdir()} == {
        f"{revision}.{kind}.sql" for revision in revisions() for kind in ("sqlite", "postgresql")
    }


@pytest.mark.parametrize("revision", revisions())
def test_no_migration_makes_anything_else_than_when_it_was_new(bare, revision):  # noqa: F811
    """Up to its revision the migrations make what was kept, and the rest makes the newest of it."""
    engine = connect(bare)
    upgrade(engine, revision)
    is_as_kept(engine, revision)
    upgrade(engine)
    is_as_kept(engine, revisions()[-1])
    engine.dispose()


def is_as_kept(engine, revision):
    """Whatever made it. It is empty afterwards."""
    made = shape(engine)
    wipe(engine)
    load(engine, revision)
    assert made == shape(engine)


@pytest.mark.parametrize("revision", revisions())
def test_a_history_of_every_schema_is_upgraded_with_its_rows(bare, revision):  # noqa: F811
    """Nothing is lost but what is kept no more, new columns are empty, and this version reads what that one wrote."""
    engine = connect(bare)
    load(engine, revision)
    fill(engine)
    before = rows(engine)
    if revision != revisions()[-1]:
        with pytest.raises(DatabaseError, match="run `tiertune db upgrade --config FILE`"):
            open_current(bare)
    assert upgrade(engine) == (revision, revisions()[-1])
    for name, kept in rows(engine).items():
        if name in before:
            anew = {*DROPPED.get(name, ()), *ANEW.get(name, ())}
            had = {column: value for column, value in before[name][0].items() if column not in anew}
            assert {column: value for column, value in kept[0].items() if column in had} == had == expected(name, had)
            assert all(value is None for column, value in kept[0].items() if column not in (*had, *anew))
        else:
            assert kept == []
    engine.dispose()
    understood(bare)


def understood(url):
    """This version's own reading of the rows."""
    history = History(open_current(url))
    (decision,) = history.decisions.find()
    assert (decision.id, decision.target, decision.after, decision.state) == (
        *(7, Target("host-a", "remote", models=("llama",)), "off"),
        State.SOAKING,
    )
    assert [one["reason"] for one in history.verdicts.of(7)] in (["good"], ["good", "pays"]), "or reviewed"
    (window,) = history.measured.windows_since("host-a", AT, tier="remote")
    assert (window.start, window.values["tier_resident_bytes"], window.values["gate_actual_seconds"].sum) == (AT, 5, 3)
    assert history.ledger.account(AT) == {"remote": {"saved": 2.5, "lost": 0.5, "money": 1.25}}
    assert ledger_rows(history, AT)[0]["bytes"] == 9 << 40
    assert history.stores()[0].pending_bypass is True
    assert history.journal.open_incidents() == {"tier_dead": 1}
    assert history.journal.frozen(LATER).reason == "release"
    (expected_of,) = history.expectations(["host-a"]).values()
    told = {"version": 1}, AT, AT
    assert (expected_of.tuning, expected_of.since, expected_of.differs) in (told, ({"version": 2}, LATER, None)), "seen"
    history.close()


def back(engine, revision):
    """Downgrade."""
    with engine.begin() as connection:
        config = _config()
        config.attributes["connection"] = connection
        command.downgrade(config, revision)


@pytest.mark.parametrize("revision", revisions()[:-1])
def test_the_way_back_loses_only_what_was_not_there(bare, revision):  # noqa: F811
    """Down to an older schema, which is as it was: what that one knows is there."""
    engine = connect(bare)
    upgrade(engine)
    fill(engine)
    back(engine, revision)
    for name, kept in rows(engine).items():
        assert kept == ([] if name == "reviews" else [expected(name, kept[0])])
    is_as_kept(engine, revision)
    engine.dispose()


@pytest.mark.parametrize("revision", ["0003", "0010"])
def test_reviews_are_verdicts_there_and_back(bare, revision):  # noqa: F811
    """A review of a decision has the word of its own; a verdict stays what it was."""
    engine = connect(bare)
    load(engine, revision)
    fill(engine)
    before = rows(engine)
    upgrade(engine)
    judged, reviewed = rows(engine)["verdicts"]
    told = {"id": 2, "verdict": "stands", "reason": "pays", "evidence": {}}
    assert (judged, reviewed) == (ROWS["verdicts"], {**ROWS["verdicts"], **told})
    back(engine, revision)
    assert {name: rows(engine)[name] for name in ("verdicts", "reviews")} == {
        name: before[name] for name in ("verdicts", "reviews")
    }
    engine.dispose()


def test_what_requests_found_in_the_remote_is_read_out_of_old_windows(bare):  # noqa: F811
    """The last twenty that found something, however old: with fetching off no others come."""
    engine = connect(bare)
    load(engine, "0011")
    fill(engine)
    asked = {
        "gate_candidate_bytes_total": 64.0,
        "gate_candidate_seconds_total{kind=fetch}": 9.0,
        "gate_candidate_seconds_total{kind=recompute}": 2.0,
        "gate_requests_total{decision=recompute,reason=unknown_cost}": 1.0,
        "gate_actual_seconds{kind=fetch}": WINDOW["gate_actual_seconds"],
    }
    with engine.begin() as connection:
        for number in range(1, 26):
            row = {**ROWS["windows"], "id": 5 + number, "start": AT + timedelta(minutes=number), "requests": number}
            counters = {**asked, "gate_candidate_requests_total": float(number)}
            connection.execute(tables(engine)["windows"].insert(), [{**row, "counters": counters}])
    upgrade(engine)
    engine.dispose()
    history = History(open_current(bare))
    told = [[number, number - 1, 64, 2] for number in range(6, 26)]
    assert history.store("host-a").candidates == told
    history.close()
