"""Whom the collector asks: stores, and sources that are only observed, as the settings name them."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from tiertune_agent.collector.adapters import ADAPTERS
from tiertune_agent.network import web_address
from tiertune_agent.records import FLEET, NAME_CHARS, cut
from tiertune_connector.documents import Document
from tiertune_connector.units import Size

if TYPE_CHECKING:
    Kind = str
else:  # the registry is the only list of them
    Kind = Literal[tuple(ADAPTERS)]
NAME = r"^[A-Za-z0-9_.-]{1,64}$"


def _no_fleet(name: str) -> str:
    if name == FLEET:
        raise ValueError(f"{FLEET} stands for the whole fleet: choose another name")
    return name


def _of_store(url: str) -> str:
    such_as = "a store's address as http://host:port"
    return web_address(url, such_as, login="a token stands in stores_token_file", path=False).rstrip("/")


def _of_source(url: str) -> str:
    such_as = "a source's address as http://host:port/metrics"
    return web_address(url, such_as, login="it is shown on the page and in incidents", path=True, query=True)


OwnName = Annotated[str, AfterValidator(cut), AfterValidator(_no_fleet)]


class StoreAddress(Document):
    url: Annotated[str, Field(max_length=NAME_CHARS), AfterValidator(_of_store)]
    """``http://host:port`` of the store; it is shown, so it has no user and no password."""
    name: OwnName = ""
    """Checked against the name that the store gives itself; empty takes that name."""


def each_once(named: Iterable[str]) -> None:
    """Raise ValueError if one is named twice."""
    if twice := sorted(one for one, times in Counter(named).items() if times > 1):
        raise ValueError(f"{twice[0]} is named twice: leave one of them out")


def _listed_once(stores: tuple[StoreAddress, ...]) -> tuple[StoreAddress, ...]:
    each_once(store.url for store in stores)
    each_once(store.name for store in stores if store.name)
    return stores


Stores = Annotated[tuple[StoreAddress, ...], AfterValidator(_listed_once)]
"""No address and no name is there twice."""


class StoresFile(Document):
    """The document of ``stores_file``: it is read again while the agent runs."""

    stores: Stores
    """As in the settings; each once."""


class ObservedSource(Document):
    """Metrics of a connector that is not TierTune's. They are read, and nothing there is ever changed."""

    name: OwnName = Field(pattern=NAME)
    """Its name on page and metrics; no store and no other source may have it."""
    url: Annotated[str, AfterValidator(_of_source)]
    """``http://host:port/metrics``."""
    kind: Kind
    """vLLM's own metrics, LMCache's server (multi-process mode), or LMCache within the engine's workers."""
    chunk_bytes: Size | None = Field(default=None, ge=1)
    """Size of LMCache's chunks, which it counts without their bytes; None: bytes moved stay unknown."""
    tier: Literal["dram", "disk", "remote"] | None = None
    """The only tier of a connector that does not report hits by tier; None: they appear under ``unknown``."""
