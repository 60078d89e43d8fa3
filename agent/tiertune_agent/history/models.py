"""The tables. Times are UTC, bytes are integers, seconds are floats."""

from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, TypeVar

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, Double, Index, Integer, String, Text, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from tiertune_agent.fields import JsonDict
from tiertune_agent.records import cut

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


Known = TypeVar("Known")
Sentence = Annotated[str, mapped_column(Words())]
Named = Mapped[str]
"""This and the next are kinds of columns; ``Base`` says what the database has for each."""
Moment = Mapped[datetime]
Amount = Mapped[float]
Whole = Mapped[int]
Document = Mapped[JsonDict]
Wording = Mapped[Sentence]
Key = Mapped[Annotated[str, mapped_column(primary_key=True)]]
Maybe = Mapped[Known | None]
"""Null where it is not known, or does not apply."""
Sparse = Maybe[Annotated[JsonDict, mapped_column(JSON(none_as_null=True))]]
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
    id: Whole = mapped_column(BigId, primary_key=True)


class StoreRow(Base):
    """A store as it last answered; ``pending_bypass`` is a wish that it has not acknowledged."""

    __tablename__ = "stores"

    name: Key
    url: Named
    boot_id: Named
    version: Named
    first_seen: Moment
    last_seen: Moment
    status: Document
    tuning: Document
    pending_bypass: Maybe[bool]
    expected: Sparse
    """The tuning that it should have: as it was found, with what decisions changed since."""
    expected_at: Maybe[datetime]
    """When that was last set."""
    differs_since: Maybe[datetime]
    """When the tuning began to differ from what is expected."""
    summed_until: Maybe[datetime]
    """Windows that began before are summed up in ``hours``; None: none are."""
    folded_until: Maybe[datetime]
    """Hours, also the ledger's, that began before are summed up in days; None: none are."""
    candidates: Maybe[list[list[float]]] = mapped_column(JSON())
    """What the last requests that found chunks in the remote were like: while fetch is off there are no others."""


class WishRow(Base):
    """A bypass commanded of a store that never answered; for other stores it is in ``pending_bypass``."""

    __tablename__ = "wishes"

    url: Key
    bypass: Mapped[bool]


class _Counted(_Numbered):
    """What was counted in a stretch of time. ``seconds``: those that its windows covered."""

    store: Named
    namespace: Named
    model: Named
    tier: Named
    start: Moment
    seconds: Amount
    counters: Document


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

    store: Named
    stage: Named
    phase: Named
    gpu: Named
    start: Moment
    seconds: Amount
    gpu_seconds: Amount
    tokens: Amount
    utilization: Maybe[float]
    memory_used_bytes: Maybe[int]
    memory_free_bytes: Maybe[int]
    power_watts: Maybe[float]
    energy_joules: Maybe[float]


UNDO, OPEN = text("undo IS NOT NULL"), text("closed_at IS NULL")
"""Of few rows of many; literal, because an index for them serves no query that binds a value."""


class DecisionRow(_Numbered, Base):
    __tablename__ = "decisions"
    __table_args__ = (
        Index("decisions_by_target", "store", "tier", "namespace", "tuner", "state", "id"),
        Index("decisions_by_update", "updated_at"),
        Index("decisions_to_undo", "state", sqlite_where=UNDO, postgresql_where=UNDO),
    )

    key: Named = mapped_column(unique=True)
    tuner: Named
    store: Named
    tier: Named
    namespace: Named
    target: Named
    """Store, tier and pool in one, for people."""
    models: Mapped[list[str]] = mapped_column(JSON())
    field: Named
    before: Mapped[Any] = mapped_column("from", JSON())
    after: Mapped[Any] = mapped_column("to", JSON())
    mode: Named
    state: Named = mapped_column(index=True)
    reason: Wording
    evidence: Document
    expected_version: Maybe[int]
    applied_version: Maybe[int]
    policy_revision: Maybe[int]
    created_at: Moment
    updated_at: Moment
    approved_at: Maybe[datetime]
    approved_by: Named
    applied_at: Maybe[datetime]
    soak_until: Maybe[datetime]
    undo: Sparse
    waits: Maybe[Sentence]
    """Why what is under way has not ended yet."""


LATELY_STATE, LATELY_ID = DecisionRow.state.concat(""), DecisionRow.id + 0
"""Of these, to be asked beside ``updated_at``: by an index of theirs SQLite walks all rows, not those of late."""


class VerdictRow(_Numbered, Base):
    """A state that a decision was judged to, or a weekly answer on whether it still pays."""

    __tablename__ = "verdicts"

    decision: Whole = mapped_column(index=True)
    at: Moment
    verdict: Named
    reason: Wording
    evidence: Document


class ProspectRow(_Numbered, Base):
    """What requests of one namespace would have cost under other sizes of the tiers."""

    __tablename__ = "prospects"
    __table_args__ = (Index("prospects_by_time", "start"),)

    namespace: Named
    start: Moment
    seconds: Amount
    requests: Whole
    costs: Document


class AnswerRow(Base):
    """The newest answer of each tuner on each target, even if it is no change."""

    __tablename__ = "answers"

    tuner: Key
    store: Key
    tier: Key
    namespace: Key
    at: Moment
    change: Mapped[bool]
    reason: Wording


class IncidentRow(_Numbered, Base):
    __tablename__ = "incidents"
    __table_args__ = (
        Index("incidents_open", "kind", "store", "closed_at"),
        Index("incidents_still", "id", sqlite_where=OPEN, postgresql_where=OPEN),
    )

    kind: Named
    store: Named
    message: Wording
    opened_at: Moment
    last_seen: Moment
    closed_at: Maybe[datetime]


class LedgerRow(Base):
    """One hour of one tier (``namespace`` empty: the whole tier) or of one pool; after a fortnight, one day."""

    __tablename__ = "ledger"

    hour: Moment = mapped_column(primary_key=True)
    store: Key
    namespace: Key
    tier: Key
    seconds: Amount
    """Seconds observed."""
    saved: Maybe[float]
    """This and the next four are null if nobody reports them: for observed sources, or for a pool if tiers do."""
    lost: Maybe[float]
    bytes: Maybe[int]
    """Resident bytes, mean over the seconds observed."""
    transferred: Maybe[int]
    money: Maybe[float]
    holdout: Sparse
    """Sums of both groups, by the share held out; None: nothing was."""
    measured: Maybe[float]
    """Seconds saved, by holdout, with the 95 % bounds."""
    measured_low: Maybe[float]
    measured_high: Maybe[float]


class PolicyRevisionRow(_Numbered, Base):
    __tablename__ = "policy_revisions"

    digest: Named
    source: Wording
    text: Wording
    loaded_at: Moment


class FreezeRow(_Numbered, Base):
    """Nothing changes from ``start`` until ``until`` (None: until lifted)."""

    __tablename__ = "freezes"

    reason: Wording
    who: Named
    start: Moment
    until: Maybe[datetime]
    lifted_at: Maybe[datetime]


class AuditRow(_Numbered, Base):
    __tablename__ = "audit"
    __table_args__ = (Index("audit_by_time", "at", "id"),)

    at: Moment
    who: Named
    source: Named
    """Where the command came from."""
    what: Named
    detail: Document
