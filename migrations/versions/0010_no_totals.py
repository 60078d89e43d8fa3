"""Counters since a store's boot are not kept beside its windows."""

import sqlalchemy as sa
from alembic import op

revision: str = "0010"
down_revision: str | None = "0009"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    with op.batch_alter_table("stores") as stores:
        stores.drop_column("totals")


def downgrade() -> None:
    op.add_column("stores", sa.Column("totals", sa.JSON(), nullable=True))
    op.execute("update stores set totals = '{}'")
    with op.batch_alter_table("stores") as stores:
        stores.alter_column("totals", existing_type=sa.JSON(), nullable=False)
