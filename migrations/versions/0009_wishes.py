"""The bypass, on or off, that was commanded to stores that never answered."""

import sqlalchemy as sa
from alembic import op

revision: str = "0009"
down_revision: str | None = "0008"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "wishes",
        sa.Column("url", sa.String(255), nullable=False),
        sa.Column("bypass", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("url"),
    )


def downgrade() -> None:
    op.drop_table("wishes")
