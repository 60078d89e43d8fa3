"""Soaks, rollbacks, expected tunings, weekly reviews, prospects of other sizes, and what a holdout measured."""

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: str | None = None
depends_on: str | None = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
MEASURED = ("measured", "measured_low", "measured_high")


def upgrade() -> None:
    op.add_column("decisions", sa.Column("soak_until", sa.DateTime(timezone=True), nullable=True))
    op.add_column("decisions", sa.Column("undo", sa.JSON(), nullable=True))
    op.add_column("ledger", sa.Column("holdout", sa.JSON(), nullable=True))
    for name in MEASURED:
        op.add_column("ledger", sa.Column(name, sa.Double(), nullable=True))
    op.add_column("stores", sa.Column("expected", sa.JSON(), nullable=True))
    op.add_column("stores", sa.Column("expected_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("stores", sa.Column("differs_since", sa.DateTime(timezone=True), nullable=True))
    op.create_table(
        "prospects",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("namespace", sa.String(255), nullable=False),
        sa.Column("start", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("costs", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("prospects_by_start", "prospects", ["namespace", "start"])
    op.create_table(
        "reviews",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("decision", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("stands", sa.String(255), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("reviews_by_decision", "reviews", ["decision", "at"])


def downgrade() -> None:
    op.drop_index("reviews_by_decision", table_name="reviews")
    op.drop_table("reviews")
    op.drop_index("prospects_by_start", table_name="prospects")
    op.drop_table("prospects")
    with op.batch_alter_table("stores") as table:
        for name in ("differs_since", "expected_at", "expected"):
            table.drop_column(name)
    with op.batch_alter_table("ledger") as table:
        for name in (*reversed(MEASURED), "holdout"):
            table.drop_column(name)
    with op.batch_alter_table("decisions") as table:
        table.drop_column("undo")
        table.drop_column("soak_until")
