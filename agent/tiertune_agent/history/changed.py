"""What decisions changed, in SQL: the last changes, their number, which were undone or followed, which stand."""

from collections import Counter
from collections.abc import Collection
from datetime import datetime
from typing import Any

from sqlalchemy import Row, and_, func, or_, select
from sqlalchemy.orm import aliased

from tiertune_agent.history.models import DecisionRow, VerdictRow
from tiertune_agent.history.sessions import OfHistory
from tiertune_agent.records import CHANGED, FLEET, STANDING, Decision, Made, State, Target
from tiertune_agent.tuners.remote_fetch import FIELD, protects

_FIELD = ("tuner", "store", "tier", "namespace", "field")
"""Columns that two changes of the same field share."""
_PLACE = (DecisionRow.store, DecisionRow.tier, DecisionRow.namespace, DecisionRow.tuner)
_CHANGE = (
    *(DecisionRow.field, DecisionRow.before, DecisionRow.after, DecisionRow.state),
    *(DecisionRow.applied_at, DecisionRow.updated_at),
    *(DecisionRow.evidence[name].label(name) for name in ("goal", "requests")),
)
Place = tuple[str, str, str, str]
"""Who changes what: tuner, store, tier and namespace."""
Where = tuple[str, str, str]
"""Store, tier and namespace."""


def place(tuner: str, target: Target) -> Place:
    return tuner, target.store, target.tier, target.namespace


class Changed(OfHistory):
    """Questions about ``stores`` leave out the many that may have left the fleet; splits, of ``fleet``, are in each."""

    def last(self, stores: Collection[str], *, splits: int = 1) -> dict[Place, Made]:
        """The last change by each tuner to each target; a rollback counts as the change, at its own time.

        Each of the last ``splits`` also counts as a change of each of its parts.
        """
        changed = DecisionRow.state.in_(CHANGED)
        newest = select(func.max(DecisionRow.id)).where(_of(stores), changed).group_by(*_PLACE)
        split_up = select(DecisionRow.id).filter_by(store=FLEET).where(changed)
        split_up = split_up.order_by(DecisionRow.id.desc()).limit(splits)
        query = select(*_PLACE, *_CHANGE, DecisionRow.evidence["split"].label("split"))
        found: dict[Place, Made] = {}
        split: dict[Place, Made] = {}
        told = or_(DecisionRow.id.in_(newest), DecisionRow.id.in_(split_up))
        for row in self._rows(query.where(told).order_by(DecisionRow.id)):
            found[row.tuner, row.store, row.tier, row.namespace] = made = _made(row)
            for step in row.split or ():
                at = row.tuner, step["store"], step["tier"], ""
                split[at] = Made(step["field"], step["from"], step["to"], made.at)
        later = {at: made for at, made in split.items() if at not in found or found[at].at < made.at}
        return found | later

    def count(self, since: datetime, now: datetime) -> Counter[str]:
        """Number of changes made up to now, by store; a split also counts for each store in it."""
        lately = (DecisionRow.updated_at >= since, DecisionRow.applied_at.between(since, now))  # the first has an index
        query = select(DecisionRow.store, DecisionRow.evidence["split"]).where(*lately)
        made = Counter[str]()
        for store, split in self._rows(query):
            made.update({store, *(step["store"] for step in split or ())})
        return made

    def undone(self, since: datetime, now: datetime, stores: Collection[str]) -> dict[Where, list[Made]]:
        """Decisions that were rolled back, switched off during their soak, or refused, by what they changed.

        Refused by the store or by a person; each has the time of that. Of refused changes that protect requests only
        the newest counts: the store may only have refused the agent's token.
        """
        ended = (State.ROLLED_BACK, State.FAILED, State.REJECTED)
        overtaken = and_(
            DecisionRow.state == State.INCONCLUSIVE, DecisionRow.field == FIELD, _followed(within_soak=True).exists()
        )
        query = select(*_PLACE, *_CHANGE).where(
            _of(stores), DecisionRow.updated_at.between(since, now), or_(DecisionRow.state.in_(ended), overtaken)
        )
        found: dict[Where, list[Made]] = {}
        refused: dict[Where, Made] = {}
        for row in self._rows(query.order_by(DecisionRow.updated_at)):
            where = row.store, row.tier, row.namespace
            made = Made(row.field, row.before, row.after, row.updated_at)
            if row.state == State.FAILED and protects(row.field, row.after):
                refused[where] = made
            elif row.state in ended or protects(row.field, row.before):
                found.setdefault(where, []).append(made)
        for where, made in refused.items():
            found.setdefault(where, []).append(made)
        return found

    def standing(self, before: datetime, stores: Collection[str], pools: Collection[str]) -> list[Decision]:
        """Decisions kept or inconclusive, not judged since ``before``, with no later one in force since then.

        None of pools other than these: each revision of the weights leaves some, for ever.
        """
        judged = select(VerdictRow.id).where(VerdictRow.decision == DecisionRow.id, VerdictRow.at > before)
        query = select(DecisionRow).where(
            _of(stores),
            DecisionRow.namespace.in_({"", *pools}),
            DecisionRow.state.in_((State.KEPT, State.INCONCLUSIVE)),
            DecisionRow.applied_at <= before,
            ~judged.exists(),
            ~_followed(since=before).exists(),
        )
        return self._decided(query)

    def superseded(self) -> set[int]:
        """Soaking decisions whose field a later decision changed."""
        return set(self._all(select(DecisionRow.id).filter_by(state=State.SOAKING).where(_followed().exists())))


def _of(stores: Collection[str]) -> Any:  # noqa: ANN401 (a condition)
    return DecisionRow.store.in_({FLEET, *stores})


def _followed(*, within_soak: bool = False, since: datetime | None = None) -> Any:  # noqa: ANN401 (a Select)
    """Query of later decisions that changed the same field.

    ``within_soak``: before the verdict; ``since``: those that were in force at any time since then.
    """
    later = aliased(DecisionRow)
    same = (getattr(later, name) == getattr(DecisionRow, name) for name in _FIELD)
    query = select(later.id).where(*same, later.id > DecisionRow.id, later.state.in_(CHANGED))
    if since:
        query = query.where(or_(later.state.in_(STANDING), later.updated_at > since))
    return query.where(later.applied_at <= DecisionRow.updated_at) if within_soak else query


def _made(row: Row[Any]) -> Made:
    """From a row with the columns ``_CHANGE``."""
    back = row.state == State.ROLLED_BACK
    at = row.updated_at if back else row.applied_at or row.updated_at
    learned = back or row.requests is not None
    return Made(row.field, row.before, row.after, at, None if back else row.goal, learned)
