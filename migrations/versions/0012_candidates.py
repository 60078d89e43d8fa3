"""What requests found in the remote last is kept with the store, not in windows that are never dropped.

The way back has none: an older version knows candidates again when requests find chunks.
"""

from collections.abc import Iterator

import sqlalchemy as sa
from alembic import op

revision: str = "0012"
down_revision: str | None = "0011"
branch_labels: str | None = None
depends_on: str | None = None

STORES = sa.table("stores", sa.column("name"), sa.column("candidates", sa.JSON()))
WINDOWS = sa.table("windows", *map(sa.column, ("store", "tier", "start", "requests")), sa.column("counters", sa.JSON()))
LAST = 20
ONLY_SOME = sa.text("requests > 0")


def upgrade() -> None:
    op.add_column("stores", sa.Column("candidates", sa.JSON(), nullable=True))
    connection = op.get_bind()
    for store in connection.scalars(sa.select(STORES.c.name)).all():
        of_remote = (WINDOWS.c.store == store, WINDOWS.c.tier == "remote", ONLY_SOME)
        last = sa.select(WINDOWS.c.counters).where(*of_remote).order_by(WINDOWS.c.start.desc()).limit(LAST)
        found = [found for counters in connection.scalars(last) for found in _found(counters)][::-1]
        if found:
            connection.execute(STORES.update().where(STORES.c.name == store).values(candidates=found))
    op.drop_index("windows_with_candidates", table_name="windows")
    op.drop_column("windows", "requests")


def _found(counters: dict[str, object]) -> Iterator[list[float]]:
    """Requests that found chunks, those whose cost is known, bytes, and seconds to recompute them, if those are."""

    def total(name: str, label: str = "") -> float:
        told = (value for series, value in counters.items() if series.split("{")[0] == name and label in series)
        return sum(float(value) for value in told if isinstance(value, (int, float)))

    requests = total("gate_candidate_requests_total")
    recompute_s = total("gate_candidate_seconds_total", "kind=recompute")
    if requests and recompute_s:
        known = requests - total("gate_requests_total", "reason=unknown_cost")
        yield [requests, known, total("gate_candidate_bytes_total"), recompute_s]


def downgrade() -> None:
    op.add_column("windows", sa.Column("requests", sa.BigInteger(), nullable=False, server_default="0"))
    with op.batch_alter_table("windows") as windows:
        windows.alter_column("requests", existing_type=sa.BigInteger(), server_default=None)
    op.create_index(
        "windows_with_candidates",
        "windows",
        ["store", "tier", "start"],
        sqlite_where=ONLY_SOME,
        postgresql_where=ONLY_SOME,
    )
    with op.batch_alter_table("stores") as stores:
        stores.drop_column("candidates")
