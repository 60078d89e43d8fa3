"""How the agent talks to what stands on the fleet's own network."""

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

AT_ONCE = 16
Asked = TypeVar("Asked")
Told = TypeVar("Told")


def http_client(**options: Any) -> httpx.Client:  # noqa: ANN401 (httpx's own)
    """No proxy of the environment lies in between."""
    return httpx.Client(trust_env=False, **options)


def at_once(ask: Callable[[Asked], Told], those: Collection[Asked]) -> list[Told]:
    """What each tells, in their order: one that is slow holds up no other."""
    if not those:
        return []
    with ThreadPoolExecutor(max_workers=min(AT_ONCE, len(those))) as pool:
        return list(pool.map(ask, those))


def said(error: Exception) -> str:
    """Its message; its kind where it has none."""
    return str(error) or type(error).__name__
