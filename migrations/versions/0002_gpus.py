"""Columns of stage_windows for what a GPU reported in a window, empty in rows of a phase."""

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: str | None = None
depends_on: str | None = None

COLUMNS = ("utilization", "memory_used_bytes", "memory_free_bytes", "power_watts", "energy_joules")


def upgrade() -> None:
    for name in COLUMNS:
        kind = sa.BigInteger() if name.endswith("bytes") else sa.Double()
        op.add_column("stage_windows", sa.Column(name, kind, nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("stage_windows") as table:
        for name in reversed(COLUMNS):
            table.drop_column(name)
