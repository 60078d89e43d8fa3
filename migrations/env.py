"""Runs migrations on the connection given by TierTune, or on sqlalchemy.url. Never imports the application."""

from alembic import context
from sqlalchemy import Connection, create_engine


def run(connection: Connection) -> None:
    context.configure(connection=connection, render_as_batch=connection.dialect.name == "sqlite")
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    with create_engine(context.config.get_main_option("sqlalchemy.url") or "").begin() as opened:
        run(opened)
