"""Weekly reviews are verdicts, too."""

import sqlalchemy as sa
from alembic import op

revision: str = "0011"
down_revision: str | None = "0010"
branch_labels: str | None = None
depends_on: str | None = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
VERDICTS = sa.table("verdicts", *map(sa.column, ("id", "decision", "at", "verdict", "reason", "evidence")))
REVIEWS = sa.table("reviews", *map(sa.column, ("id", "decision", "at", "stands", "reason", "evidence")))
WEEKLY = VERDICTS.c.verdict.not_in(["kept", "rolled_back", "inconclusive"])


def upgrade() -> None:
    read = sa.select(*list(REVIEWS.c)[1:]).order_by(REVIEWS.c.id)
    op.execute(VERDICTS.insert().from_select(list(VERDICTS.c)[1:], read))
    op.drop_index("reviews_by_decision", table_name="reviews")
    op.drop_table("reviews")


def downgrade() -> None:
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
    read = sa.select(*list(VERDICTS.c)[1:]).where(WEEKLY).order_by(VERDICTS.c.id)
    op.execute(REVIEWS.insert().from_select(list(REVIEWS.c)[1:], read))
    op.execute(VERDICTS.delete().where(WEEKLY))
