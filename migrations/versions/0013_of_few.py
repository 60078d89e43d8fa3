"""Indexes of the few decisions that are to be undone, of open incidents, and of commands by time."""

import sqlalchemy as sa
from alembic import op

revision: str = "0013"
down_revision: str | None = "0012"
branch_labels: str | None = None
depends_on: str | None = None

UNDO, OPEN = sa.text("undo IS NOT NULL"), sa.text("closed_at IS NULL")


def upgrade() -> None:
    op.create_index("decisions_to_undo", "decisions", ["state"], sqlite_where=UNDO, postgresql_where=UNDO)
    op.create_index("incidents_still", "incidents", ["id"], sqlite_where=OPEN, postgresql_where=OPEN)
    op.create_index("audit_by_time", "audit", ["at", "id"])


def downgrade() -> None:
    op.drop_index("audit_by_time", table_name="audit")
    op.drop_index("incidents_still", table_name="incidents")
    op.drop_index("decisions_to_undo", table_name="decisions")
