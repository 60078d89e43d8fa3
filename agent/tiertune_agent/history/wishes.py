"""What was commanded of stores that never answered, in SQL, until they have heard it."""

from collections.abc import Collection

from sqlalchemy import delete, select

from tiertune_agent.history.models import WishRow, cut
from tiertune_agent.history.sessions import OfHistory


class Wishes(OfHistory):
    """A bypass, on or off, by the store's address."""

    def of(self, urls: Collection[str]) -> dict[str, bool]:
        """Those that are kept, of these addresses."""
        with self._session() as session:
            kept = {row.url: row.bypass for row in session.scalars(select(WishRow))}
        return {url: kept[cut(url)] for url in urls if cut(url) in kept}

    def keep(self, url: str, *, on: bool) -> None:
        """The last wish stands."""
        with self._session() as session:
            session.merge(WishRow(url=cut(url), bypass=on))

    def heard(self, url: str, *, on: bool) -> None:
        """The store has acknowledged it. If another wish came meanwhile, that one stays."""
        with self._session() as session:
            session.execute(delete(WishRow).where(WishRow.url == cut(url), WishRow.bypass == on))

    def drop(self, url: str) -> None:
        """The store is known by now: what it has not heard is kept beside its name."""
        with self._session() as session:
            session.execute(delete(WishRow).where(WishRow.url == cut(url)))
