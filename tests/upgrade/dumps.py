"""The schema of each revision as its migration made it when it was new: ``schemas/REVISION.BACKEND.sql``.

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


def dump(engine: Engine) -> str:
    """Statements that make what there is, alembic's note of the revision included."""
    found = MetaData()
    found.reflect(engine)
    wanted: list[ExecutableDDLElement] = [CreateTable(table) for table in found.sorted_tables]
    for table in found.sorted_tables:
        wanted += [CreateIndex(index) for index in sorted(table.indexes, key=lambda one: str(one.name))]
    told = [str(one.compile(engine)).replace(" NULLS DISTINCT", "") for one in wanted]  # the default; not before 15
    with engine.connect() as connection:
        (revision,) = connection.exec_driver_sql("select version_num from alembic_version").scalars()
    lines = _END.join((*told, f"INSERT INTO alembic_version VALUES ('{revision}')", "")).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines if line.strip())


def wipe(engine: Engine) -> None:
    """Drop all tables."""
    found = MetaData()
    found.reflect(engine)
    found.drop_all(engine)


def load(engine: Engine, revision: str) -> None:
    """An empty database becomes one of this revision."""
    with engine.begin() as connection:
        for statement in path(engine, revision).read_text().split(_END)[:-1]:
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
    if not path(engine, revision).exists():
        upgrade(engine, revision)
        path(engine, revision).write_text(dump(engine))


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
