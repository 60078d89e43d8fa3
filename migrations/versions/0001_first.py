"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None
branch_labels: str | None = None
depends_on: str | None = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "answers",
        sa.Column("tuner", sa.String(255), nullable=False),
        sa.Column("store", sa.String(255), nullable=False),
        sa.Column("tier", sa.String(255), nullable=False),
        sa.Column("namespace", sa.String(255), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("change", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("tuner", "store", "tier", "namespace"),
    )
    op.create_table(
        "audit",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("who", sa.String(255), nullable=False),
        sa.Column("source", sa.String(255), nullable=False),
        sa.Column("what", sa.String(255), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "decisions",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("tuner", sa.String(255), nullable=False),
        sa.Column("store", sa.String(255), nullable=False),
        sa.Column("tier", sa.String(255), nullable=False),
        sa.Column("namespace", sa.String(255), nullable=False),
        sa.Column("target", sa.String(255), nullable=False),
        sa.Column("models", sa.JSON(), nullable=False),
        sa.Column("field", sa.String(255), nullable=False),
        sa.Column("from", sa.JSON(), nullable=False),
        sa.Column("to", sa.JSON(), nullable=False),
        sa.Column("mode", sa.String(255), nullable=False),
        sa.Column("state", sa.String(255), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.Column("expected_version", sa.BigInteger(), nullable=True),
        sa.Column("applied_version", sa.BigInteger(), nullable=True),
        sa.Column("policy_revision", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("approved_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("approved_by", sa.String(255), nullable=False),
        sa.Column("applied_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("key"),
    )
    op.create_index("decisions_by_target", "decisions", ["store", "tier", "namespace", "tuner"])
    op.create_index("ix_decisions_state", "decisions", ["state"])
    op.create_table(
        "freezes",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("who", sa.String(255), nullable=False),
        sa.Column("start", sa.DateTime(timezone=True), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("lifted_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "incidents",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("kind", sa.String(255), nullable=False),
        sa.Column("store", sa.String(255), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen", sa.DateTime(timezone=True), nullable=False),
        sa.Column("closed_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("incidents_open", "incidents", ["kind", "store", "closed_at"])
    op.create_table(
        "ledger",
        sa.Column("hour", sa.DateTime(timezone=True), nullable=False),
        sa.Column("store", sa.String(255), nullable=False),
        sa.Column("namespace", sa.String(255), nullable=False),
        sa.Column("tier", sa.String(255), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("saved", sa.Double(), nullable=False),
        sa.Column("lost", sa.Double(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("transferred", sa.BigInteger(), nullable=False),
        sa.Column("money", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("hour", "store", "namespace", "tier"),
    )
    op.create_table(
        "policy_revisions",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("digest", sa.String(255), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("loaded_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "stage_windows",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("store", sa.String(255), nullable=False),
        sa.Column("stage", sa.String(255), nullable=False),
        sa.Column("phase", sa.String(255), nullable=False),
        sa.Column("gpu", sa.String(255), nullable=False),
        sa.Column("start", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("gpu_seconds", sa.Double(), nullable=False),
        sa.Column("tokens", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("stage_windows_by_start", "stage_windows", ["store", "start"])
    op.create_table(
        "stores",
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("url", sa.String(255), nullable=False),
        sa.Column("boot_id", sa.String(255), nullable=False),
        sa.Column("version", sa.String(255), nullable=False),
        sa.Column("first_seen", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen", sa.DateTime(timezone=True), nullable=False),
        sa.Column("status", sa.JSON(), nullable=False),
        sa.Column("tuning", sa.JSON(), nullable=False),
        sa.Column("totals", sa.JSON(), nullable=False),
        sa.Column("pending_bypass", sa.Boolean(), nullable=True),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "verdicts",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("decision", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("verdict", sa.String(255), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_verdicts_decision", "verdicts", ["decision"])
    op.create_table(
        "windows",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("store", sa.String(255), nullable=False),
        sa.Column("namespace", sa.String(255), nullable=False),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("tier", sa.String(255), nullable=False),
        sa.Column("start", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("counters", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("windows_by_start", "windows", ["start"])
    op.create_index("windows_by_tier", "windows", ["store", "tier", "namespace", "start"])


def downgrade() -> None:
    op.drop_index("windows_by_tier", table_name="windows")
    op.drop_index("windows_by_start", table_name="windows")
    op.drop_table("windows")
    op.drop_index("ix_verdicts_decision", table_name="verdicts")
    op.drop_table("verdicts")
    op.drop_table("stores")
    op.drop_index("stage_windows_by_start", table_name="stage_windows")
    op.drop_table("stage_windows")
    op.drop_table("policy_revisions")
    op.drop_table("ledger")
    op.drop_index("incidents_open", table_name="incidents")
    op.drop_table("incidents")
    op.drop_table("freezes")
    op.drop_index("ix_decisions_state", table_name="decisions")
    op.drop_index("decisions_by_target", table_name="decisions")
    op.drop_table("decisions")
    op.drop_table("audit")
    op.drop_table("answers")
