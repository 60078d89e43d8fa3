"""Commands for stores that never answered, in SQL, until they have received them."""

from collections.abc import Collection

from sqlalchemy import delete, select

from tiertune_agent.history.models import WishRow, cut
from tiertune_agent.history.sessions import OfHistory


class Wishes(OfHistory):
    """Bypass wishes, on or off, by the store's address."""

    def of(self, urls: Collection[str]) -> dict[str, bool]:
        """The wishes kept for these addresses."""
        kept = {row.url: row.bypass for row in self._all(select(WishRow))}
        return {url: kept[cut(url)] for url in urls if cut(url) in kept}

    def keep(self, url: str, *, on: bool) -> None:
        """Keep a wish; it replaces an earlier one."""
        with self._session() as session:
            session.merge(WishRow(url=cut(url), bypass=on))

    def heard(self, url: str, *, on: bool) -> None:
        """Drop a wish that the store has acknowledged; another one that came meanwhile stays."""
        self._do(delete(WishRow).where(WishRow.url == cut(url), WishRow.bypass == on))

    def drop(self, url: str) -> None:
        """Drop the wish: the store is known by now, and what it has not received is kept beside its name."""
        self._do(delete(WishRow).where(WishRow.url == cut(url)))
