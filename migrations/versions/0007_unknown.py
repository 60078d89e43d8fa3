"""Unknown amounts are null in the ledger: sources that are only observed do not report all of them."""

import sqlalchemy as sa
from alembic import op

revision: str = "0007"
down_revision: str | None = "0006"
branch_labels: str | None = None
depends_on: str | None = None

AMOUNTS = {
    "saved": sa.Double(),
    "lost": sa.Double(),
    "bytes": sa.BigInteger(),
    "transferred": sa.BigInteger(),
    "money": sa.Double(),
}


def upgrade() -> None:
    with op.batch_alter_table("ledger") as ledger:
        for name, kind in AMOUNTS.items():
            ledger.alter_column(name, existing_type=kind, nullable=True)


def downgrade() -> None:
    for name in AMOUNTS:
        op.execute(f"update ledger set {name} = 0 where {name} is null")  # noqa: S608 (no input)
    with op.batch_alter_table("ledger") as ledger:
        for name, kind in AMOUNTS.items():
            ledger.alter_column(name, existing_type=kind, nullable=False)
