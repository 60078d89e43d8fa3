"""Indices for what a round reads of the decisions of the whole fleet."""

from alembic import op

revision: str = "0006"
down_revision: str | None = "0005"
branch_labels: str | None = None
depends_on: str | None = None

TARGET = ["store", "tier", "namespace", "tuner"]


def upgrade() -> None:
    op.drop_index("decisions_by_target", table_name="decisions")
    op.create_index("decisions_by_target", "decisions", [*TARGET, "state", "id"])
    op.create_index("decisions_by_update", "decisions", ["updated_at"])


def downgrade() -> None:
    op.drop_index("decisions_by_update", table_name="decisions")
    op.drop_index("decisions_by_target", table_name="decisions")
    op.create_index("decisions_by_target", "decisions", TARGET)
