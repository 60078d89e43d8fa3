"""Windows summed up by the hour, and indices for what rounds, judge and reviews read."""

import sqlalchemy as sa
from alembic import op

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels: str | None = None
depends_on: str | None = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
CANDIDATES = sa.text("requests > 0")


def upgrade() -> None:
    op.add_column("stores", sa.Column("summed_until", sa.DateTime(timezone=True), nullable=True))
    op.create_table(
        "hours",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("store", sa.String(255), nullable=False),
        sa.Column("namespace", sa.String(255), nullable=False),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("tier", sa.String(255), nullable=False),
        sa.Column("start", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("counters", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("hours_by_tier", "hours", ["store", "tier", "namespace", "start"])
    op.create_index("windows_by_store", "windows", ["store", "start"])
    op.create_index(
        "windows_with_candidates",
        "windows",
        ["store", "tier", "start"],
        sqlite_where=CANDIDATES,
        postgresql_where=CANDIDATES,
    )
    op.drop_index("windows_by_start", table_name="windows")
    op.create_index("prospects_by_time", "prospects", ["start"])
    op.drop_index("prospects_by_start", table_name="prospects")


def downgrade() -> None:
    op.create_index("prospects_by_start", "prospects", ["namespace", "start"])
    op.drop_index("prospects_by_time", table_name="prospects")
    op.create_index("windows_by_start", "windows", ["start"])
    op.drop_index("windows_with_candidates", table_name="windows")
    op.drop_index("windows_by_store", table_name="windows")
    op.drop_index("hours_by_tier", table_name="hours")
    op.drop_table("hours")
    with op.batch_alter_table("stores") as table:
        table.drop_column("summed_until")
