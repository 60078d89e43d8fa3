"""The tables. Times are UTC, bytes are integers, seconds are floats."""

from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, Double, Index, Integer, String, Text, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from tiertune_agent.fields import JsonDict

BigId = BigInteger().with_variant(Integer(), "sqlite")
"""A counting key: on SQLite only an Integer counts up by itself."""


class Utc(TypeDecorator[datetime]):
    """Aware datetimes in and out; SQLite forgets the zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a time without a zone")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def cut(value: str) -> str:
    """A name as the database keeps it."""
    return value.replace("\0", "")[:255]


class Name(TypeDecorator[str]):
    """Up to 255 characters. What a store sends may be longer, or hold a zero byte: PostgreSQL accepts neither."""

    impl = String(255)
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002
        return None if value is None else cut(value)


class Words(TypeDecorator[str]):
    """Any text, without zero bytes, which PostgreSQL does not accept."""

    impl = Text()
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002
        return None if value is None else value.replace("\0", "")


Key = Annotated[str, mapped_column(primary_key=True)]
Wording = Annotated[str, mapped_column(Words())]
Sparse = Annotated[JsonDict, mapped_column(JSON(none_as_null=True))]
"""A document that is SQL's null where there is none, not JSON's."""


class Base(DeclarativeBase):
    type_annotation_map: ClassVar = {
        datetime: Utc(),
        str: Name(),
        float: Double(),
        int: BigInteger(),
        JsonDict: JSON(),
    }

    def told(self, *columns: str) -> JsonDict:
        """These columns, ready for JSON."""
        values = ((name, getattr(self, name)) for name in columns)
        return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in values}


class _Numbered:
    id: Mapped[int] = mapped_column(BigId, primary_key=True)


class StoreRow(Base):
    """A store as it last answered; ``pending_bypass`` is a wish that it has not acknowledged."""

    __tablename__ = "stores"

    name: Mapped[Key]
    url: Mapped[str]
    boot_id: Mapped[str]
    version: Mapped[str]
    first_seen: Mapped[datetime]
    last_seen: Mapped[datetime]
    status: Mapped[JsonDict]
    tuning: Mapped[JsonDict]
    pending_bypass: Mapped[bool | None]
    expected: Mapped[Sparse | None]
    """The tuning that it should have: as it was found, with what decisions changed since."""
    expected_at: Mapped[datetime | None]
    """When that was last set."""
    differs_since: Mapped[datetime | None]
    """When the tuning began to differ from what is expected."""
    summed_until: Mapped[datetime | None]
    """Windows that began before are summed up in ``hours``; None: none are."""
    folded_until: Mapped[datetime | None]
    """Hours, also the ledger's, that began before are summed up in days; None: none are."""
    candidates: Mapped[list[list[float]] | None] = mapped_column(JSON())
    """What the last requests that found chunks in the remote were like: while fetch is off there are no others."""


class WishRow(Base):
    """A bypass commanded of a store that never answered; for other stores it is in ``pending_bypass``."""

    __tablename__ = "wishes"

    url: Mapped[Key]
    bypass: Mapped[bool]


class _Counted(_Numbered):
    """What was counted in a stretch of time. ``seconds``: those that its windows covered."""

    store: Mapped[str]
    namespace: Mapped[str]
    model: Mapped[str]
    tier: Mapped[str]
    start: Mapped[datetime]
    seconds: Mapped[float]
    counters: Mapped[JsonDict]


class WindowRow(_Counted, Base):
    __tablename__ = "windows"
    __table_args__ = (
        Index("windows_by_tier", "store", "tier", "namespace", "start"),
        Index("windows_by_store", "store", "start"),
    )


class HourRow(_Counted, Base):
    """All windows of one tier or pool that began within an hour: counters add up, gauges are means.

    After a fortnight hours are summed up once more, into rows of a day.
    """

    __tablename__ = "hours"
    __table_args__ = (Index("hours_by_tier", "store", "tier", "namespace", "start"),)


class StageWindowRow(_Numbered, Base):
    """A window of one stage and phase, or of one GPU (``phase`` empty): only the latter has the last five figures."""

    __tablename__ = "stage_windows"
    __table_args__ = (Index("stage_windows_by_start", "store", "start"),)

    store: Mapped[str]
    stage: Mapped[str]
    phase: Mapped[str]
    gpu: Mapped[str]
    start: Mapped[datetime]
    seconds: Mapped[float]
    gpu_seconds: Mapped[float]
    tokens: Mapped[float]
    utilization: Mapped[float | None]
    memory_used_bytes: Mapped[int | None]
    memory_free_bytes: Mapped[int | None]
    power_watts: Mapped[float | None]
    energy_joules: Mapped[float | None]


UNDO, OPEN = text("undo IS NOT NULL"), text("closed_at IS NULL")
"""Of few rows of many; literal, because an index for them serves no query that binds a value."""


