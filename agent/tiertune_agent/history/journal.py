"""What happened besides decisions: incidents, freezes, policies, and who commanded what."""

import logging
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import func, select

from tiertune_agent.collector.direct_commands import Entry
from tiertune_agent.fields import Json, JsonDict
from tiertune_agent.history.models import AuditRow, FreezeRow, IncidentRow, PolicyRevisionRow
from tiertune_agent.history.sessions import OfHistory

log = logging.getLogger(__name__)


class Journal(OfHistory):
    def tell_incidents(self, told: Mapping[tuple[str, str], str], now: datetime) -> None:
        """By kind and store: open an incident with the message, or renew the open one; empty: close it.

        Opening and closing are logged, with messages as literals, because they hold what others wrote.
        """
        kinds, stores = ({place[part] for place in told} for part in (0, 1))  # both: the index begins with them
        query = select(IncidentRow).where(
            IncidentRow.kind.in_(kinds), IncidentRow.store.in_(stores), IncidentRow.closed_at.is_(None)
        )
        moved: list[tuple[Any, ...]] = []
        with self._session() as session:
            here = {(row.kind, row.store): row for row in session.scalars(query)}
            for (kind, store), message in told.items():
                row = here.get((kind, store))
                if row and message:
                    row.message, row.last_seen = message, now
                elif row:
                    row.closed_at = now
                    moved.append((logging.INFO, "incident %s %r closed", kind, store))
                elif message:
                    session.add(IncidentRow(kind=kind, store=store, message=message, opened_at=now, last_seen=now))
                    moved.append((logging.WARNING, "incident %s %r opened: %r", kind, store, message))
        for each in moved:
            log.log(*each)

    def incidents(self) -> list[JsonDict]:
        """All open incidents, then others, newest first, up to 100 in all."""
        newest, closed_at = select(IncidentRow).order_by(IncidentRow.id.desc()), IncidentRow.closed_at
        with self._session() as session:  # two queries: one would sort all that ever were
            still = session.scalars(newest.where(closed_at.is_(None))).all()
            last = session.scalars(newest.where(closed_at.is_not(None)).limit(max(0, 100 - len(still)))).all()
            over = [row for row in last if row not in still]  # one may have been closed in between
        columns = ("id", "kind", "store", "message", "opened_at", "last_seen", "closed_at")
        return [row.told(*columns) for row in (*still, *over)]

    def open_incidents(self) -> dict[str, int]:
        """Number of open incidents by kind; 0 for kinds of which none is open any more."""
        query = select(IncidentRow.kind, func.count(), func.count(IncidentRow.closed_at)).group_by(IncidentRow.kind)
        return {kind: int(every) - int(closed) for kind, every, closed in self._rows(query)}

    def freeze(self, reason: str, who: str, now: datetime, until: datetime | None) -> None:
        with self._session() as session:
            session.add(FreezeRow(reason=reason, who=who, start=now, until=until))

    def unfreeze(self, now: datetime) -> int:
        """Lift every freeze in force; returns how many."""
        with self._session() as session:
            rows = session.scalars(_in_force(now)).all()
            for row in rows:
                row.lifted_at = now
            return len(rows)

    def frozen(self, now: datetime) -> FreezeRow | None:
        """The freeze in force that lasts longest."""
        rows = self._all(_in_force(now))
        return max(rows, key=lambda row: (row.until is None, row.until or now, row.id), default=None)

    def policy_revision(self, digest: str, source: str, text: str, now: datetime) -> int:
        """The number of this policy: that of the newest revision, or of a new row if the text or source differs."""
        with self._session() as session:
            row = session.scalars(select(PolicyRevisionRow).order_by(PolicyRevisionRow.id.desc()).limit(1)).first()
            if row is None or row.digest != digest or row.source != source:
                row = PolicyRevisionRow(digest=digest, source=source, text=text, loaded_at=now)
                session.add(row)
                session.flush()
            return row.id

    def policy_revisions(self) -> list[JsonDict]:
        """The last 20, newest first."""
        query = select(PolicyRevisionRow).order_by(PolicyRevisionRow.id.desc()).limit(20)
        return self._told(query, "id", "digest", "source", "text", "loaded_at")

    def audit(self, who: str, source: str, what: str, detail: Json, now: datetime) -> int:
        """Returns the row's number, for ``refused``."""
        with self._session() as session:
            row = AuditRow(at=now, who=who, source=source, what=what, detail=dict(detail))
            session.add(row)
            session.flush()
            return row.id

    def refused(self, number: int, why: str) -> None:
        """Add to a row's detail that nothing was done."""
        with self._session() as session:
            row = session.get_one(AuditRow, number)
            row.detail = {**row.detail, "refused": why}

    def audit_once(self, entries: Collection[Entry]) -> None:
        """Write entries that came late; one that has its row already gets no second one.

        Also not if its store was called otherwise then.
        """
        new = {entry[:4]: entry for entry in entries}
        query = select(AuditRow.at, AuditRow.who, AuditRow.source, AuditRow.what).where(
            AuditRow.source.startswith("store "), AuditRow.at >= min(entry.at for entry in entries)
        )
        with self._session() as session:
            known = {_nameless(*row) for row in session.execute(query)}
            rows = (AuditRow(**entry._asdict()) for told, entry in new.items() if _nameless(*told) not in known)
            session.add_all(rows)

    def audited(self, limit: int = 100) -> list[JsonDict]:
        """Newest first."""
        query = select(AuditRow).order_by(AuditRow.at.desc(), AuditRow.id.desc()).limit(limit)
        return [{"from": row.source, **row.told("at", "who", "what", "detail")} for row in self._all(query)]


def _nameless(at: datetime, who: str, source: str, what: str) -> tuple[datetime, str, str, str]:
    """What identifies a command, whatever its store is called: ``source`` ends with who called it."""
    return at, who, source.rpartition(", ")[2], what


def _in_force(now: datetime) -> Any:  # noqa: ANN401 (a Select)
    """Query of freezes in force. Their start is ignored: the clock may have gone back, or another agent's is behind."""
    ends = FreezeRow.until.is_(None) | (FreezeRow.until > now)
    return select(FreezeRow).where(FreezeRow.lifted_at.is_(None), ends)
