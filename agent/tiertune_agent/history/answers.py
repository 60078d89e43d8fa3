"""The tuners' latest answers, in SQL."""

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite

from tiertune_agent.fields import JsonDict
from tiertune_agent.history.models import AnswerRow
from tiertune_agent.history.sessions import OfHistory
from tiertune_agent.records import Target
from tiertune_agent.tuners.base import Answer, Proposal

_KEY = ("tuner", "store", "tier", "namespace")
INSERTS: Mapping[str, Callable[..., Any]] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


class Answers(OfHistory):
    def remember(self, told: Iterable[tuple[str, Target, Answer]], now: datetime) -> None:
        """Keep the newest answer of each tuner and target, even if it is no change."""
        rows = [
            {
                "tuner": tuner,
                "store": target.store,
                "tier": target.tier,
                "namespace": target.namespace,
                "at": now,
                "change": isinstance(answer, Proposal),
                "reason": answer.reason,
            }
            for tuner, target, answer in told
        ]
        if rows:
            with self._session() as session:
                newer = INSERTS[session.get_bind().dialect.name](AnswerRow)
                told_now = {name: newer.excluded[name] for name in ("at", "change", "reason")}
                session.execute(newer.on_conflict_do_update(index_elements=_KEY, set_=told_now), rows)

    def newest(self) -> list[JsonDict]:
        query = select(AnswerRow).order_by(AnswerRow.store, AnswerRow.tuner, AnswerRow.tier, AnswerRow.namespace)
        columns = ("tuner", "store", "tier", "at", "change", "reason")
        return [{"pool": row.namespace, **row.told(*columns)} for row in self._all(query)]
