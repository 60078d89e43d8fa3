"""A column of decisions: why one under way has not ended yet."""

import sqlalchemy as sa
from alembic import op

revision: str = "0008"
down_revision: str | None = "0007"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.add_column("decisions", sa.Column("waits", sa.Text(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("decisions") as decisions:
        decisions.drop_column("waits")