class DecisionRow(_Numbered, Base):
    __tablename__ = "decisions"
    __table_args__ = (
        Index("decisions_by_target", "store", "tier", "namespace", "tuner", "state", "id"),
        Index("decisions_by_update", "updated_at"),
        Index("decisions_to_undo", "state", sqlite_where=UNDO, postgresql_where=UNDO),
    )

    key: Mapped[str] = mapped_column(unique=True)
    tuner: Mapped[str]
    store: Mapped[str]
    tier: Mapped[str]
    namespace: Mapped[str]
    target: Mapped[str]
    """Store, tier and pool in one, for people."""
    models: Mapped[list[str]] = mapped_column(JSON())
    field: Mapped[str]
    before: Mapped[Any] = mapped_column("from", JSON())
    after: Mapped[Any] = mapped_column("to", JSON())
    mode: Mapped[str]
    state: Mapped[str] = mapped_column(index=True)
    reason: Mapped[Wording]
    evidence: Mapped[JsonDict]
    expected_version: Mapped[int | None]
    applied_version: Mapped[int | None]
    policy_revision: Mapped[int | None]
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]
    approved_at: Mapped[datetime | None]
    approved_by: Mapped[str]
    applied_at: Mapped[datetime | None]
    soak_until: Mapped[datetime | None]
    undo: Mapped[Sparse | None]
    waits: Mapped[Wording | None]
    """Why what is under way has not ended yet."""


LATELY_STATE, LATELY_ID = DecisionRow.state.concat(""), DecisionRow.id + 0
"""Of these, to be asked beside ``updated_at``: by an index of theirs SQLite walks all rows, not those of late."""


class VerdictRow(_Numbered, Base):
    """A state that a decision was judged to, or a weekly answer on whether it still pays."""

    __tablename__ = "verdicts"

    decision: Mapped[int] = mapped_column(index=True)
    at: Mapped[datetime]
    verdict: Mapped[str]
    reason: Mapped[Wording]
    evidence: Mapped[JsonDict]


class ProspectRow(_Numbered, Base):
    """What requests of one namespace would have cost under other sizes of the tiers."""

    __tablename__ = "prospects"
    __table_args__ = (Index("prospects_by_time", "start"),)

    namespace: Mapped[str]
    start: Mapped[datetime]
    seconds: Mapped[float]
    requests: Mapped[int]
    costs: Mapped[JsonDict]


class AnswerRow(Base):
    """The newest answer of each tuner on each target, even if it is no change."""

    __tablename__ = "answers"

    tuner: Mapped[Key]
    store: Mapped[Key]
    tier: Mapped[Key]
    namespace: Mapped[Key]
    at: Mapped[datetime]
    change: Mapped[bool]
    reason: Mapped[Wording]


class IncidentRow(_Numbered, Base):
    __tablename__ = "incidents"
    __table_args__ = (
        Index("incidents_open", "kind", "store", "closed_at"),
        Index("incidents_still", "id", sqlite_where=OPEN, postgresql_where=OPEN),
    )

    kind: Mapped[str]
    store: Mapped[str]
    message: Mapped[Wording]
    opened_at: Mapped[datetime]
    last_seen: Mapped[datetime]
    closed_at: Mapped[datetime | None]


class LedgerRow(Base):
    """One hour of one tier (``namespace`` empty: the whole tier) or of one pool; after a fortnight, one day."""

    __tablename__ = "ledger"

    hour: Mapped[datetime] = mapped_column(primary_key=True)
    store: Mapped[Key]
    namespace: Mapped[Key]
    tier: Mapped[Key]
    seconds: Mapped[float]
    """Seconds observed."""
    saved: Mapped[float | None]
    """This and the next four are null if nobody reports them: for observed sources, or for a pool if tiers do."""
    lost: Mapped[float | None]
    bytes: Mapped[int | None]
    """Resident bytes, mean over the seconds observed."""
    transferred: Mapped[int | None]
    money: Mapped[float | None]
    holdout: Mapped[Sparse | None]
    """Sums of both groups, by the share held out; None: nothing was."""
    measured: Mapped[float | None]
    """Seconds saved, by holdout, with the 95 % bounds."""
    measured_low: Mapped[float | None]
    measured_high: Mapped[float | None]


class PolicyRevisionRow(_Numbered, Base):
    __tablename__ = "policy_revisions"

    digest: Mapped[str]
    source: Mapped[Wording]
    text: Mapped[Wording]
    loaded_at: Mapped[datetime]


class FreezeRow(_Numbered, Base):
    """Nothing changes from ``start`` until ``until`` (None: until lifted)."""

    __tablename__ = "freezes"

    reason: Mapped[Wording]
    who: Mapped[str]
    start: Mapped[datetime]
    until: Mapped[datetime | None]
    lifted_at: Mapped[datetime | None]


class AuditRow(_Numbered, Base):
    __tablename__ = "audit"
    __table_args__ = (Index("audit_by_time", "at", "id"),)

    at: Mapped[datetime]
    who: Mapped[str]
    source: Mapped[str]
    """Where the command came from."""
    what: Mapped[str]
    detail: Mapped[JsonDict]
