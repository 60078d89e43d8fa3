"""Counters since a store's boot are not kept; what is expected of a store is what it answered last.

Until now that was a base of some hours ago, without the decisions since.

Incidents of samples that nobody understands are closed, as they are only logged.
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0010"
down_revision: str | None = "0009"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    with op.batch_alter_table("stores") as stores:
        stores.drop_column("totals")
    op.execute("update stores set expected = tuning, expected_at = last_seen, differs_since = null")
    op.execute("update incidents set closed_at = last_seen where kind = 'samples_nonsense' and closed_at is null")


def downgrade() -> None:
    op.add_column("stores", sa.Column("totals", sa.JSON(), nullable=True))
    op.execute("update stores set totals = '{}'")
    with op.batch_alter_table("stores") as stores:
        stores.alter_column("totals", existing_type=sa.JSON(), nullable=False)
