"""The schema of each revision as its migration made it when it was new: ``schemas/REVISION.BACKEND.sql``.

A file says what its revision made, made otherwise (the whole of it) or dropped; the rest stands in the files before it.
After a new migration: ``PYTHONPATH=tests .venv/bin/python -m upgrade.dumps``. It writes the dumps that are missing, and
never one that is there: databases out there have that schema, whatever a migration says later.
"""

import tempfile
from pathlib import Path

from alembic.script import ScriptDirectory
from sqlalchemy import Engine, MetaData, inspect
from sqlalchemy.schema import CreateIndex, CreateTable, ExecutableDDLElement

from e2e.postgres import postgres_server
from tiertune_agent.history.database import _config, connect, upgrade

SCHEMAS = Path(__file__).with_name("schemas")
_END = ";\n"


def revisions() -> list[str]:
    """Every one, the oldest first."""
    return [script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()][::-1]


def path(engine: Engine, revision: str) -> Path:
    return SCHEMAS / f"{revision}.{engine.dialect.name}.sql"


def dump(engine: Engine) -> list[str]:
    """Statements that make what there is, alembic's note of the revision included."""
    found = MetaData()
    found.reflect(engine)
    wanted: list[ExecutableDDLElement] = [CreateTable(table) for table in found.sorted_tables]
    for table in found.sorted_tables:
        wanted += [CreateIndex(index) for index in sorted(table.indexes, key=lambda one: str(one.name))]
    told = [str(one.compile(engine)).replace(" NULLS DISTINCT", "") for one in wanted]  # the default; not before 15
    with engine.connect() as connection:
        (revision,) = connection.exec_driver_sql("select version_num from alembic_version").scalars()
    told.append(f"INSERT INTO alembic_version VALUES ('{revision}')")
    return ["".join(f"{line.rstrip()}\n" for line in one.splitlines() if line.strip()).rstrip() for one in told]


def kept(engine: Engine, revision: str) -> list[str]:
    """The statements of ``dump`` when this revision was new, tables before indexes; no table refers to another."""
    stand: dict[tuple[str, str], str] = {}
    for one in revisions()[: revisions().index(revision) + 1]:
        for statement in path(engine, one).read_text().split(_END)[:-1]:
            if statement.startswith("DROP "):
                del stand[_made(statement)]
            else:
                stand[_made(statement)] = statement
    return [stand[made] for made in sorted(stand, key=lambda made: ("TABLE", "INDEX", "INTO").index(made[0]))]


def _made(statement: str) -> tuple[str, str]:
    """What a statement is about: ``TABLE`` and its name, say."""
    _, kind, name = statement.split(maxsplit=3)[:3]
    return kind, name


def wipe(engine: Engine) -> None:
    """Drop all tables."""
    found = MetaData()
    found.reflect(engine)
    found.drop_all(engine)


def load(engine: Engine, revision: str) -> None:
    """An empty database becomes one of this revision."""
    with engine.begin() as connection:
        for statement in kept(engine, revision):
            connection.exec_driver_sql(statement)


def shape(engine: Engine) -> dict[str, dict[str, object]]:
    """Columns, keys and indexes of each table, to be compared: no matter in which words they were made."""
    look = inspect(engine)
    return {
        name: {
            "columns": {
                str(one["name"]): (one["type"].compile(engine.dialect), one["nullable"], one["default"])
                for one in look.get_columns(name)
            },
            "key": look.get_pk_constraint(name)["constrained_columns"],
            "unique": sorted(one["column_names"] for one in look.get_unique_constraints(name)),
            "indexes": {
                str(one["name"]): (
                    *(one["column_names"], one["unique"]),
                    {option: str(told) for option, told in one.get("dialect_options", {}).items()},
                )
                for one in look.get_indexes(name)
            },
        }
        for name in look.get_table_names()
    }


def _write(engine: Engine, revision: str) -> None:
    """Only what was dropped since the revision before, and what is new or otherwise."""
    if path(engine, revision).exists():
        return
    before = kept(engine, revisions()[revisions().index(revision) - 1]) if revision != revisions()[0] else []
    upgrade(engine, revision)
    after = dump(engine)
    gone = {_made(one) for one in before} - {_made(one) for one in after}
    dropped = [" ".join(("DROP", *made)) for made in sorted(gone)]
    made = [one for one in after if one not in before]
    path(engine, revision).write_text("".join(f"{one}{_END}" for one in (*dropped, *made)))


def main() -> None:
    with postgres_server() as server, tempfile.TemporaryDirectory() as folder:
        for revision in revisions():
            server.command(f'create database "{revision}"')
            for url in (f"sqlite:///{folder}/{revision}.sqlite", server.url(revision)):
                engine = connect(url)
                _write(engine, revision)
                engine.dispose()


if __name__ == "__main__":
    main()
